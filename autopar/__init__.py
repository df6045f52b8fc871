"""autopar: an auto-parallelization compiler for PyTorch.

Names are imported when first used, so that `autopar.runtime` alone needs nothing but torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar import views

if TYPE_CHECKING:
    from autopar.auditing import Audit as Audit
    from autopar.auditing import audit as audit
    from autopar.ir.constraint import Constraint as Constraint
    from autopar.ir.mesh import Mesh as Mesh
    from autopar.ir.plan import Plan as Plan
    from autopar.ir.routing import Routing as Routing
    from autopar.ladders import Ladder as Ladder
    from autopar.ladders import ladder as ladder
    from autopar.ops import register_rule as register_rule
    from autopar.pipeline import parallelize as parallelize
    from autopar.pipeline import template_plan as template_plan
    from autopar.pipeline import verify as verify
    from autopar.request import SearchBudget as SearchBudget
    from autopar.serving import serve as serve

__version__ = "0.1.0"

_HOMES = {
    "Audit": "autopar.auditing",
    "AutoparError": "autopar.errors",
    "Constraint": "autopar.ir.constraint",
    "Ladder": "autopar.ladders",
    "Mesh": "autopar.ir.mesh",
    "Plan": "autopar.ir.plan",
    "Routing": "autopar.ir.routing",
    "SearchBudget": "autopar.request",
    "Servers": "autopar.ir.servers",
    "audit": "autopar.auditing",
    "ladder": "autopar.ladders",
    "parallelize": "autopar.pipeline",
    "register_rule": "autopar.ops",
    "serve": "autopar.serving",
    "template_plan": "autopar.pipeline",
    "verify": "autopar.pipeline",
}


views.fill(
    {
        "audit": "autopar.auditing.text:audit_text",
        "text": "autopar.show.text:plan_text",
        "compare": "autopar.observed.comparison:compare",
        "comparison": "autopar.show.comparison:comparison_text",
        "difference": "autopar.show.text:diff_text",
        "explanation": "autopar.show.explain:explain_text",
        "tables": "autopar.show.tables:plan_tables",
        "card": "autopar.show.card:card",
        "report": "autopar.show.report:write_report",
        "picture": "autopar.show.picture:picture",
        "predicted_again": "autopar.step:predicted_again",
        "perfetto": "autopar.show.perfetto:trace",
        "measured_routing": "autopar.trace.popularity:measured",
        "to_json": "autopar.ir.serialization:to_json",
        "from_json": "autopar.ir.serialization:from_json",
        "ladder_text": "autopar.ladders.text:ladder_text",
        "ladder_json": "autopar.ladders.form:ladder_json",
        "ladder_page": "autopar.ladders.page:ladder_page",
        "packing_text": "autopar.colocation.text:packing_text",
        "packing_json": "autopar.colocation.form:packing_json",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
