"""How long a server waits for the next request: bounds as a simulated server has them, and what waiting gains."""

from __future__ import annotations

import math

import pytest

from autopar.colocation import BatchCurve, BatchPoint, window, windows
from autopar.colocation.arrivals import excess, left_over, most_arrivals
from autopar.errors import InfeasibleError, PlanError
from tests.colocation import reference

MS = 10**6
CURVE = BatchCurve(tuple(BatchPoint(b, (6 * MS) + b * MS) for b in (1, 2, 4, 8, 16, 32)))
COUNT = 20_000


@pytest.mark.parametrize("rate", [1.0, 30.0, 150.0, 400.0, 600.0])
@pytest.mark.parametrize("bound_ms", [40, 90])
def test_the_bound_is_held(rate: float, bound_ms: int) -> None:
    """Of 99 in 100 requests, with a host as busy as predicted, or less: what comes meanwhile fills the next batch."""
    try:
        found = window(CURVE, rate, bound_ms * MS)
    except InfeasibleError:
        assert (rate, bound_ms) in ((400.0, 40), (600.0, 40))
        return
    waited, busy = reference.waited_in_windows(
        reference.arrivals(rate, COUNT, seed=2), CURVE.up_to(found.batch), found.batch, found.wait_ns
    )
    assert found.worst_ns <= bound_ms * MS
    assert reference.share_within(waited, bound_ms * MS) >= 0.99
    assert busy <= found.busy_share * 1.03 + 0.005


def test_waiting_makes_hosts_less_busy() -> None:
    rate, bound = 150.0, 90 * MS
    found = window(CURVE, rate, bound)
    came = reference.arrivals(rate, COUNT, seed=3)
    own, without = (reference.waited_in_windows(came, CURVE, found.batch, wait)[1] for wait in (found.wait_ns, 0))
    assert found.mean_batch > 5 and own < 0.75 * without


def test_rare_requests_do_not_wait() -> None:
    rare, busy = windows(CURVE, (0.01, 200.0), 90 * MS)
    assert rare.wait_ns == 0 and rare.mean_batch == pytest.approx(1.0, abs=0.01)
    assert busy.wait_ns > 10 * MS and busy.left_ns(1, 0) == busy.wait_ns and busy.left_ns(1, 10**9) == 0
    assert busy.left_ns(busy.batch, 0) == 0


def test_a_table_ends_where_one_host_is_too_little() -> None:
    found = windows(CURVE, (100.0, 200.0, 5_000.0), 90 * MS)
    assert [one.rate_s for one in found] == [100.0, 200.0]
    with pytest.raises(InfeasibleError, match=r"one host takes \d+(\.\d+)? requests a second at most"):
        window(CURVE, 5_000.0, 90 * MS)
    with pytest.raises(InfeasibleError, match="14 ms is the least bound"):
        window(CURVE, 1.0, 10 * MS)
    with pytest.raises(PlanError, match="percentile"):
        window(CURVE, 1.0, 90 * MS, percentile=1.0)


def test_what_is_left_over_is_what_a_queue_has() -> None:
    """Against the queue's own chain, run until it stands; and more never comes than what leaves a hundredth over."""
    for batch, mean in ((1, 0.3), (4, 2.5), (16, 14.0)):
        assert left_over(mean, batch) == pytest.approx(_chain(mean, batch), rel=1e-6)
        most = most_arrivals(batch, 0.99)
        assert left_over(most, batch) == pytest.approx(0.01 * most, rel=1e-6) and most < most_arrivals(batch, 0.9)
    assert most_arrivals(8, None) == 8 and math.isinf(left_over(4.0, 4))
    assert excess(2.0, 3) == pytest.approx(
        2 - 3 + sum((3 - n) * math.exp(-2) * 2**n / math.factorial(n) for n in range(3))
    )


def _chain(mean: float, batch: int, most: int = 200) -> float:
    """The mean of Q ← max(0, Q + A − batch)."""
    chances = [math.exp(-mean + n * math.log(mean) - math.lgamma(n + 1)) for n in range(most)]
    held = [1.0, *[0.0] * (most - 1)]
    for _ in range(400):
        after = [0.0] * most
        for queued, held_chance in enumerate(held):
            if held_chance > 1e-13:
                for n in range(min(80, most)):
                    after[min(most - 1, max(0, queued + n - batch))] += held_chance * chances[n]
        if max(abs(a - b) for a, b in zip(after, held, strict=True)) < 1e-12:
            break
        held = after
    return sum(n * chance for n, chance in enumerate(held))
