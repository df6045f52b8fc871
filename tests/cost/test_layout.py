"""Strides after views, against torch's own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.ir.graph import Node, Ref
from autopar.ops.call import base_name
from autopar.ops.layout import (
    RESHAPES,
    contiguous_strides,
    copied,
    copied_operands,
    dense_strides,
    reshaped_strides,
    strides_of_part,
)
from autopar.trace import trace
from models import gpt, llama
from tests.trace.interpret import run_graph


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A tensor whose dims lie in any order, with a gap perhaps, and a shape of as many elements."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    x = torch.empty(shape).permute(draw(st.permutations(range(len(shape)))))
    if x.size(0) > 1 and draw(st.booleans()):
        x = x.narrow(0, 0, x.size(0) - 1)
    left, new = x.numel(), []
    for factor in draw(st.lists(st.sampled_from([1, 2, 3, 4, 5]), max_size=4)):
        if left % factor == 0:
            new.append(factor)
            left //= factor
    return x, tuple(draw(st.permutations([*new, left])))


@given(reshapes())
@settings(max_examples=300, deadline=None)
def test_a_reshape_is_a_view_where_torch_makes_one(case: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    x, new = case
    assert math.prod(new) == x.numel()
    strides = reshaped_strides(tuple(x.shape), x.stride(), new)
    try:
        view = x.view(new)
    except RuntimeError:
        view = None
    assert (view is None) == (strides is None)
    if view is not None and strides is not None:
        pairs = zip(new, view.stride(), strides, strict=True)
        assert all(theirs == ours for size, theirs, ours in pairs if size > 1)


@st.composite
def products(draw: st.DrawFn) -> tuple[str, torch.Tensor, torch.Tensor]:
    """An equation of two operands, whose dims lie in any order, and of which some have one element."""
    sizes = {letter: draw(st.sampled_from([1, 1, 2, 3])) for letter in "abcde"}
    left, right = (draw(st.permutations("abcde"))[: draw(st.integers(1, 4))] for _ in range(2))
    out = [
        letter for letter in sizes if (letter in left) != (letter in right) or (letter in left and draw(st.booleans()))
    ]
    operands = []
    for letters in (left, right):
        order = draw(st.permutations(range(len(letters))))
        x = torch.ones([sizes[letters[place]] for place in order])
        operands.append(x.permute([order.index(dim) for dim in range(len(letters))]).requires_grad_())
    return f"{''.join(left)},{''.join(right)}->{''.join(draw(st.permutations(out)))}", operands[0], operands[1]


@given(products())
@settings(max_examples=300, deadline=None)
def test_an_einsum_copies_what_torch_copies(case: tuple[str, torch.Tensor, torch.Tensor]) -> None:
    """Dims of one element have no order among others: of one expert no copy is made."""
    equation, *operands = case
    kept = set[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.add(x.untyped_storage().data_ptr()), lambda x: x):
        torch.einsum(equation, operands)
    copies = tuple(place for place, x in enumerate(operands) if x.untyped_storage().data_ptr() not in kept)
    node = Node("made", "aten.einsum.default", (equation, (Ref("a"), Ref("b"))), (), ("c",))
    assert copied_operands(node, [tuple(x.shape) for x in operands], [x.stride() for x in operands]) == copies


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_strides_of_a_part(data: st.DataObject) -> None:
    """Of a tensor of the part's shape, made as the whole was."""
    shape = data.draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    part = [data.draw(st.sampled_from([1, length])) for length in shape]
    whole, small = (torch.empty(lengths).permute(order) for lengths in (shape, part))
    found = strides_of_part(tuple(whole.shape), whole.stride(), tuple(small.shape))
    pairs = zip(small.shape, small.stride(), found, strict=True)
    assert all(theirs == ours for size, theirs, ours in pairs if size > 1)


def test_pointwise_results_keep_the_order_of_dims() -> None:
    x = torch.empty(2, 3, 4).permute(2, 0, 1)
    assert dense_strides(tuple(x.shape), x.stride()) == (x * 2).stride()


def test_attention_heads_are_joined_by_copying_where_queries_were_put_together() -> None:
    """Rotary positions concatenate queries, which are contiguous then; GPT's are a view of the projection."""
    joined = [copied(trace(m.build(m.Config()), m.example_inputs(m.Config()))).reshapes for m in (gpt, llama)]
    assert [len(names) for names in joined] == [0, llama.Config().num_layers]


class Chain(nn.Module):
    """Views one after the other, then a reshape; gradients flow."""

    def __init__(self, chain: Sequence[Callable[[Tensor], Any]]) -> None:
        super().__init__()
        self.chain, self.factor = chain, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.factor
        for view in self.chain:
            x = view(x)
        return x.reshape(-1).sum() + x.reshape(*x.shape[:-2], -1).square().sum()


VIEWS: list[Callable[[Tensor], Any]] = [
    lambda x: x.transpose(0, 1),
    lambda x: x.transpose(-1, -2),
    lambda x: x.permute(*range(1, x.dim()), 0),
    lambda x: x.select(0, x.size(0) - 1) if x.dim() > 3 else x,
    lambda x: x.select(-1, 0) if x.dim() > 3 else x,
    lambda x: x.unbind(1)[0] if x.dim() > 3 else x,
    lambda x: x.unsqueeze(1),
    lambda x: x.unsqueeze(-1),
    lambda x: x.squeeze(),
    lambda x: x.squeeze(1),
    lambda x: x[..., ::2, :],
    lambda x: x.chunk(2, -1)[-1],
    lambda x: x.diagonal(0, 0, 2) if x.dim() > 3 else x,
    lambda x: x.expand(2, *x.shape) if x.dim() < 5 else x,
    lambda x: x.clamp_min(-1.0),
    lambda x: F.softplus(x),
    lambda x: x.contiguous(),
    lambda x: x.view(2, -1, *x.shape[1:]) if x.dim() < 5 and x.size(0) % 2 == 0 else x,
]


@pytest.mark.parametrize("seed", range(8))
def test_chains_of_views_copy_where_torch_copies(seed: int) -> None:
    """Heads of one projection that unbind takes apart were said to be copied, of rows that select picks the reshape
    was said to be a view."""
    rng = random.Random(seed)
    model, x = Chain(rng.choices(VIEWS, k=6)), torch.randn(4, 6, 2, 8)
    graph = trace(model, (x,))
    values, known = run_graph(graph, model, {"x": x}), copied(graph)
    for node in graph.nodes:
        for name in node.results if node.operands else ():
            made, ours = values[name], known.permuted.get(name) or contiguous_strides(graph.tensors[name].shape)
            pairs = zip(made.shape, made.stride(), ours, strict=True)
            assert all(theirs == own for size, theirs, own in pairs if size > 1), (
                node,
                made.shape,
                made.stride(),
                ours,
            )
        if base_name(node.op) in RESHAPES:
            before = values[node.operands[0]].untyped_storage().data_ptr()
            shares = before == values[node.results[0]].untyped_storage().data_ptr()
            assert shares == (node.name not in known.reshapes)
