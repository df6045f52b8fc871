"""A session on a kind of host: which program takes what comes in a period, and how much a whole host takes.

a host runs each of its sessions once a period d, in a fixed order
m(b)             requests a period that a batch of b takes                               `arrivals.most_arrivals`
program(d)       the fastest with m(b) ≥ rate · d
answered         within d + latency(program), which is to be at most the session's bound
a whole host     d = latency: rate m(b) / latency(b), where twice the latency is within the bound
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.colocation.arrivals import most_arrivals
from autopar.colocation.sessions import SECOND_NS, BatchPoint, HostKind, ServingSession

_NONE_LEFT = 1e-9
"""Of a session's rate, what is taken for nothing."""


@dataclass(frozen=True, eq=False)
class Demand:
    """Of a session, what comes at one host: requests a second, the programs that it may run, and its bound."""

    session: int
    rate_s: float
    points: Sequence[BatchPoint]
    bound_ns: int
    percentile: float | None

    @cached_property
    def _until(self) -> list[tuple[int, BatchPoint]]:
        """Of each program, the longest period whose requests it takes, none longer than the bound."""
        return [
            (min(self.bound_ns, int(most_arrivals(p.batch, self.percentile) / self.rate_s * SECOND_NS)), p)
            for p in self.points
        ]

    def program(self, period_ns: int) -> BatchPoint | None:
        """The one that is run each period; None where none takes what comes, or answers within the bound."""
        taking = (point for until, point in self._until if until >= period_ns)
        found = min(taking, key=lambda point: (point.latency_ns, point.peak_bytes), default=None)
        return found if found is not None and period_ns + found.latency_ns <= self.bound_ns else None

    @cached_property
    def periods(self) -> list[int]:
        """Those of which one is the longest for any set of sessions beside this: where its program changes, or where
        its bound is just held. A longer period leaves more of it to others, as long as the programs stay."""
        ends = {until for until, _ in self._until} | {self.bound_ns - point.latency_ns for point in self.points}
        return sorted(period for period in ends if period > 0 and self.program(period) is not None)


class Whole(NamedTuple):
    """Hosts that a session has for itself, back to back: how many, what they run, and what each takes a second."""

    hosts: int
    point: BatchPoint | None
    rate_s: float


class HostChoice(NamedTuple):
    """A session on a kind of host: hosts of its own, and what is left to be run beside others."""

    session: int
    kind: str
    whole: Whole
    rest: Demand | None


def choice(number: int, session: ServingSession, host: HostKind, percentile: float | None) -> HostChoice | None:
    """None where the session cannot be run there: `why_not` says why."""
    points = session.curves[host.name].within(host.capacity_bytes) if host.name in session.curves else ()
    rates = [
        (most_arrivals(p.batch, percentile) / p.latency_ns * SECOND_NS, p)
        for p in points
        if 2 * p.latency_ns <= session.bound_ns
    ]
    if not rates:
        return None
    most, point = max(rates, key=lambda pair: (pair[0], -pair[1].batch))
    hosts = math.floor(session.rate_s / most * (1 + _NONE_LEFT))
    left = session.rate_s - hosts * most
    if left <= _NONE_LEFT * session.rate_s:
        return HostChoice(number, host.name, Whole(hosts, point, min(most, session.rate_s / max(1, hosts))), None)
    rest = Demand(number, left, points, session.bound_ns, percentile)
    return HostChoice(number, host.name, Whole(hosts, point if hosts else None, most), rest)


def why_not(session: ServingSession, host: HostKind) -> str:
    """What lacks where a session has no choice on a kind of host."""
    curve = session.curves.get(host.name)
    if curve is None:
        return f"{host.name}: it has no curve there"
    fits = curve.within(host.capacity_bytes)
    if not fits:
        least = min(point.peak_bytes for point in curve.points)
        return f"{host.name}: it takes {least:,} bytes a device at least, found {host.capacity_bytes:,}"
    least = 2 * min(point.latency_ns for point in fits)
    return (
        f"{host.name}: a bound of {least / 1e6:.4g} ms is the least (a request waits for one batch and goes with the "
        f"next), found {session.bound_ns / 1e6:.4g} ms"
    )
