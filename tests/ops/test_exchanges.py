"""Tokens that are exchanged for experts, over one axis and several, on virtual ranks: values, gradients and bytes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from autopar.ir.placement import Axis, S
from autopar.ir.plan import NodePlan
from autopar.ops import axis_rules
from autopar.ops.experts import ROUTED_EXPERTS, exchanged_rows, place_table_bytes
from autopar.ops.notation import AxisRule
from autopar.runtime.lowering import experts as lowering
from autopar.runtime.lowering.experts import routed_experts as runtime_experts
from tests.ops.interpreter import Case, check, make_case
from tests.ops.samples import f, table_samples
from tests.ops.sweep import everything_trusted


def routed_cases() -> list[Case]:
    torch.manual_seed(0)
    return [make_case(s.op, s.args, s.kwargs, s.exact) for s in table_samples() if s.op == ROUTED_EXPERTS]


CASES = routed_cases()


def rules_of(case: Case) -> tuple[AxisRule, list[AxisRule]]:
    """The exchange, and all that splits something."""
    with everything_trusted():
        rules = [rule for rule in axis_rules(case.graph, case.node) if S(0) in rule.operands]
    exchange = next(rule for rule in rules if rule.operands[0] == S(0) == rule.operands[3])
    return exchange, rules


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2)])
def test_an_exchange_goes_with_every_other_split(number: int, sizes: tuple[int, int]) -> None:
    case = CASES[number]
    exchange, rules = rules_of(case)
    for other in rules:
        for pair in dict.fromkeys(itertools.permutations((exchange, other))):
            assert check(case, pair, sizes) is None, (pair, sizes)


@pytest.mark.sampled
@pytest.mark.parametrize("chosen", [[0, 0], [0, 1], [3, 3], [5, 2]], ids=str)
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_any_routing_computes_the_same(chosen: list[int], chunks: int) -> None:
    """All tokens to one expert, or two; most ranks get none, and chunks are more than the tokens of a rank."""
    ids = torch.tensor(chosen).expand(10, 2).contiguous()
    args = (f(10, 6), ids, f(10, 2), f(7, 6, 4), f(7, 4, 6), "relu", False, 7)
    case = make_case(ROUTED_EXPERTS, args, {"chunks": chunks})
    exchange, _ = rules_of(case)
    for rules, sizes in (((exchange,), (4,)), ((exchange, exchange), (2, 2))):
        assert check(case, rules, sizes) is None, sizes


TABLES = ["0:flat:4", "0:two-level:8", "0:flat:1;2:two-level:3", "0:two-level:2;5:flat:4;18:two-level:4"]


@pytest.mark.parametrize("chosen", [None, [0, 0], [5, 2]], ids=str)
@pytest.mark.parametrize("table", TABLES)
def test_any_way_computes_the_same_whatever_the_load(chosen: list[int] | None, table: str) -> None:
    """Over one axis, and over two that are taken as one, or one after the other."""
    torch.manual_seed(1)
    rows = [torch.randperm(7)[:2] if chosen is None else torch.tensor(chosen) for _ in range(10)]
    args = (f(10, 6), torch.stack(rows), f(10, 2), f(7, 6, 4), f(7, 4, 6), "relu", False, 7)
    case = make_case(ROUTED_EXPERTS, args, {"exchange": table})
    exchange, _ = rules_of(case)
    for rules, sizes in (((exchange,), (4,)), ((exchange, exchange), (2, 2)), ((exchange, exchange), (3, 2))):
        assert check(case, rules, sizes) is None, sizes


@pytest.mark.sampled
@pytest.mark.parametrize("chosen", [None, [0, 1], [6, 7]], ids=str)
@pytest.mark.parametrize("replicas", [1, 3, 6])
def test_replicas_compute_the_same_whatever_the_load(chosen: list[int] | None, replicas: int) -> None:
    """Of experts with rows, of some without any, and beside a number that is no expert's; with biases, over one axis or
    two, some ranks of which have no expert."""
    torch.manual_seed(1)
    rows = [torch.randperm(7)[:2] if chosen is None else torch.tensor(chosen) for _ in range(10)]
    biases = (f(7, 4), f(7, 6))
    args = (f(10, 6), torch.stack(rows), f(10, 2), f(7, 6, 4), f(7, 4, 6), "relu", False, 7, *biases)
    case = make_case(ROUTED_EXPERTS, args, {"replicas": replicas, "chunks": 2})
    exchange, _ = rules_of(case)
    for rules, sizes in (((exchange,), (4,)), ((exchange, exchange), (2, 2)), ((exchange,), (9,))):
        assert check(case, rules, sizes) is None, sizes


@pytest.mark.parametrize("chunks", [1, 4])
def test_numbers_of_no_expert_add_nothing(chunks: int) -> None:
    """Models mark choices that they drop so: histograms of the experts leave them out."""
    ids = torch.tensor([[0, 7], [8, 6], [7, 7], [3, 2]] * 3)
    args = (f(12, 6), ids, f(12, 2), f(7, 6, 4), f(7, 4, 6), "relu", False, 7)
    case = make_case(ROUTED_EXPERTS, args, {"chunks": chunks})
    exchange, rules = rules_of(case)
    for rule in rules:
        assert check(case, (rule,), (4,)) is None, rule
    assert check(case, (exchange, exchange), (2, 2)) is None


def test_numbers_below_all_experts_end_in_an_error() -> None:
    ids = torch.tensor([[0, -1]])
    with pytest.raises(RuntimeError, match="found one below 0"):
        runtime_experts(f(1, 6), ids, f(1, 2), f(7, 6, 4), f(7, 4, 6), "relu", False, 7)


def test_what_is_exchanged_follows_the_tokens() -> None:
    rows = exchanged_rows(4096, 2, 8, 8)
    assert rows.sent == 8192 <= rows.mean <= rows.most < 8192 * 1.1
    assert exchanged_rows(4096, 2, 8, 8, "power_law:1.2").most > 2 * rows.most


@pytest.mark.parametrize(
    ("exchange", "sizes", "tables"), [("", (), 1), ("", (4,), 1), ("0:flat:1;2:two-level:3", (2, 2), 2)]
)
def test_what_tells_where_experts_are_is_counted_once_for_layers_alike(
    exchange: str, sizes: tuple[int, ...], tables: int
) -> None:
    """The runtime's own table, of which layers that are alike share one; by load, one for each order of ranks."""
    ids = torch.zeros(10, 2, dtype=torch.int64)
    args = (f(10, 6), ids, f(10, 2), f(7, 6, 4), f(7, 4, 6), "relu", False, 7)
    node = make_case(ROUTED_EXPERTS, args, {"exchange": exchange} if exchange else {}).node
    axes = tuple(Axis(f"a{n}", size, 2 - n) for n, size in enumerate(sizes))
    twin = replace(node, name="twin")
    split = NodePlan((tuple(S(0) for _ in sizes),) * 5, (tuple(S(0) for _ in sizes),))
    found = place_table_bytes([node, twin], {node.name: split, "twin": split}, axes)
    own = tuple(lowering._ExpertAxis(size, 0, n) for n, size in enumerate(sizes))
    assert found == tables * lowering._slots(7, own, torch.device("cpu")).nbytes
