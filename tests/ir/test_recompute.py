"""Operators that a plan computes again by themselves: named as calls, refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import autopar
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.recompute import PieceStep, again_text, pieces_needed
from autopar.pipeline import template_of_graph
from autopar.trace import trace
from tests.equivalence import planned, zoo


@cache
def graph() -> Graph:
    return trace(*zoo.build("gpt"))


@cache
def plan(**choices: object) -> Plan:
    return template_of_graph(graph(), autopar.Mesh("cpu", devices_per_node=2), **choices)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("layers.0.mlp.gelu_9()",), r"operators of the model to recompute, found 'layers.0.mlp.gelu_9\(\)'; .*gelu"),
        (("layers.1.mlp.gelu()",), r"found 'layers.1.mlp.gelu\(\)'; there is layers"),
        (("layers.0.mlp.gelu()", "layers.0.mlp.gelu()"), r"found layers.0.mlp.gelu\(\) inside of itself"),
        (("layers.0.mlp", "layers.0.mlp.gelu()"), r"found layers.0.mlp.gelu\(\) inside of layers.0.mlp"),
        (("layers.0.add_2()",), r"found 'layers.0.add_2\(\)': .* reads what it makes outside of layers.0"),
        (("layers.0.attention.layer_norm_shared()",), "it is a name for what is there"),
        (("embedding.arange()", ), "found 'embedding.arange"),
    ],
)  # fmt: skip
def test_what_cannot_run_again_is_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned.program("gpt", replace(plan(dp=2), recompute=names))


def test_they_come_back_from_a_file_and_are_printed() -> None:
    again = plan(dp=2, recompute="selective")
    assert Plan.from_json(again.to_json()) == again
    assert "recompute   layers.* (gelu, layer_norm ×2)  ×2" in str(again)
    some = replace(again, recompute=again.recompute[:3])
    assert "layers.* (gelu, layer_norm ×2)  ×1 of 2" in str(some)
    assert "recompute: none | layers.* (gelu" in plan(dp=2).diff(again)
    assert "again in the backward pass, by themselves: gelu" in again.explain("layers.0.mlp")


def test_a_constraint_pins_them() -> None:
    model, batch = zoo.build("gpt")
    rules = (autopar.Constraint("layers.1", recompute="selective"), autopar.Constraint(stages=1))
    budget = autopar.SearchBudget(substitutions=False, proposals=0)
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    found = autopar.parallelize(model, mesh, batch, constraints=rules, search=budget).plan
    assert found.recompute == tuple(name for name in plan(dp=2, recompute="selective").recompute if "layers.1" in name)


def test_a_piece_needs_those_that_made_what_it_reads() -> None:
    """Memory 0 enters; piece 0 makes 1, piece 1 makes 2 of it, which a kept step saves; 3 is a view of 2."""
    steps = [
        PieceStep(0, True, [0], [1], [0], True),
        PieceStep(-1, False, [1], [4], [], False),
        PieceStep(1, True, [1, 4], [2], [], False),
        PieceStep(-1, False, [2], [], [], False),
        PieceStep(-1, False, [2], [5], [2], True),
        PieceStep(-1, False, [5], [6], [5], True),
    ]
    assert pieces_needed(steps) == [(0,), (), (), (), (0, 1), ()]


def test_what_is_computed_again_is_told_for_what_it_is() -> None:
    """Operators were told as so many modules."""
    assert again_text(("layers.0", "layers.1.mlp.gelu_3()", "layers.2.mlp.gelu_5()")) == "1 module and 2 operators"
    assert again_text(("layers.0", "layers.1")) == "2 modules" and again_text(()) == ""
