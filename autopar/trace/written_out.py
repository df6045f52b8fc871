"""Functions of torch whose own code asks for values or shapes of values, written out while a model is traced.

    bincount(x, minlength=n)   →  zeros(n).scatter_add(0, x, ones): a number that is not below n is an error then
    cov(x), corrcoef(x)        →  the products that torch computes, without its checks of weights
    a batch norm in training without momentum (a running mean of all batches)
                               →  statistics += (those of the batch − statistics) / num_batches_tracked

Sequences that are packed, whose rows are in an order that lengths decide, are refused with their line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.errors import TraceError
from autopar.trace.lines import user_line


@contextmanager
def functions_written_out() -> Iterator[None]:
    """While a model is traced. Not by a mode of torch's, which functions of torch.nn.functional run without."""
    with ExitStack() as stack:
        for name, function in (("bincount", _bincount), ("cov", _cov), ("corrcoef", _corrcoef)):
            for place in (torch, Tensor):
                stack.enter_context(mock.patch.object(place, name, _of_fakes(getattr(place, name), function)))
        stack.enter_context(mock.patch.object(_BatchNorm, "forward", _batch_norm(_BatchNorm.forward)))
        own = nn.utils.rnn._VF  # type: ignore[attr-defined]
        called = SimpleNamespace(_pack_padded_sequence=_packed, _pad_packed_sequence=own._pad_packed_sequence)
        stack.enter_context(mock.patch.object(nn.utils.rnn, "_VF", called))
        yield


def _packed(*args: Any) -> NoReturn:
    raise TraceError(
        "expected sequences of one length, found packed ones, whose rows the lengths decide, at\n"
        f"  {user_line(sys._getframe(1))}\nRun the recurrent module on the padded batch and leave out of its output, "
        "by a mask or by index, what is behind the end of a sequence."
    )


def _of_fakes(own: Callable[..., Tensor], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def called(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (function if isinstance(x, FakeTensor) else own)(x, *args, **kwargs)

    return called


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if minlength == 0:
        raise TraceError(
            "expected shapes that do not depend on tensor values, found bincount, which makes as many counts as the "
            f"largest number says, at\n  {user_line(sys._getframe(2))}\nGive it minlength= that no number reaches."
        )
    dtype = torch.float64 if weights is None or weights.dtype != torch.float32 else torch.float32
    values = torch.ones_like(x, dtype=dtype) if weights is None else weights.detach().to(dtype)
    counts = torch.zeros(minlength, dtype=dtype, device=x.device).scatter_add(0, x.long(), values)
    return counts.long() if weights is None else counts


def _cov(
    x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:  # fmt: skip
    rows = x if x.dim() == 2 else x.reshape(1, -1)
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        count = max(rows.shape[1] - correction, 0)
        centred = rows - rows.sum(1, keepdim=True) / rows.shape[1]
        return (centred @ centred.t().conj() / count).squeeze()
    total = weights.sum()
    centred = rows - (rows * weights).sum(1, keepdim=True) / total
    taken = correction if aweights is None else correction * (weights * aweights).sum() / total
    return (centred @ (centred * weights).t().conj() / (total - taken).clamp(min=0)).squeeze()


def _corrcoef(x: Tensor) -> Tensor:
    found = _cov(x)
    if found.dim() == 0:
        return found / found
    deviation = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    found = found / deviation[:, None] / deviation[None, :]
    return found if found.is_complex() else found.clamp(-1, 1)


def _batch_norm(own: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def forward(module: Any, x: Tensor) -> Tensor:
        counted = module.num_batches_tracked
        if module.momentum is not None or counted is None or not (module.training and module.track_running_stats):
            return own(module, x)
        module._check_input_dim(x)
        counted.add_(1)
        kept = {name: getattr(module, name) for name in ("running_mean", "running_var")}
        found = {
            name: torch.zeros(len(old), dtype=old.dtype, device=old.device) for name, old in kept.items()
        }  # reads none
        mean, variance = found.values()
        made = F.batch_norm(x, mean, variance, module.weight, module.bias, True, 1.0, module.eps)
        with torch.no_grad():
            for name, value in found.items():
                kept[name].add_((value - kept[name]) / counted)
        return made

    return forward
