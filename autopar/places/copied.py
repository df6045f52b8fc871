"""A place traded against memory by what waits on the host: placements as where all blocks are copied out, and along
each ladder more of them, those that save first before others.

    every block     what a link hides costs nothing
    every second    or third, one: a slow link has longer for each; what lies between is computed again

A place that fits so may be faster than with blocks computed again alone, or the only one that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.ir.plan import Plan
from autopar.places.traded import Rung, TradedPlace
from autopar.planning import Place
from autopar.zero import Modules

STRIDES = (1, 2, 3)
"""Of how many blocks one is copied out."""


class Spared(NamedTuple):
    """As in `Plan`: modules that wait on the host, and what is computed again."""

    copied_out: Modules = ()
    recompute: Modules = ()


def copied_ladders(blocks: Sequence[str], recompute: Modules = ()) -> list[list[Spared]]:
    """From nothing to all, a block more at each rung. blocks: that may be copied out, in the order in which they run;
    recompute: what is computed again anyway."""
    found = []
    for stride in STRIDES[: max(1, len(blocks))]:
        rungs = [Spared((), recompute)]
        for number, path in enumerate(blocks):
            last = rungs[-1]
            if number % stride:
                rungs.append(last._replace(recompute=(*last.recompute, path)))
            else:
                rungs.append(last._replace(copied_out=(*last.copied_out, path)))
        found.append(rungs)
    return found


@dataclass(eq=False)
class CopiedPlace(TradedPlace):
    """As `TradedPlace`, with rungs of `Spared`. host_bytes: what a rank may have on its host."""

    host_bytes: int = 0

    def _sparing(self, plan: Plan, again: Rung) -> Plan:
        return replace(plan, **Spared(*again)._asdict())

    def _fits(self, plan: Plan) -> bool:
        return super()._fits(plan) and (plan.predicted.host_bytes or 0) <= self.host_bytes

    @property
    def _smallest(self) -> Place:
        """With all of it copied out."""
        return replace(self.there, request=replace(self.there.request, copied_out=self.ladders[0][-1][0]))
