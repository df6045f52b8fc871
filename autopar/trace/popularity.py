"""How often a model's routers choose each expert on its data: `Routing.measured` and `autopar profile --routing`.

The traced graph is run on one device, batch by batch, without gradients; routed experts say which choices they were
given. Weights are those that the model has now: a router at its start chooses otherwise than one that is trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node
from autopar.ir.routing import Routing
from autopar.ops.call import overload
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.runtime.lowering.experts import routed_experts
from autopar.trace.eager import named_state
from autopar.trace.export import bind_inputs
from autopar.trace.interpreter import run_graph
from autopar.trace.tracing import trace

_NOT_COMPUTED = ("routing", "chunks", "exchange")  # say what is expected, or how several ranks go about it


def measured(model: nn.Module, batches: Any, loss_fn: Callable[..., Any] | None = None) -> Routing:
    """The histogram of a model's choices, by layer and expert. batches: one batch, as `parallelize` takes it, or a list
    or iterator of such. Raises PlanError for a model without routed experts that are known as such."""
    counts: dict[str, Tensor] = {}
    graphs: dict[Any, Graph] = {}
    for batch in _each(batches):
        names, inputs = bind_inputs(model, batch, loss_fn)
        given = dict(zip(names, inputs, strict=True))
        shapes = tuple((name, tuple(x.shape), x.dtype) for name, x in given.items())
        if shapes not in graphs:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of outputs that nobody asks for here
                graphs[shapes] = trace(model, batch, loss_fn=loss_fn, mode="inference")
        _count(graphs[shapes], named_state(model, loss_fn), given, counts)
    if not counts:
        raise PlanError(
            "expected a model with routed experts that are known as such, and a batch for it, found no choices of "
            f"experts in {type(model).__name__}"
        )
    return Routing.histogram({path: own.tolist() for path, own in counts.items()})


def _each(batches: Any) -> Iterable[Any]:
    return [batches] if isinstance(batches, (Tensor, tuple, Mapping)) else batches


def _count(graph: Graph, state: Mapping[str, Tensor], given: dict[str, Tensor], counts: dict[str, Tensor]) -> None:
    """Adds what one batch chooses."""
    if any(tensor.is_meta for tensor in (*state.values(), *given.values())):
        raise PlanError("expected weights and inputs, by which routers choose, found tensors on the meta device")
    device = next(iter(state.values())).device

    def computed(node: Node, *args: Any, **options: Any) -> Tensor:
        own = torch.bincount(args[1].reshape(-1), minlength=node.args[7]).cpu()
        path = node.scope.module
        counts[path] = counts[path] + own if path in counts else own
        names = [argument.name for argument in overload(node.op)._schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **options}
        return routed_experts(**{name: value for name, value in named.items() if name not in _NOT_COMPUTED})

    moved = {name: x.to(device) for name, x in given.items()}
    with torch.no_grad():
        run_graph(graph, state, moved, device=str(device), keep_all=False, instead={ROUTED_EXPERTS: computed})
