"""`pack`: which models share which devices, so that all answer in time on the fewest hosts, or the cheapest.

sessions × kinds of hosts → whole hosts, and what is left         `periods`
what is left              → hosts that several share, greedily    `squishy` (Nexus): the most that is needed
                          → the fewest, proved                    `exact` (CP-SAT)
hosts of one session      → how long each waits for the next      `windows`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from autopar.colocation.arrivals import checked_percentile
from autopar.colocation.exact import Solved, cost_of, solved
from autopar.colocation.periods import HostChoice, choice, why_not
from autopar.colocation.sessions import HostKind, ServingSession
from autopar.colocation.squishy import Bin, greedy
from autopar.colocation.windows import BatchingWindow, window
from autopar.errors import PlanError
from autopar.views import view

MILLIONTHS = 10**6
WORK_S = 60.0
"""What CP-SAT may do, of its deterministic time. Halved, more than some fifteen sessions are packed less surely."""


class HostedRun(NamedTuple):
    """A session on a host: rate_s requests a second of it, in batches of up to `batch`, begun begins_ns into each
    period and answered within worst_ns. window: where the host has no other, by which it begins instead."""

    session: str
    rate_s: float
    batch: int
    begins_ns: int
    latency_ns: int
    worst_ns: int
    window: BatchingWindow | None = None


@dataclass(frozen=True)
class PackedHost:
    """So many hosts of a kind that all do the same. period_ns: in which each session has its turn; the time that is
    left in it is idle. peak_bytes: of a device, all programs together."""

    kind: str
    count: int
    period_ns: int
    runs: tuple[HostedRun, ...]
    peak_bytes: int

    @property
    def busy_share(self) -> float:
        """Of its time, with all batches full."""
        return sum(run.latency_ns for run in self.runs) / self.period_ns


@dataclass(frozen=True)
class HostPacking:
    """What runs where. cost: hosts' devices, or money an hour where all kinds have prices (`unit`); bound: what any
    such packing costs at least; greedy_cost: what Nexus' method alone finds. percentile: of requests that are answered
    in time, where they come at random; None where they come evenly, and all are. lacks: why there is none, and what
    would do."""

    hosts: tuple[PackedHost, ...] = ()
    unit: str = "devices"
    cost: float = 0.0
    bound: float = 0.0
    greedy_cost: float = 0.0
    percentile: float | None = 0.99
    lacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(view("packing_text")(self))

    @property
    def is_proved(self) -> bool:
        """Whether none is better."""
        return not self.lacks and self.bound >= self.cost

    def to_json(self) -> str:
        """`packing.schema.json` says what each field means."""
        return str(view("packing_json")(self))

    def counts(self) -> dict[str, int]:
        """Hosts by kind."""
        found: dict[str, int] = {}
        for host in self.hosts:
            found[host.kind] = found.get(host.kind, 0) + host.count
        return found


def pack(
    sessions: Iterable[ServingSession], hosts: Iterable[HostKind], *, percentile: float | None = 0.99,
    work_s: float = WORK_S,
) -> HostPacking:  # fmt: skip
    """Packs sessions on hosts: the fewest devices, or the least money an hour where all kinds have prices.

    A session takes whole hosts, as many as it fills, and what is left has a turn each period on a host that it shares
    (Nexus, SOSP'19). percentile: of requests that are to be answered within their session's bound where they come at
    random (Poisson); None where they come evenly. work_s: what the exact search may do. What cannot be is said in
    `lacks`. Raises PlanError for arguments that are none.
    """
    wanted, kinds = list(sessions), {host.name: host for host in hosts}
    _check(wanted, kinds)
    if percentile is not None:
        checked_percentile(percentile)
    unit, costs = _costs(kinds)
    options = [
        [one for host in kinds.values() if (one := choice(n, session, host, percentile)) is not None]
        for n, session in enumerate(wanted)
    ]
    impossible = [
        f"{session.name}: " + "; ".join(why_not(session, host) for host in kinds.values())
        for session, own in zip(wanted, options, strict=True)
        if not own
    ]
    if impossible:
        return HostPacking(unit=unit, percentile=percentile, lacks=tuple(impossible))
    hint = greedy(options, kinds, costs)
    best = solved(options, kinds, costs, hint, work_s)
    if best is None:
        return HostPacking(unit=unit, percentile=percentile, lacks=(_too_few(options, kinds, costs, hint, work_s),))
    scale = 1 if unit == "devices" else MILLIONTHS
    found = tuple(_hosts(wanted, best, percentile))
    return HostPacking(found, unit, best.cost / scale, best.bound / scale, cost_of(*hint, costs) / scale, percentile)


def _check(sessions: Sequence[ServingSession], kinds: Mapping[str, HostKind]) -> None:
    names = [session.name for session in sessions]
    if not names or len(set(names)) < len(names):
        raise PlanError(f"expected at least one session, each name once, found {names}")
    if not kinds:
        raise PlanError("expected at least one kind of host, such as host_of('h100:1x1'), found none")


def _costs(kinds: Mapping[str, HostKind]) -> tuple[str, dict[str, int]]:
    """The unit, and what a host of each kind costs in it: whole devices, or millionths of money."""
    if all(host.price is not None for host in kinds.values()):
        return "money an hour", {name: round((host.price or 0.0) * MILLIONTHS) for name, host in kinds.items()}
    return "devices", {name: host.devices for name, host in kinds.items()}


def _too_few(
    options: Sequence[Sequence[HostChoice]], kinds: Mapping[str, HostKind], costs: Mapping[str, int],
    hint: tuple[list[HostChoice], list[Bin]], work_s: float,
) -> str:  # fmt: skip
    """What would do instead of what is available."""
    free = {name: replace(host, available=None) for name, host in kinds.items()}
    best = solved(options, free, costs, hint, work_s)
    assert best is not None, "what is available anyhow does"
    counts: dict[str, int] = {}
    for kind, count in [*((one.kind, one.whole.hosts) for one in best.chosen), *((one.kind, 1) for one in best.bins)]:
        counts[kind] = counts.get(kind, 0) + count
    wanted = ", ".join(f"{count} of {kind}" for kind, count in counts.items() if count)
    have = ", ".join(f"{host.available} of {name}" for name, host in kinds.items() if host.available is not None)
    return f"what is available is too little ({have}); with as many as are asked for, {wanted} would do"


def _hosts(sessions: Sequence[ServingSession], best: Solved, percentile: float | None) -> Iterable[PackedHost]:
    for one in best.chosen:
        point, session = one.whole.point, sessions[one.session]
        if one.whole.hosts and point is not None:
            worst = 2 * point.latency_ns
            run = HostedRun(session.name, one.whole.rate_s, point.batch, 0, point.latency_ns, worst)
            run = run._replace(window=_window(session, one.kind, run, percentile))
            yield PackedHost(one.kind, one.whole.hosts, point.latency_ns, (run,), point.peak_bytes)
    for one_bin in best.bins:
        points = [rest.program(one_bin.period_ns) for rest in one_bin.rests]
        runs = list[HostedRun]()
        begins = accumulate((p.latency_ns for p in points if p is not None), initial=0)
        for rest, point, begin in zip(one_bin.rests, points, begins, strict=False):
            assert point is not None
            name, worst = sessions[rest.session].name, one_bin.period_ns + point.latency_ns
            runs.append(HostedRun(name, rest.rate_s, point.batch, begin, point.latency_ns, worst))
        if len(runs) == 1:
            session = sessions[one_bin.rests[0].session]
            runs = [runs[0]._replace(window=_window(session, one_bin.kind, runs[0], percentile))]
        yield PackedHost(one_bin.kind, 1, one_bin.period_ns, tuple(runs), one_bin.peak_bytes)


def _window(session: ServingSession, kind: str, run: HostedRun, percentile: float | None) -> BatchingWindow | None:
    """Of a host that has one session, with programs up to what it was packed for."""
    if percentile is None:
        return None
    return window(session.curves[kind].up_to(run.batch), run.rate_s, session.bound_ns, percentile)
