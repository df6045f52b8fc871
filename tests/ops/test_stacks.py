"""Which stacks of matrices a product copies, held against what torch saves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopar.ops.layout import copied_operands

MATMUL = SimpleNamespace(op="aten.matmul.default")


def heads() -> Tensor:
    """4 samples, 2 heads, transposed with the length."""
    return torch.randn(4, 6, 2, 8).transpose(1, 2)


def stack() -> Tensor:
    return torch.randn(4, 2, 8, 6)


PAIRS = {
    "heads transposed with the length": (heads(), stack()),
    "both": (heads(), heads().transpose(-1, -2)),
    "as they lie": (stack().transpose(-1, -2), stack()),
    "one sample": (heads()[:1], stack()[:1]),
    "one head": (heads()[:, :1], stack()[:, :1]),
    "broadcast along one dim": (heads(), stack()[:1]),
    "broadcast along the stack": (heads(), torch.randn(1, 8, 6)),
    "one dim": (stack()[:, 0].transpose(-1, -2), stack()[:, 1]),
    "slices": (stack()[:, :, 1:3].transpose(-1, -2), stack()[:, :, :2]),
    "every other sample": (heads()[::2], stack()[::2]),
    "broadcast along all": (heads()[:1, :1], heads().transpose(-1, -2)),
    "broadcast in groups": (torch.randn(4, 2, 3, 6, 8), stack()[:, :, None]),
    "rows of heads and a matrix": (heads(), torch.randn(8, 3)),
    "rows of heads and a vector": (heads(), torch.randn(8)),
    "a matrix and columns": (torch.randn(3, 8), stack()),
    "a matrix and columns that lie as rows do": (torch.randn(3, 6), torch.randn(4, 2, 8, 6).transpose(-1, -2)),
    "a vector and columns": (torch.randn(8), stack()),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_copied_is_what_torch_saves_as_other_memory(name: str) -> None:
    left, right = (x.detach().requires_grad_() for x in PAIRS[name])
    saved: list[int] = []

    def note(x: Tensor) -> Tensor:
        saved.append(x.untyped_storage().data_ptr())
        return x

    with saved_tensors_hooks(note, lambda x: x):
        torch.matmul(left, right)
    expected = tuple(n for n, x in enumerate((left, right)) if x.untyped_storage().data_ptr() not in saved)
    shapes, strides = [tuple(left.shape), tuple(right.shape)], [left.stride(), right.stride()]
    assert copied_operands(MATMUL, shapes, strides) == expected  # type: ignore[arg-type] # its operator is all that counts
