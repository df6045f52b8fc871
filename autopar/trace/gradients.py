"""Through which results of an operator a gradient flows: autograd itself is asked, on meta tensors."""

from __future__ import annotations

from typing import Any

import torch

from autopar.ir.graph import Atom, Node, Tensor, map_references
from autopar.ir.structure import FUNCTION, HOOK, OWN_BACKWARD
from autopar.ops import overload, run

_CACHE: dict[Any, tuple[bool, ...]] = {}


def differentiable_results(node: Node, operands: list[Tensor]) -> tuple[bool, ...]:
    """One flag a result (named or not). An operator that cannot run on meta tensors passes gradients to all."""
    if not any(tensor.differentiable for tensor in operands):
        return (False,) * len(node.outputs)
    if node.op == FUNCTION:
        return tuple(node.args[3])
    if node.op == HOOK:
        return (operands[0].differentiable,)
    key = (node.op, len(node.outputs), _text(node), tuple((t.dtype, t.differentiable) for t in operands))
    if key not in _CACHE:
        _CACHE[key] = _ask(node, operands)
    return _CACHE[key]


def is_view(op: str) -> bool:
    """Whether an operator's result is memory of its operand."""
    if op in OWN_BACKWARD:
        return False
    return any(item.alias_info is not None for item in overload(op)._schema.returns)


def saves(node: Node, operands: list[Tensor], name: str) -> bool:
    """Whether the backward pass of an operator reads the value that one of its operands had, or may do so."""
    if not any(tensor.differentiable for tensor in operands):
        return False
    if node.op in OWN_BACKWARD:
        return True
    memory: set[int] = set()
    metas = [_meta(tensor) for tensor in operands]
    own = {x.untyped_storage()._cdata for x, tensor in zip(metas, operands, strict=True) if tensor.name == name}

    def pack(x: torch.Tensor) -> torch.Tensor:
        memory.add(x.untyped_storage()._cdata)
        return x

    given = iter(metas)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run(node, lambda _: next(given), "meta")
    except (RuntimeError, NotImplementedError):
        return True
    return not own.isdisjoint(memory)


def _text(node: Node) -> str:
    """The arguments without shapes: flags do not depend on them, dtypes and modes may decide."""
    args, kwargs = map_references((node.args, dict(node.kwargs)), lambda _: None)
    named = (*enumerate(args), *sorted(kwargs.items()))
    return repr(
        [
            (name, value)
            for name, value in named
            if isinstance(value, (Atom, bool)) or not isinstance(value, (int, tuple))
        ]
    )


def _ask(node: Node, operands: list[Tensor]) -> tuple[bool, ...]:
    metas = iter([_meta(tensor) for tensor in operands])
    try:
        with torch.enable_grad():
            results = run(node, lambda _: next(metas), "meta")
    except (RuntimeError, NotImplementedError):
        return (True,) * len(node.outputs)
    return tuple(torch.is_tensor(result) and result.requires_grad for result in results)


def _meta(tensor: Tensor) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype)
    return torch.empty(tensor.shape, dtype=dtype, device="meta", requires_grad=tensor.differentiable)
