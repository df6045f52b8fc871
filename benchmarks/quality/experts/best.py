"""The best of a grid of configurations, of which most need not be played."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from autopar.errors import AutoparError
from autopar.tunables import USAGE_ABOVE
from benchmarks.quality.experts.grid import Expert
from benchmarks.quality.experts.played import Played

KEPT = 5
"""Of the best of a grid, how many are noted."""
LESS = {"none": (), "selective": ("none",), "block": ("none",), "full": ("none", "selective", "block")}
"""What computes less again than each word of `recompute`."""


class GridPlayer(Protocol):
    """What plays configurations, and says of each what it takes at least, and likely (`played.Player`)."""

    @property
    def limit(self) -> int: ...
    def least_ns(self, expert: Expert, own_count: bool = False) -> float: ...
    def likely_ns(self, expert: Expert) -> float: ...
    def likely_bytes(self, expert: Expert, own: bool = False) -> float: ...
    def played(self, expert: Expert, until_ns: float = math.inf) -> Played: ...


def best_of(
    player: GridPlayer, grid: Iterable[Expert], than_ns: float = math.inf, beyond: float = math.inf,
    most: float = math.inf,
) -> dict[str, Any]:  # fmt: skip
    """Plays what may be the best of a grid, and faster than a step that is given: how many were, why others were not,
    and the best few. beyond: times the best that an estimate may be to be played; most: how many are."""
    began = time.process_time()
    every = sorted(grid, key=player.likely_ns)
    print(f"  {sum(player.least_ns(one) < than_ns for one in every)} of {len(every)} by a first bound", flush=True)
    fitting, counts = list[Played](), Counter[str]()
    settled = set[Expert]()  # those of which nothing that computes more again can be faster: they fit, or are slower
    best_ns = than_ns
    for expert in every:
        why = _left_out(player, expert, best_ns, beyond, settled)
        why = why or ("left" if counts["played"] >= most else "")
        played = None if why else _played(player, expert, best_ns, counts)
        counts[why or "played"] += 1
        if played is None:
            continue
        counts["of these below their bound"] += played.step_ns < min(best_ns, player.least_ns(expert, own_count=True))
        counts["of these slower"] += played.peak_bytes is None
        fits = played.peak_bytes is not None and played.peak_bytes <= player.limit
        settled |= {expert} if fits or played.peak_bytes is None else set()
        if fits:
            fitting.append(played)
            best_ns = played.step_ns
            print(f"  {best_ns / 1e9:.3f} s, {played.peak_bytes / 1e9:.1f} GB: {expert}", flush=True)
    fitting.sort(key=lambda one: one.step_ns)
    return {
        "configurations": len(every), "faster_than_ns": None if than_ns == math.inf else round(than_ns), **counts,
        "fit": len(fitting), "limit_bytes": player.limit, "processor_s": round(time.process_time() - began, 1),
        "best": [
            {"expert": str(one.expert), "step_time_ns": one.step_ns, "peak_bytes": one.peak_bytes}
            for one in fitting[:KEPT]
        ],
    }  # fmt: skip


def _left_out(player: GridPlayer, expert: Expert, best_ns: float, beyond: float, settled: set[Expert]) -> str:
    """Why a configuration is not played, if it is not."""
    if player.least_ns(expert) >= best_ns:
        return "slower by a bound"
    if any(replace(expert, recompute=less) in settled for less in LESS[expert.recompute]):
        return "fit, or slower, with less computed again"
    if player.likely_bytes(expert) > USAGE_ABOVE * player.limit:
        return "too large by an estimate"
    if player.likely_ns(expert) > beyond * best_ns:
        return "slower by an estimate"
    if player.least_ns(expert, own_count=True) >= best_ns:
        return "slower by a bound"
    return "too large by an estimate" if player.likely_bytes(expert, own=True) > USAGE_ABOVE * player.limit else ""


def _played(player: GridPlayer, expert: Expert, until_ns: float, counts: Counter[str]) -> Played | None:
    try:
        return player.played(expert, until_ns)
    except AutoparError:
        counts["of these not possible"] += 1
        return None
