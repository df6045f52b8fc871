"""`plan.report("plan.html")`: one page that shows a plan, with everything that it needs inside.

Names in a plan are text that somebody else wrote. They travel as JSON in which no "<" is left, and the page's script
puts them into the document as text alone. A content security policy in the page names the hashes of its own style and
script: nothing else runs, and nothing is fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from autopar.ir.plan import Plan
from autopar.ir.writing import write_whole
from autopar.observed.comparison import StepComparison
from autopar.show.comparison import comparison_data
from autopar.show.data import plan_data

SCRIPTS = (
    "dom", "format", "passes", "summary", "tiles", "tree", "mesh", "details", "axis", "timeline", "memory", "traffic",
    "observed", "search", "main",
)  # fmt: skip
"""The parts of the page's script, in order: each may use what is in those before it."""


def write_report(
    plan: Plan, path: str | Path, compare: Plan | None = None, observed: StepComparison | None = None
) -> None:  # fmt: skip
    """Writes the page of a plan, or of two side by side, whole or not at all. observed: what ran of the first."""
    write_whole(Path(path), page(plan, compare, observed))


def page(plan: Plan, compare: Plan | None = None, observed: StepComparison | None = None) -> str:
    """The page's HTML."""
    plans = [plan] if compare is None else [plan, compare]
    names = ["plan"] if compare is None else ["A", "B"]
    data = {
        "plans": [plan_data(item, name, _timeline(item)) for item, name in zip(plans, names, strict=True)],
        "observed": None if observed is None else comparison_data(observed),
        "difference": plan.diff(compare).splitlines() if compare is not None else [],
    }
    style, script = _asset("report.css"), _script()
    return Template(_asset("report.html")).substitute(
        title=escape(f"{plan.model} on {plan.mesh}"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=_embedded(data),
    )


def _timeline(plan: Plan) -> Any:
    """None for a plan that was read from a file: it lacks the model's graph."""
    return None if plan.simulator is None else plan.timeline().picture()


def _script() -> str:
    """The parts as one function, which leaves no names behind."""
    parts: Iterable[str] = (_asset(f"{name}.js") for name in SCRIPTS)
    return "(() => {\n'use strict';\n" + "\n".join(parts) + "\n})();"


def _asset(name: str) -> str:
    return (files("autopar.show") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a content security policy names a text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: Any) -> str:
    """JSON that may stand in a script element: without "<", no text in it ends the element or begins a comment."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
