"""How a call reads on one rank: what a row's `local` is given to name a function of the runtime.

Most operators run on local tensors as they are. A few need more where they are sharded (their rule says so): a masked
lookup for split rows, a loss or mean over the global count, statistics over shards. Their rows name the function of
`autopar.runtime.lowering` that does it, and say which arguments it takes beside the operator's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Node
from autopar.ir.mesh import MICROBATCH, LogicalMesh
from autopar.ir.placement import Placement, Type
from autopar.ops.call import Call


@dataclass(frozen=True)
class LocalCall:
    """One call in an emitted program: `names` are the variables of its operands, in operand order.

    counted: the variable that holds the global number of samples, where a mean over them does not count them itself.
    on_rank: the call with the sizes that it is told on local tensors. plain: the text of a node's own operator on
    variables.
    """

    call: Call
    names: Sequence[str]
    placements: tuple[Placement, ...]
    axes: LogicalMesh
    counted: str
    on_rank: Callable[[], Call]
    plain: Callable[[Sequence[str], Node], str]

    def axes_where(self, operand: int, test: Callable[[Type], bool]) -> list[str]:
        """Names of the real mesh axes on which an operand's type passes the test."""
        return axes_where(self.axes, self.placements[operand], test)

    def is_cut(self, operand: int) -> bool:
        """Whether an operand is a microbatch's slice of what the step has."""
        return is_microbatched(self.axes, self.placements[operand])

    def variable(self, argument: str) -> str:
        """The variable of an optional tensor argument, or "None"."""
        positions = self.call.positions.get(argument)
        return self.names[positions[0]] if positions else "None"


LocalRule = Callable[[LocalCall], str | None]
"""The text of the call where its placements ask for more than the operator itself; None where they do not."""


def axes_where(axes: LogicalMesh, placement: Placement, test: Callable[[Type], bool]) -> list[str]:
    """Names of the real mesh axes on which the placement's type passes the test."""
    pairs = zip(axes, placement, strict=True)
    return [axis.name for axis, type_ in pairs if test(type_) and axis.name != MICROBATCH]


def is_microbatched(axes: LogicalMesh, placement: Placement) -> bool:
    """Whether a value is a microbatch's slice of what the step has."""
    return any(axis.name == MICROBATCH and type_.kind == "S" for axis, type_ in zip(axes, placement, strict=True))


def tuple_of(names: Sequence[str]) -> str:
    """ "(dp, tp,)": axes as the argument of a call."""
    return "(" + "".join(f"{name}, " for name in names).rstrip(" ") + ")" if names else "()"


def items(parts: Sequence[str]) -> str:
    """ "(a, b)" or "(a,)"."""
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
