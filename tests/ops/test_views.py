"""Views over sharded dims: what would need other ranks' elements is never claimed, or refused for its lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.ir.placement import P, R, S, Type
from autopar.ops import axis_rules, shape_error
from tests.ops.interpreter import Layout, check, make_case
from tests.ops.samples import f, ids

CUTS = [
    ("aten.slice.Tensor", (f(4, 12), 1, 0, 6)),  # half of a fused projection
    ("aten.slice.Tensor", (f(4, 12), -1, 6, 12)),
    ("aten.slice.Tensor", (f(4, 12), 1, 0, 12, 2)),
    ("aten.slice.Tensor", (f(4, 12), 1, 0, 11)),
    ("aten.split.Tensor", (f(4, 12), 4, 1)),
    ("aten.split.Tensor", (f(4, 12), 12, -1)),
    ("aten.split_with_sizes.default", (f(4, 12), [6, 3, 3], 1)),
    ("aten.unsafe_split.Tensor", (f(4, 12), 4, 1)),
    ("aten.unfold.default", (f(4, 12), 1, 4, 4)),
    ("aten.flip.default", (f(4, 12), [1])),
    ("aten.roll.default", (f(4, 12), [6], [1])),
    ("aten.repeat.default", (f(4, 12), [1, 2])),
    ("aten.constant_pad_nd.default", (f(4, 12), [4, 0])),
    ("aten.index_select.default", (f(4, 12), 1, ids(12, 4))),
    ("aten.gather.default", (f(4, 12), 1, ids(12, 4, 4))),
    ("aten.sort.default", (f(4, 12), 1)),
    ("aten.cumsum.default", (f(4, 12), -1)),
    ("aten.topk.default", (f(4, 12), 2)),
]


@pytest.mark.parametrize(("op", "args"), CUTS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_dim_that_is_cut_or_moved_is_not_split(op: str, args: tuple[Any, ...]) -> None:
    case = make_case(op, args, {})
    rules = axis_rules(case.graph, case.node)
    assert S(0) in {rule.operands[0] for rule in rules}
    assert S(1) not in {rule.operands[0] for rule in rules}


RESHAPES = [
    ("view", (6, 4), [24], (4,), S(0)),  # merges 2, 2, 2, 0 rows into slices that are not 6 long
    ("view", (5, 4), [20], (2,), S(0)),  # 3 and 2 rows: 12 and 8 elements, not 10 and 10
    ("reshape", (4, 5, 2), [4, 10], (2,), S(1)),
    ("view", (10, 4), [5, 2, 4], (4,), S(0)),  # splits
    ("view", (12, 2), [3, 4, 2], (2,), S(0)),  # 6 rows are not whole blocks of 4
    ("view", (4, 12), [4, 6, 2], (4,), S(1)),  # heads: 6 in 4
    ("_unsafe_view", (6, 4), [24], (4,), S(0)),
    ("view_copy", (6, 4), [24], (4,), S(0)),
    ("_reshape_copy", (10, 4), [5, 2, 4], (4,), S(0)),
    ("view", (6, 4), [24], (2, 2), S(0)),
]


@pytest.mark.parametrize(("op", "before", "after", "sizes", "type_"), RESHAPES)
def test_reshapes_that_do_not_keep_slices_whole_are_refused(
    op: str, before: tuple[int, ...], after: list[int], sizes: tuple[int, ...], type_: Type
) -> None:
    case = make_case(f"aten.{op}.default", (f(*before), after), {})
    rule = next(rule for rule in axis_rules(case.graph, case.node) if rule.operands == (type_,))
    layout = Layout((rule,) * len(sizes), sizes)
    error = shape_error(case.graph, case.node, layout.operands, layout.axes)
    assert error is not None and "does not reshape" in error


def test_reshapes_that_leave_an_uneven_dim_alone_are_not_refused() -> None:
    case = make_case("aten.view.default", (f(5, 4, 6), [5, 24]), {})
    rule = next(rule for rule in axis_rules(case.graph, case.node) if rule.operands == (S(0),))
    layout = Layout((rule,), (2,))
    assert shape_error(case.graph, case.node, layout.operands, layout.axes) is None
    assert check(case, layout.rules, layout.sizes) is None


def test_only_the_leading_dim_of_a_merge_is_split() -> None:
    case = make_case("aten.view.default", (f(4, 6), [24]), {})
    assert S(1) not in {rule.operands[0] for rule in axis_rules(case.graph, case.node)}


def test_a_squeeze_that_would_remove_a_slice_of_length_one_is_refused() -> None:
    case = make_case("aten.squeeze.default", (f(3, 4),), {})
    rule = next(rule for rule in axis_rules(case.graph, case.node) if rule.operands == (S(0),))
    layout = Layout((rule,), (2,))  # 2 rows and 1 row
    error = shape_error(case.graph, case.node, layout.operands, layout.axes)
    assert error is not None and "squeezed" in error


def test_strides_of_its_own_are_not_split() -> None:
    """as_strided reads by position in memory, which a slice does not have."""
    case = make_case("aten.as_strided.default", (f(4, 6), [2, 3], [6, 2]), {})
    assert {rule.operands for rule in axis_rules(case.graph, case.node)} == {(R,), (Type("I"),)}


OVERWRITES = [
    ("aten.scatter.src", (f(4, 12), 1, ids(12, 4, 6), f(4, 6))),
    ("aten.index_put.default", (f(12, 4), [ids(12, 6)], f(6, 4))),
    ("aten.index_copy.default", (f(4, 12), 1, ids(12, 6), f(4, 6))),
    ("aten.scatter.value", (f(4, 12), 1, ids(12, 4, 6), 2.0)),
    ("aten.masked_fill.Scalar", (f(4, 6), torch.ones(4, 6).bool(), 1.0)),
]


@pytest.mark.parametrize(("op", "args"), OVERWRITES, ids=lambda value: value if isinstance(value, str) else "")
def test_overwriting_takes_no_summands(op: str, args: tuple[Any, ...]) -> None:
    """With duplicate indices one write wins; of summands, different writes could win on different ranks."""
    case = make_case(op, args, {})
    assert P not in {type_ for rule in axis_rules(case.graph, case.node) for type_ in rule.operands}


def test_integer_results_are_summands_of_counts_alone() -> None:
    case = make_case("aten.sum.dim_IntList", (ids(5, 4, 6), [1]), {})
    rules = axis_rules(case.graph, case.node)
    assert all(rule.operands[0].kind == "S" for rule in rules if rule.results[0] == P)
    other = make_case("aten.neg.default", (ids(5, 4, 6),), {})
    assert P not in {rule.results[0] for rule in axis_rules(other.graph, other.node)}
