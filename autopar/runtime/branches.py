"""Parts of a program that the ranks at one coordinate of an axis run alone, while others run other parts.

    what goes in     R on the axis: all have it. Its gradient is P: that of the ranks that ran, zeros of the others
    what comes out   P on the axis: the value of the ranks that ran, zeros of the others. Its gradient is R

To autograd a branch is one function of what goes in and of its parameters, on every rank: the backward pass comes to
it at the same place everywhere, and parameters' gradients leave in the same order, whoever runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.runtime.declare import Block, Parameters
from autopar.runtime.mesh import Axis
from autopar.runtime.stored import slot_names

Run = Callable[..., tuple[Tensor, ...]]


class Zeros(NamedTuple):
    """What a branch makes, as a rank has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = True


def owned(
    axis: Axis,
    coordinate: int,
    run: Run,
    inputs: Sequence[Tensor],
    uses: Sequence[Tensor | nn.Module],
    makes: Sequence[Zeros],
) -> tuple[Tensor, ...]:
    """Calls `run(*inputs)` on the ranks at this coordinate of the axis; the others get zeros as `makes` says.

    uses: the parameters that `run` reads beside its inputs, or modules of which it reads them all. All ranks name them,
    so that those that were sent for are in place on all ranks from here on.
    """
    leaves = [leaf for item in uses for leaf in _leaves(item)]
    owner = getattr(run, "__self__", None)
    device = owner.mesh.device if isinstance(owner, Block) else inputs[0].device
    branch = _LocalBranch(run if axis.index == coordinate else None, len(inputs), tuple(makes), device)
    tensors = (*inputs, *leaves)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        made: tuple[Tensor, ...] = _Owned.apply(branch, *tensors)  # type: ignore[no-untyped-call] # torch's
        return made
    return run(*inputs) if branch.run is not None else branch.zeros()


def _leaves(item: Tensor | nn.Module) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
        return
    for module in item.modules():
        if isinstance(module, Parameters):
            for name, declared in module.declared_parameters.items():
                yield from (getattr(module, used) for used in slot_names(name, len(declared.uses)))


@dataclass(frozen=True, eq=False)
class _LocalBranch:
    """`run` is None on the ranks that do not run it."""

    run: Run | None
    num_inputs: int
    makes: tuple[Zeros, ...]
    device: torch.device

    def zeros(self) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(made.shape, dtype=made.dtype, device=self.device) for made in self.makes)


class _Owned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, branch: _LocalBranch, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        if branch.run is None:
            ctx.inside, ctx.sizes = None, [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
            made = branch.zeros()
        else:
            ctx.inside, made = _run_inside(branch, tensors, ctx.needs_input_grad[1:])
        fixed = [tensor for tensor, told in zip(made, branch.makes, strict=True) if not told.differentiable]
        ctx.mark_non_differentiable(*fixed)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        if ctx.inside is None:
            sizes = zip(ctx.sizes, needed, strict=True)
            return None, *(torch.zeros(n, dtype=d, device=at) if need else None for (n, d, at), need in sizes)
        inside, ctx.inside = ctx.inside, None
        return None, *inside.gradients(gradients, needed)


@dataclass(frozen=True, eq=False)
class _Inside:
    """A branch's own graph: where gradients enter it, and the tensors that it is asked for the gradients of."""

    ends: list[GradientEdge | None]
    begins: tuple[Tensor, ...]

    def gradients(self, gradients: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of what is needed, zeros where none arrives: no rank may leave out what the others send."""
        pairs = [(end, grad) for end, grad in zip(self.ends, gradients, strict=True) if end is not None]
        pairs = [(end, grad) for end, grad in pairs if grad is not None]
        wanted = [begin for begin, need in zip(self.begins, needed, strict=True) if need]
        found: list[Tensor | None] = [None] * len(wanted)
        if pairs:
            ends, heads = zip(*pairs, strict=True)
            found = list(torch.autograd.grad(ends, wanted, heads, allow_unused=True))
        whole = iter([torch.zeros_like(b) if g is None else g for b, g in zip(wanted, found, strict=True)])
        return [next(whole) if need else None for need in needed]


def _run_inside(
    branch: _LocalBranch, tensors: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[_Inside, tuple[Tensor, ...]]:  # fmt: skip
    """Runs a branch on copies of its inputs that its own graph begins with; parameters are their own beginnings."""
    assert branch.run is not None
    with torch.enable_grad():
        inputs = [
            t.detach().requires_grad_(need) for t, need in zip(tensors[: branch.num_inputs], needed, strict=False)
        ]
        made = branch.run(*inputs)
    ends = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in made]
    begins = (*inputs, *tensors[branch.num_inputs :])
    return _Inside(ends, begins), tuple(tensor.detach() for tensor in made)
