"""The search over substitutions: equal to looking at everything, and as good as its limits say."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.cost import node_time_ns
from autopar.ir.graph import Graph, Node
from autopar.profiler import load_profile
from autopar.substitute import load_rules
from autopar.substitute.backtracking import RESOLUTION, Backtracking, key
from autopar.substitute.defined import Values
from autopar.substitute.lifting import lifted
from autopar.substitute.lowering import lowered
from autopar.substitute.matching import Matcher
from autopar.substitute.packing import packed
from autopar.substitute.pricing import Pricer
from autopar.substitute.rewriting import rewritten
from autopar.trace import trace
from tests.oracles.frozen.cases import PROFILES

#: rules that make graphs cheaper, dearer, and no more than so many of them
RULES = (
    "merge-linears", "add-of-linears-of-one", "add-of-linears-by-one", "linear-after-linear", "transpose-twice",
    "scale-of-scale", "scale-of-add", "relu-twice",
)  # fmt: skip


@cache
def matchers() -> tuple[Matcher, ...]:
    found = {rule.name: rule for rule in load_rules()}
    return tuple(Matcher(found[name]) for name in RULES)


class Random(nn.Module):
    """A few operators on what was made before, drawn by chance; all of one size."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        kinds = ("linear", "linear", "linear", "linear", "add", "scale", "relu", "turned")
        self.steps = [
            (draw.choice(kinds), draw.randrange(1 + n) * draw.randrange(2), draw.randrange(1 + n)) for n in range(count)
        ]
        self.weights = nn.ParameterList(torch.zeros(8, 8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for (kind, first, second), weight in zip(self.steps, self.weights, strict=True):
            one, other = made[first], made[second]
            made.append({
                "linear": lambda one=one, weight=weight: nn.functional.linear(one, weight),
                "add": lambda one=one, other=other: one + other,
                "scale": lambda one=one: one * 2.0,
                "relu": lambda one=one: torch.relu(one),
                "turned": lambda one=one: one.transpose(-1, -2).transpose(-1, -2),
            }[kind]())  # fmt: skip
        return sum((value.sum() for value in made[-3:]), torch.zeros(()))


def random_graph(seed: int, count: int) -> Graph:
    return trace(Random(seed, count), (torch.zeros(8, 8),))


def everything(values: Values, pricer: Pricer, most: int) -> int | None:
    """The least cost of all graphs that the rules lead to; None where there are too many."""
    seen, stack, best = {key(values)}, [values], pricer(values)
    while stack:
        now = stack.pop()
        for matcher in matchers():
            for match in matcher.matches(now):
                after = rewritten(now, match)
                if after is not None and key(after) not in seen:
                    seen.add(key(after))
                    stack.append(after)
                    best = min(best, pricer(after))
                    if len(seen) > most:
                        return None
    return best


@pytest.mark.parametrize("seed", [2, 3, 4, 5, 7, 10, 22, 28])
def test_backtracking_finds_what_exhaustive_search_finds(seed: int) -> None:
    """Of seeds that train something, and from which the rules lead to at most 150 graphs."""
    graph = random_graph(seed, 3 + seed % 3)
    assert len(graph.nodes) <= 12
    values, pricer = lifted(graph), Pricer(load_profile(PROFILES["h100"]), trains=True)
    least = everything(values, pricer, 150)
    assert least is not None
    outcome = Backtracking(matchers(), pricer).run(values, 60.0)
    assert outcome.stop == "every graph within the threshold was looked at"
    assert outcome.cheapest.cost_ns == least
    assert outcome.best.cost_ns <= least * (1 + RESOLUTION)


def linears(count: int) -> Values:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            return sum((layer(x).relu().sum() for layer in self.layers), torch.zeros(()))

    return lifted(trace(Parallel(), (torch.zeros(4, 8),)))


def test_gains_add_up() -> None:
    pricer = Pricer(load_profile(PROFILES["h100"]), trains=True)
    outcome = Backtracking(matchers(), pricer).run(linears(4), 20.0)
    assert [match.rule.name for match in outcome.cheapest.matches] == ["merge-linears"] * 3
    assert pricer(linears(4)) - sum(outcome.cheapest.gains_ns) == outcome.cheapest.cost_ns
    assert pricer(outcome.cheapest.values) == outcome.cheapest.cost_ns


class Frozen(nn.Module):
    """Two products of one value; as many of their weights are trained as is said."""

    def __init__(self, trained: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(8, 8, bias=False).requires_grad_(n < trained) for n in range(2))
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.one(x).relu(), self.two(x).sigmoid()], -1)).sum()


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_joining_weights_costs_nothing_where_they_can_be_stored_so(trained: int) -> None:
    """All trained or all frozen can; of others, one cannot ask for the gradient of a part."""
    values, pricer = (
        lifted(trace(Frozen(trained), (torch.zeros(4, 8),))),
        Pricer(load_profile(PROFILES["h100"]), trains=True),
    )
    (match,) = matchers()[0].matches(values)
    merged = rewritten(values, match)
    assert merged is not None
    graph = lowered(merged)
    joined = [node for node in graph.nodes if node.op == "aten.cat.default" and set(node.operands) <= {
        item.tensor for item in graph.stored}]  # fmt: skip
    assert len(joined) == 1
    stays = any(node.name == joined[0].name for node in packed(graph).nodes)
    assert stays == (trained == 1)
    total = sum(_time_ns(graph, node) for node in graph.nodes)
    assert pricer(merged) == total - (0 if stays else _time_ns(graph, joined[0]))


def _time_ns(graph: Graph, node: Node) -> int:
    tensors = graph.tensors
    shapes = [tuple([tensors[name].shape for name in names]) for names in (node.operands, node.results)]
    return sum(node_time_ns(node, *shapes, tensors, load_profile(PROFILES["h100"])))


def test_limits_end_the_search() -> None:
    search = Backtracking(matchers(), Pricer(load_profile(PROFILES["h100"]), trains=True))
    assert search.run(linears(6), 20.0, most=5).seen <= 5
    assert "substitutions" in search.run(linears(6), 20.0, patience=3).stop
    assert "work limit" in search.run(linears(6), 0.0).stop


def test_equal_graphs_have_equal_keys_however_they_were_reached() -> None:
    merge = matchers()[0]
    first, second, *_ = values = list(merge.matches(linears(3)))
    assert len(values) == 3
    start = linears(3)
    one, other = rewritten(start, first), rewritten(start, second)
    assert one is not None
    assert other is not None
    assert key(one) != key(other) != key(start)
    assert key(linears(3)) == key(start)
