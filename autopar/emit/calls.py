"""One local operator call as text: usually the same ATen operator on local tensors, with local sizes.

A few operators need more than their own ATen call when sharded (their rule says so): their rows name a function of
`autopar.runtime` (`ops.local`).
"""

from __future__ import annotations

from functools import partial

from autopar.emit.plain import PlainCalls
from autopar.ir.statements import Operate
from autopar.ops.call import Call
from autopar.ops.local import LocalCall
from autopar.ops.table import operator


class CallWriter(PlainCalls):
    """Writes the calls of one program."""

    def write(self, statement: Operate, names: list[str]) -> str:
        """The call with `names` for its operands, in operand order."""
        lowering = operator(statement.node.op).local
        text = lowering(self._local(statement, names)) if lowering else None
        return text or self.plain(statement, names)

    def _local(self, statement: Operate, names: list[str]) -> LocalCall:
        return LocalCall(
            call=Call(self.graph, statement.node),
            names=names,
            placements=tuple(placement for _, placement in statement.reads),
            axes=self.plan.axes,
            counted=self.counted(statement),
            on_rank=partial(self.local_call, statement),
            plain=partial(self.plain, statement),
        )
