"""The borders of the lowerings of spatial operators and grouped channels: what they refuse, and what they don't."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.ir.placement import Placement, R, S, parse_placement
from autopar.ops import axis_rules, shape_error
from autopar.ops.notation import AxisRule
from tests.ops.interpreter import check, make_case
from tests.ops.samples import distinct, f
from tests.ops.shards import make_axes


def refusal(op: str, args: tuple[Any, ...], x: str, others: str, sizes: tuple[int, ...]) -> str | None:
    """The reason against x and its result placed so, and the other operands all placed otherwise."""
    case = make_case(f"aten.{op}", args, {})
    operands: list[Placement] = [parse_placement(x), *[parse_placement(others)] * (len(case.operands) - 1)]
    return shape_error(case.graph, case.node, tuple(operands), make_axes(sizes))


def test_one_axis_splits_a_spatial_dim() -> None:
    args = (f(2, 3, 12), f(4, 3, 3), None, [1], [1])
    assert refusal("conv1d.default", args, "S(2) R", "R R", (2, 2)) is None
    assert refusal("conv1d.default", args, "S(2) S(2)", "R R", (2, 2)) == (
        "spatial dim 2 is split by 2 axes; halos are exchanged over one"
    )


def test_every_rank_makes_a_row() -> None:
    args = (distinct(2, 3, 10), [2], [2])  # five rows: 2 + 2 + 1 on three ranks, 2 + 2 + 1 + 0 on four
    assert refusal("max_pool1d.default", args, "S(2)", "R", (3,)) is None
    assert refusal("max_pool1d.default", args, "S(2)", "R", (4,)) == (
        "spatial dim 2 of the result, 5 long, leaves one of 4 ranks without a row"
    )


def test_a_halo_may_be_longer_than_a_shard() -> None:
    args = (f(2, 3, 6), f(4, 3, 7), None, [1], [3])
    assert refusal("conv1d.default", args, "S(2)", "R", (3,)) is None


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("conv2d.default", (f(2, 3, 8, 7), f(4, 3, 3, 3), None, [1, 2], [1, 1])),
        ("avg_pool2d.default", (f(2, 3, 8, 7), [3, 2], [1, 2], [1, 1], False, False)),
    ],
)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_an_axis_of_one_rank_splits_nothing(op: str, args: tuple[Any, ...], sizes: tuple[int, int]) -> None:
    case = make_case(f"aten.{op}", args, {}, exact=False)
    others = (R,) * (len(case.operands) - 1)
    rules = tuple(AxisRule((S(dim), *others), (S(dim),)) for dim in (3, 2))
    assert check(case, rules, sizes) is None


@pytest.mark.parametrize(
    ("op", "args", "others"),
    [
        ("conv1d.default", (f(2, 12, 5), f(12, 2, 3), None, [1], [1], [1], 6), "S(0)"),
        ("conv_transpose1d.default", (f(2, 12, 5), f(12, 2, 3), None, [1], [1], [0], 6), "S(0)"),
        ("group_norm.default", (f(2, 12, 5), 6, f(12), f(12)), "S(0)"),
    ],
)
def test_channels_split_by_whole_groups(op: str, args: tuple[Any, ...], others: str) -> None:
    assert refusal(op, args, "S(1)", others, (3,)) is None
    assert refusal(op, args, "S(1)", others, (4,)) == "6 groups of channels do not split in 4"


def spatial_rules(op: str, *args: Any) -> list[str]:
    case = make_case(f"aten.{op}", args, {})
    return [str(rule.operands[0]) for rule in axis_rules(case.graph, case.node) if str(rule.operands[0]) == "S(2)"]


def test_sizes_that_are_rounded_up_are_not_split() -> None:
    assert spatial_rules("max_pool1d.default", distinct(2, 3, 11), [2]) == ["S(2)"]
    assert not spatial_rules("max_pool1d.default", distinct(2, 3, 11), [2], [2], [0], [1], True)


def test_pools_of_several_windows_need_the_whole_image() -> None:
    assert spatial_rules("adaptive_avg_pool1d.default", f(2, 3, 8), [1]) == ["S(2)"]
    assert not spatial_rules("adaptive_avg_pool1d.default", f(2, 3, 8), [4])
