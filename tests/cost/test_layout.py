"""Strides after views, against torch's own."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ops.layout import copied, dense_strides, reshaped_strides
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


def test_pointwise_results_keep_the_order_of_dims() -> None:
    x = torch.empty(2, 3, 4).permute(2, 0, 1)
    assert dense_strides(tuple(x.shape), x.stride()) == (x * 2).stride()


def test_attention_heads_are_joined_by_copying_where_queries_were_put_together() -> None:
    """Rotary positions concatenate queries, which are contiguous then; GPT's are a view of the projection."""
    joined = [copied(trace(m.build(m.Config()), m.example_inputs(m.Config()))).reshapes for m in (gpt, llama)]
    assert [len(names) for names in joined] == [0, llama.Config().num_layers]
