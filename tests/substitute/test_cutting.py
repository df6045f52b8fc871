"""Large regions are cut where few substitutions cross, and what their parts come to is put together again."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from autopar.ir.graph import Graph
from autopar.ir.sharing import unshared
from autopar.profiler import load_profile
from autopar.substitute import load_rules
from autopar.substitute.backtracking import Backtracking
from autopar.substitute.cutting import CutPart, parts, together
from autopar.substitute.lifting import lifted
from autopar.substitute.lowering import lowered
from autopar.substitute.matching import Matcher
from autopar.substitute.pricing import Pricer
from autopar.substitute.rewriting import rewritten
from autopar.substitute.searching import Limits, Searcher
from autopar.trace import trace
from tests.oracles.frozen.cases import PROFILES
from tests.substitute.adapted import Adapted

RULES = ("merge-linears", "linear-after-linear", "scale-of-scale", "relu-twice", "adapter-folded-scaled")


@cache
def matchers(pinned: frozenset[str] = frozenset()) -> tuple[Matcher, ...]:
    found = {rule.name: rule for rule in load_rules()}
    return tuple(Matcher(found[name], pinned) for name in RULES)


class Cells(nn.Module):
    """Equal cells one after the other: three products of one value each, and a sum of what they make."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for one, two, three in self.cells:
            x = torch.tanh(one(x)) + torch.sigmoid(two(x)) * torch.relu(torch.relu(three(x)))
        return x.sum()


@cache
def cells(count: int) -> Graph:
    return unshared(trace(Cells(count), (torch.zeros(4, 8),)))


def pricer() -> Pricer:
    return Pricer(load_profile(PROFILES["h100"]), trains=True)


def test_parts_come_one_after_the_other_and_no_substitution_crosses_a_cut_between_cells() -> None:
    graph = cells(6)
    found = parts(lifted(graph), matchers(), most=20)
    assert [node.name for part in found for node in part.nodes] == [
        node.name for part in found for node in graph.nodes if node in part.nodes
    ]
    assert sorted(node.name for part in found for node in part.nodes) == sorted(node.name for node in graph.nodes)
    assert len(found) > 2
    assert all(len(part.nodes) <= 20 for part in found)
    made: set[str] = {*graph.inputs, *graph.stored_by_tensor}
    for part in found:
        assert made.issuperset(part.inputs)
        made.update(name for node in part.nodes for name in node.results)
    whole = sum(1 for matcher in matchers() for _ in matcher.matches(lifted(graph)))
    apart = sum(1 for part in found for matcher in matchers() for _ in matcher.matches(lifted(part)))
    assert apart == whole > 0


def test_a_small_graph_is_one_part() -> None:
    graph = cells(2)
    (part,) = parts(lifted(graph), matchers())
    assert part is lifted(graph).graph or part == graph


def test_what_is_found_for_parts_is_found_for_the_whole() -> None:
    values, cost = lifted(cells(6)), pricer()
    search = Backtracking(matchers(), cost)
    found = [
        CutPart(lifted(part), search.run(lifted(part), 20.0, patience=100))
        for part in parts(values, matchers(), most=20)
    ]
    whole = together(values, found, cost)
    assert len(whole.matches) == sum(len(part.outcome.best.matches) for part in found) == 18
    assert whole.cost_ns == cost(whole.values) == cost(values) - sum(whole.gains_ns)
    again = values
    for match in whole.matches:  # as a plan replays them
        after = rewritten(again, Matcher(match.rule).at(again, match.roots, match.binding))
        assert after is not None
        again = after
    assert cost(again) == whole.cost_ns
    assert len([node for node in lowered(again).nodes if node.op == "aten.linear.default"]) == 6


def test_a_cut_region_costs_no_more_than_one_that_is_searched_whole() -> None:
    values = lifted(cells(6))
    cut = Searcher(matchers(), pricer(), limits=Limits(20)).run(values, 20.0)
    whole = Searcher(matchers(), pricer(), limits=Limits(1000)).run(values, 20.0)
    assert cut.best.cost_ns <= whole.best.cost_ns < pricer()(values)
    assert cut.seen < whole.seen


def test_pinned_tensors_of_one_of_equal_parts_stay() -> None:
    """Equal parts are searched once, but for what is pinned in one of them."""
    graph = cells(6)
    weight = next(node for node in graph.nodes[len(graph.nodes) // 2 :] if node.op == "aten.linear.default").operands[1]
    search = Searcher(matchers(frozenset((weight,))), pricer(), limits=Limits(20))
    outcome = search.run(lifted(graph), 20.0)
    assert outcome.best.matches
    assert all(weight not in match.binding.values() for match in outcome.best.matches)


def test_rules_that_say_most_are_tried_first_too() -> None:
    """Adapters fold into weights in inference, although merging their products is met first and gains as well."""
    with torch.no_grad():
        values = lifted(trace(Adapted(3).eval(), (torch.zeros(4, 64),), mode="inference"))
    outcome = Searcher(matchers(), Pricer(load_profile("h100"), trains=False)).run(values, 20.0)
    rules = [match.rule.name for match in outcome.cheapest.matches]
    assert rules.count("adapter-folded-scaled") == 3
    assert rules.count("merge-linears") == 2
