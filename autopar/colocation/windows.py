"""How long a server waits for the next request before it begins with those it has: an adaptive batching window.

A host that has one model begins when it is free and either a whole batch b is there, or the oldest has waited w.
Requests come at random, r a second (Poisson). A window opens with the first that comes after a batch has begun, so that
a batch has that one and what comes in w, at most b:

    n = min(b, 1 + N), N Poisson of mean r · w        E[requests a batch] = E[n]
    busy share = r · E[latency(n)] / E[n]             latency(n): of the smallest program that holds n
    answered within max(w, latency(b)) + latency(b)   of the oldest: it waits out what runs, goes with the next batch,
                                                      unless that is full: r · latency(b) ≤ m(b) of `arrivals`

The longer the wait, the fuller are batches, and the less is the host busy. Of all b and w that hold the bound, one of
about the least busy share is taken, with the shortest wait: none where requests are so rare that waiting brings none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.colocation.arrivals import checked_percentile, counted, most_arrivals
from autopar.colocation.sessions import SECOND_NS, BatchCurve, BatchPoint
from autopar.errors import InfeasibleError

_WAITS = 64
"""Of a window, in how many steps it is looked at. Halved, it may be longer by twice as much than it needs to be."""
_AS_GOOD = 0.01
"""Of a host's time, by which a shorter wait may have it busier."""


@dataclass(frozen=True)
class BatchingWindow:
    """Begin once `batch` requests are there, or the oldest has waited wait_ns. rate_s: for which it was found.

    worst_ns: within which the percentile of requests is answered. mean_batch and busy_share as predicted.
    """

    rate_s: float
    batch: int
    wait_ns: int
    worst_ns: int
    mean_batch: float
    busy_share: float

    def left_ns(self, queued: int, oldest_waited_ns: int) -> int:
        """How much longer to wait, with so many requests there; 0 to begin."""
        return 0 if queued >= self.batch else max(0, self.wait_ns - oldest_waited_ns)


def window(curve: BatchCurve, rate_s: float, bound_ns: int, percentile: float = 0.99) -> BatchingWindow:
    """The window for a rate of requests a second, with which that share of them is answered within the bound.

    Raises InfeasibleError where one host cannot take so many in time, naming the highest rate that it does.
    """
    checked_percentile(percentile)
    points = [point for point in curve.points if 2 * point.latency_ns <= bound_ns]
    rates = {p: most_arrivals(p.batch, percentile) / p.latency_ns * SECOND_NS for p in points}
    taking = [point for point in points if rate_s <= rates[point]]
    if not taking:
        least = 2 * min(point.latency_ns for point in curve.points)
        most = f"one host takes {max(rates.values()):.4g} requests a second" if rates else f"{least / 1e6:.4g} ms"
        raise InfeasibleError(
            f"expected {rate_s:g} requests a second answered within {bound_ns / 1e6:.4g} ms on one host, found "
            + (f"that {most} at most; share them out over more hosts" if rates else f"that {most} is the least bound")
        )
    every = [_window(curve, point, rate_s, bound_ns, step) for point in taking for step in range(_WAITS + 1)]
    busy = min(one.busy_share for one in every) + _AS_GOOD
    return min((one for one in every if one.busy_share <= busy), key=lambda one: (one.worst_ns, one.wait_ns))


def windows(
    curve: BatchCurve, rates_s: Iterable[float], bound_ns: int, percentile: float = 0.99
) -> list[BatchingWindow]:
    """A table by rate, for a server that measures its own: it takes the window of the next higher rate. Ends before the
    first rate that one host cannot take."""
    found = list[BatchingWindow]()
    for rate in sorted(rates_s):
        try:
            found.append(window(curve, rate, bound_ns, percentile))
        except InfeasibleError:
            if not found:
                raise
            break
    return found


def _window(curve: BatchCurve, point: BatchPoint, rate_s: float, bound_ns: int, step: int) -> BatchingWindow:
    wait = (bound_ns - point.latency_ns) * step // _WAITS
    chances = counted(rate_s * wait / SECOND_NS, point.batch - 1)  # of 0 … b − 1 more, the last of all above, too
    sizes = range(1, point.batch + 1)
    mean = sum(chance * size for chance, size in zip(chances, sizes, strict=True))
    latencies = [_latency(curve, size, point) for size in sizes]
    busy = sum(chance * taken for chance, taken in zip(chances, latencies, strict=True)) / SECOND_NS * rate_s / mean
    return BatchingWindow(
        rate_s, point.batch, wait, max(wait, point.latency_ns) + point.latency_ns, mean, min(1.0, busy)
    )


def _latency(curve: BatchCurve, requests: int, point: BatchPoint) -> int:
    found = curve.of(requests)
    return point.latency_ns if found is None else min(found.latency_ns, point.latency_ns)
