"""Caches of keys and values: buffers of which each step writes some rows, in place, and reads all.

    write_rows(cache, positions, rows, is_written)[b, h, positions[b, t]] = rows[b, h, t]   where is_written[b, t]

cache: (batch, heads, length, head dim); positions: (batch, steps), different ones of each sequence; rows: (batch,
heads, steps, head dim); is_written: (batch, steps). All other rows stay. In a model the result is copied to the buffer
that was given, which nothing else reads: what runs is one write into that buffer's memory, of which ranks may have
parts (`Graph.kept_in_parts`). There is no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.errors import TraceError
from autopar.ir.graph import WRITE_ROWS, Graph
from autopar.ops import saved, work
from autopar.ops.local import LocalCall
from autopar.ops.operator import Operator
from autopar.ops.patterns import Entry

torch.library.define(
    "autopar::write_rows", "(Tensor cache, Tensor positions, Tensor rows, Tensor is_written) -> Tensor"
)
write_rows = torch.ops.autopar.write_rows.default


@torch.library.impl("autopar::write_rows", "CompositeExplicitAutograd")
def _write_rows(cache: Tensor, positions: Tensor, rows: Tensor, is_written: Tensor) -> Tensor:
    """As a function, which leaves the cache that it is given as it was."""
    index = positions[:, None, :, None].expand_as(rows)
    return cache.scatter(2, index, torch.where(is_written[:, None, :, None], rows, cache.gather(2, index)))


def _write_call(local: LocalCall) -> str:
    """The runtime's function always: it writes in place."""
    return f"rt.write_rows({', '.join(local.names)})"


CACHES: dict[str, Operator] = {
    WRITE_ROWS: Operator(
        Entry("b h L d, b T, b h T d, b T -> b h L d"), work=work.CACHED_ROWS, saved=saved.nothing, local=_write_call,
        is_view=True,
    ),
}  # fmt: skip


def check_caches(graph: Graph) -> None:
    """That what is written in place is a buffer which becomes the result, and that nothing else reads. Raises
    TraceError with node and source line."""
    for node in graph.nodes:
        if node.op != WRITE_ROWS:
            continue
        stored = graph.stored_by_tensor.get(node.operands[0])
        is_own = stored is not None and stored.name in graph.kept_in_parts and stored.kind == "buffer"
        if not is_own or len(graph.consumers[node.operands[0]]) > 1 or node.operands[0] in graph.outputs:
            raise TraceError(
                f"expected write_rows of a buffer that nothing else reads, and its result copied to that buffer, found "
                f"{node.operands[0]} in {node.name} at {node.source or 'an unknown line'}: it is written in place. Use "
                "`buffer.copy_(write_rows(buffer, …))`, and read the buffer afterwards"
            )
