"""Ladders of rungs whose step times are given, for tests of what is read off them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import autopar
from autopar.ir.plan import Plan, Prediction, Stage
from autopar.ladders import Ladder, Rung
from autopar.simulate import Timeline

GB = 10**9


def rung(
    mesh: str, batch: int, seconds: float, price: float | None = None, peak_bytes: int = 10 * GB, state_bytes: int = GB,
    timeline: Timeline | None = None,
) -> Rung:  # fmt: skip
    """price: of a device hour."""
    own = autopar.Mesh.parse(mesh)
    plan = Plan(
        "none", "model", own, (Stage(0, ()),), memory_limit=80 * GB,
        predicted=Prediction(step_time_ns=round(seconds * 1e9), peak_bytes=peak_bytes),
        simulator=None if timeline is None else lambda _: timeline,
    )  # fmt: skip
    return Rung(
        own, batch, plan, "shared", round(seconds * 4e8), 1024, None if price is None else price * own.num_devices,
        state_bytes,
    )  # fmt: skip


def ladder(
    seconds: Callable[[int, int], float], counts: Iterable[int] = (1, 2, 4, 8, 16, 32), batches: Iterable[int] = (256,),
    kind: str = "h100", price: float | None = None,
) -> Ladder:  # fmt: skip
    """Of devices and batch to seconds a step, in nodes of eight."""
    batches = list(batches)

    def mesh(count: int) -> str:
        return f"{kind}:{-(-count // 8)}x{min(8, count)}"

    return Ladder("model", tuple(rung(mesh(n), b, seconds(n, b), price) for b in batches for n in counts))
