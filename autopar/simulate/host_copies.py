"""Copies between a device and its host on a stage's streams: a queue for each direction, beside the links of ranks.

A stored tensor that is on the host begins its way to a use with a copy, and its gradient's way home ends with one: a
step of its own (`COPY`) in front of the steps over axes, whose gradient's step is the last. On CPU ranks the copy is
made at once, and only waited for, so that what follows it on its way runs beside it (`runtime.host_link`); a GPU's
collectives wait for it.
"""

from __future__ import annotations

from autopar.ir.placement import R, S
from autopar.ir.redistribution import Step

AXIS = -2  # in the place of a mesh axis; -1 is from one submesh to another
DOWN, UP = "host down", "host up"
"""Streams, and kinds of what is sent on them."""

COPY = Step(AXIS, S(0), R)
"""From the host to the device; its gradient's goes the other way. As of a gather, the result has its own memory."""


def is_copy(step: Step) -> bool:
    """Whether a step is between a device and its host."""
    return step.axis == AXIS
