"""The row of an operator: all that the compiler knows of it, in one entry.

Rules, limits and collectives are proved together by the property test, which shards, runs locally, combines and
compares; `cost/`, `simulate/` and `emit/` ask a row for the property that they need, and never for a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from autopar.ir.placement import Axis, Placement, Shape
from autopar.ops import saved, work
from autopar.ops.call import Call
from autopar.ops.in_bits import InBits
from autopar.ops.inner import SendRule
from autopar.ops.local import LocalRule
from autopar.ops.patterns import RuleFunction
from autopar.ops.saved import PassRule, SaveRule
from autopar.ops.work import WorkKind
from autopar.ops.workspace import LoweredRule, WorkspaceRule

Limit = Callable[[Call, tuple[Placement, ...], tuple[Axis, ...]], str | None]
"""Why local shapes forbid placements of the operands that follow the rule on each axis, or None."""

Mixing = Callable[[Call, tuple[Placement, ...], tuple[Axis, ...]], bool]
"""Whether a slice of the result depends on more than the slices of the operands, with operands so placed."""


WorkedRule = Callable[[tuple[Shape, ...], tuple[Placement, ...], tuple[Axis, ...]], tuple[Shape, ...]]
"""Of local shapes of the operands, by where these lie."""


GatheredRule = Callable[[tuple[Placement, ...], tuple[Axis, ...]], int]
"""By where the operands lie, on which axes."""


class Groups(NamedTuple):
    """Channels in groups: the argument that says in how many, and which dim of the result the channels are."""

    argument: str
    channel: Callable[[Call], int]


@dataclass(frozen=True, eq=False)
class Operator:
    """What is known of an operator. A field that is left out says what holds for most."""

    rule: RuleFunction | None = None  # the types it runs with locally; None: torch's tags and registry are asked
    linear: str | Callable[[Call], str] = ""  # words as of `notation`: summands that pass a pointwise one
    limits: tuple[Limit, ...] = ()  # local shapes that it cannot run with
    needs_elements: bool = False  # torch's kernels refuse tensors without elements, forward or backward, or crash
    cuts_samples_alone: bool = False  # where an axis has shares: windows and groups are shared out evenly only

    # Cost
    work: WorkKind = work.POINTWISE  # family, FLOPs and bytes, forward and backward
    saved: SaveRule = saved.everything  # what autograd keeps for the backward pass
    saved_on_cpu: SaveRule | None = None  # where CPUs have no fused kernel
    in_bits: InBits | None = None  # how a few bits of each element may be kept instead
    workspace: WorkspaceRule | None = None  # memory that it takes for a while
    lowered: LoweredRule | None = None  # both, where the runtime has a function for it
    worked: WorkedRule | None = None  # shapes by which its work is counted, where ranks do some of each other's
    gathered: GatheredRule | None = None  # of how many ranks' rows each makes gradients of what is stored
    is_view: bool = False  # its results share the memory of the first operand
    passes: PassRule | None = None  # which operands' gradients are the result's own

    # Ranks
    inside: SendRule | None = None  # collectives inside
    sends_for: int = 0  # the operand for whose gradient it sends in the backward pass
    passes_when_split: tuple[int, int] | None = None  # over the activation, where it communicates; else as `work` says
    local: LocalRule | None = None  # the runtime's function that it calls, where its placements ask for one
    size: str = ""  # the argument that holds the shape of the result
    groups: Groups | None = None
    creates: bool = False  # makes tensors of its own
    asks_makers: bool = False  # its rules ask what made an operand

    # Samples
    counts_samples: Callable[[Call], bool] | None = None  # it divides by a number of samples, which all ranks count
    mixes_samples: Mixing | None = None  # microbatches cannot run it so, though nothing is sent inside

    def by(self, rule: RuleFunction | None = None, **others: Any) -> Operator:
        """A row of this kind with the rule of an operator, and what else is its own."""
        return replace(self, rule=rule, **others)

    def of_other_overloads(self) -> Operator:
        """What holds of an operator's other overloads: all but what speaks of arguments that these need not have."""
        return replace(
            self, rule=None, linear="", limits=(), inside=None, local=None, groups=None, counts_samples=None,
            mixes_samples=None, gathered=None,
        )  # fmt: skip
