"""Views of plans: the page of `plan.report`."""
