"""A server simulated event by event, and packings tried one by one: what the room's formulas are held against.

Written without the room's own arithmetic: sets of sessions are tried in all partitions, periods on a grid and at every
end of an interval, in whole fractions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction

from autopar.colocation import BatchCurve, HostKind, ServingSession

SECOND = 10**9


# Packings ----------------------------------------


def latency_within(session: ServingSession, kind: HostKind, rate: Fraction, period: Fraction) -> tuple[int, int] | None:
    """The fastest program that takes what comes evenly in a period, if it answers in time: ns and bytes."""
    takes = [
        (p.latency_ns, p.peak_bytes)
        for p in session.curves[kind.name].points
        if p.peak_bytes <= kind.capacity_bytes and rate * period <= p.batch * SECOND
    ]
    if not takes or period + min(takes)[0] > session.bound_ns:
        return None
    return min(takes)


def is_host(members: Sequence[tuple[ServingSession, Fraction]], kind: HostKind) -> bool:
    """Whether some period serves all."""
    periods = {Fraction(max(s.bound_ns for s, _ in members) * n, 200) for n in range(1, 201)}
    for session, rate in members:
        for p in session.curves[kind.name].points:
            periods |= {Fraction(p.batch * SECOND) / rate // 1, Fraction(session.bound_ns - p.latency_ns)}
    for period in periods:
        found = [latency_within(session, kind, rate, period) for session, rate in members] if period > 0 else [None]
        told = [one for one in found if one is not None]
        has_time = len(told) == len(members) and sum(ns for ns, _ in told) <= period
        if has_time and sum(bytes_ for _, bytes_ in told) <= kind.capacity_bytes:
            return True
    return False


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for found in partitions(rest):
        yield [[first], *found]
        for number, part in enumerate(found):
            yield [*found[:number], [first, *part], *found[number + 1 :]]


def fewest(sessions: Sequence[ServingSession], kinds: Sequence[HostKind], costs: Sequence[int]) -> int | None:
    """The least cost of all packings in which each session is on one kind: hosts of its own, and a rest on one more.
    Requests come evenly."""
    best: int | None = None
    for where in itertools.product(range(len(kinds)), repeat=len(sessions)):
        alone = [whole(session, kinds[kind]) for session, kind in zip(sessions, where, strict=True)]
        if None in alone:
            continue
        counts = [0] * len(kinds)
        for kind, one in zip(where, alone, strict=True):
            counts[kind] += one[0] if one else 0
        rests = [(n, one[1]) for n, one in enumerate(alone) if one and one[1] > 0]
        feasible = True
        for k, kind in enumerate(kinds):
            own = [n for n, _ in rests if where[n] == k]
            rate_of = dict(rests)
            sizes = [
                len(parts) for parts in partitions(own)
                if all(is_host([(sessions[n], rate_of[n]) for n in part], kind) for part in parts)
            ]  # fmt: skip
            if not sizes:
                feasible = False
                break
            counts[k] += min(sizes)
            feasible &= kind.available is None or counts[k] <= kind.available
        if feasible:
            cost = sum(c * count for c, count in zip(costs, counts, strict=True))
            best = cost if best is None else min(best, cost)
    return best


def whole(session: ServingSession, kind: HostKind) -> tuple[int, Fraction] | None:
    """Hosts that it fills, and the rate that is left."""
    if kind.name not in session.curves:
        return None
    rates = [
        Fraction(p.batch * SECOND, p.latency_ns)
        for p in session.curves[kind.name].points
        if 2 * p.latency_ns <= session.bound_ns and p.peak_bytes <= kind.capacity_bytes
    ]
    if not rates:
        return None
    rate = Fraction(session.rate_s)
    count = rate // max(rates)
    return int(count), rate - count * max(rates)


# Servers ----------------------------------------


def arrivals(rate_s: float, count: int, seed: int) -> list[float]:
    """Times in ns of requests that come at random."""
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate_s) * SECOND
        found.append(now)
    return found


def waited_in_turns(came: Sequence[float], curve: BatchCurve, period: int, begins: int, batch: int) -> list[float]:
    """From arrival to answer, where a batch of those that are there begins at each period's turn."""
    found, served, turn = list[float](), 0, float(begins)
    while served < len(came):
        ready = served
        while ready < len(came) and ready < served + batch and came[ready] <= turn:
            ready += 1
        if ready > served:
            ends = turn + latency(curve, ready - served, batch)
            found += [ends - one for one in came[served:ready]]
            served = ready
        turn += period
    return found


def waited_in_windows(came: Sequence[float], curve: BatchCurve, batch: int, wait: int) -> tuple[list[float], float]:
    """From arrival to answer, where a free host begins once a batch is there or the oldest has waited; and the share of
    the time in which it is busy."""
    found, served, free, busy = list[float](), 0, 0.0, 0.0
    while served < len(came):
        full = came[served + batch - 1] if served + batch <= len(came) else float("inf")
        begin = max(free, min(full, came[served] + wait))
        ready = served
        while ready < len(came) and ready < served + batch and came[ready] <= begin:
            ready += 1
        spent = latency(curve, ready - served, batch)
        free, busy = begin + spent, busy + spent
        found += [free - one for one in came[served:ready]]
        served = ready
    return found, busy / free


def latency(curve: BatchCurve, requests: int, batch: int) -> int:
    """Of the fastest program that holds so many, of those up to a batch."""
    return min(p.latency_ns for p in curve.points if requests <= p.batch <= batch)


def share_within(waited: Sequence[float], bound: int) -> float:
    return sum(one <= bound for one in waited) / len(waited)
