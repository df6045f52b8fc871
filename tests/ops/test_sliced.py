"""Experts whose hidden values are sliced over ranks with tokens of their own: values, gradients and bytes."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.errors import PlanError
from autopar.ir.placement import S
from autopar.ir.slice_table import SliceTable
from autopar.ops import axis_rules
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.notation import AxisRule
from tests.ops.interpreter import Case, check, make_case
from tests.ops.samples import f, table_samples
from tests.ops.sweep import everything_trusted

SAMPLES = [sample for sample in table_samples() if sample.op == ROUTED_EXPERTS]


def case_of(number: int, table: str) -> Case:
    torch.manual_seed(0)
    sample = SAMPLES[number]
    return make_case(sample.op, sample.args, {**sample.kwargs, "slices": table}, sample.exact)


def rules_of(case: Case) -> tuple[AxisRule | None, list[AxisRule]]:
    """That of slices, where hidden values can be split, and all that split something."""
    with everything_trusted():
        rules = [rule for rule in axis_rules(case.graph, case.node) if any(t.kind == "S" for t in rule.operands)]
    return next((rule for rule in rules if rule.operands[0] == S(0) and rule.operands[4] == S(1)), None), rules


def test_hidden_values_that_can_be_split_can_be_sliced() -> None:
    """Not those that a model has as halves of one dim."""
    found = [rules_of(case_of(number, ""))[0] for number in range(len(SAMPLES))]
    splits = [
        any(r.operands[0] != S(0) and r.operands[4] == S(1) for r in rules_of(case_of(n, ""))[1])
        for n in range(len(SAMPLES))
    ]
    assert [rule is not None for rule in found] == splits and 3 <= sum(splits) < len(splits)


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(len(SAMPLES)))
@pytest.mark.parametrize("table", ["", "0:data"])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_slices_go_with_every_other_split(number: int, table: str, sizes: tuple[int, int]) -> None:
    case = case_of(number, table)
    sliced, rules = rules_of(case)
    if sliced is None:
        return
    for other in (rule for rule in rules if rule.operands[4] != S(1)):
        assert check(case, (sliced, other), sizes) is None, (table, other)
        assert check(case, (other, sliced), (sizes[1], 2)) is None, (table, other)


@pytest.mark.parametrize("chosen", [None, [0, 0], [5, 2]], ids=str)
@pytest.mark.parametrize("table", ["0:tensor;4:data", "0:data;3:tensor;6:data"])
@pytest.mark.parametrize("options", [{}, {"chunks": 3}], ids=str)
def test_any_way_computes_the_same_whatever_the_load(
    chosen: list[int] | None, table: str, options: dict[str, object]
) -> None:
    """Groups of ranks that share slices take ways of their own, beside exchanges in chunks."""
    torch.manual_seed(1)
    rows = [torch.randperm(7)[:2] if chosen is None else torch.tensor(chosen) for _ in range(10)]
    args = (f(10, 6), torch.stack(rows), f(10, 2), f(7, 6, 4), f(7, 4, 6), "relu", False, 7, f(7, 4), f(7, 6))
    case = make_case(ROUTED_EXPERTS, args, {"slices": table, **options})
    sliced, rules = rules_of(case)
    exchange = next(rule for rule in rules if rule.operands[0] == S(0) == rule.operands[3])
    assert sliced is not None
    for pair in itertools.permutations((sliced, exchange)):
        assert check(case, pair, (2, 2)) is None, pair
    assert check(case, (sliced,), (2,)) is None


def test_tables_that_no_rank_can_read_are_refused() -> None:
    for text in ("4:data", "0:data;0:tensor", "0:both", "0:data;;", "data"):
        with pytest.raises(PlanError, match="0:tensor;4096:data"):
            SliceTable.parse(text)
    assert SliceTable.parse("0:tensor;8:data").at(8) == "data" and SliceTable.parse("").at(10**9) == "tensor"
