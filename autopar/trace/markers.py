"""Operators that stand in an exported program for what is written out afterwards (`trace.unroll`).

    y = first_block(x)   → y = left(first_block's operators(entered(x)))
    z = like_block(y)    → z = repeated([y], [first_block's results])

    y = Reverse.apply(x, 0.7)  → [y] = function([x], "models:Reverse …")

`entered` and `left` enclose the operators of a block that was exported; `repeated` is a block that was seen to do the
same (`trace.repeats`); `function` is a call of an autograd Function (`trace.functions`), `hooked` a tensor whose
gradient goes through a hook (`trace.hooks`). They are never computed:
export asks them for shapes and whether gradients flow, no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

torch.library.define("autopar_trace::entered", "(Tensor x, str block, int position) -> Tensor")
torch.library.define("autopar_trace::left", "(Tensor x, str block, int position) -> Tensor")
torch.library.define("autopar_trace::repeated", "(Tensor[] inputs, Tensor[] made, str like, str block) -> Tensor[]")
torch.library.define("autopar_trace::function", "(Tensor[] operands, str call) -> Tensor[]")
torch.library.define("autopar_trace::hooked", "(Tensor[] operands, str hook) -> Tensor")

entered, left = torch.ops.autopar_trace.entered.default, torch.ops.autopar_trace.left.default
repeated = torch.ops.autopar_trace.repeated.default
function = torch.ops.autopar_trace.function.default
hooked = torch.ops.autopar_trace.hooked.default
has_side_effect(hooked)  # it stays where nothing reads what it makes, until `hooks.place_hooks`


@dataclass(frozen=True)
class Hooked:
    """What `hooked` stands for: what a hook does with a gradient, as the text of a lambda, and where it was found.

    pointwise: it works on each element by itself. linear: the hook of a sum is the sum of hooks. everywhere: it is a
    tensor's, whoever reads that; else of those alone that read the marker.
    """

    text: str
    pointwise: bool
    linear: bool
    everywhere: bool
    where: str


HOOKED: dict[str, Hooked] = {}


@dataclass(frozen=True)
class Called:
    """What `function` stands for: the operator's arguments beside its operands, and the looks of its results."""

    function: str
    arguments: str
    differentiable: tuple[bool, ...]
    draws: bool
    looks: tuple[tuple[Any, ...], ...]  # shape, strides, dtype, device


#: by what the marker is given, which says all of it
CALLED: dict[str, Called] = {}


def is_everywhere(node: fx.Node) -> bool:
    """Whether a node marks a hook that is for all who read its tensor."""
    return node.target is hooked and HOOKED[str(node.args[1])].everywhere


def _like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _one(x: Tensor, block: str, position: int) -> Tensor:
    return _like(x)


def _many(inputs: list[Tensor], made: list[Tensor], like: str, block: str) -> list[Tensor]:
    return [_like(x) for x in made]


def _without_gradient(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Results pass gradients on where those of the exported block do."""
    pairs = zip(output, inputs[1], strict=True)
    ctx.mark_non_differentiable(*(result for result, made in pairs if not made.requires_grad))


def _never(ctx: Any, *gradients: Any) -> Any:
    raise AssertionError("markers are not computed")


def _called(operands: list[Tensor], call: str) -> list[Tensor]:
    return [torch.empty_strided(size, stride, dtype=d, device=at) for size, stride, d, at in CALLED[call].looks]


def _hooked(operands: list[Tensor], hook: str) -> Tensor:
    return _like(operands[0])


def _as_called(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    pairs = zip(output, CALLED[inputs[1]].differentiable, strict=True)
    ctx.mark_non_differentiable(*(result for result, differentiable in pairs if not differentiable))


torch.library.register_fake(entered, _one)
torch.library.register_fake(left, _one)
torch.library.register_fake(repeated, _many)
torch.library.register_fake(function, _called)
torch.library.register_fake(hooked, _hooked)
torch.library.register_autograd(entered, _never)
torch.library.register_autograd(left, _never)
torch.library.register_autograd(repeated, _never, setup_context=_without_gradient)
torch.library.register_autograd(hooked, _never)
torch.library.register_autograd(function, _never, setup_context=_as_called)
