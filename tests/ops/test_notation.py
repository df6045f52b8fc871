"""The notation: what a rule text stands for, and which texts are refused."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import RuleError
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.graph import Tensor as Value
from autopar.ir.placement import P, R, S
from autopar.ops import axis_rules, lookup, overload, register_rule
from autopar.ops.lowering import local_arguments
from autopar.ops.notation import AxisRule, einsum_rules


def test_letters_are_split_where_they_stand_and_summed_where_they_vanish() -> None:
    rules = einsum_rules("m k, k n -> m n", [(4, 6), (6, 2)], [(4, 2)])
    assert set(rules) == {
        AxisRule((S(0), R), (S(0),)),
        AxisRule((S(1), S(0)), (P,)),
        AxisRule((R, S(1)), (S(1),)),
    }


def test_additive_operands_are_summands_where_a_letter_vanishes() -> None:
    rules = einsum_rules("... k, n k, n -> ... n", [(4, 6), (2, 6), (2,)], [(4, 2)], "PRP", additive=(2,))
    assert AxisRule((S(1), S(1), P), (P,)) in rules
    assert AxisRule((P, R, P), (P,)) in rules
    assert AxisRule((S(0), R, R), (S(0),)) in rules


def test_upper_case_letters_and_dims_of_length_one_are_not_split() -> None:
    assert einsum_rules("b H -> b H", [(4, 6)], [(4, 6)]) == [AxisRule((S(0),), (S(0),))]
    assert AxisRule((S(0), R), (S(0),)) in einsum_rules("..., ... -> ...", [(4, 6), (1, 6)], [(4, 6)])


@pytest.mark.parametrize("text", ["m k, k n", "m-k -> m", "1 2 -> 1"])
def test_malformed_texts_are_refused(text: str) -> None:
    with pytest.raises(RuleError, match="found"):
        einsum_rules(text, [(4, 6), (6, 2)], [(4, 2)])


def test_texts_that_do_not_fit_the_shapes_are_refused() -> None:
    with pytest.raises(RuleError, match="expected 2 dims"):
        einsum_rules("m k -> m", [(4, 6, 2)], [(4,)])
    with pytest.raises(RuleError, match="at least 2 dims"):
        einsum_rules("... m k -> m", [(4,)], [(4,)])


def _graph(op: str, args: tuple[object, ...], shape: tuple[int, ...], result: tuple[int, ...]) -> tuple[Graph, Node]:
    node = Node("y", op, (Ref("x"), *args), (), ("y",))
    tensors = {"x": Value("x", shape, "float32", True), "y": Value("y", result, "float32", True)}
    return Graph(inputs=("x",), stored=(), nodes=(node,), outputs=("y",), tensors=tensors), node


def test_user_rules_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_USER", {})
    register_rule("aten.cholesky.default", "b N M -> b N M")
    graph, node = _graph("aten.cholesky.default", (), (4, 3, 3), (4, 3, 3))
    assert AxisRule((S(0),), (S(0),)) in axis_rules(graph, node)
    assert lookup.coverage(graph) == {"aten.cholesky.default": "user"}


def test_user_rules_are_checked() -> None:
    with pytest.raises(RuleError, match="at most 1 operands"):
        register_rule("aten.relu.default", "b, b -> b")
    with pytest.raises(RuleError, match="letters P or R"):
        register_rule("aten.relu.default", "b -> b", partial="PX")
    with pytest.raises(RuleError, match="expected an operator such as"):
        register_rule("aten.no_such_thing.default", "b -> b")


def test_sizes_become_local_and_unknown_ones_stay() -> None:
    graph, node = _graph("aten.view.default", ((-1, 4, 6),), (8, 24), (8, 4, 6))
    args, _ = local_arguments(graph, node, ((4, 4, 6),))
    assert args == (Ref("x"), (-1, 4, 6))
    assert local_arguments(graph, node, ((8, 2, 6),))[0] == (Ref("x"), (-1, 2, 6))
    assert local_arguments(graph, node, ((0, 4, 6),))[0] == (Ref("x"), (0, 4, 6))  # -1 would be ambiguous


def test_other_arguments_stay_as_they_are() -> None:
    graph, node = _graph("aten.slice.Tensor", (1, 0, 4), (8, 24), (8, 4))
    assert local_arguments(graph, node, ((4, 4),)) == (node.args, node.kwargs)


def test_overload_finds_operators_by_name() -> None:
    assert overload("aten.linear.default") is torch.ops.aten.linear.default
