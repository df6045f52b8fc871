"""Which graph the search for substitutions ends with: the given one where a profile cannot tell another faster."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.graph import Graph
from autopar.profiler import load_profile
from autopar.substitute import GraphCandidate, load_rules, substituted
from autopar.substitute.backtracking import RESOLUTION
from autopar.substitute.joint import Substituted
from autopar.substitute.searching import SHORT
from autopar.trace import find_blocks, trace


class Block(nn.Module):
    """Three products of one value, of which one larger product can be made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = (layer(x) for layer in self.layers)
        return x + one.relu() * two.sigmoid() + three.tanh()


class Net(nn.Module):
    """Two small blocks, and a head of so many columns."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, columns)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


@cache
def graph(columns: int = 64) -> Graph:
    with torch.device("meta"):
        return trace(Net(columns), (torch.zeros(128, 64),))


def searched(columns: int) -> Substituted:
    given = graph(columns)
    blocks = find_blocks(given)
    return substituted(
        given, blocks.paths, blocks.node_representative, load_rules(), load_profile("h100"), limits=SHORT
    )


@pytest.mark.parametrize(("columns", "is_rewritten"), [(64, True), (1 << 26, False)])
def test_what_gains_much_of_a_block_and_little_of_the_whole_is_not_worth_while(
    columns: int, is_rewritten: bool
) -> None:
    found = searched(columns)
    gain = found.before_ns / found.best.cost_ns - 1
    assert gain > RESOLUTION if is_rewritten else gain == 0
    assert bool(found.best.steps) == is_rewritten
    assert found.seen > 1, "there is something to be found in either"


def candidate(num_steps: int, cost_ns: int) -> GraphCandidate:
    steps: Any = (None,) * num_steps
    return GraphCandidate(graph(), steps, cost_ns)


def test_the_best_candidate_is_the_simplest_of_those_that_are_as_good_as_the_fastest() -> None:
    given, little, much, more = candidate(0, 1000), candidate(1, 990), candidate(2, 904), candidate(9, 900)

    def best(*candidates: GraphCandidate) -> GraphCandidate:
        return Substituted(candidates, 1000, 0.0, 0, "").best

    assert best(little, given) is given
    assert best(more, much, given) is much
    assert best(more, given) is more
