"""How values of a rank lie in memory, where conversions have made them anew or where it has one element of several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.cost.memory import is_view, saved_values
from autopar.ir.graph import Graph, Node, Ref, Tensor
from autopar.ir.placement import I, Placement, R, S, Shape
from autopar.ir.redistribution import Step
from autopar.ops.saved import whole_copy
from autopar.simulate.facts import Copies, LocalShapes
from autopar.simulate.layouts import AS_IN_GRAPH, Layouts
from tests.random_programs.plans import make_axes

GATHER, CUT = Step(0, S(0), R), Step(0, R, S(0))


def _graph(shapes: dict[str, Shape], *nodes: Node) -> Graph:
    tensors = {name: Tensor(name, shape, "float32", True) for name, shape in shapes.items()}
    made = {name for node in nodes for name in node.results}
    inputs = tuple(name for name in shapes if name not in made)
    return Graph(inputs=inputs, stored=(), nodes=nodes, outputs=nodes[-1].results, tensors=tensors)


HEADS = _graph(
    {"x": (2, 4, 6, 8), "turned": (2, 6, 4, 8), "joined": (2, 6, 32)},
    Node("turn", "aten.transpose.int", (Ref("x"), 1, 2), (), ("turned",)),
    Node("join", "aten.reshape.default", (Ref("turned"), (2, 6, 32)), (), ("joined",)),
)


@pytest.mark.parametrize(
    ("steps", "part", "made", "shares"),
    [
        (None, (2, 6, 4, 8), (2, 6, 32), False),  # as in the graph
        ([GATHER], (2, 6, 4, 8), (2, 6, 32), True),  # what is gathered lies in order
        ([CUT], (1, 6, 4, 8), (1, 6, 32), False),  # a slice keeps the order of the dims
        (None, (2, 6, 1, 8), (2, 6, 8), True),  # one head is joined with none
    ],
)
def test_heads_are_joined_by_copying_where_they_lie_apart(
    steps: list[Step] | None, part: Shape, made: Shape, shares: bool
) -> None:
    """What a conversion laid anew was said to be copied, so that a rank sent more than foretold to make it again."""
    layouts, join = Layouts(HEADS), HEADS.nodes[1]
    if steps is not None:
        layouts.converted("value", "turned", steps)
    laid = layouts.of_results(join, ["value"], [part], made)
    assert layouts.is_view(join, laid, is_view(join, HEADS)) == shares
    assert is_view(join, HEADS) is False


EXPERTS = _graph(
    {"gates": (2, 8, 4, 3), "rows": (4, 2, 3, 5), "made": (2, 8, 5)},
    Node("mix", "aten.einsum.default", ("gsec,egcm->gsm", (Ref("gates"), Ref("rows"))), (), ("made",)),
)


def test_a_product_with_one_expert_of_several_keeps_the_slice_and_no_copy() -> None:
    """A slice along the outermost dim is of the memory of the whole, which the product keeps."""
    layouts, mix = Layouts(EXPERTS), EXPERTS.nodes[0]
    usual = saved_values(mix, EXPERTS)
    assert set(usual) == {whole_copy(EXPERTS.tensors[name]) for name in ("gates", "rows")}
    laid = layouts.of_results(mix, ["a", "b"], [(2, 8, 1, 3), (1, 2, 3, 5)], (2, 8, 5))
    assert set(layouts.kept(mix, laid, usual)) == {"gates", "rows"}
    several = layouts.of_results(mix, ["a", "b"], [(2, 8, 2, 3), (2, 2, 3, 5)], (2, 8, 5))
    assert several == AS_IN_GRAPH and layouts.kept(mix, several, usual) == usual


def _copies(shape: Shape, size: int) -> tuple[Copies, Placement]:
    graph = _graph({"w": shape, "y": shape}, Node("same", "aten.exp.default", (Ref("w"),), (), ("y",)))
    plan: Any = SimpleNamespace(axes=make_axes((size,)), storage={"w": None})
    return Copies(graph, plan, "cpu", LocalShapes(graph, plan)), (S(2),)


@pytest.mark.parametrize(("rows", "padded"), [(4, 4), (3, 4), (5, 8), (2, 4)])
def test_unequal_shards_of_a_parameter_are_gathered_as_long_as_the_longest(rows: int, padded: int) -> None:
    """Of three rows on four ranks, four are received: a third more than the parameter."""
    copies, stored = _copies((256, 128, rows, 3), 4)
    row = 256 * 128 * 3 * 4
    assert copies.gather_bytes("w", stored, [Step(0, S(2), I)]) == row * (padded + padded // 4)
