"""Equality saturation: choices that backtracking and greedy extraction miss, as substitutions that plans replay."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.cost import load_profile
from autopar.substitute import load_rules
from autopar.substitute.backtracking import Backtracking, Found
from autopar.substitute.defined import Values
from autopar.substitute.extraction import Extraction, saturated
from autopar.substitute.lifting import lifted
from autopar.substitute.matching import Matcher
from autopar.substitute.pricing import Pricer
from autopar.substitute.rewriting import rewritten
from autopar.substitute.saturation import EGraph, ENode
from autopar.substitute.searching import Searcher
from autopar.trace import trace
from tests.substitute.adapted import Adapted
from tests.substitute.test_backtracking import everything, linears, random_graph
from tests.substitute.test_backtracking import matchers as few

NAMES = ("merge-linears", "linear-is-matmul", "transpose-twice", "linear-of-scale",
         "linear-of-scale-reversed", "add-regrouped", "add-regrouped-reversed", "adapter-folded-scaled",
         "adapter-folded-scaled-reversed")  # fmt: skip


@cache
def matchers() -> tuple[Matcher, ...]:
    found = {rule.name: rule for rule in load_rules()}
    return tuple(Matcher(found[name]) for name in NAMES)


def pricer(trains: bool = True) -> Pricer:
    return Pricer(load_profile("h100"), trains)


def given(values: Values, cost: Pricer) -> Found:
    return Found(values, (), (), cost(values))


class Attention(nn.Module):
    """Query, key and value of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 16)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v).sum()


def greedy(extraction: Extraction) -> dict[str, ENode]:
    """For each class its cheapest node with all that it reads, as if nothing else read that."""
    cost: dict[str, int] = dict.fromkeys(extraction.leaves, 0)
    chosen: dict[str, ENode] = {}
    find, own = extraction.egraph.find, cache(extraction.node_ns)
    before = -1
    while before != len(chosen):
        before = len(chosen)
        for name, nodes in extraction.classes.items():
            for node in nodes:
                if all(find(operand) in cost for operand in node.operands):
                    total = own(node) + sum(cost[find(operand)] for operand in node.operands)
                    if total < cost.get(name, 1 << 60):
                        cost[name], chosen[name] = total, node
    return chosen


def test_query_key_and_value_are_merged_where_greedy_extraction_takes_three_products() -> None:
    cost = pricer()
    values = lifted(trace(Attention(), (torch.zeros(1, 8, 64),)))
    egraph = EGraph(values)
    egraph.saturate(few(), 10.0, most=200)
    extraction = Extraction(egraph, cost)
    assert not {"first", "second"} & {node.op for node in _reached(extraction, greedy(extraction))}
    chosen = extraction.chosen(10.0)
    assert chosen is not None
    assert sum(node.op == "linear" for node in _reached(extraction, chosen)) == 1
    found = extraction.found(chosen, given(values, cost))
    assert [match.rule.name for match in found.matches] == ["merge-linears"] * 2
    assert found.cost_ns == cost(found.values) < cost(values)


def _reached(extraction: Extraction, chosen: dict[str, ENode]) -> list[ENode]:
    """What the ends are made of."""
    find, stack, seen = extraction.egraph.find, [*extraction.ends], dict[str, ENode]()
    while stack:
        name = find(stack.pop())
        if name in chosen and name not in seen:
            seen[name] = chosen[name]
            stack += chosen[name].operands
    return list(seen.values())


@pytest.mark.parametrize("seed", [2, 3, 4, 5, 7, 10, 22, 28])
def test_saturation_finds_what_exhaustive_search_finds(seed: int) -> None:
    """By itself but for what parts of several tensors cost together, and exactly after backtracking."""
    cost, values = pricer(), lifted(random_graph(seed, 3 + seed % 3))
    least = everything(values, cost, 150)
    assert least is not None
    assert saturated(given(values, cost), few(), cost, 30.0).cost_ns <= least * 1.005
    assert Searcher(few(), cost).run(values, 60.0).cheapest.cost_ns == least


def test_merged_products_of_adapters_come_apart_again_where_folding_is_cheaper() -> None:
    """Backtracking that has merged them cannot go back; in an e-graph the given form is still there."""
    cost = pricer(trains=False)
    with torch.no_grad():
        values = lifted(trace(Adapted(2).eval(), (torch.zeros(4, 64),), mode="inference"))
    stuck = Backtracking(matchers(), cost).run(values, 20.0, patience=100).cheapest
    found = saturated(given(values, cost), matchers(), cost, 20.0)
    assert found.cost_ns < stuck.cost_ns < cost(values)
    assert [match.rule.name for match in found.matches].count("adapter-folded-scaled") == 2


def test_what_is_found_is_replayed_and_gains_add_up() -> None:
    cost, values = pricer(), linears(4)
    found = saturated(given(values, cost), few(), cost, 20.0)
    again = values
    for match in found.matches:
        after = rewritten(again, Matcher(match.rule).at(again, match.roots, match.binding))
        assert after is not None
        again = after
    assert found.matches
    assert cost(again) == found.cost_ns == cost(values) - sum(found.gains_ns)


def test_equal_classes_have_reasons() -> None:
    values = linears(3)
    egraph = EGraph(values)
    egraph.saturate([few()[0]], 10.0)
    joined = [(n, root) for n, made in enumerate(egraph.applications) for root in made.roots]
    assert joined
    for number, root in joined:
        target = egraph.edges[root][0]
        assert egraph.reasons(root, target.other, len(egraph.applications)) <= set(range(len(egraph.applications)))
        assert egraph.reasons(root, target.other, -1) == set()
        assert egraph.find(root) == egraph.find(target.other)
        assert number < len(egraph.applications)


def test_limits_end_the_saturation() -> None:
    assert "nodes" in EGraph(linears(6)).saturate(few(), 10.0, most=40)
    assert "time" in EGraph(linears(6)).saturate(few(), 0.0)
    assert EGraph(linears(2)).saturate(few()[1:], 10.0) == "saturated"


def test_nothing_is_saturated_where_a_tensor_is_pinned() -> None:
    values = linears(3)
    weight = next(name for name in values.live if name in values.graph.stored_by_tensor)
    free = [Matcher(matcher.rule, frozenset((weight,))) for matcher in few()]
    outcome = Searcher(free, pricer()).run(values, 20.0)
    assert all(weight not in match.binding.values() for match in outcome.cheapest.matches)
