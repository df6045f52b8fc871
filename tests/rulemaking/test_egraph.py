"""The e-graph finds what follows from rules, joins equal parts, and does not find what does not follow."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from rulemaking.egraph import Compiled, EGraph, Limits, Node, derivable
from rulemaking.shapes import variable_shape
from rulemaking.statement import parse_rules

ADAPTER = "add(linear(x, w1), linear(linear(x, w2), w3)) => linear(x, add(w1, matmul(w3, w2)))"
LIMITS = Limits(rounds=6, nodes=2000, seconds=10)

KNOWN = """
twice: transpose(transpose(x)) => x
product: linear(x, w) => matmul(x, transpose(w))
turned: transpose(matmul(x, y)) => matmul(transpose(y), transpose(x))
regroup: linear(linear(x, w1), w2) => linear(x, matmul(w2, w1))
together: add(linear(x, w1), linear(x, w2)) => linear(x, add(w1, w2))
concat: linear(x, concat[row](w1, w2)) => concat[col](linear(x, w1), linear(x, w2))
first: first[col, x.col](concat[col](x, y)) => x
second: second[col, x.col](concat[col](x, y)) => y
merge: linear(x, w1), linear(x, w2)
  => first[col, w1.row](linear(x, concat[row](w1, w2))), second[col, w1.row](linear(x, concat[row](w1, w2)))
fold: scale[?a](scale[?b](x)) => scale[?c](x) where ?c == ?a * ?b
"""


def known(*names: str) -> list[Compiled]:
    """Some of the known rules, ready to be applied."""
    return [Compiled.of(rule) for rule in parse_rules(KNOWN, "") if rule.name in names]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("transpose(linear(x, w)) => matmul(w, transpose(x))", ("product", "turned", "twice")),
        (
            ADAPTER,
            ("regroup", "together"),
        ),
        (KNOWN.split("merge: ")[1].split("\nfold")[0].replace("\n ", ""), ("concat", "first", "second")),
        ("scale[?a](scale[?b](scale[?c](x))) => scale[?d](x) where ?e == ?b * ?c, ?d == ?a * ?e", ("fold",)),
    ],
    ids=["through products", "adapter", "merge", "guards that define"],
)
def test_a_rule_that_follows_is_derived_and_needs_each_of_the_others(text: str, names: tuple[str, ...]) -> None:
    (rule,) = parse_rules(f"r: {text}", "")
    assert derivable(rule, known(*names), LIMITS)
    for name in names:
        assert not derivable(rule, known(*(other for other in names if other != name)), LIMITS)


def test_rules_of_two_outputs_are_applied() -> None:
    text = "r: linear(x, w1), linear(x, w2) => second[col, w2.row](linear(x, concat[row](w2, w1))), linear(x, w2)"
    (rule,) = parse_rules(text, "")
    assert derivable(rule, known("merge"), LIMITS)


@pytest.mark.parametrize(
    "text",
    [
        "linear(linear(x, w1), w2) => linear(linear(x, w2), w1)",
        "first[col, ?n](linear(x, w)) => linear(first[col, ?n](x), w)",
        "first[col, y.col](concat[col](x, y)) => first[col, y.col](concat[col](y, x))",
        "linear(x, w1), linear(x, w2) => linear(x, w2), linear(x, w1)",
    ],
)
def test_a_false_rule_is_not_derived(text: str) -> None:
    (rule,) = parse_rules(f"r: {text}", "")
    names = tuple(rule.name for rule in parse_rules(KNOWN, ""))
    assert not derivable(rule, known(*names), LIMITS)


def test_equal_operands_make_equal_terms() -> None:
    graph = EGraph()
    shape = variable_shape("x", "weight").resized({"row": 3, "col": 3})
    x, y = (graph.add(Node(f"${name}", (), ()), shape) for name in "xy")
    above = [graph.add(Node("relu", (), (graph.add(Node("transpose", (), (one,))),))) for one in (x, y)]
    assert graph.find(above[0]) != graph.find(above[1])
    graph.union(x, y)
    graph.rebuild()
    assert graph.find(above[0]) == graph.find(above[1])


def test_terms_of_different_shapes_are_not_joined() -> None:
    graph = EGraph()
    shapes = [variable_shape("x", "weight").resized({"row": 3, "col": length}) for length in (3, 4)]
    x, y = (graph.add(Node(f"${name}", (), ()), shape) for name, shape in zip("xy", shapes, strict=True))
    with pytest.raises(PlanError, match="different shapes"):
        graph.union(x, y)
    with pytest.raises(PlanError, match="4 is not 3"):
        graph.add(Node("matmul", (), (y, y)))


def test_sizes_of_variables_that_are_bound_later_are_compared() -> None:
    """A constant's size may stand before the variable that has it."""
    text = """
zero: matmul(zeros[w.row, w.col](), w) => zeros[w.row, w.col]()
turn: transpose(zeros[?m, ?n]()) => zeros[?n, ?m]()
"""
    rules = [Compiled.of(rule) for rule in parse_rules(text, "")]
    (rule,) = parse_rules("r: transpose(matmul(zeros[w.row, w.col](), w)) => zeros[w.col, w.row]()", "")
    assert derivable(rule, rules, LIMITS)
    (other,) = parse_rules("r: matmul(zeros[?n, w.row](), w) => zeros[?n, w.col]()", "")
    assert not derivable(other, rules, LIMITS)
