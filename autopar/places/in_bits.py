"""A place traded against memory by what operators keep: ever more of them bits, then blocks computed again, too.

To pack and unpack bits takes less than to compute a block again, and frees what no block has: the first layers of an
image network, whose activations are largest. A place that fits so may be faster than with blocks computed again alone,
in more microbatches or in more shards, or the only one that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.ir.plan import Plan
from autopar.places.traded import Rung, TradedPlace
from autopar.planning import Place
from autopar.zero import KeptIn, Modules, that_run, with_in_bits


class Compact(NamedTuple):
    """Operators that keep bits, and 8 bits of each activation, and what is computed again, as in `Plan.recompute`."""

    in_bits: tuple[str, ...] = ()
    in_eight_bits: tuple[str, ...] = ()
    recompute: Modules = ()


def compact_ladder(rungs: Sequence[KeptIn], blocks: Sequence[str], recompute: Modules = ()) -> list[Compact]:
    """From nothing to all. rungs: of operators in bits (`zero.rungs_in_bits`). blocks: that may be computed again, in
    the order in which they run; recompute: what is anyway."""
    found = [Compact(*rung, recompute) for rung in rungs]
    for path in blocks:
        found.append(found[-1]._replace(recompute=(*found[-1].recompute, path)))
    return found


def compact_ladders(
    exact: Sequence[KeptIn], inexact: Sequence[KeptIn], blocks: Sequence[str], recompute: Modules = ()
) -> list[list[Compact]]:
    """One of what is exact; and where inexact gradients are allowed, first one in which that comes before blocks are
    computed again. All end with all of it. inexact: rungs that begin with the exact ones; none where it is not."""
    ladder = compact_ladder(exact, blocks, recompute)
    if len(inexact) <= len(exact):
        return [ladder]
    first = compact_ladder(inexact, blocks, recompute)
    return [first, [*ladder, first[-1]]]


@dataclass(eq=False)
class CompactPlace(TradedPlace):
    """As `TradedPlace`, with rungs of `Compact`."""

    def _sparing(self, plan: Plan, again: Rung) -> Plan:
        rung = Compact(*again)
        eight = that_run(self.there.part.graph, plan, rung.in_eight_bits)
        return replace(with_in_bits(plan, rung.in_bits, eight), recompute=rung.recompute)

    @property
    def _smallest(self) -> Place:
        """With all of it."""
        last = Compact(*self.ladders[0][-1])
        return replace(self.there, request=replace(self.there.request, **last._asdict()))
