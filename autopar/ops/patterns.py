"""Rules that many operators share: a text of the notation, dims that are reduced, run along, or passed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.ir.placement import P, S
from autopar.ops.call import Call
from autopar.ops.notation import AxisRule, einsum_rules


@dataclass(frozen=True)
class Entry:
    """A rule text ("b m k, b k n -> b m n") with the words under which it is linear; see notation.py."""

    text: str
    partial: str = ""
    additive: tuple[int, ...] = ()

    def __call__(self, call: Call) -> list[AxisRule]:
        return einsum_rules(self.text, call.operand_shapes, call.result_shapes, self.partial, self.additive)


RuleFunction = Callable[[Call], list[AxisRule]]


def _reduced(call: Call) -> set[int]:
    rank = len(call.shape(0))
    dims = call.arguments.get("dim")
    if dims is None or dims == ():
        return set(range(rank))
    return {dim % rank for dim in (dims if isinstance(dims, tuple) else (dims,)) if rank}


def reduction(call: Call) -> list[AxisRule]:
    """Dims that stay may be split, dims that are reduced may not."""
    gone, rank = _reduced(call), len(call.shape(0))
    keep = len(call.result_shapes[0]) == rank
    stay = [dim for dim in range(rank) if dim not in gone]
    count = len(call.node.results)
    return [AxisRule((S(dim),), (S(dim if keep else stay.index(dim)),) * count) for dim in stay]


def split_sum(call: Call) -> list[AxisRule]:
    """A split dim that is summed away leaves summands."""
    return [AxisRule((S(dim),), (P,)) for dim in sorted(_reduced(call)) if call.shape(0)[dim] > 1]


def linear_reduction(call: Call) -> list[AxisRule]:
    """sum and mean: a split dim that is reduced leaves summands (mean divides by the global length)."""
    return [*reduction(call), *split_sum(call), AxisRule((P,), (P,))]


def along_dim(call: Call) -> list[AxisRule]:
    """softmax, cumsum and the like: every dim but the one they run along."""
    rank, count = len(call.shape(0)), len(call.node.results)
    own = call.dim("dim", rank) if rank else 0
    return [AxisRule((S(dim),), (S(dim),) * count) for dim in range(rank) if dim != own]


def cumsum(call: Call) -> list[AxisRule]:
    """Every dim but the one that it runs along; linear."""
    return [*along_dim(call), AxisRule((P,), (P,))]


def passes_leading_dims(trailing: int) -> RuleFunction:
    """All dims but the last ones (`trailing` of them), which the operator works on: pooling."""

    def rules(call: Call) -> list[AxisRule]:
        results = len(call.node.results)
        return [AxisRule((S(dim),), (S(dim),) * results) for dim in range(len(call.shape(0)) - trailing)]

    return rules


def linear_leading_dims(trailing: int) -> RuleFunction:
    """All dims but the last ones, which the operator works on; linear: interpolation, tril."""
    return lambda call: [*passes_leading_dims(trailing)(call), AxisRule((P,), (P,))]
