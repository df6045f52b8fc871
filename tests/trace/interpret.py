"""Runs a traced graph on one device, operator by operator: what the graph means, to compare with the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.graph import Atom, Graph, map_references
from autopar.ops import overload


def run_graph(graph: Graph, model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The value of every tensor; the model's own parameters and buffers are read, never written."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = dict(inputs)
    for item in graph.stored:
        value = graph.values[item.name] if item.kind == "constant" else state[item.name]
        values[item.tensor] = value if item.requires_grad else value.detach().clone()
    for node in graph.nodes:
        args, kwargs = _real(map_references((node.args, dict(node.kwargs)), values.__getitem__))
        made: Any = overload(node.op)(*args, **kwargs)
        results = made if isinstance(made, (tuple, list)) else [made]
        values.update((name, value) for name, value in zip(node.outputs, results, strict=True) if name is not None)
    return values


def _real(value: Any) -> Any:
    if isinstance(value, Atom):
        return torch.device("cpu") if value.kind == "device" else getattr(torch, value.name)
    if isinstance(value, dict):
        return {key: _real(item) for key, item in value.items()}
    return [_real(item) for item in value] if isinstance(value, (list, tuple)) else value


def graph_gradients(graph: Graph, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and each parameter's gradient according to the graph."""
    assert graph.loss is not None
    names = [item.name for item in graph.parameters if item.requires_grad]
    parameters = dict(model.named_parameters())
    loss = run_graph(graph, model, inputs)[graph.loss]
    found = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    return loss.detach(), {n: g for n, g in zip(names, found, strict=True) if g is not None}


def check_flags(graph: Graph, values: dict[str, Tensor]) -> None:
    """Whether autograd agrees with the graph about where gradients flow, and about shapes and dtypes."""
    for node in graph.nodes:
        for name in node.results:
            value, told = values[name], graph.tensors[name]
            assert tuple(value.shape) == told.shape, (node, value.shape, told)
            assert str(value.dtype) == f"torch.{told.dtype}", (node, value.dtype, told)
            assert value.requires_grad == told.differentiable, (node, value.requires_grad, told)
