"""trace: nn.Module + example inputs -> Graph.

export (torch.export, functional; of blocks that do the same, one) → convert (plain data, every block)
→ clean (alias, assert and dead nodes removed) → without_counting (indexing that takes all, in order, is a reshape)
→ fuse_routing (tokens' way to their experts and back becomes one operator) → clean → number (nodes named by their
order) → share (one identity node for each tensor with several consumers)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.ir.graph import Graph
from autopar.ir.sharing import share
from autopar.trace.buffers import unsaved_buffers
from autopar.trace.clean import clean
from autopar.trace.convert import convert
from autopar.trace.counting import without_counting
from autopar.trace.export import bind_inputs, export
from autopar.trace.model_names import check_names
from autopar.trace.numbering import number
from autopar.trace.precision import buffer_dtypes, cast_copy, cast_inputs, with_kept_dtypes
from autopar.trace.repeats import FEWEST
from autopar.trace.routing import fuse_routing
from autopar.trace.wide import with_wide_buffers


def trace(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | dict[str, Any],
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    mode: str = "train",
    compute_dtype: torch.dtype | None = None,
    fewest: int = FEWEST,
) -> Graph:
    """The cleaned forward graph of `model` on one global batch.

    example_inputs: tensors (real or meta) as forward takes them, by position or name. With `loss_fn`, those that
    forward does not take are passed on to `loss_fn(output, ...)`. `mode="train"` keeps only the loss and the
    buffers that forward updates; "inference" keeps every output. Nothing is computed and the model is not changed.
    Of blocks that do the same, when there are at least `fewest`, one is exported, and the graph is as if all were.
    With `compute_dtype`, the graph is that of the model cast to it; its `kept_dtypes` says what is stored.
    Raises TraceError naming the source line when the model cannot be captured.
    """
    check_names(model)
    names, bound = bind_inputs(model, example_inputs, loss_fn)
    traced = model if compute_dtype is None else cast_copy(model, compute_dtype)
    arguments = bound if compute_dtype is None else cast_inputs(model, names, bound, compute_dtype)
    program = export(traced, names, arguments, loss_fn, mode, fewest)
    graph = convert(program, traced, names, with_loss=loss_fn is not None, mode=mode)
    if compute_dtype is not None:
        graph = with_wide_buffers(graph, buffer_dtypes(model), str(compute_dtype).removeprefix("torch."))
    graph = share(number(clean(fuse_routing(clean(without_counting(clean(graph)))))))
    graph = replace(graph, unsaved=unsaved_buffers(model))
    return graph if compute_dtype is None else with_kept_dtypes(graph, model, names, bound)
