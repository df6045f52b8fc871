"""Other shapes of inputs under the placements of one plan: each is traced, type-checked and emitted by itself.

What a plan says of an operator's operands may hold for any length, or not: heads may not divide, a mean may be of other
counts, a batch of one may take another path through the model. So each shape is a graph of its own, which the plan must
fit as it is. What does not is refused here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autopar.errors import AutoparError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import check_plan
from autopar.rewrites import graph_of
from autopar.simulate import predict
from autopar.step import met, simulated_step

Trace = Callable[[Any], Graph]
"""From inputs to the model's graph, which is held against the model where that is asked for."""


def under_plan(plan: Plan, example_inputs: Any, shapes: Iterable[Any], trace: Trace) -> list[tuple[Graph, Plan]]:
    """The graph and the plan of each shape. Raises PlanError that names the shape which the plan does not fit."""
    found: list[tuple[Graph, Plan]] = []
    for shape in shapes:
        inputs = shaped(example_inputs, shape)
        try:
            graph = graph_of(plan, trace(inputs))
            own = of_graph(plan, graph)
            check_plan(graph, own)
        except AutoparError as error:
            raise PlanError(
                f"expected the plan to hold for inputs of {_told(inputs)} as well, found that it does not: {error}. "
                "Leave the shape out, or plan for it by itself"
            ) from error
        if _is_longer(inputs, example_inputs):
            _check_memory(graph, own, inputs)
        if all(graph.fingerprint != known.fingerprint for known, _ in found) and graph.fingerprint != plan.fingerprint:
            found.append((graph, own))
    return found


def of_graph(plan: Plan, graph: Graph) -> Plan:
    """A plan for a graph of the same operators on inputs of other shapes."""
    names = (*graph.inputs, *(item.tensor for item in graph.stored))
    return replace(
        plan, fingerprint=graph.fingerprint, types={name: str(graph.kept(name)) for name in names}, simulator=None
    )


def _is_longer(inputs: Any, example: Any) -> bool:
    """Whether a tensor has more elements than the plan was made for."""
    pairs = zip(tree_leaves(inputs), tree_leaves(example), strict=True)
    return any(isinstance(own, Tensor) and own.numel() > there.numel() for own, there in pairs)


def _check_memory(graph: Graph, plan: Plan, inputs: Any) -> None:
    needed = met(graph, replace(plan, predicted=predict(simulated_step(graph, plan)))).predicted.peak_bytes
    if plan.memory_limit and needed > plan.memory_limit:
        raise PlanError(
            f"expected inputs of {_told(inputs)} to fit into {plan.memory_limit:,} bytes a device, found that they "
            f"need {needed:,}; leave the shape out, or make it the example that is planned for"
        )


def shaped(example: Any, shape: Any) -> Any:
    """Example inputs of another shape: parts of the given ones, or these again and again. A tensor is taken as it is;
    what the shape does not name stays. Raises PlanError for what does not go together."""
    if isinstance(shape, Tensor) or shape is None:
        return example if shape is None else shape
    if isinstance(example, Tensor):
        return _resized(example, shape)
    if isinstance(example, Mapping) and isinstance(shape, Mapping) and set(shape) <= set(example):
        return {name: shaped(value, shape.get(name)) for name, value in example.items()}
    if isinstance(example, (tuple, list)) and isinstance(shape, (tuple, list)) and len(shape) == len(example):
        return type(example)(shaped(value, part) for value, part in zip(example, shape, strict=True))
    raise PlanError(
        f"expected shapes as the example inputs are, with a tuple of lengths or a tensor for each tensor, such as "
        f"{{'input_ids': (8, 64), 'labels': (8, 64)}}, found {shape!r}"
    )


def _resized(example: Tensor, shape: Any) -> Tensor:
    is_lengths = isinstance(shape, Sequence) and all(isinstance(size, int) and size > 0 for size in shape)
    if not is_lengths or len(shape) != example.dim():
        raise PlanError(f"expected {example.dim()} lengths, of an input of {tuple(example.shape)}, found {shape!r}")
    for dim, size in enumerate(shape):
        if size <= example.size(dim):
            example = example.narrow(dim, 0, size)
        else:
            example = example.index_select(dim, torch.arange(size, device=example.device) % example.size(dim))
    return example.contiguous()


def _told(inputs: Any) -> str:
    if isinstance(inputs, Tensor):
        return str(tuple(inputs.shape))
    if isinstance(inputs, Mapping):
        return ", ".join(f"{name} {_told(value)}" for name, value in inputs.items())
    return ", ".join(map(_told, inputs)) if isinstance(inputs, (tuple, list)) else repr(inputs)
