"""A traced graph's gradients and flags on one device, to compare with the model; `trace.interpreter` runs it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.ir.graph import Graph
from autopar.trace import interpreter


def run_graph(graph: Graph, model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The value of every tensor; the model's own parameters and buffers are read, never written."""
    return interpreter.run_graph(graph, {**dict(model.named_parameters()), **dict(model.named_buffers())}, inputs)


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
