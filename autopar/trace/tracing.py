"""trace: nn.Module + example inputs -> Graph.

export (torch.export, functional; of blocks that do the same, one) → convert (plain data, every block)
→ clean (alias, assert and dead nodes removed) → without_counting (indexing that takes all, in order, is a reshape)
→ fuse_routing (tokens' way to their experts and back becomes one operator) → clean → with_leading_batch (a batch that
is merged behind another dim is parted from it, or turned to its front) → clean → with_offsets (numbers that are added
to scalars are tensors) → number (nodes named by their order) → share (one identity node for each tensor with
several consumers)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.ir.graph import Graph
from autopar.ir.sharing import share
from autopar.ops.caches import check_caches
from autopar.trace.buffers import all_on_meta, unsaved_buffers
from autopar.trace.clean import clean
from autopar.trace.convert import convert
from autopar.trace.counting import without_counting
from autopar.trace.export import bind_inputs, check_gradients, export
from autopar.trace.filled import with_parts_joined
from autopar.trace.hooks import parameter_hooks
from autopar.trace.inner_batch import with_leading_batch
from autopar.trace.layouts import check_layouts
from autopar.trace.losses import loss_values, with_loss
from autopar.trace.model_names import check_names, is_wrapped
from autopar.trace.numbering import number
from autopar.trace.offsets import with_offsets
from autopar.trace.precision import buffer_dtypes, cast_copy, cast_inputs, cast_loss, check_one_dtype, with_kept_dtypes
from autopar.trace.repeats import FEWEST
from autopar.trace.routing import fuse_routing
from autopar.trace.wide import with_wide_buffers


def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    mode: str = "train",
    compute_dtype: torch.dtype | None = None,
    fewest: int = FEWEST,
    is_part: bool = False,
) -> Graph:
    """The cleaned forward graph of `model` on one global batch.

    example_inputs: what forward takes, by position or name: tensors (real or meta), containers of such, and constants,
    which the graph is then for. With `loss_fn`, what forward does not take is passed on to `loss_fn(output, ...)`.
    `mode="train"` keeps only the loss and the buffers that forward updates; "inference" keeps every output. Nothing is
    computed and the model is not changed. Of blocks that do the same, when there are at least `fewest`, one is
    exported, and the graph is as if all were. is_part: of a model, whose other parts lead to its inputs, which then
    have gradients, and go on with its outputs, which then follow the loss. With `compute_dtype`, the graph is that of
    the model cast to it; its `kept_dtypes` says what is stored.
    Raises TraceError naming the source line when the model cannot be captured.
    """
    names, inputs = bind_inputs(model, example_inputs, loss_fn)
    if mode == "train":
        check_gradients(names, inputs)
    whole = with_loss(model, loss_fn)
    check_names(whole)
    check_layouts(whole, names, inputs)
    unsaved = unsaved_buffers(whole)
    traced, loss, given = model, loss_fn, inputs
    with all_on_meta(whole):
        if compute_dtype is not None:
            traced, loss = cast_copy(model, compute_dtype), cast_loss(loss_fn, compute_dtype)
            given = cast_inputs(inputs, compute_dtype)
        hooks = parameter_hooks(whole) if mode == "train" else {}
        program, paths = export(traced, given, loss, mode, fewest, hooks)
        prefix = "model." if loss_fn is not None or is_wrapped(model) else ""
        graph = convert(program, with_loss(traced, loss), names, paths, prefix=prefix, mode=mode, is_part=is_part)
    arguments = () if inputs.is_plain else inputs.tree
    graph = replace(graph, arguments=arguments, starts=loss_values(model, loss_fn), unsaved=unsaved)
    if compute_dtype is not None:
        graph = with_wide_buffers(graph, buffer_dtypes(whole), str(compute_dtype).removeprefix("torch."))
    routed = clean(fuse_routing(clean(without_counting(with_parts_joined(clean(graph))))))
    graph = share(number(with_offsets(clean(with_leading_batch(routed)))))
    check_caches(graph)
    if compute_dtype is None:
        return graph
    check_one_dtype(graph, compute_dtype)
    return with_kept_dtypes(graph, whole, names, inputs)
