"""Which blocks' activations wait in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Graph
from autopar.ir.structure import block_paths


def copied_blocks(graph: Graph, repeated: Sequence[str]) -> tuple[str, ...]:
    """Of the repeated blocks those that may be copied out, in the order in which they run, but for the last if there
    are several: what it saves is needed again at once."""
    blocks, wanted = block_paths(graph), {*repeated}
    found = tuple(dict.fromkeys(path for node in graph.nodes for path, _ in node.scope.path if path in wanted & blocks))
    return found[:-1] if len(found) > 1 else found
