"""The card that notebooks show of a plan: static HTML, no script, at home on light and dark pages.

Every name from the plan is escaped. Colours are those of the report's page; each has a text beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from autopar.ir.labels import use_text
from autopar.ir.placement import Placement, parse_placement
from autopar.ir.plan import Plan
from autopar.show.tables import breakdown_rows, tile_text
from autopar.show.text import axes_text, bytes_text, parameter_rows, plan_text, stage_blocks, time_text

MOST_ROWS = 24
TILES = {
    "S0": "#0072b2;color:#fff",
    "S1": "#e69f00;color:#2b1d00",
    "S2": "#007a59;color:#fff",
    "P": "#b9530f;color:#fff",
}
SPENT = {
    "compute": "#0072b2",
    "recomputation": "#cc79a7",
    "exposed communication": "#e69f00",
    "bubble": "#9aa3af",
    "optimizer": "#009e73",
}
_TILE = (
    "display:inline-block;min-width:1.7em;margin-right:1px;text-align:center;border-radius:3px;"
    "border:1px solid #8884;font:600 11px monospace"
)
_CELL = "padding:1px 10px 1px 0;text-align:left;vertical-align:top"


def card(plan: Plan) -> str:
    """Header, where the time goes as a bar, memory, stages, and the placements of parameters."""
    step, peak = plan.predicted.step_time_ns, plan.predicted.peak_bytes
    memory = f"{bytes_text(peak)} of {bytes_text(plan.memory_limit)} a device"
    parts = [
        f"<b>{escape(plan_text(plan).partition(chr(10))[0])}</b>",
        f"<div>step time <b>{time_text(step)}</b>, memory <b>{memory}</b></div>",
        _bar(breakdown_rows(plan.predicted.breakdown), step),
        _stages(plan),
        _placements(plan) if any(stage.axes for stage in plan.stages) else "",
    ]
    return f'<div style="font:13px/1.5 system-ui,sans-serif;max-width:60em">{"".join(parts)}</div>'


def _bar(rows: list[tuple[str, int]], whole: int) -> str:
    boxes = (
        f'<div title="{escape(name)}: {time_text(spent)}" style="width:{100 * spent / max(1, whole):.2f}%;'
        f'background:{SPENT[name]}"></div>'
        for name, spent in rows
    )
    legend = ", ".join(
        f'<span style="color:{SPENT[name]}">■</span> {escape(name)} {time_text(spent)}' for name, spent in rows
    )
    return f'<div style="display:flex;height:14px;border-radius:3px;overflow:hidden">{"".join(boxes)}</div>{legend}'


def _stages(plan: Plan) -> str:
    if len(plan.stages) == 1:
        return ""
    rows = (
        (
            str(number),
            f"{s.ranks.start} to {s.ranks.stop - 1}",
            escape(axes_text(s.axes)),
            escape(stage_blocks(plan, s)),
        )
        for number, s in enumerate(plan.stages)
    )
    return _table(("stage", "ranks", "as", "runs"), rows)


def _placements(plan: Plan) -> str:
    found = parameter_rows(plan)
    rows = (
        (
            f"<code>{escape(row.name)}</code>" + (f" ×{row.times}" if row.times > 1 else ""),
            _tiles(row.storage.placement) + use_text(row.storage),
            " | ".join(_used(text) for text in row.used),
        )
        for row in found[:MOST_ROWS]
    )
    axes = next(stage.axes for stage in plan.stages if stage.axes)
    more = f"<div>and {len(found) - MOST_ROWS} more</div>" if len(found) > MOST_ROWS else ""
    return _table((f"parameter, over {escape(axes_text(axes))}", "stored", "used"), rows) + more


def _used(text: str) -> str:
    return _tiles(parse_placement(text.strip("[]"))) if text.startswith("[") else escape(text)


def _tiles(placement: Placement) -> str:
    return "".join(
        f'<span style="{_TILE};background:{TILES.get(tile_text(kind), "#8883")}">{tile_text(kind)}</span>'
        for kind in placement
    )


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Cells are HTML."""
    head = "".join(f'<th style="{_CELL}">{heading}</th>' for heading in headings)
    body = "".join("<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    return f'<table style="margin:6px 0;border-collapse:collapse;font:inherit"><tr>{head}</tr>{body}</table>'
