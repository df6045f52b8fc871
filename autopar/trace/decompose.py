"""Decomposes the operators that have no sharding rule, with torch's own decompositions.

`mse_loss(x, y)` → `mean(pow(sub(x, y), 2))`. Operators with a rule stay whole (`linear`, attention, `layer_norm`):
they read better, run faster, and their rules say more. An operator with neither stays too: it is replicated and
reported. So does one that draws random numbers: another way to draw them would draw others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram

from autopar.ops import has_rules


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return source.to(target.dtype).expand(target.shape)


def _scatter_of_reals(scatter: OpOverload) -> Callable[..., Any]:
    """Writing into a part of a complex tensor, which torch does not differentiate, as writing into its real form."""

    def taken_apart(x: torch.Tensor, source: torch.Tensor, dim: int = 0, *where: Any, **options: Any) -> Any:
        if not x.is_complex():
            return NotImplemented
        real = scatter(torch.view_as_real(x), torch.view_as_real(source), dim % x.dim(), *where, **options)
        return torch.view_as_complex(real.contiguous())

    return taken_apart


#: what torch neither decomposes nor differentiates: `x[:, 0] = y` leaves a copy
_OWN: dict[OpOverload, Callable[..., Any]] = {torch.ops.aten.copy.default: _copy}
_OF_REALS = {
    scatter: _scatter_of_reals(scatter)
    for scatter in (torch.ops.aten.slice_scatter.default, torch.ops.aten.select_scatter.default)
}


def decompose(program: ExportedProgram) -> ExportedProgram:
    """The functional program, in which operators without a rule are taken apart as far as torch knows how.

    One pass does both: each pass runs the whole model on fake tensors, which is most of the time that tracing takes.
    """
    functional: ExportedProgram = program.run_decompositions(_decompositions())
    return functional


def _decompositions() -> dict[OpOverload, Callable[..., Any]]:
    return {**{op: taken_apart for op, taken_apart in _known().items() if not has_rules(op)}, **_OF_REALS}


@cache
def _known() -> dict[OpOverload, Callable[..., Any]]:
    """Of torch's own operators: torch goes through all that are registered to list them, a sixth of a small trace."""
    known = {**torch.export.default_decompositions(), **_OWN}
    wanted = (op for op in known if op.namespace == "aten" and torch.Tag.nondeterministic_seeded not in op.tags)
    return {op: known[op] for op in wanted}
