"""Which operators of a block are computed again: the best of all subsets, by what each would keep and cost."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations, pairwise

import pytest

from autopar.ir.graph import Graph
from autopar.ir.recompute import is_operator_call, node_of_call
from autopar.trace import find_blocks, trace
from autopar.zero import recomputable
from autopar.zero.selective import BlockMemory, BlockTrade, Remakable, block_trade
from models import gpt, llama
from tests.equivalence import zoo


def random_trade(rng: random.Random) -> BlockTrade:
    names = [f"n{number}" for number in range(rng.randint(1, 8))]
    operators = tuple(Remakable(name, rng.choice([0, 1, 2, 5, 9]), rng.choice([0, 0, 3])) for name in names)
    memory = tuple(
        BlockMemory(
            rng.choice([1, 4, 8]), rng.choice([*names, None]), frozenset(rng.choices(names, k=rng.randint(0, 3))),
            rng.random() < 0.6,
        )
        for _ in range(rng.randint(1, 10))
    )  # fmt: skip
    return BlockTrade(operators, memory)


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_best_of_all_subsets(seed: int) -> None:
    rng = random.Random(seed)
    trade = random_trade(rng)
    names = [operator.name for operator in trade.operators]
    subsets = [frozenset(some) for count in range(len(names) + 1) for some in combinations(names, count)]
    for price in (Fraction(0), Fraction(1, 3), Fraction(1), Fraction(7, 2), Fraction(100)):
        cost = {some: trade.kept_bytes(some) * price + trade.time(some) for some in subsets}
        best = trade.best(price)
        assert cost[best] == min(cost.values())
        assert len(best) == min(len(some) for some in subsets if cost[some] == cost[best])


@pytest.mark.parametrize("seed", range(20))
def test_prices_from_low_to_high_lead_along_the_hull(seed: int) -> None:
    """Each choice keeps less and takes longer than the one before, and has all of it."""
    trade = random_trade(random.Random(1000 + seed))
    chosen = [trade.best(Fraction(price, 4)) for price in range(0, 80, 3)]
    for before, after in pairwise(chosen):
        assert before <= after
        assert trade.kept_bytes(before) >= trade.kept_bytes(after)


def test_what_is_only_read_must_be_kept_for_who_runs_again() -> None:
    """Nobody saves the sum before an activation: to make the activation again is to keep it, or make it again too."""
    operators = (Remakable("add", 30, 0), Remakable("gelu", 2, 0))
    read, saved = frozenset({"add", "gelu"}), frozenset({"gelu"})
    for size, freed, expected in ((4, 40, {"gelu"}), (50, 40, {"add", "gelu"}), (50, 8, set())):
        trade = BlockTrade(operators, (BlockMemory(size, "add", read, False), BlockMemory(freed, "gelu", saved, True)))
        assert trade.best(Fraction(1)) == expected


def traced(name: str) -> tuple[Graph, list[str]]:
    graph = trace(*zoo.build(name))
    return graph, [path for group in find_blocks(graph).paths for path in group]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt", {"layer_norm", "gelu"}),
        ("llama", {"rms_norm", "silu", "mul", "reshape"}),
        ("hf_bert", {"layer_norm", "gelu"}),
    ],
)
def test_norms_and_activations_are_made_again_and_products_are_not(name: str, expected: set[str]) -> None:
    graph, paths = traced(name)
    groups = recomputable(graph, paths).operators
    assert len(groups) == len(paths)
    for names in groups:
        assert all(map(is_operator_call, names))
        assert {graph.node_by_name[node_of_call(one)].op.split(".")[1] for one in names} == expected


@pytest.mark.parametrize("module", [gpt, llama])
def test_a_block_is_the_best_of_all_subsets_of_its_cheapest_operators(module: object) -> None:
    config = module.Config(num_layers=2)  # type: ignore[attr-defined]
    graph = trace(module.build(config), module.example_inputs(config))  # type: ignore[attr-defined]
    nodes = [node for node in graph.nodes if node.scope.outermost({"layers.0"})]
    priced = [node.name for node in nodes if "view" not in node.op and "reshape" not in node.op][-9:]
    sizes = {name: graph.tensors[graph.node_by_name[name].results[0]].num_bytes for name in priced}
    trade = block_trade(graph, nodes, lambda node: sizes.get(node.name), "cuda")
    names = [operator.name for operator in trade.operators]
    subsets = [set(some) for count in range(len(names) + 1) for some in combinations(names, count)]
    assert len(names) > 3
    for price in (Fraction(1, 2), Fraction(3, 2), Fraction(4)):
        least = min(trade.kept_bytes(some) * price + trade.time(some) for some in subsets)
        best = trade.best(price)
        assert trade.kept_bytes(best) * price + trade.time(best) == least
