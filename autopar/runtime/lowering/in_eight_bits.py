"""Operators whose activations are kept for the backward pass in 8 bits, which changes their gradients a little.

    forward    as ever: what an operator reads and makes is exact, and so is the loss
    backward   autograd's own, of what 8 bits say of the values that were kept (`eight_bits`)

Parameters, statistics and whatever else autograd keeps of the operator stay as they are. What it keeps several times,
as a norm that is made of products does, is packed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopar.runtime.eight_bits import packed_values, unpacked_values

__all__ = ["in_eight_bits", "result_in_eight_bits"]

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _EightBits:
    """What autograd keeps instead of a tensor; its dims lie in memory in the same order when it is back, on which
    depends how its gradient does. around: hooks of a block that is computed again or copied out, which keep the bytes
    in their way, and give them once."""

    __slots__ = ("around", "dtype", "kept", "order", "shape")

    def __init__(self, tensor: Tensor, around: _Hooks | None) -> None:
        strides = tensor.stride()
        self.order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        ordered = tensor.permute(self.order)
        kept = packed_values(ordered)
        self.kept: Any = kept if around is None else around[0](kept)
        self.around, self.shape, self.dtype = around, ordered.shape, tensor.dtype

    def tensor(self) -> Tensor:
        if self.around is not None:
            self.kept, self.around = self.around[1](self.kept), None
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        return unpacked_values(self.kept, self.shape, self.dtype).permute(places)


class _AsAround:
    """What hooks around have packed."""

    __slots__ = ("around", "kept")

    def __init__(self, tensor: Tensor, around: _Hooks) -> None:
        self.kept, self.around = around[0](tensor), around

    def tensor(self) -> Tensor:
        return self.around[1](self.kept)


def in_eight_bits(call: Callable[[], Any], *activations: Tensor) -> Any:
    """What the call returns; of these of its operands, autograd keeps 8 bits a value."""
    memories = {tensor.untyped_storage().data_ptr() for tensor in activations}
    return _called(call, lambda tensor: tensor.untyped_storage().data_ptr() in memories)


def result_in_eight_bits(call: Callable[[], Tensor]) -> Tensor:
    """What the call returns, an operator that keeps its result alone; autograd keeps 8 bits a value of it."""
    made: Tensor = _called(call, lambda tensor: True)
    return made


def _called(call: Callable[[], Any], is_packed: Callable[[Tensor], bool]) -> Any:
    around: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    known = dict[Any, _EightBits]()

    def packed(tensor: Tensor) -> Any:
        if not (tensor.is_floating_point() and tensor.numel() and is_packed(tensor)):
            # a result that its own graph keeps as it is would never be given back: each holds the other
            return tensor.detach() if around is None else _AsAround(tensor, around)
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in known:
            known[key] = _EightBits(tensor, around)
        return known[key]

    with saved_tensors_hooks(packed, _unpacked):
        made = call()
    known.clear()
    return made


def _unpacked(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.tensor()
