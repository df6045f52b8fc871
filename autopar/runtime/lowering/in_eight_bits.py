"""Operators whose activations are kept for the backward pass in 8 bits, which changes their gradients a little.

    forward    as ever: what an operator reads and makes is exact, and so is the loss
    backward   autograd's own, of what 8 bits say of the values that were kept (`eight_bits`)

Parameters, statistics and whatever else autograd keeps of the operator stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopar.runtime.eight_bits import packed_values, unpacked_values

__all__ = ["in_eight_bits", "result_in_eight_bits"]


class _EightBits(NamedTuple):
    """What autograd keeps instead of a tensor. kept: its bytes, as whoever keeps tensors around has packed these."""

    kept: Any
    shape: torch.Size
    dtype: torch.dtype
    unpack: Callable[[Any], Tensor] | None

    def tensor(self) -> Tensor:
        kept = self.kept if self.unpack is None else self.unpack(self.kept)
        return unpacked_values(kept, self.shape, self.dtype)


def in_eight_bits(call: Callable[[], Any], *activations: Tensor) -> Any:
    """What the call returns; of these of its operands, autograd keeps 8 bits a value."""
    memories = {tensor.untyped_storage().data_ptr() for tensor in activations}
    return _called(call, lambda tensor: tensor.untyped_storage().data_ptr() in memories)


def result_in_eight_bits(call: Callable[[], Tensor]) -> Tensor:
    """What the call returns, an operator that keeps its result alone; autograd keeps 8 bits a value of it."""
    made: Tensor = _called(call, lambda tensor: True)
    return made


def _called(call: Callable[[], Any], is_packed: Callable[[Tensor], bool]) -> Any:
    """Under hooks inside of those that are there, which blocks have that are computed again or copied out."""
    around: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack, unpack = (None, None) if around is None else around

    def packed(tensor: Tensor) -> Any:
        if tensor.is_floating_point() and tensor.numel() and is_packed(tensor):
            kept = packed_values(tensor)
            return _EightBits(kept if pack is None else pack(kept), tensor.shape, tensor.dtype, unpack)
        return tensor if pack is None else _Around(pack(tensor))

    def unpacked(kept: Any) -> Tensor:
        if isinstance(kept, _EightBits):
            return kept.tensor()
        tensor: Tensor = unpack(kept.packed) if isinstance(kept, _Around) and unpack is not None else kept
        return tensor

    with saved_tensors_hooks(packed, unpacked):
        return call()


class _Around(NamedTuple):
    """What is kept as others keep it."""

    packed: Any
