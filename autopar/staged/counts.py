"""Numbers of microbatches: a ladder for each logical shape, and what is between two of its rungs.

Each rung is at least twice the one before. As far as there are such, rungs leave each rank of the outer axis, which
mostly is for data, as many samples: others would cut something else there, or nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from autopar.interop.submeshes import divisors
from autopar.ir.mesh import LogicalMesh
from autopar.microbatch import divisible
from autopar.staged.layered import Layered
from autopar.staged.ways import Setting


class Counts:
    """The numbers of microbatches that a batch may be divided into, ascending."""

    def __init__(self, layered: Layered) -> None:
        self._graph, self._batch, self._given = layered.folded.graph, layered.batch, layered.counts
        self.ladder = cache(self._ladder)

    def _ladder(self, axes: LogicalMesh) -> list[int]:
        """The rungs of a logical shape; where the number is pinned, that alone."""
        if len(self._given) == 1:
            return self._given
        found = [1]
        while (rung := next(self._from(2 * found[-1], axes), None)) is not None:
            found.append(rung)
        return found

    def _from(self, least: int, axes: LogicalMesh) -> Iterator[int]:
        """Those from a number on, first all that leave ranks of the outer axis as many samples."""
        more = [n for n in divisors(self._batch) if n >= least]
        even = [n for n in more if self._is_even(n, axes)]
        return (n for n in (*even, *more) if divisible(self._graph, n))

    def _is_even(self, count: int, axes: LogicalMesh) -> bool:
        return self._batch // count % (axes[0].size if axes else 1) == 0

    def beside(self, setting: Setting, step: int) -> Iterator[Setting]:
        """The setting on the rungs above, or below where the step is −1, the nearest first."""
        ladder, own = self.ladder(setting.axes), setting.microbatches
        others = [n for n in ladder if n > own] if step > 0 else [n for n in reversed(ladder) if n < own]
        return (replace(setting, microbatches=n) for n in others)

    def between(self, setting: Setting) -> list[list[Setting]]:
        """Below and above a setting, the nearest first: the others up to the next rung, of as even shares."""
        own, axes = setting.microbatches, setting.axes
        ladder, is_even = self.ladder(axes), self._is_even(own, axes)
        below, above = (
            max((n for n in ladder if n < own), default=own),
            min((n for n in ladder if n > own), default=own),
        )
        near = [n for n in divisors(self._batch) if below < n < above and n != own and len(ladder) > 1]
        near = [n for n in near if self._is_even(n, axes) >= is_even and divisible(self._graph, n)]
        every = [replace(setting, microbatches=n) for n in near]
        return [[s for s in reversed(every) if s.microbatches < own], [s for s in every if s.microbatches > own]]
