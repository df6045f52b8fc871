"""What planning does grows with a graph, and no faster: counted in calls, not in seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autopar
from autopar.interop import block_layers, fold
from autopar.ir.constraint import Constraint, ConstraintIndex
from autopar.ir.graph import Graph
from autopar.ir.stages import leaving_values, maker_of, stage_graph
from autopar.pipeline import planned, template_of_graph
from autopar.request import Request, SearchBudget
from autopar.trace import find_blocks, trace

MESH = autopar.Mesh("a100", devices_per_node=2)


class Turns(nn.Module):
    """Layers of two kinds that take turns."""

    def __init__(self, num_pairs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(num_pairs) for layer in (nn.Linear(8, 8), nn.ReLU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def turns(num_pairs: int) -> Graph:
    with torch.device("meta"):
        return trace(Turns(num_pairs), (torch.empty(8, 8),))


def num_calls(work: Callable[[], Any]) -> int:
    """Of functions, and of generators for their next item."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_kinds_of_blocks_that_take_turns_are_folded_to_one_size() -> None:
    for num_pairs in (40, 80):
        graph = turns(num_pairs)
        blocks = find_blocks(graph)
        layers = block_layers(graph, [path for group in blocks.paths for path in group])
        folded = fold(graph, blocks, layers)
        assert len(folded.graph.nodes) < 16
        assert sum(folded.copies.get(node.name, 1) for node in folded.graph.nodes) == len(graph.nodes)
        unread = [name for node in folded.graph.nodes for name in node.results if not folded.graph.consumers[name]]
        assert unread == [graph.loss]


def test_planning_twice_the_layers_takes_few_more_than_twice_the_calls() -> None:
    """They may be cut into more numbers of chunks, of which more are simulated."""
    budget = SearchBudget(60.0, substitutions=False, proposals=0)
    request = Request(MESH, "train", "adamw", None, (), budget)
    graphs = [turns(num_pairs) for num_pairs in (34, 68)]
    fewer, more = (num_calls(lambda graph=graph: planned(graph, request)) for graph in graphs)
    assert more < 2.6 * fewer


def test_what_leaves_stages_is_found_in_calls_that_grow_with_their_number() -> None:
    def work(num_pairs: int) -> int:
        graph = turns(num_pairs)
        plan = template_of_graph(graph, MESH, pp=2, schedule="interleaved", chunks=num_pairs, microbatches=2)
        assert len(plan.stages) == 2 * num_pairs
        plan.__dict__.pop("_wiring", None)
        for index in range(1, len(plan.stages)):
            (name,) = plan.stages[index].inputs
            assert maker_of(graph, plan, index, name) == index - 1
            assert [left for left, _ in leaving_values(graph, plan, index - 1)] == [name]
            assert name in stage_graph(graph, plan, index - 1).sent
        return num_calls(lambda: [leaving_values(graph, plan, index) for index in range(len(plan.stages))])

    assert work(32) < 2.3 * work(16)


def test_rules_are_found_by_name_and_by_pattern_in_their_order() -> None:
    rules = [
        Constraint("a", ("R",)), Constraint("*", ("I",)), Constraint("b", ("R",)), Constraint("a", ("R",), "tensor"),
        Constraint("[ab]", ("P",)), Constraint("a", ("S(0)",)),
    ]  # fmt: skip
    for what in ("output", "tensor", "stored"):
        for names in (("a",), ("b", "a"), ("a", "a"), ("c",)):
            wanted = [rule for rule in rules if rule.what == what and rule.matches(*names)]
            assert ConstraintIndex(rules).matching(what, names) == wanted
