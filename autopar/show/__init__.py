"""Views of plans and timelines: text, reasons, tables, cards, the page of `plan.report`, Perfetto's trace."""
