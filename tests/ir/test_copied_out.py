"""Which modules a plan may copy out, and beside what; what is not built is refused with a remedy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import autopar
from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.pipeline import check_plan, template_of_graph
from tests.equivalence.planned import graph, template


@cache
def plan() -> Plan:
    return template("gpt", dp=2, offload="activations")


def test_template_copies_all_repeated_blocks_but_the_last() -> None:
    blocks = plan().blocks[0]
    assert plan().copied_out == blocks[:-1] and len(blocks) > 1
    assert plan().predicted.host_bytes


def test_plan_file_round_trip() -> None:
    again = autopar.Plan.from_json(plan().to_json())
    assert again.copied_out == plan().copied_out and again == replace(plan(), simulator=None)
    plain = replace(plan(), copied_out=())
    assert '"copied_out"' not in plain.to_json() and '"copied_out"' in plan().to_json()


def test_prints_say_what_is_copied_out() -> None:
    assert "copied out" in str(plan()) and "on the host" in str(plan())
    assert "waits on the host" in plan().explain(plan().copied_out[0])
    assert "copied out: " in plan().diff(replace(plan(), copied_out=()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"copied_out": ("nowhere",)}, "expected modules with modules inside that run to copy out"),
        ({"mode": "inference"}, "in which none are kept"),
        ({"runs": "compiled"}, "runs eagerly"),
    ],
)
def test_refusals(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(graph("gpt"), replace(plan(), **changes))  # type: ignore[arg-type] # of several types


def test_refused_beside_recomputation_of_the_same() -> None:
    first = plan().copied_out[0]
    with pytest.raises(PlanError, match="copied out or computed again"):
        check_plan(graph("gpt"), replace(plan(), recompute=(first,)))
    again = template("gpt", dp=2, recompute="selective").recompute
    with pytest.raises(PlanError, match="no operators computed again by themselves"):
        check_plan(graph("gpt"), replace(plan(), recompute=again))
    check_plan(graph("gpt"), replace(plan(), recompute=plan().blocks[0][-1:]))
    with pytest.raises(PlanError, match="copy out once"):
        check_plan(graph("gpt"), replace(plan(), copied_out=(first, first)))


def test_refused_with_a_backward_pass_in_two_parts() -> None:
    with pytest.raises(PlanError, match="in two parts would bring them back twice"):
        template("gpt", pp=2, microbatches=4, schedule="zero_bubble", offload="activations")


def test_refused_where_nothing_is_known_of_the_host(tmp_path: object) -> None:
    with pytest.raises(PlanError, match="offload as one of"):
        template_of_graph(graph("gpt"), autopar.Mesh("cpu", devices_per_node=2), dp=2, offload="everything")
