"""Kernels that the runtime takes on GPUs alone, against the same in float64.

Needs torch and `autopar.runtime` only, so that it runs on a training machine:
`pytest --noconftest -c /dev/null tests/gpu`.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopar import runtime as rt
from autopar.runtime.lowering.grouped import grouped_mm, grouped_product
from autopar.runtime.lowering.parts import (
    AttentionPart,
    PartCall,
    PartQueries,
    ScoreSums,
    add_part,
    empty_part,
    part_gradients,
    part_over,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is false")

#: how far a kernel may be from float64, relative to the largest value
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def _drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def _assert_close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert got.isfinite().all()
    distance = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    assert distance.item() <= CLOSE[dtype]


def _whole(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Attention over all keys and its gradients, in float64."""
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    result = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    return result, *torch.autograd.grad(result, leaves, grad.double())


def _calls(rows: int, causal: bool, scale: float) -> list[tuple[slice, slice, PartCall]]:
    """Three blocks of keys: all queries see each, or, causal, those of the block its triangle, later ones all of it."""
    third = rows // 3
    found = []
    for number in range(3):
        begin, end = number * third, (number + 1) * third if number < 2 else rows
        if not causal:
            found.append((slice(0, rows), slice(begin, end), PartCall(False, scale)))
            continue
        found.append((slice(begin, end), slice(begin, end), PartCall(True, scale)))
        if end < rows:
            found.append((slice(end, rows), slice(begin, end), PartCall(False, scale)))
    return found


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 40, 20, 128, 256])
def test_parts_of_attention_are_the_whole(dtype: torch.dtype, causal: bool, width: int) -> None:
    """Of flash attention's own sums (log-sum-exp) and where it takes no such head, forward and backward."""
    shape = (2, 3, 210, width)
    query, key, value, grad = (_drawn(*shape, dtype=dtype, seed=seed) for seed in range(4))
    scale = width**-0.5
    wanted = _whole(query, key, value, grad, causal)
    whole = empty_part(query, width)
    for rows, keys, call in _calls(210, causal, scale):
        add_part(whole, rows, part_over(query[:, :, rows], key[:, :, keys], value[:, :, keys], call))
    out = whole.result.to(dtype)
    _assert_close(out, wanted[0], dtype)
    sums = whole.sums.top + whole.sums.total.log()
    own = PartQueries(query, out, grad, ScoreSums(sums, torch.ones_like(sums)))
    found = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    for rows, keys, call in _calls(210, causal, scale):
        parts = part_gradients(own.of(rows), key[:, :, keys], value[:, :, keys], call)
        for total, part, where in zip(found, parts, (rows, keys, keys), strict=True):
            total[:, :, where] += part
    for got, want in zip(found, wanted[1:], strict=True):
        _assert_close(got, want, dtype)


def test_a_part_tells_the_sums_of_its_scores() -> None:
    query, key, value = (_drawn(1, 2, 64, 64, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    part: AttentionPart = part_over(query, key, value, PartCall(False, 0.125))
    wanted = (query.double() @ key.double().mT * 0.125).logsumexp(-1)
    assert part.sums.top.shape == (1, 2, 64)
    _assert_close(part.sums.top + part.sums.total.log(), wanted, torch.float16)


COUNTS = [(5, 0, 16, 43), (0, 0, 64, 0), (64,), (1, 1, 1, 1, 60)]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("form", ["plain", "transposed", "sliced"])
@pytest.mark.parametrize("upstream", ["drawn", "expanded", "transposed"])
def test_grouped_products_are_those_of_each_group(counts: tuple[int, ...], form: str, upstream: str) -> None:
    """Of matrices as they are stored, transposed and cut; of gradients as a sum, or another product, gives them."""
    rows = _drawn(sum(counts), 64, dtype=torch.bfloat16, seed=0).requires_grad_()
    stored = {"plain": (64, 48), "transposed": (48, 64), "sliced": (64, 96)}[form]
    leaf = _drawn(len(counts), *stored, dtype=torch.bfloat16, seed=1).requires_grad_()
    matrices = {"plain": leaf, "transposed": leaf.mT, "sliced": leaf[..., 8:56]}[form]
    result = grouped_product(rows, matrices, counts)
    grad = {
        "drawn": _drawn(sum(counts), 48, dtype=torch.bfloat16, seed=2),
        "expanded": torch.ones((), dtype=torch.bfloat16, device="cuda").expand(sum(counts), 48),
        "transposed": _drawn(48, sum(counts), dtype=torch.bfloat16, seed=2).mT,
    }[upstream]
    found = (result, *torch.autograd.grad(result, [rows, leaf], grad))
    exact = [x.detach().double().requires_grad_() for x in (rows, leaf)]
    own = {"plain": exact[1], "transposed": exact[1].mT, "sliced": exact[1][..., 8:56]}[form]
    parts = [x @ matrix for x, matrix in zip(exact[0].split(list(counts)), own.unbind(0), strict=True)]
    wanted = (torch.cat(parts), *torch.autograd.grad(torch.cat(parts), exact, grad.double()))
    for got, want in zip(found, wanted, strict=True):
        _assert_close(got, want, torch.bfloat16)


def test_rows_beyond_the_last_group_are_zeros() -> None:
    rows = _drawn(40, 64, dtype=torch.bfloat16, seed=0).requires_grad_()
    matrices = _drawn(2, 64, 32, dtype=torch.bfloat16, seed=1).requires_grad_()
    result = grouped_mm(rows, matrices, torch.tensor([7, 24], dtype=torch.int32, device="cuda"))
    assert result.shape == (40, 32)
    assert not result[24:].any()
    _assert_close(result[7:24], rows[7:24].double() @ matrices[1].double(), torch.bfloat16)
    assert not torch.autograd.grad(result.sum(), rows)[0][24:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dropout_draws_what_exact_mode_draws(dtype: torch.dtype) -> None:
    """From a generator of the GPU, the global mask; the GPU's own generator stays where it was."""
    x = torch.ones(1000, device="cuda", dtype=dtype)
    before = torch.cuda.get_rng_state()
    with rt.reference_dropout(seed=5):
        first = F.dropout(x, 0.25)
    with rt.reference_dropout(seed=5):
        again = F.dropout(x, 0.25)
    assert torch.equal(first, again)
    assert 0.6 < (first != 0).float().mean().item() < 0.9
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_masked_and_uneven_heads_are_taken_apart() -> None:
    """No kernel tells the sums of attention under a mask, nor of values of another width."""
    for width, values in itertools.product((64,), (64, 32)):
        query, key = (_drawn(1, 2, 96, width, dtype=torch.bfloat16, seed=seed) for seed in range(2))
        value = _drawn(1, 2, 96, values, dtype=torch.bfloat16, seed=2)
        mask = torch.rand(1, 1, 96, 96, device="cuda") > 0.3
        part = part_over(query, key, value, PartCall(False, 0.125, mask))
        wanted = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask, scale=0.125)
        _assert_close(part.result, wanted, torch.bfloat16)
