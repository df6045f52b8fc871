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
    if not layers and routing.kind != BALANCED:
        raise PlanError(
            f"expected a model with routed experts that are known as such, for {routing}, found none in "
            f"{graph.model_name}; leave routing out"
        )
    texts = {node.name: ((EXPECTED, routing_over(routing, node, layers).text),) for node in layers}
    return replace(graph, nodes=tuple(replace(n, kwargs=texts.get(n.name, n.kwargs)) for n in graph.nodes))


def routing_over(routing: Routing, layer: Node, layers: Sequence[Node]) -> Routing:
    """The routing of the layers with as many experts as one has."""
    if routing.kind != HISTOGRAM:
        return routing
    alike = [node for node in layers if node.args[7] == layer.args[7]]
    return replace(routing, counts=tuple((node.scope.module, _counts(routing, node)) for node in alike))


def _counts(routing: Routing, layer: Node) -> tuple[float, ...]:
    """Of one layer. Raises PlanError."""
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
