"""Decomposes the operators that have no sharding rule, with torch's own decompositions.

`mse_loss(x, y)` → `mean(pow(sub(x, y), 2))`. Operators with a rule stay whole (`linear`, attention, `layer_norm`):
they read better, run faster, and their rules say more. An operator with neither stays too: it is replicated and
reported. So does one that draws random numbers: another way to draw them would draw others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._export import utils
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from autopar.ops import has_rules
from autopar.trace.registrations import registrations_kept


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


class StridedError(Exception):
    """An as_strided that depends on how memory is laid out; torch adds the line."""


def _as_strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> torch.Tensor:
    """Elements by where they lie in memory, as elements by number: a shard's memory is laid out in another way."""
    first = 0 if offset is None else offset - int(x.storage_offset())
    for dim in range(x.dim()):
        x = x.narrow(dim, 0, 1) if x.shape[dim] > 1 and x.stride(dim) == 0 else x
    memory = x.permute(_memory_order(x)).reshape(-1)
    return memory.index_select(0, _places(memory, size, stride, first)).reshape(tuple(size))


def _as_strided_scatter(
    x: torch.Tensor, source: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    """The same, written (`fill_diagonal_`). The gradient that torch gives this operator is of the wrong elements."""
    first, order = 0 if offset is None else offset - int(x.storage_offset()), _memory_order(x)
    whole = x.permute(order)
    memory = whole.reshape(-1)
    written = memory.scatter(0, _places(memory, size, stride, first), source.reshape(-1)).reshape(whole.shape)
    return written.permute([order.index(dim) for dim in range(len(order))])


def _memory_order(x: torch.Tensor) -> list[int]:
    """The dims in the order in which they lie in memory. Raises StridedError where that has gaps, or elements twice."""
    order = sorted(range(x.dim()), key=lambda dim: (x.stride()[dim], x.shape[dim]), reverse=True)
    if not x.permute(order).is_contiguous():
        raise StridedError(
            f"expected as_strided of a tensor whose elements lie side by side in memory, found one of shape "
            f"{tuple(x.shape)} with strides {tuple(x.stride())}; index it, or call contiguous() first"
        )
    return order


def _places(memory: torch.Tensor, size: Sequence[int], stride: Sequence[int], first: int) -> torch.Tensor:
    """The numbers of such elements in memory. Raises StridedError where some lie outside of it."""
    last = first + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if first < 0 or (last >= memory.numel() and all(size)):
        raise StridedError(
            f"expected as_strided to stay among the {memory.numel()} elements of its tensor, found elements {first} to "
            f"{last}: call it on the tensor that these belong to"
        )
    found = torch.full((1,), first, dtype=torch.int64, device=memory.device)
    for length, step in zip(size, stride, strict=True):
        found = (found[:, None] + torch.arange(length, device=memory.device)[None, :] * step).reshape(-1)
    return found


def _unchecked(name: str, count: int) -> Callable[..., Any]:
    """Without the check that there is a solution, which torch exports as an effect that no plan has."""
    operator = getattr(torch.ops.aten, f"linalg_{name}_ex").default

    def taken_apart(x: torch.Tensor, *others: torch.Tensor, **options: bool) -> Any:
        found = operator(x, *others, **options)
        return found[0] if count == 1 else tuple(found[:count])

    return taken_apart


def _linalg_tensorinv(x: torch.Tensor, ind: int = 2) -> torch.Tensor:
    rows, columns = x.shape[:ind], x.shape[ind:]
    inverse: torch.Tensor = _unchecked("inv", 1)(x.reshape(math.prod(rows), -1))
    return inverse.reshape(*columns, *rows)


_binary_cross_entropy, _xlog1py = torch.ops.aten.binary_cross_entropy.default, torch.ops.aten.special_xlog1py.default


def _reduced_binary_cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1
) -> Any:
    """The loss of each element stays whole: torch has a formula for its gradient, which is finite where a probability
    is 0 or 1, and that of the logarithms it is made of is not."""
    if reduction == 0:
        return NotImplemented
    each = _binary_cross_entropy(x, target, weight, 0)
    return each.mean() if reduction == 1 else each.sum()


def _xlog1py_of_number(number: float, x: torch.Tensor) -> Any:
    """As the operator on tensors, whose gradient is that of zero times a logarithm, too."""
    return _xlog1py(torch.full((), number, dtype=x.dtype, device=x.device), x)


def _xlog1py_by_number(x: torch.Tensor, number: float) -> Any:
    return _xlog1py(x, torch.full((), number, dtype=x.dtype, device=x.device))


#: what torch neither decomposes nor differentiates: `x[:, 0] = y` leaves a copy
_OWN: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.copy.default: _copy,
    torch.ops.aten.as_strided.default: _as_strided,
    torch.ops.aten.as_strided_scatter.default: _as_strided_scatter,
    torch.ops.aten.linalg_inv.default: _unchecked("inv", 1),
    torch.ops.aten.linalg_tensorinv.default: _linalg_tensorinv,
    torch.ops.aten.linalg_cholesky.default: _unchecked("cholesky", 1),
    torch.ops.aten.linalg_solve.default: _unchecked("solve", 1),
    torch.ops.aten.linalg_lu_factor.default: _unchecked("lu_factor", 2),
    torch.ops.aten.linalg_ldl_factor.default: _unchecked("ldl_factor", 2),
    torch.ops.aten.special_xlog1py.self_scalar: _xlog1py_of_number,
    torch.ops.aten.special_xlog1py.other_scalar: _xlog1py_by_number,
}
_REDUCED = {_binary_cross_entropy: _reduced_binary_cross_entropy}
"""Taken apart where they are, though what remains has a rule."""
_OF_REALS = {
    scatter: _scatter_of_reals(scatter)
    for scatter in (torch.ops.aten.slice_scatter.default, torch.ops.aten.select_scatter.default)
}

_COMPUTED = {torch.ops.aten._conj.default: torch.conj_physical, torch.ops.aten._neg_view.default: torch.neg}
"""Views that only mark memory to be read as conjugated or negated: what a rank sends is memory as it lies, and an
operator that takes such a mark off again finds none where a conversion has computed it."""


_WRONG = {torch.ops.aten.multilabel_margin_loss_forward.default}
"""What torch's decompositions of these compute is something else than the operators do."""


def decompose(program: ExportedProgram) -> ExportedProgram:
    """The functional program, in which operators without a rule are taken apart as far as torch knows how.

    One pass does both: each pass runs the whole model on fake tensors, which is most of the time that tracing takes.
    """
    with _composites_listed_once(), registrations_kept(), _unwatched():
        functional: ExportedProgram = program.run_decompositions(_decompositions())
    return functional


@contextmanager
def _unwatched() -> Iterator[None]:
    """While inside, what watches forward is not told of operators, and no node gets a line but that of the one that it
    is made of: nothing of the model runs, and both take a tenth of the time."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(fx.config, "do_not_emit_stack_traces", True))
        while type(_get_current_function_mode()).__module__.startswith("autopar."):  # type: ignore[no-untyped-call]
            stack.enter_context(_pop_mode_temporarily())
        yield


@contextmanager
def _composites_listed_once() -> Iterator[None]:
    """Before torch decomposes a program it lists all composite operators, again for each namespace of operators, which
    takes as long as a tenth of a small trace; while inside, once."""
    listed = utils._materialize_cpp_cia_ops
    utils._materialize_cpp_cia_ops = cache(listed)
    try:
        yield
    finally:
        utils._materialize_cpp_cia_ops = listed


def _decompositions() -> dict[OpOverload, Callable[..., Any]]:
    return {
        **{op: taken_apart for op, taken_apart in _known().items() if not has_rules(op)},
        **_OF_REALS,
        **_COMPUTED,
        **_REDUCED,
    }


@cache
def _known() -> dict[OpOverload, Callable[..., Any]]:
    """Of torch's own operators: torch goes through all that are registered to list them, a sixth of a small trace."""
    known = {**torch.export.default_decompositions(), **_OWN}
    own = (op for op in known if op.namespace == "aten" and torch.Tag.nondeterministic_seeded not in op.tags)
    return {op: known[op] for op in own if op not in _WRONG}
