"""Loops in forward without modules of their own: their turns are equal blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar import Constraint
from autopar.interop.clustering import _least_within
from autopar.trace import find_blocks, trace
from tests.equivalence.on_threads import planned, program_differences


class Loop(nn.Module):
    """So many turns of three operators; the weights are one, or each turn's own."""

    def __init__(self, turns: int, shared: bool = True, odd: int = -1) -> None:
        super().__init__()
        self.turns, self.odd = turns, odd
        self.weights = nn.ParameterList(nn.Parameter(torch.eye(8) * 0.9) for _ in range(1 if shared else turns))

    def forward(self, x: Tensor) -> Tensor:
        for turn in range(self.turns):
            x = (x @ self.weights[turn % len(self.weights)] + 0.01).tanh()
            if turn == self.odd:
                x = x * 2.0
        return x.square().mean()


@pytest.mark.parametrize("shared", [True, False])
def test_turns_of_a_long_loop_are_equal_blocks(shared: bool) -> None:
    graph = trace(Loop(100, shared), (torch.randn(4, 8),))
    blocks = find_blocks(graph)
    assert not blocks.paths, "they are no modules"
    kinds = {blocks.representative_node(node.name) for node in graph.nodes}
    assert len(kinds) <= 12, "the turns but for the first and the last, and the loss"
    for name, twin in blocks.node_representative.items():
        node, first = graph.node_by_name[name], graph.node_by_name[twin]
        assert (node.op, len(node.operands)) == (first.op, len(first.operands))
    weights = {blocks.representative_tensor(item.tensor) for item in graph.stored}
    assert len(weights) <= 3


def test_a_short_loop_is_planned_turn_by_turn() -> None:
    assert not find_blocks(trace(Loop(20), (torch.randn(4, 8),))).node_representative


def test_what_does_something_else_between_turns_is_no_turn() -> None:
    graph = trace(Loop(200, odd=99), (torch.randn(4, 8),))
    blocks = find_blocks(graph)
    (odd,) = (node for node in graph.nodes if node.op == "aten.mul.Tensor")
    assert odd.name not in blocks.node_representative
    assert odd.name not in blocks.node_representative.values()


def test_a_turn_of_which_a_constraint_says_something_else_is_not_equal() -> None:
    graph = trace(Loop(100, shared=False), (torch.randn(4, 8),))
    blocks = find_blocks(graph, [Constraint("weights.50", ("S(0)",), "used")])
    (own,) = (item.tensor for item in graph.stored if item.name == "weights.50")
    assert blocks.representative_tensor(own) == own
    assert own not in blocks.tensor_representative.values()


@pytest.mark.sampled(only=("tp=2", "stages=2"))
@pytest.mark.parametrize("how", ["dp=2", "tp=2", "stages=2"])
def test_programs_of_long_loops_equal_the_model(how: str) -> None:
    model, batch = Loop(100, shared=False, odd=60), {"x": torch.randn(8, 8)}
    assert not program_differences(model, batch, planned(model, batch, how))


def test_the_first_of_the_least_values_of_each_range_is_found() -> None:
    random = np.random.default_rng(0)
    for length in (2, 3, 7, 40):
        values = random.integers(0, 5, length).astype(float)
        first = np.minimum(np.sort(random.integers(0, length, length)), np.arange(length))
        found, least = _least_within(values, first)
        for end in range(length):
            inside = values[first[end] : end]
            assert least[end] == (inside.min() if len(inside) else np.inf)
            assert not len(inside) or found[end] == first[end] + inside.argmin()
