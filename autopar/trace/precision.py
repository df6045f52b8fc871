"""Low-precision compute with master weights: the graph of the model cast to a dtype, and what is kept beside it.

    stored (float32) → cast → gathered and used (bfloat16) → gradients (bfloat16) → cast → summed and stored (float32)

As `model.to(bfloat16)` would, the cast takes every floating-point parameter and buffer, and the inputs of forward;
integers stay, and so does what a loss function is given besides the outputs. Buffers that forward updates are stored
in their own dtype with the cast model's values.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Node
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.table import operator
from autopar.trace.export import Inputs

_ONE_DTYPE = {"matmul": 3, "convolution": 3, "attention": 3}
"""By family, how many operands torch multiplies: a mask may have a dtype of its own."""


def cast_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the model in which floating-point parameters and buffers have the dtype; no other tensor is copied
    twice. Raises TraceError where the model cannot be copied."""
    tensors = (*model.parameters(), *model.buffers())
    memo: dict[int, Any] = {id(tensor): _cast(tensor, dtype) for tensor in tensors}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise TraceError(
            f"expected a model that copy.deepcopy can copy, which tracing it in {dtype} needs: {error}; cast it "
            "yourself (`model.bfloat16()`) and plan with precision=None"
        ) from error


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach().clone()
    return nn.Parameter(cast, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cast


def cast_loss(loss_fn: Any, dtype: torch.dtype) -> Any:
    """A loss function that is a module, as the cast model's outputs meet it; any other as it is."""
    return cast_copy(loss_fn, dtype) if isinstance(loss_fn, nn.Module) else loss_fn


def cast_inputs(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The inputs as the cast model takes them; what forward does not take goes to the loss function as it is."""
    pairs = zip(inputs, inputs.of_loss(), strict=True)
    return inputs.filled([x.to(dtype) if x.is_floating_point() and not of_loss else x for x, of_loss in pairs])


def with_kept_dtypes(graph: Graph, model: nn.Module, names: Sequence[str], inputs: Inputs) -> Graph:
    """Notes the dtype of each stored tensor (float32 at least) and of each input, where the graph has another."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    kept = {item.tensor: _master(own[item.name].dtype) for item in graph.stored if item.name in own}
    kept |= {name: value.dtype for name, value in zip(names, inputs, strict=True) if name in graph.tensors}
    texts = {name: str(dtype).removeprefix("torch.") for name, dtype in kept.items()}
    return replace(graph, kept_dtypes={n: text for n, text in texts.items() if text != graph.tensors[n].dtype})


def check_one_dtype(graph: Graph, dtype: torch.dtype) -> None:
    """That each product reads operands of one dtype, which torch asks for when it runs, and not when it is traced.
    Raises TraceError with node and source line."""
    for node in graph.nodes:
        found = [graph.tensors[name].dtype for name in _multiplied(node)]
        if len({text for text in found if "float" in text}) > 1:
            short = str(dtype).removeprefix("torch.")
            raise TraceError(
                f"expected operands of one dtype in {node.name} ({node.op}) at {node.source or 'an unknown line'}, "
                f"found {', '.join(found)}: with precision, the model is cast to {short}, and something before this "
                "line makes another dtype, such as .float(). Cast it back there (x.to(weight.dtype)), or plan with "
                "precision=None."
            )


def _multiplied(node: Node) -> tuple[str, ...]:
    """The operands that a product multiplies; none of another operator. Routed experts multiply tokens and matrices:
    weights of choices may have a dtype of their own."""
    if node.op == ROUTED_EXPERTS:
        return tuple(node.operands[position] for position in (0, 3, 4))
    return node.operands[: _ONE_DTYPE.get(operator(node.op).work.family, 0)]


def buffer_dtypes(model: nn.Module) -> dict[str, str]:
    """Of each buffer, by name, as the model has it."""
    return {name: str(x.dtype).removeprefix("torch.") for name, x in model.named_buffers(remove_duplicate=False)}


def _master(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
