"""Routed experts as one operator: every token goes through the experts that its router chose, each a small network.

    y[t] = Σ_k weights[t, k] · expert(ids[t, k])(x[t])
    expert(e)(x) = f(x @ up[e]) @ down[e]         f(h) = activation(h), or activation(h₁) · h₂ of the halves of h

Models write this as sort, gather, grouped products and the way back (see `trace.routing`). Sorted rows belong to no
slice of the tokens, so those operators have no rules one by one; together they treat each token by itself.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.ir.placement import S
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
    "int num_experts) -> Tensor"
)


def _routed_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
    activation: str, gated: bool, num_experts: int,
) -> torch.Tensor:  # fmt: skip
    """The formula above, a matrix for each token and choice: simple, and large; programs call the runtime's."""
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
