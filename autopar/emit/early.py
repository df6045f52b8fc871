"""What a step can start before anything else, so that ranks need not wait for one another in its midst.

A mean over samples that axes split divides by their global count. The count depends on the targets alone: where these
follow from the program's inputs, its all-reduce starts at the top of forward and is awaited at the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.emit.calls import CallWriter
from autopar.emit.names import Names
from autopar.emit.tree import Region
from autopar.ir.statements import Operate, Statement, Value
from autopar.ops.ahead import chain, makers


@dataclass(frozen=True)
class Early:
    """Statements to move to the top, the losses whose samples are counted there, and what is left."""

    moved: list[Statement | Region]
    losses: list[Operate]
    rest: list[Statement | Region]


def find_early(items: Sequence[Statement | Region], known: set[Value], calls: CallWriter) -> Early:
    """Finds the losses in `items` whose targets follow from the values `known`, and what makes these targets."""
    own = makers([item for item in items if not isinstance(item, Region)])
    losses, needed = [], set()
    for item in items:
        if isinstance(item, Operate) and len(item.reads) == 2 and calls.counted_axes(item):
            found = chain(item.reads[1], known, own)
            if found is not None:
                losses.append(item)
                needed |= {id(statement) for statement in found}
    moved = [item for item in items if id(item) in needed]
    return Early(moved, losses, [item for item in items if id(item) not in needed])


def count_lines(losses: Sequence[Operate], calls: CallWriter, names: Names, indent: str) -> list[str]:
    """Starts the counts, and tells `calls` the variables that hold them."""
    lines = []
    for loss in losses:
        name = names.make((f"count of {loss.node.name}", ()), "count")
        calls.counts[loss.node.name] = name
        lines.append(f"{indent}{name} = {calls.write_count(loss, names[loss.reads[1]])}  # all_reduce 4 B")
    return lines
