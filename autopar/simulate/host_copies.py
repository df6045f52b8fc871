"""Copies between a device and its host on a stage's streams: a queue for each direction, beside the links of ranks.

A stored tensor that is on the host begins its way to a use with a copy, and its gradient's way home ends with one: a
step of its own (`COPY`) in front of the steps over axes, whose gradient's step is the last. On CPU ranks the copy is
made at once, and only waited for, so that what follows it on its way runs beside it (`runtime.host_link`); a GPU's
collectives wait for it.
"""

from __future__ import annotations

from autopar.cost.host_memory import HostMemory
from autopar.cost.profile import Profile
from autopar.errors import ProfileError
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


def host_of(profile: Profile) -> HostMemory:
    """What a device may use of its host. Raises ProfileError where its profile does not say."""
    if profile.beside is None:
        raise ProfileError(
            f"expected host_memory in the profile {profile.name}, which says what the host holds and how fast its link "
            "is, found none; add it to the profile's file, or keep everything on the device"
        )
    return profile.beside
