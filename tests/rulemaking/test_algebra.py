"""Operators compute what torch computes; sizes and guards are what terms need; random instances are varied."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from autopar.errors import PlanError
from autopar.substitute.rules.expressions import parse_expression, parse_guard, solve, value_of
from autopar.substitute.rules.terms import Rule, Size, Unknown
from rulemaking.drawing import Drawing
from rulemaking.elimination import eliminated
from rulemaking.formed import rule_conditions
from rulemaking.instances import instances
from rulemaking.polynomials import Polynomials
from rulemaking.statement import parse_rules
from rulemaking.values import Doubles, Field, Integers, Values, pair

WINDOWS = [(1, 0, 1, 1), ((1, 2), (2, 1), (2, 1), 2), (2, 1, (1, 2), 3)]


def rule(text: str) -> Rule:
    """The one rule of a statement."""
    (found,) = parse_rules(text, "test")
    return found


@pytest.mark.parametrize(("stride", "padding", "dilation", "groups"), WINDOWS)
@pytest.mark.parametrize("values", [Integers(), Doubles()], ids=["integers", "doubles"])
def test_convolutions_are_torchs(values: Values, stride: Any, padding: Any, dilation: Any, groups: int) -> None:
    drawn = np.random.default_rng(0)
    image, kernel = values.array((2, 6, 9, 8), drawn), values.array((6, 6 // groups, 3, 2), drawn)
    found = torch.as_tensor(values.conv(image, kernel, stride, padding, dilation, groups)).double()
    doubles = torch.as_tensor(image).double(), torch.as_tensor(kernel).double()
    expected = torch.nn.functional.conv2d(*doubles, None, stride, padding, dilation, groups)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", [2, (3, 2)])
def test_poolings_are_torchs(size: Any) -> None:
    image = Integers().array((2, 3, 7, 6), np.random.default_rng(0))
    doubles = torch.from_numpy(image).double()
    largest = torch.from_numpy(Integers().max_pool(image, size, (2, 1), 1)).double()
    torch.testing.assert_close(largest, torch.nn.functional.max_pool2d(doubles, size, (2, 1), 1))
    mean = Doubles().avg_pool(doubles, size, (2, 1), 1)
    torch.testing.assert_close(mean, torch.nn.functional.avg_pool2d(doubles, size, (2, 1), 1))
    places = pair(size)[0] * pair(size)[1]
    total = Field().mul(Field().avg_pool(image, size, (2, 1), 1), places)
    torch.testing.assert_close(torch.from_numpy(total).double(), mean * places)


def test_heads_are_split_as_views_split_them() -> None:
    x = Integers().array((2, 5, 6), np.random.default_rng(0))
    expected = torch.from_numpy(x).view(2, 5, 3, 2).transpose(1, 2)
    assert np.array_equal(Integers().split_heads(3, x), expected.numpy())
    assert np.array_equal(Integers().merge_heads(expected.numpy()), x)


def test_casts_round_as_torch_does() -> None:
    x = np.array([2049, 65_519, -3, 257])
    assert Integers().cast("float16", x).tolist() == [2048, 65_504, -3, 257]
    assert Integers().cast("bfloat16", x).tolist() == [2048, 65_536, -3, 256]


def test_polynomials_are_equal_where_they_agree_for_all_numbers() -> None:
    polynomials = Polynomials()
    x, y, z = (polynomials.array((2, 2), None) for _ in range(3))
    assert ((x @ (y + z)) == (x @ y + x @ z)).all()
    assert not ((x @ y) == (y @ x)).any()
    assert (polynomials.map("f", x + y) == polynomials.map("f", y + x)).all()
    assert not (polynomials.map("f", x) == polynomials.map("g", x)).any()


def test_conditions_are_those_of_both_sides() -> None:
    """A rule says nothing of sizes that make either side ill formed, or the sides' shapes differ."""
    found = rule_conditions(rule("r: first[col, ?n](linear(x, w)) => linear(x, first[row, ?n](w))"))
    assert [f"{left} == {right}" for left, right in found.equalities] == [
        "x.col == w.col",
        "w.row == ?n + ?_1",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "add(x, i) => x",
        "conv[1, 1, 1, 1](x, k) => x",
        "scale[?c](x, y) => x",
        "linear[?c](x, w) => x",
        "first[up, 1](x) => x",
    ],
)
def test_ill_sorted_terms_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"is ill formed|takes \["):
        rule_conditions(rule(f"r: {text}"))


def test_guards_define_what_they_name_and_refuse_what_does_not_hold() -> None:
    guards = [parse_guard("?c == ?a * ?b + 1"), parse_guard("?c >= 7"), parse_guard("float32 holds x.dtype")]
    binding = {Unknown("a"): 2, Unknown("b"): 3, Size("x", "dtype"): "bfloat16"}
    assert solve(guards, binding) == {**binding, Unknown("c"): 7}
    assert solve(guards, {**binding, Unknown("a"): 1}) is None
    assert solve(guards, {**binding, Size("x", "dtype"): "float64"}) is None
    with pytest.raises(PlanError, match=r"cannot be checked: \?b is not bound"):
        solve(guards, {Unknown("a"): 2})


@pytest.mark.parametrize("text", ["?g = 1", "?g == 1 == 2", "== 1", "?g == ", "?g == 1 +", "?g == @"])
def test_guards_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="expected"):
        parse_guard(text)


def test_equalities_are_solved_so_that_what_is_left_can_be_drawn() -> None:
    equalities = [("x.col + y.col", "?n + ?m"), ("?m", "y.col"), ("?n", "z.row + 2")]
    solved, last = eliminated([(parse_expression(left), parse_expression(right)) for left, right in equalities])
    assert len(last) == len(solved) == 3
    free = {"y.col": 5, "z.row": 3, "?n": 5, "?m": 5, "x.col": 5}
    binding = {parse_expression(name): value for name, value in free.items()}
    assert all(value_of(left, binding) == value_of(right, binding) for left, right in solved)


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ("x.col + x.col", "y.col + y.col", [("x.col", "y.col")]),
        ("x.col + x.col", "y.col + y.col + y.col", [("x.col + x.col", "y.col + y.col + y.col")]),
        ("2", "x.col + x.col", [("1", "x.col")]),
        ("3", "x.col + x.col", [("3", "x.col + x.col")]),
        ("x.col + 1", "x.col", [("1", "0")]),
    ],
)
def test_no_equality_is_lost_where_none_can_be_solved(left: str, right: str, found: list[tuple[str, str]]) -> None:
    solved, _ = eliminated([(parse_expression(left), parse_expression(right))])
    assert {frozenset(map(str, sides)) for sides in solved} == {frozenset(sides) for sides in found}


def test_instances_have_groups_uneven_sizes_zeros_and_negative_values() -> None:
    text = "r: scale[?c](conv[?s, ?p, ?d, ?g](i, k)) => conv[?s, ?p, ?d, ?g](i, scale[?c](k))"
    drawn = list(islice(instances(rule(text), Integers()), 300))
    bindings = [instance.binding for instance in drawn]
    assert {binding[Unknown("g")] for binding in bindings} == {1, 2, 3}
    assert any(binding[Size("i", "height")] != binding[Size("i", "width")] for binding in bindings)
    assert any(isinstance(binding[Unknown("s")], tuple) for binding in bindings)
    assert any(binding[Size("i", "batch")] == 0 for binding in bindings)
    assert any(binding[Unknown("c")] < 0 for binding in bindings)
    assert any((instance.arrays["k"] < 0).any() for instance in drawn)


def test_conditions_that_nothing_meets_have_no_instance() -> None:
    impossible = rule("r: first[col, ?n](x) => x where ?n > x.col")
    assert Drawing.of(impossible).binding(random.Random(0)) is None
    assert list(islice(instances(impossible, Integers()), 1)) == []
