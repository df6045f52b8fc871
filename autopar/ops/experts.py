"""Routed experts as one operator: every token goes through the experts that its router chose, each a small network.

    y[t] = Σ_k weights[t, k] · expert(ids[t, k])(x[t])
    expert(e)(x) = f(x @ up[e]) @ down[e]         f(h) = activation(h), or activation(h₁) · h₂ of the halves of h

Models write this as sort, gather, grouped products and the way back (see `trace.routing`). Sorted rows belong to no
slice of the tokens, so those operators have no rules one by one; together they treat each token by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.ir.graph import EXPECTED, Graph, Node
from autopar.ir.placement import S
from autopar.ir.routing import BALANCED, HISTOGRAM, Routing
from autopar.ops import saved, work
from autopar.ops.call import Call
from autopar.ops.local import LocalCall, tuple_of
from autopar.ops.notation import AxisRule, einsum_rules
from autopar.ops.operator import Operator
from autopar.runtime.lowering.experts import activated

ROUTED_EXPERTS = "autopar.routed_experts.default"
POSITIONS = "expert_positions"
"""What a constant is named that says where each expert is placed."""

_LIBRARY: Any = torch.library.Library("autopar", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "routed_experts(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, str activation, bool gated, "
    'int num_experts, *, str routing="") -> Tensor'
)


def _routed_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
    activation: str, gated: bool, num_experts: int, routing: str = "",
) -> torch.Tensor:  # fmt: skip
    """The formula above, a matrix for each token and choice: simple, and large; programs call the runtime's.

    routing: how tokens are expected to choose, as `Routing.text` has it; what is computed does not depend on it.
    """
    hidden = activated(torch.einsum("td,tkdn->tkn", x, up[ids]), activation, gated)
    return (torch.einsum("tkh,tkhm->tkm", hidden, down[ids]) * weights.unsqueeze(-1)).sum(1)


_LIBRARY.impl("routed_experts", _routed_experts, "CompositeImplicitAutograd")


def routed_experts(call: Call) -> list[AxisRule]:
    """Tokens; experts, whose ranks each add what their own experts make; columns of the result."""
    text = "t D, t K, t K, e D N, e H m -> t m"
    return einsum_rules(text, call.operand_shapes, call.result_shapes, "RRPRR RRRRP")


def _local(local: LocalCall) -> str:
    """The runtime's function always: the operator is autopar's own."""
    axes = local.axes_where(3, lambda type_: type_ == S(0))
    options = [repr(local.call.arguments[key]) for key in ("activation", "gated", "num_experts")]
    return f"rt.routed_experts({', '.join([*local.names, *options, tuple_of(axes)])})"


# How tokens choose experts ----------------------------------------


def with_routing(graph: Graph, routing: Routing | None) -> Graph:
    """The graph whose routed experts say how tokens choose them, each with the counts of all layers that are like it,
    so that equal layers stay equal. Raises PlanError where a histogram does not fit the model."""
    if routing is None:
        return graph
    layers = [node for node in graph.nodes if node.op == ROUTED_EXPERTS]
    sizes = {node.args[7] for node in layers}
    if not layers and routing.kind != BALANCED:
        raise PlanError(
            f"expected a model with routed experts that are known as such, for {routing}, found none in "
            f"{graph.model_name}; leave routing out"
        )
    texts = {n: _over(graph, routing, [node for node in layers if node.args[7] == n]).text for n in sizes}
    nodes = (_told(node, texts[node.args[7]]) if node.op == ROUTED_EXPERTS else node for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def _told(node: Node, routing: str) -> Node:
    return replace(node, kwargs=tuple({**dict(node.kwargs), EXPECTED: routing}.items()))


def _over(graph: Graph, routing: Routing, layers: Sequence[Node]) -> Routing:
    """The routing of layers with as many experts each, in the order in which these are placed."""
    if routing.kind != HISTOGRAM:
        return routing
    return replace(
        routing,
        counts=tuple((node.scope.module, _by_position(graph, node, counts_of(routing, node))) for node in layers),
    )


def _by_position(graph: Graph, layer: Node, counts: tuple[float, ...]) -> tuple[float, ...]:
    """The counts of the experts as they are placed (`substitute.placing`)."""
    lookup = graph.producers.get(layer.args[1].tensor)
    table = graph.stored_by_tensor.get(lookup.operands[0]) if lookup is not None and lookup.operands else None
    if table is None or table.kind != "constant" or POSITIONS not in table.name:
        return counts
    positions = graph.values[table.tensor].tolist()
    return tuple(counts[expert] for expert in sorted(range(len(counts)), key=positions.__getitem__))


def counts_of(routing: Routing, layer: Node) -> tuple[float, ...]:
    """Of one layer, by expert of the model. Raises PlanError."""
    found, path, num_experts = routing.of_layer(layer.scope.module), layer.scope.module, layer.args[7]
    if found is None:
        known = ", ".join(itertools.islice(routing.layers, 4))
        raise PlanError(f"expected counts for the experts of {path!r} {layer.source}, found those of {known}")
    if len(found) != num_experts:
        raise PlanError(f"expected counts of {num_experts} experts for {path!r} {layer.source}, found {len(found)}")
    return found


def _grouped_mm_local(local: LocalCall) -> str:
    """The operator is another library's, which the program need not import."""
    return f"rt.grouped_mm({', '.join(local.names)})"


EXPERTS: dict[str, Operator] = {
    ROUTED_EXPERTS: Operator(
        routed_experts, work=work.EXPERTS, saved=saved.routed_experts, local=_local, needs_elements=True
    ),
    "transformers.grouped_mm_fallback.default": Operator(
        work=work.GROUPED, saved=saved.matrices, local=_grouped_mm_local
    ),
    "_grouped_mm": Operator(work=work.GROUPED),
}
