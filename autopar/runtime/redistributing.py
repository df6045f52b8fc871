"""Redistributions: a tensor changes its type on one mesh axis, and its gradient changes type accordingly.

A type fixes the type of its gradient: S(d) ↔ S(d), I ↔ I, R → P, P → R. TABLE holds, for every change of
type, what it does to the tensor and what its transpose does to the gradient; nothing else in the runtime
decides that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import pieces
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis
from autopar.runtime.placement import AxisType, parse_type

Size = int | tuple[int | None, int | None] | None


@dataclass(frozen=True, slots=True)
class Resharding:
    """One redistribution of one tensor: the dims sharded before and after it, and their whole lengths."""

    axis: Axis
    source: int = -1
    target: int = -1
    source_size: int | None = None
    target_size: int | None = None
    wait: bool = True


Rule = Callable[[Resharding, Tensor], Tensor]
TABLE: dict[tuple[str, str], tuple[Rule, Rule]] = {
    # from, to: (what happens to the tensor, what happens to its gradient)
    ("I", "R"): (lambda m, x: x, lambda m, g: pieces.sum_over(g, m.axis)),
    ("R", "I"): (lambda m, x: x, lambda m, g: pieces.keep_on_first(g, m.axis)),
    ("I", "S"): (
        lambda m, x: pieces.cut(x, m.target, m.axis),
        lambda m, g: pieces.gather(g, m.target, m.axis, m.target_size),
    ),
    ("R", "S"): (
        lambda m, x: pieces.cut(x, m.target, m.axis),
        lambda m, g: pieces.place(g, m.target, m.axis, m.target_size),
    ),
    ("S", "R"): (
        lambda m, x: pieces.gather(x, m.source, m.axis, m.source_size),
        lambda m, g: pieces.reduce_scatter(g, m.source, m.axis),
    ),
    ("S", "I"): (
        lambda m, x: pieces.gather(x, m.source, m.axis, m.source_size),
        lambda m, g: pieces.cut(g, m.source, m.axis),
    ),
    ("S", "S"): (
        lambda m, x: pieces.all_to_all(x, m.source, m.target, m.axis, m.source_size),
        lambda m, g: pieces.all_to_all(g, m.target, m.source, m.axis, m.target_size),
    ),
    ("P", "R"): (lambda m, x: pieces.sum_over(x, m.axis), lambda m, g: pieces.sum_over(g, m.axis)),
    ("P", "I"): (lambda m, x: pieces.sum_over(x, m.axis, wait=m.wait), lambda m, g: g),
    ("P", "S"): (
        lambda m, x: pieces.reduce_scatter(x, m.target, m.axis),
        lambda m, g: pieces.gather(g, m.target, m.axis, m.target_size),
    ),
    ("I", "P"): (lambda m, x: pieces.keep_on_first(x, m.axis), lambda m, g: g),
    ("R", "P"): (
        lambda m, x: pieces.keep_on_first(x, m.axis),
        lambda m, g: pieces.keep_on_first(g, m.axis),
    ),
}


def redistribute(x: Tensor, axis: Axis, change: str, size: Size = None, *, wait: bool = True) -> Tensor:
    """Changes the type of `x` on one axis, as in `redistribute(x, tp, "S(1) -> R")`; differentiable.

    `size` is the whole length, over this axis, of the dim that is sharded before; for "S(d) -> S(e)" it may
    be the pair of both lengths. It may be left out where the axis size divides it. Integer and bool
    tensors, which have no gradient, are welcome. With `wait=False`, "P -> I" is done by the end of the step
    only: for an output, such as the loss, that the program itself does not read. Raises ProgramError for a
    change that is not in TABLE.
    """
    source, target = _parse_change(change)
    if axis.size == 1 or source == target:
        return x
    move = _plan_move(x, axis, source, target, size, wait)
    if x.requires_grad and torch.is_grad_enabled():
        result: Tensor = _RedistributeFunction.apply(x, source.kind, target.kind, move)  # type: ignore[no-untyped-call]
        return result
    return TABLE[source.kind, target.kind][0](move, x)


def forward_step(x: Tensor, axis: Axis, source: AxisType, target: AxisType, size: Size = None) -> Tensor:
    """What `redistribute` computes, outside autograd."""
    if axis.size == 1:
        return x
    return TABLE[source.kind, target.kind][0](_plan_move(x, axis, source, target, size), x)


def backward_step(
    grad: Tensor, axis: Axis, source: AxisType, target: AxisType, sizes: tuple[int | None, int | None]
) -> Tensor:
    """What the backward pass of `redistribute` computes; `sizes` are the whole lengths before and after."""
    if axis.size == 1:
        return grad
    return TABLE[source.kind, target.kind][1](Resharding(axis, source.dim, target.dim, *sizes), grad)


@cache
def _parse_change(change: str) -> tuple[AxisType, AxisType]:
    source_text, arrow, target_text = change.partition("->")
    source, target = parse_type(source_text.strip()), parse_type(target_text.strip())
    if not arrow or (source != target and (source.kind, target.kind) not in TABLE):
        raise ProgramError(f"no redistribution {change!r}; known: {', '.join(f'{a} -> {b}' for a, b in TABLE)}")
    return source, target


def _plan_move(x: Tensor, axis: Axis, source: AxisType, target: AxisType, size: Size, wait: bool = True) -> Resharding:
    source_size = size[0] if isinstance(size, tuple) else size
    if source.is_shard and source_size is None:
        source_size = x.size(source.dim) * axis.size
    target_size = x.size(target.dim) if target.is_shard else None
    return Resharding(axis, source.dim, target.dim, source_size, target_size, wait)


class _RedistributeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: str, target: str, move: Resharding) -> Tensor:
        ctx.kinds, ctx.move = (source, target), move
        result = TABLE[source, target][0](move, x)
        return result.view_as(result) if result is x else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return TABLE[ctx.kinds][1](ctx.move, grad), None, None, None
