"""Strides after views, against torch's own."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.graph import Node, Ref
from autopar.ops.layout import copied, copied_operands, dense_strides, reshaped_strides, strides_of_part
from autopar.trace import trace
from models import gpt, llama


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
