"""What is kept in bits comes back as it was, and gradients by it are torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopar import runtime as rt
from autopar.runtime.bits import packed, room_for, unpacked, written

FLOATS = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (3, 5, 7), (16, 16)], ids=str)
def test_numbers_come_back_and_take_as_few_bytes_as_hold_them(bits: int, shape: tuple[int, ...]) -> None:
    numbers = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
    room = room_for(numbers.shape, bits, numbers)
    written(room, numbers.shape).copy_(numbers)
    found = packed(room, bits)
    assert found.nbytes == -(-numbers.numel() * bits // 8) and found.untyped_storage().nbytes() == found.nbytes
    assert torch.equal(unpacked(found, bits, numbers.shape), numbers)


def held(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, int]:
    """The result, and bytes that are saved for its gradient."""
    saved = list[Tensor]()
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
        made = function(x)
    return made, sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in saved}.values())


def assert_equal(
    plain: Callable[[Tensor], Tensor], kept: Callable[[Tensor], Tensor], x: Tensor, num_bytes: int
) -> None:
    """Results and gradients bit for bit, NaN where torch has it; and what is saved."""
    own, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, (made, saved) = plain(own), held(kept, other)
    gradient = torch.randn_like(made)
    gradient.flatten()[:1] = float("inf")
    expected.backward(gradient)
    made.backward(gradient)
    assert own.grad is not None and other.grad is not None and saved == num_bytes
    for one, two in ((expected, made), (own.grad, other.grad)):
        assert one.stride() == two.stride()
        assert torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activations_pass_gradients_as_torch_does(dtype: torch.dtype) -> None:
    x = torch.randn(3, 67).to(dtype)
    x[0, :4] = torch.tensor([float("nan"), 0.0, -0.0, float("inf")])
    assert_equal(torch.relu, rt.relu_in_bits, x, 26)
    assert_equal(lambda v: F.leaky_relu(v, 0.1), lambda v: rt.leaky_relu_in_bits(v, 0.1), x, 26)
    channels_last = torch.randn(2, 3, 4, 5).to(dtype).contiguous(memory_format=torch.channels_last)
    assert_equal(torch.relu, rt.relu_in_bits, channels_last, 15)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_clipped_passes_gradients_as_torch_does(dtype: torch.dtype) -> None:
    """At a bound, hardtanh stops them and clamp does not."""
    x = torch.randn(3, 67).to(dtype)
    x[0, :7] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 0.5, -0.5, 6.0])
    for low, high in ((0, 6), (-0.5, 0.5), (0.5, 0.5)):
        assert_equal(lambda v: F.hardtanh(v, low, high), lambda v: rt.hardtanh_in_bits(v, low, high), x, 26)  # noqa: B023
    for low, high in ((-0.5, 0.5), (0, None), (None, 0.5), (0.5, -0.5)):
        assert_equal(lambda v: torch.clamp(v, low, high), lambda v: rt.clamp_in_bits(v, low, high), x, 26)  # noqa: B023
    x[0, 7] = float("nan")
    assert_equal(lambda v: v.clamp(-1, 1), lambda v: rt.clamp_in_bits(v, -1, 1), x, 26)
    assert_equal(lambda v: F.threshold(v, 0.5, 2.0), lambda v: rt.threshold_in_bits(v, 0.5, 2.0), x, 26)
    last = torch.randn(2, 3, 4, 5).to(dtype).contiguous(memory_format=torch.channels_last)
    assert_equal(F.relu6, lambda v: rt.hardtanh_in_bits(v, 0, 6), last, 15)
    assert_equal(lambda v: v.clamp(0, 1), lambda v: rt.clamp_in_bits(v, 0, 1), last, 15)


def test_dropout_draws_the_mask_that_it_draws_else() -> None:
    x = torch.randn(5, 13)

    def drawn(function: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        def run(tensor: Tensor) -> Tensor:
            rt.seed_dropout(3)
            made: Tensor = function(tensor, 0.4)[0]
            return made

        return run

    assert_equal(drawn(rt.native_dropout), drawn(rt.native_dropout_in_bits), x, 9)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "window", "num_bytes"),
    [
        ((2, 3, 8, 9), ((2, 2), (2, 2), (0, 0), (1, 1), False), 24),  # 96 of 2 bits
        ((2, 3, 9, 11), ((3, 3), (2, 2), (1, 1), (1, 1), True), 90),  # 180 of 4
        ((1, 2, 7, 7), ((3, 3), (1, 1), (1, 1), (2, 2), False), 25),  # 50 of 4, with dilation
        ((2, 1, 1, 5), ((3, 3), (1, 1), (1, 1), (1, 1), False), 5),  # of one row
        ((3, 2, 5, 1), ((3, 3), (1, 1), (1, 1), (1, 1), False), 15),  # narrower than a window: two offsets are one
        ((3, 12, 12), ((4, 4), (4, 4), (0, 0), (1, 1), False), 14),  # without samples
        ((1, 2, 20, 20), ((13, 13), (3, 3), (6, 6), (1, 1), False), 98),  # a byte each
    ],
    ids=str,
)
def test_pooling_passes_gradients_as_torch_does(
    dtype: torch.dtype, shape: tuple[int, ...], window: Any, num_bytes: int
) -> None:
    """Of images with equal elements, of which torch takes one."""
    x = torch.randint(-3, 4, shape).to(dtype)
    assert_equal(lambda v: F.max_pool2d(v, *window), lambda v: rt.max_pool_in_bits(v, *window), x, num_bytes)
