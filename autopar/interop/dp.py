"""Cuts a chain of layers into stages and gives each a submesh: the dynamic programme of Alpa (OSDI'22), section 5.

    minimise  Σᵢ tᵢ + maxⱼ ((B − 1) · tⱼ + eⱼ)      over contiguous stages whose submeshes tile the mesh,
    subject to   rᵢ + f(i) · aᵢ + wᵢ ≤ memory limit

t: a microbatch forward and backward through a stage, what it receives included (`_Ranges.time`); B: microbatches; e:
what a stage does once a step, of gradient sums what its last backward pass does not hide (`_Ranges.once`). r: bytes
that stay; f: microbatches in flight (`ir.schedule`), which depends on how many stages are behind; a: bytes each
of them takes; w: the largest workspace. So the programme goes from the last stage to the first, and the number of
stages is a part of its state:

    F(s, i, d) = min over kinds k and ends j of   t(k, i, j) + F(s − 1, j, d − devices of k)

The bottleneck max is bounded, and the bound lowered below the bottleneck of what was found until no better sum of both
is possible. That visits the Pareto front of (sum, bottleneck) from one end, so what is left is never better: the result
is optimal unless `max_rounds` stops it first. Where nothing stops it, the part of the front that is surely worse than
what halving finds by more than `_NEAR` is passed over: its bottlenecks, beside the least sum of all, are too long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.errors import InfeasibleError
from autopar.ir.schedule import PLAIN, in_flight

Int64Array = npt.NDArray[np.int64]

NEVER = np.int64(2**60)
"""More than any sum of times: what is not possible."""

_HALVINGS = 6  # of what is between the mean and the first bottleneck
_NEAR = 0.01
"""Of a choice's objective, by how much more others may take that are told beside it."""


@dataclass(frozen=True, eq=False)
class StageKind:
    """What each layer costs on one kind of submesh, used in one way. Times in ns, memory in bytes a device.

    All arrays have an entry a layer. time_ns: forward and backward of a microbatch. receive_ns: what a stage that
    begins at the layer waits for its tensors and for sending their gradients back, a microbatch. once_ns: a step.
    reduce_ns: gradient sums a step, of which `hide_ns` can run beside the last backward pass. workspace_bytes: of a
    stage the largest counts. Of backward passes in two parts: waiting_bytes: of a microbatch between them.
    second_bytes: what the second takes besides. split_ns: what both take longer, a microbatch.
    """

    key: Any
    num_devices: int
    time_ns: Int64Array
    receive_ns: Int64Array
    once_ns: Int64Array
    reduce_ns: Int64Array
    hide_ns: Int64Array
    resident_bytes: Int64Array
    activation_bytes: Int64Array
    workspace_bytes: Int64Array
    waiting_bytes: Int64Array
    second_bytes: Int64Array
    split_ns: Int64Array
    memory_limit: int

    @property
    def num_layers(self) -> int:
        return len(self.time_ns)


class ChosenStage(NamedTuple):
    """Layers from `begin` to before `end`, on the kind of submesh at that position of the list."""

    begin: int
    end: int
    kind: int


@dataclass(frozen=True)
class StageChoice:
    """Stages in the order of the layers, and the objective in ns."""

    stages: tuple[ChosenStage, ...]
    step_ns: int


@dataclass(frozen=True)
class StageSearch:
    """The best stages, a bound below which none can be, why the search stopped, and what was found on the way."""

    best: StageChoice
    lower_bound_ns: int
    stop_reason: str
    seconds: float
    runners_up: tuple[StageChoice, ...]


def best_stages(
    kinds: Sequence[StageKind], num_devices: int, microbatches: int, schedule: str = PLAIN,
    max_stages: int | None = None, max_rounds: int | None = None,
) -> StageSearch:  # fmt: skip
    """The stages of least step time whose submeshes have `num_devices` together, under each kind's memory limit.

    schedule: one without chunks. Raises InfeasibleError naming the smallest limit in bytes, equal for all kinds, that
    stages exist for (None where no submeshes tile the mesh).
    """
    started = time.monotonic()
    search = _Search(kinds, num_devices, microbatches, schedule, max_stages)
    found, bound = search.sweep(max_rounds)
    if not found:
        raise search.refusal()
    found.sort(key=lambda choice: choice.step_ns)
    best = found[0]
    bound = min(bound, best.step_ns)
    reason = "optimal" if bound == best.step_ns else "round limit"
    return StageSearch(best, bound, reason, time.monotonic() - started, tuple(found[1:]))


def equally_cut(kind: StageKind, num_stages: int, microbatches: int) -> StageChoice | None:
    """Stages of as many layers each, whatever memory they take; None where the layers do not divide."""
    if kind.num_layers % num_stages:
        return None
    ranges, each = _Ranges(kind, microbatches), kind.num_layers // num_stages
    spans = [(begin, begin + each) for begin in range(0, kind.num_layers, each)]
    step = sum(int(ranges.time[span]) for span in spans) + max(int(ranges.bottleneck[span]) for span in spans)
    return StageChoice(tuple(ChosenStage(*span, 0) for span in spans), step)


class _Ranges:
    """A kind's costs of every range of layers, [begin, end]; those with end ≤ begin are never allowed."""

    def __init__(self, kind: StageKind, microbatches: int) -> None:
        self.kind = kind
        self.is_range = np.triu(np.ones((kind.num_layers, kind.num_layers + 1), dtype=bool), 1)
        self.time = _sums(kind.time_ns) + kind.receive_ns[:, None]
        hidden = np.maximum(0, _sums(kind.reduce_ns) - _sums(kind.hide_ns))
        self.once = _sums(kind.once_ns) + hidden
        self.bottleneck = (microbatches - 1) * self.time + self.once
        self.resident = _sums(kind.resident_bytes) + _largest(kind.workspace_bytes)
        self.activations = _sums(kind.activation_bytes)
        self._fitting: dict[int, Int64Array] = {}  # by microbatches in flight

    def peak_bytes(self, num_in_flight: int) -> Int64Array:
        total: Int64Array = self.resident + num_in_flight * self.activations
        return total

    def fitting_time(self, num_in_flight: int) -> Int64Array:
        """The time of each range that fits, NEVER of others."""
        if num_in_flight not in self._fitting:
            fits = self.is_range & (self.peak_bytes(num_in_flight) <= self.kind.memory_limit)
            self._fitting[num_in_flight] = np.where(fits, self.time, NEVER)
        return self._fitting[num_in_flight]


def _sums(values: Int64Array) -> Int64Array:
    """The sum of each range, by prefix sums."""
    until = np.concatenate([[0], np.cumsum(values)])
    total: Int64Array = until[None, :] - until[:-1, None]
    return total


def _largest(values: Int64Array) -> Int64Array:
    """The largest of each range; 0 where it is empty."""
    count = len(values)
    spread = np.where(np.arange(count)[None, :] >= np.arange(count)[:, None], values[None, :], 0)
    running = np.maximum.accumulate(spread, axis=1)
    return np.concatenate([np.zeros((count, 1), np.int64), running], axis=1)


class _Table(NamedTuple):
    """For one number of stages and of devices, by first layer: the least sum, and the end and kind that give it."""

    total: Int64Array
    end: Int64Array
    kind: Int64Array


class _Under(NamedTuple):
    """The choice of the least sum of times under some bound on the bottleneck."""

    choice: StageChoice
    bottleneck_ns: int
    total_ns: int


class _Search:
    def __init__(
        self, kinds: Sequence[StageKind], num_devices: int, microbatches: int, schedule: str, max_stages: int | None
    ) -> None:
        self.num_layers = kinds[0].num_layers
        self.num_devices, self.microbatches, self.schedule = num_devices, microbatches, schedule
        self.ranges = [_Ranges(kind, microbatches) for kind in kinds]
        most = min(self.num_layers, num_devices // min(kind.num_devices for kind in kinds))
        self.max_stages = min(most, max_stages or most)
        self.reachable = _reachable({kind.num_devices for kind in kinds}, num_devices, self.max_stages)

    def sweep(self, max_rounds: int | None) -> tuple[list[StageChoice], int]:
        """What is found under ever lower bounds on the bottleneck, and a lower bound on the objective of all."""
        found: dict[tuple[ChosenStage, ...], StageChoice] = {}
        threshold, best, impossible = int(NEVER), int(NEVER), 0
        for number in range(max_rounds or 2**31):
            under = self._least_sum(threshold) if threshold > impossible else None
            least = 0 if under is None else under.total_ns + self._mean_bottleneck(under.total_ns)
            if under is None or least >= best:
                return [*found.values()], best
            found[under.choice.stages] = under.choice
            best, threshold = min(best, under.choice.step_ns), under.bottleneck_ns - 1
            if number == 0 and max_rounds is None and self.max_stages > 1:
                low, impossible = self._low_bottlenecks(under)
                found |= {choice.stages: choice for choice in low}
                best = min([best, *(choice.step_ns for choice in low)])
                threshold = min(threshold, int(best * (1 + _NEAR)) - under.total_ns)
        return [*found.values()], min(best, least)

    def _low_bottlenecks(self, first: _Under) -> tuple[list[StageChoice], int]:
        """Choices of lower bottlenecks than that of the least sum, and one that none has, by halving what is between.

        Where layers are alike, all choices have nearly the same sum, and the least may be that of one long stage.
        """
        low, high, found = self._mean_bottleneck(first.total_ns) - 1, first.bottleneck_ns, list[StageChoice]()
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            under = self._least_sum(middle) if middle > low else None
            if under is None:
                low = middle
            else:
                found.append(under.choice)
                high = under.bottleneck_ns
        return found, low

    def _mean_bottleneck(self, total_ns: int) -> int:
        """At most the bottleneck of stages that take so long together."""
        return (self.microbatches - 1) * math.ceil(total_ns / self.max_stages)

    def _least_sum(self, threshold: int) -> _Under | None:
        """The choice of the least sum with a bottleneck of at most the threshold; None where there is none."""
        tables = self._tables(threshold)
        count = min(range(1, self.max_stages + 1), key=lambda s: self._total(tables, s))
        total = self._total(tables, count)
        return None if total >= NEVER else _Under(*self._read(tables, count), total)

    def _total(self, tables: list[dict[int, _Table]], count: int) -> int:
        table = tables[count].get(self.num_devices)
        return int(NEVER) if table is None else int(table.total[0])

    def _tables(self, threshold: int) -> list[dict[int, _Table]]:
        """F(s, ·, d) under a bound on the bottleneck, by number of stages and by devices."""
        end = np.full(self.num_layers + 1, NEVER)
        end[-1] = 0
        nothing = np.zeros(0, np.int64)
        tables: list[dict[int, _Table]] = [{0: _Table(end, nothing, nothing)}]
        for count in range(1, self.max_stages + 1):
            prices = [self._prices(ranges, count, threshold) for ranges in self.ranges]
            tables.append(self._extended(tables[-1], prices, self.reachable[count]))
        return tables

    def _prices(self, ranges: _Ranges, count: int, threshold: int) -> Int64Array:
        """The time of each range as the first of `count` stages, NEVER where it is not allowed."""
        fitting = ranges.fitting_time(in_flight(self.schedule, count, self.microbatches))
        return fitting if threshold >= NEVER else np.where(ranges.bottleneck <= threshold, fitting, NEVER)

    def _extended(
        self, behind: dict[int, _Table], prices: Sequence[Int64Array], reachable: set[int]
    ) -> dict[int, _Table]:
        """One stage more, in front of those that are there."""
        found: dict[int, _Table] = {}
        for devices, table in behind.items():
            for kind, price in enumerate(prices):
                total = devices + self.ranges[kind].kind.num_devices
                if total in reachable:
                    new = _in_front(price, table.total, kind)
                    found[total] = _cheaper(found[total], new) if total in found else new
        return found

    def _read(self, tables: list[dict[int, _Table]], count: int) -> tuple[StageChoice, int]:
        """The stages behind an entry of the table, and their bottleneck."""
        stages: list[ChosenStage] = []
        begin, devices = 0, self.num_devices
        for number in range(count, 0, -1):
            table = tables[number][devices]
            stage = ChosenStage(begin, int(table.end[begin]), int(table.kind[begin]))
            stages.append(stage)
            begin, devices = stage.end, devices - self.ranges[stage.kind].kind.num_devices
        bottleneck = max(int(self.ranges[k].bottleneck[begin, end]) for begin, end, k in stages)
        total = sum(int(self.ranges[k].time[begin, end]) for begin, end, k in stages)
        return StageChoice(tuple(stages), total + bottleneck), bottleneck

    # Where nothing fits ----------------------------------------

    def refusal(self) -> InfeasibleError:
        """Says which limit, equal for all kinds, would do."""
        needed = self._least_limit()
        if not needed:
            sizes = sorted({ranges.kind.num_devices for ranges in self.ranges})
            return InfeasibleError(
                f"expected at most {self.max_stages} stages on submeshes of {sizes} devices that tile "
                f"{self.num_devices}, found none; allow other submeshes or more stages"
            )
        limits = sorted({ranges.kind.memory_limit for ranges in self.ranges})
        return InfeasibleError(
            f"expected stages within {' or '.join(f'{limit:,}' for limit in limits)} bytes a device, found none: the "
            f"smallest limit that can be met is {needed:,} bytes ({self.microbatches} microbatches, "
            f"schedule {self.schedule})",
            needed,
        )

    def _least_limit(self) -> int:
        """min over stages of the largest peak, by the same recursion with max for +; 0 if no submeshes tile."""
        end = np.full(self.num_layers + 1, NEVER)
        end[-1] = 0
        tables, least = {0: end}, int(NEVER)
        for count in range(1, self.max_stages + 1):
            peaks = [self._peaks(ranges, count) for ranges in self.ranges]
            new: dict[int, Int64Array] = {}
            for devices, behind in tables.items():
                for ranges, peak in zip(self.ranges, peaks, strict=True):
                    total = devices + ranges.kind.num_devices
                    if total in self.reachable[count]:
                        most = np.append(np.maximum(peak, behind[None, :]).min(axis=1), NEVER)
                        new[total] = np.minimum(new[total], most) if total in new else most
            tables = new
            if self.num_devices in tables:
                least = min(least, int(tables[self.num_devices][0]))
        return 0 if least >= NEVER else least

    def _peaks(self, ranges: _Ranges, count: int) -> Int64Array:
        peak = ranges.peak_bytes(in_flight(self.schedule, count, self.microbatches))
        return np.where(ranges.is_range, peak, NEVER)


def _reachable(sizes: set[int], num_devices: int, max_stages: int) -> list[set[int]]:
    """By number of stages: the numbers of devices behind which submeshes can still tile the rest."""
    forward: list[set[int]] = [{0}]
    for _ in range(max_stages):
        forward.append({total + size for total in forward[-1] for size in sizes if total + size <= num_devices})
    rest = set().union(*forward)  # what further stages may hold; none of them, too
    return [{total for total in totals if num_devices - total in rest} for totals in forward]


def _in_front(price: Int64Array, behind: Int64Array, kind: int) -> _Table:
    """The best end of a stage of one kind for each first layer."""
    totals = price + behind[None, :]
    end = totals.argmin(axis=1)
    total = np.minimum(totals[np.arange(len(end)), end], NEVER)
    return _Table(np.append(total, NEVER), end, np.full(len(end), kind))


def _cheaper(one: _Table, other: _Table) -> _Table:
    """Of two tables the cheaper entry for each first layer."""
    better = other.total < one.total
    return _Table(
        np.where(better, other.total, one.total),
        np.where(better[:-1], other.end, one.end),
        np.where(better[:-1], other.kind, one.kind),
    )
