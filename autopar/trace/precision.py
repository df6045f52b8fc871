"""Low-precision compute with master weights: the graph of the model cast to a dtype, and what is kept beside it.

    stored (float32) → cast → gathered and used (bfloat16) → gradients (bfloat16) → cast → summed and stored (float32)

As `model.to(bfloat16)` would, the cast takes every floating-point parameter and buffer, and the inputs of forward;
integers stay, and so does what a loss function is given besides the outputs. Buffers that forward updates are stored
in their own dtype with the cast model's values.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.ir.graph import Graph


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


def cast_inputs(
    model: nn.Module, names: Sequence[str], bound: tuple[Any, ...] | dict[str, Any], dtype: torch.dtype
) -> tuple[Any, ...] | dict[str, Any]:
    """The inputs as the cast model takes them; what forward does not take goes to the loss function as it is."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(item.kind == inspect.Parameter.VAR_KEYWORD for item in parameters.values())

    def cast(name: str, value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() and (takes_any or name in parameters) else value

    if isinstance(bound, dict):
        return {name: cast(name, value) for name, value in bound.items()}
    return tuple(cast(name, value) for name, value in zip(names, bound, strict=True))


def with_kept_dtypes(
    graph: Graph, model: nn.Module, names: Sequence[str], bound: tuple[Any, ...] | dict[str, Any]
) -> Graph:
    """Notes the dtype of each stored tensor (float32 at least) and of each input, where the graph has another."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    kept = {item.tensor: _master(own[item.name].dtype) for item in graph.stored if item.name in own}
    values = bound.values() if isinstance(bound, dict) else bound
    kept |= {name: value.dtype for name, value in zip(names, values, strict=True) if name in graph.tensors}
    texts = {name: str(dtype).removeprefix("torch.") for name, dtype in kept.items()}
    return replace(graph, kept_dtypes={n: text for n, text in texts.items() if text != graph.tensors[n].dtype})


def buffer_dtypes(model: nn.Module) -> dict[str, str]:
    """Of each buffer, by name, as the model has it."""
    return {name: str(x.dtype).removeprefix("torch.") for name, x in model.named_buffers(remove_duplicate=False)}


def _master(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
