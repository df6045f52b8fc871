"""Squishy bin packing, as Nexus has it (SOSP'19, section 6.1, algorithm 1): what sessions have left, merged greedily.

    each alone in the longest period that holds its bound      occupancy = latency / period
    the most occupied first, into the host where it leaves least, in the shorter of both periods
    none has room → a host of its own

"Squishy", since what a session takes of a host depends on the period, and so on who is beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.colocation.periods import Demand, HostChoice
from autopar.colocation.sessions import BatchPoint, HostKind


class Bin(NamedTuple):
    """Sessions' rests that share a host of a kind, each once a period."""

    kind: str
    rests: tuple[Demand, ...]
    period_ns: int

    @property
    def latency_ns(self) -> int:
        """Of a period, how long the host is busy."""
        return sum(point.latency_ns for point in map(self._program, self.rests) if point is not None)

    @property
    def peak_bytes(self) -> int:
        """Of all programs: each keeps what it holds while others run."""
        return sum(point.peak_bytes for point in map(self._program, self.rests) if point is not None)

    def _program(self, rest: Demand) -> BatchPoint | None:
        return rest.program(self.period_ns)

    def holds(self, host: HostKind) -> bool:
        """Whether all have their time, memory and bounds."""
        if any(rest.program(self.period_ns) is None for rest in self.rests):
            return False
        return self.latency_ns <= self.period_ns and self.peak_bytes <= host.capacity_bytes


def greedy(
    options: Sequence[Sequence[HostChoice]], hosts: Mapping[str, HostKind], costs: Mapping[str, int]
) -> tuple[list[HostChoice], list[Bin]]:
    """Of each session a choice, that of least cost if rests were shared out evenly, and the hosts of the rests."""
    chosen = [min(own, key=lambda one: costs[one.kind] * (one.whole.hosts + _occupancy(one.rest))) for own in options]
    bins = list[Bin]()
    for kind, host in hosts.items():
        rests = [one.rest for one in chosen if one.kind == kind and one.rest is not None]
        bins += merged(kind, rests, host)
    return chosen, bins


def merged(kind: str, rests: Sequence[Demand], host: HostKind) -> list[Bin]:
    """Rests on hosts of one kind."""
    bins = list[Bin]()
    for rest in sorted(rests, key=_occupancy, reverse=True):
        joined = [
            (number, one)
            for number, known in enumerate(bins)
            if (one := Bin(kind, (*known.rests, rest), min(known.period_ns, _longest(rest)))).holds(host)
        ]
        if joined:
            number, one = max(joined, key=lambda pair: pair[1].latency_ns / pair[1].period_ns)
            bins[number] = one
        else:
            bins.append(Bin(kind, (rest,), _longest(rest)))
    return bins


def _longest(rest: Demand) -> int:
    """The longest period in which it is answered in time, and its host has done before the next."""
    return max(d for d in rest.periods if (point := rest.program(d)) is not None and point.latency_ns <= d)


def _occupancy(rest: Demand | None) -> float:
    if rest is None:
        return 0.0
    period = _longest(rest)
    point = rest.program(period)
    assert point is not None
    return point.latency_ns / period
