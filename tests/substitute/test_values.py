"""Graphs as values of the algebra: nothing changes on the way there and back; what is lowered is what was said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.sharing import share
from autopar.substitute.defined import OPAQUE, Values
from autopar.substitute.lifting import lifted
from autopar.substitute.lowering import lowered
from autopar.substitute.matching import Match, Matcher
from autopar.substitute.rewriting import rewritten
from autopar.substitute.rules.terms import Rule, Sort, parse_term
from autopar.trace import trace
from tests.equivalence import planned

SORTS: dict[str, Sort] = {"w": "weight", "w1": "weight", "w2": "weight", "b": "vector"}


def rule(source: str, target: str, sorts: dict[str, Sort] | None = None, guards: tuple[str, ...] = ()) -> Rule:
    """A rule of outputs parted by " ; "."""
    sides = [tuple(map(parse_term, side.split(" ; "))) for side in (source, target)]
    return Rule("test", *sides, SORTS | (sorts or {}), guards)


MERGE = rule(
    "linear(x, w1) ; linear(x, w2)",
    "first[col, w1.row](linear(x, concat[row](w1, w2))) ; second[col, w1.row](linear(x, concat[row](w1, w2)))",
)


class Branches(nn.Module):
    """Three products of one input, and what the algebra must keep apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, size, bias=False) for size in (4, 5, 3))

    def forward(self, x: Tensor) -> Tensor:
        first, rest = x.split([2, 6], -1)
        y = torch.cat([self.a(rest), self.b(rest), self.c(rest), first], -1)
        return (torch.tanh(y) * 2.0 + nn.functional.gelu(y, approximate="tanh")).sum()


class Trained(nn.Module):
    """What a function makes of a trained input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.factor = function, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.factor).sum()


def values_of(module: nn.Module, *shape: int) -> Values:
    return lifted(trace(module, (torch.zeros(shape),)))


def only(values: Values, found: Rule) -> Match:
    (match,) = Matcher(found).matches(values)
    return match


@pytest.mark.parametrize("name", ["gpt", "llama", "moe", "lstm", "unet", "wide_resnet", "hf_gpt2", "dlrm"])
def test_there_and_back_is_the_same(name: str) -> None:
    graph = planned.graph(name)
    values = lifted(graph)
    assert share(lowered(values)) == graph
    assert {made.op for made in values.definitions.values()} > {OPAQUE}


def applied(values: Values, found: Rule, times: int) -> Values:
    for _ in range(times):
        after = rewritten(values, next(iter(Matcher(found).matches(values))))
        assert after is not None
        values = after
    return values


def test_merged_products_are_one_product_and_one_split() -> None:
    graph = lowered(applied(values_of(Branches(), 7, 8), MERGE, 2))
    products = [node for node in graph.nodes if node.op == "aten.linear.default"]
    (split,) = (node for node in graph.nodes if node.op.startswith("aten.split") and len(node.outputs) == 3)
    assert [graph.tensors[node.results[0]].shape for node in products] == [(7, 12)]
    assert sorted(split.args[1]) == [3, 4, 5]
    (weights,) = (node for node in graph.nodes if node.op == "aten.cat.default" and len(node.operands) == 3)
    assert {name.split(".")[0] for name in weights.operands} == {"a", "b", "c"}


def test_a_part_of_a_part_is_cut_from_the_whole() -> None:
    def parts(x: Tensor) -> Tensor:
        first, second = x.split([3, 5], -1)
        third, fourth = second.split([1, 4], -1)
        return first.sum() + third.exp().sum() + fourth.exp().sum()

    values = values_of(Trained(parts), 2, 8)
    together = rule("map[?f](second[col, ?n](x))", "second[col, ?n](map[?f](x))")
    matches = [match for match in Matcher(together).matches(values) if match.binding["?n"] == 1]
    after = rewritten(values, matches[0])
    assert after is not None
    again = rewritten(after, next(m for m in Matcher(together).matches(after) if m.binding["?n"] == 3))
    assert again is not None
    cuts = [node for node in lowered(again).nodes if node.op == "aten.split_with_sizes.default"]
    assert (cuts[-1].args[1], cuts[-1].outputs[0]) == ((4, 4), None)


def test_a_value_that_equals_another_is_read_instead() -> None:
    values = values_of(Trained(lambda x: torch.tanh(x.transpose(-1, -2).transpose(-1, -2))), 2, 3, 4)
    twice = rule("transpose(transpose(x))", "x")
    after = rewritten(values, only(values, twice))
    assert after is not None
    assert [node.op for node in lowered(after).nodes] == ["aten.mul.Tensor", "aten.tanh.default", "aten.sum.default"]


def test_two_outputs_that_need_each_other_are_not_merged() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.a(x)).sum()

    values = values_of(Chain(), 3, 4)
    on_the_right = rule(
        "linear(x, w) ; linear(y, w)",
        "first[row, x.row](linear(concat[row](x, y), w)) ; second[row, x.row](linear(concat[row](x, y), w))",
    )
    found = list(Matcher(on_the_right).matches(values))
    assert found
    assert all(rewritten(values, match) is None for match in found)


def test_flattened_rows_are_rows_of_the_stack() -> None:
    values = lifted(planned.graph("hf_gpt2"))
    fused = [made for made in values.definitions.values() if made.op == "affine" and made.through]
    assert fused
    assert all(len(made.tensor.shape) == 3 for made in fused)


def test_guards_are_asked() -> None:
    values = values_of(Trained(lambda x: torch.relu(x * -2.0) + torch.relu(x * 3.0)), 2, 2)
    positive = rule("relu(scale[?c](x))", "scale[?c](relu(x))", guards=("?c >= 0",))
    assert [match.binding["?c"] for match in Matcher(positive).matches(values)] == [3.0]


def test_pinned_tensors_stay() -> None:
    values = values_of(Branches(), 7, 8)
    kinds = {name for match in Matcher(MERGE, frozenset({"a.weight"})).matches(values) for name in match.roots}
    free = {name for match in Matcher(MERGE).matches(values) for name in match.roots}
    assert len(kinds) == 2
    assert len(free) == 3
