"""Activations in 8 bits: as many bytes as are foretold, at most half a step off, and nothing else of an operator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from autopar import runtime as rt
from autopar.ir.inexact import EIGHT_BITS_ERROR
from autopar.runtime.eight_bits import BLOCK, LEVELS, packed_bytes, packed_values, unpacked_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 7, 256, 300, 5120])
def test_values_come_back_to_half_a_step(dtype: torch.dtype, count: int) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    packed = packed_values(x)
    assert packed.nbytes == packed_bytes(count, x.element_size()) == packed.untyped_storage().nbytes()
    found = unpacked_values(packed, x.shape, dtype)
    assert found.dtype == dtype
    for own, other in zip(x.split(BLOCK), found.split(BLOCK), strict=True):
        low, high = own.double().aminmax()
        rounded = 2.0**-8 * own.double().abs().max() if dtype == torch.bfloat16 else 1e-6
        assert (own.double() - other.double()).abs().max() <= (high - low) / LEVELS / 2 + rounded


def test_error_is_that_of_the_formula_for_normally_distributed_values() -> None:
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    off = float((unpacked_values(packed_values(x), x.shape, x.dtype) - x).norm() / x.norm())
    assert off == pytest.approx(EIGHT_BITS_ERROR, rel=0.03)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_seen_in_its_block(wrong: float) -> None:
    x = torch.randn(600)
    x[300] = wrong
    found = unpacked_values(packed_values(x), x.shape, x.dtype)
    assert found[256:512].isnan().all() and found[:256].isfinite().all() and found[512:].isfinite().all()
    same = torch.full((300,), 3.0)
    assert torch.equal(unpacked_values(packed_values(same), same.shape, same.dtype), same)


def saved_bytes(run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    saved = list[Tensor]()
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        made = run()
    return made, sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}.values())


CALLS: dict[str, Callable[[Tensor, Tensor, bool], Tensor]] = {
    "linear": lambda x, w, eight: rt.in_eight_bits(lambda: F.linear(x, w), x) if eight else F.linear(x, w),
    "gelu": lambda x, w, eight: rt.in_eight_bits(lambda: F.gelu(x), x) if eight else F.gelu(x),
    "softmax": lambda x, w, eight: rt.result_in_eight_bits(lambda: x.softmax(-1)) if eight else x.softmax(-1),
    "rms_norm": lambda x, w, eight: (
        rt.in_eight_bits(lambda: F.rms_norm(x, (40,), w[0]), x) if eight else F.rms_norm(x, (40,), w[0])
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_activations_are_packed_once_and_gradients_are_near(name: str) -> None:
    x, w = torch.randn(30, 40), torch.randn(24, 40)
    found = []
    for eight in (False, True):
        own, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        made, kept = saved_bytes(lambda own=own, weight=weight, eight=eight: CALLS[name](own, weight, eight))  # type: ignore[misc]
        made.square().sum().backward()
        found.append((made.detach(), kept, own.grad, weight.grad))
    (plain, all_bytes, *exact), (made, kept, *near) = found
    assert torch.equal(plain, made) and kept <= all_bytes - x.nbytes + packed_bytes(x.numel(), 4)
    for one, two in zip(exact, near, strict=True):
        if one is not None:
            assert two is not None and (one - two).norm() <= 0.03 * one.norm()


def test_blocks_that_are_computed_again_keep_nothing_of_it() -> None:
    x, w = torch.randn(30, 40), torch.randn(24, 40, requires_grad=True)
    found = []
    for again in (False, True):
        own = x.clone().requires_grad_()

        def block(inner: Tensor) -> Tensor:
            return CALLS["linear"](CALLS["gelu"](inner, w, True), w, True)

        made: Any = checkpoint(block, own, use_reentrant=False) if again else block(own)
        made.square().sum().backward()
        found.append(own.grad)
    assert found[0] is not None and torch.equal(found[0], found[1])


def test_nothing_holds_itself() -> None:
    """A result that its graph keeps, as attention does, is given back with the graph."""
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    gc.collect()
    gc.disable()
    try:
        made: Tensor = rt.in_eight_bits(lambda: F.scaled_dot_product_attention(q, k, v), q, k, v)
        known = StorageWeakRef(made.untyped_storage())
        del made
        assert known.expired()
    finally:
        gc.enable()
