"""Cuts a chain of layers into stages and gives each a submesh: the dynamic programme of Alpa (OSDI'22), section 5.

    minimise  Σᵢ tᵢ + maxⱼ ((B − 1) · tⱼ + eⱼ)      over contiguous stages whose submeshes tile the mesh,
    subject to   rᵢ + f(i) · aᵢ + wᵢ ≤ memory limit

t: a microbatch forward and backward through a stage, what it receives included (`_Ranges.time`); B: microbatches; e:
what a stage does once a step, of gradient sums what its last backward pass does not hide (the rest of
`_Ranges.bottleneck`). r: bytes that stay; f: microbatches in flight (`ir.schedule`), which depends on how many stages
are behind; a: bytes each of them takes; w: the largest workspace. So the programme goes from the last stage to the
first, and the number of stages is a part of its state:

    F(s, i, d) = min over kinds k and ends j of   t(k, i, j) + F(s − 1, j, d − devices of k)

A longer stage takes more, so that within bounds the ends of each are those up to a last one, but for few; the least
over a range of ends is that of two ranges, whose length is a power of two: L · log L steps for L layers, not L².

The bottleneck max is bounded, and the bound lowered below the bottleneck of what was found until no better sum of both
is possible. That visits the Pareto front of (sum, bottleneck) from one end, so what is left is never better: the result
is optimal unless `max_rounds` stops it first. Where nothing stops it, the part of the front that is surely worse than
what halving finds by more than `_NEAR` is passed over: its bottlenecks, beside the least sum of all, are too long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.clock import Clock, worked
from autopar.errors import InfeasibleError
from autopar.ir.schedule import PLAIN, in_flight
from autopar.tunables import RANGES_S

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
    begins at the layer waits for its tensors and for sending their gradients back, a microbatch; of that, travel_ns
    while they are on their way, which other passes may hide. once_ns: a step.
    reduce_ns: gradient sums a step, of which `hide_ns` can run beside the last backward pass; last_ns: by how much that
    is longer than others. begin_bytes: before the first pass, at most. gradient_bytes: of what stays, that which is
    there from the first backward pass on. travelling_bytes: beside what stays, of all layers of a stage, but no more
    than the largest `most_travelling_bytes`.
    workspace_bytes: of a stage the largest counts. Of backward passes in two parts: waiting_bytes: of a microbatch
    between them. second_bytes: what the second takes besides. split_ns: what both take longer, a microbatch.
    """

    key: Any
    num_devices: int
    time_ns: Int64Array
    receive_ns: Int64Array
    travel_ns: Int64Array
    once_ns: Int64Array
    reduce_ns: Int64Array
    hide_ns: Int64Array
    last_ns: Int64Array
    begin_bytes: Int64Array
    resident_bytes: Int64Array
    gradient_bytes: Int64Array
    travelling_bytes: Int64Array
    most_travelling_bytes: Int64Array
    activation_bytes: Int64Array
    workspace_bytes: Int64Array
    waiting_bytes: Int64Array
    second_bytes: Int64Array
    split_ns: Int64Array
    memory_limit: int

    @classmethod
    def columns(cls) -> list[str]:
        """Names of what each layer costs."""
        return [field.name for field in fields(cls) if field.name.endswith(("_ns", "_bytes"))]

    @property
    def num_layers(self) -> int:
        return len(self.time_ns)

    @cached_property
    def most_travelling(self) -> int:
        """Of gradients on their way, bytes of any stage."""
        return int(self.most_travelling_bytes.max(initial=0))


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
    clock = Clock.of(0.0)
    worked(RANGES_S * sum(kind.num_layers**2 for kind in kinds) * (max_rounds or 1))
    search = _Search(kinds, num_devices, microbatches, schedule, max_stages)
    found, bound = search.sweep(max_rounds)
    if not found:
        raise search.refusal()
    found.sort(key=lambda choice: choice.step_ns)
    best = found[0]
    bound = min(bound, best.step_ns)
    reason = "optimal" if bound == best.step_ns else "round limit"
    return StageSearch(best, bound, reason, clock.passed_s, tuple(found[1:]))


def equally_cut(kind: StageKind, num_stages: int, microbatches: int) -> StageChoice | None:
    """Stages of as many layers each, whatever memory they take; None where the layers do not divide."""
    if kind.num_layers % num_stages:
        return None
    ranges, each = _Ranges(kind, microbatches), kind.num_layers // num_stages
    spans = [(begin, begin + each) for begin in range(0, kind.num_layers, each)]
    step = sum(int(ranges.time(*span)) for span in spans) + max(int(ranges.bottleneck(*span)) for span in spans)
    return StageChoice(tuple(ChosenStage(*span, 0) for span in spans), step)


class _Largest:
    """The largest of values in any ranges, begin < end, by those of all ranges of 1, 2, 4, … of them."""

    def __init__(self, values: Int64Array) -> None:
        self.of_length = np.empty((len(values).bit_length(), len(values)), np.int64)  # by power of two, by first
        self.of_length[:1] = values
        for power in range(1, len(self.of_length)):
            half, count = 1 << (power - 1), len(values) - (1 << power) + 1
            before = self.of_length[power - 1]
            np.maximum(before[:count], before[half : half + count], out=self.of_length[power, :count])

    def between(self, begin: Int64Array, end: Int64Array) -> Int64Array:
        return self.at(*_places(begin, end, self.of_length.shape[1]))

    def at(self, one: Int64Array, other: Int64Array) -> Int64Array:
        """Of ranges by their `_places`."""
        largest: Int64Array = np.maximum(self.of_length.take(one), self.of_length.take(other))
        return largest


def _places(begin: Int64Array, end: Int64Array, length: int) -> tuple[Int64Array, Int64Array]:
    """Of values of that length, where two ranges are listed that may overlap and together are the ranges asked for."""
    power = np.frexp(end - begin)[1].astype(np.int64) - 1
    return power * length + begin, power * length + end - (1 << power)


class _Ranges:
    """A kind's costs of ranges of layers, begin < end, by prefix sums: there are too many ranges to list them."""

    def __init__(self, kind: StageKind, microbatches: int) -> None:
        self.kind, self.others = kind, microbatches - 1
        self.begins = np.arange(kind.num_layers)
        self.time_until, self.once_until = _until(kind.time_ns), _until(kind.once_ns)
        self.exposed_until = _until(kind.reduce_ns - kind.hide_ns)
        self.resident_until, self.activations_until = _until(kind.resident_bytes), _until(kind.activation_bytes)
        self.travelling_until = _until(kind.travelling_bytes)
        self.workspace = _Largest(kind.workspace_bytes)
        # The bottleneck is the larger of two differences: with what is exposed of gradient sums, and without.
        self.least_until = self.others * self.time_until + self.once_until
        self.most_until = self.least_until + self.exposed_until
        self.received = self.others * kind.receive_ns
        self._most, self._negated = _Largest(self.most_until), _Largest(-self.most_until)
        self._fitting: dict[tuple[int, int], Int64Array] = {}
        self._under: dict[int, tuple[Int64Array, Int64Array]] = {}
        self._allowed: dict[_Bounds, _Ends] = {}

    def time(self, begin: Any, end: Any) -> Any:
        return self.time_until[end] - self.time_until[begin] + self.kind.receive_ns[begin]

    def bottleneck(self, begin: Any, end: Any) -> Any:
        hidden = np.maximum(0, self.exposed_until[end] - self.exposed_until[begin])
        return self.others * self.time(begin, end) + self.once_until[end] - self.once_until[begin] + hidden

    def peak_bytes(self, begin: Any, end: Any, num_in_flight: int) -> Any:
        travelling = np.minimum(self.travelling_until[end] - self.travelling_until[begin], self.kind.most_travelling)
        resident = self.resident_until[end] - self.resident_until[begin] + self.workspace.between(begin, end)
        return resident + travelling + num_in_flight * (self.activations_until[end] - self.activations_until[begin])

    def least_ahead(self, behind: Int64Array, under: _Bounds) -> Int64Array:
        """For each first layer the least sum of a stage's time and what is behind it, by the first layer there."""
        least = np.minimum(NEVER, self._least(behind + self.time_until, under) - self.time_until[:-1])
        total: Int64Array = np.where(least < NEVER, np.minimum(NEVER, least + self.kind.receive_ns), NEVER)
        return total

    def end_ahead(self, begin: int, behind: Int64Array, under: _Bounds) -> int:
        """Of a stage that gives that sum, the first such end."""
        ends = np.arange(begin + 1, self._ends(under).last[begin] + 1)
        ends = ends[self.bottleneck(begin, ends) <= under.bottleneck_ns]
        return int(ends[(behind + self.time_until)[ends].argmin()])

    def _least(self, values: Int64Array, under: _Bounds) -> Int64Array:
        """The least value at the ends that are allowed, for each first layer."""
        last, is_none, places, uneven = self._ends(under)
        least = -_Largest(-values).at(*places)
        least[is_none] = 2 * NEVER
        if len(uneven):
            begins, ends = uneven[:, None], np.flatnonzero(values < NEVER)
            is_allowed = (begins < ends) & (ends <= last[begins])
            is_allowed &= self.bottleneck(begins, ends) <= under.bottleneck_ns
            least[uneven] = np.where(is_allowed, values[ends], 2 * NEVER).min(axis=1, initial=2 * NEVER)
        return least

    def _ends(self, under: _Bounds) -> _Ends:
        """Those that are allowed; the same where memory forbids none, however many microbatches are in flight."""
        fitting = self._last_fitting(under.num_in_flight, under.memory_limit or self.kind.memory_limit)
        last, uneven = self._last_under(under.bottleneck_ns)
        key = _Bounds(under.bottleneck_ns, 0) if (fitting >= last).all() else under
        if key not in self._allowed:
            last, first = np.minimum(fitting, last), self.begins + 1
            places = _places(first, np.maximum(last, first) + 1, len(self.begins) + 1)
            self._allowed[key] = _Ends(last, np.flatnonzero(last < first), places, uneven)
        return self._allowed[key]

    def _last_under(self, bottleneck_ns: int) -> tuple[Int64Array, Int64Array]:
        """For each first layer the last end whose bottleneck is no more; and those for which an end before it has more,
        since the layers after that hide it."""
        if bottleneck_ns not in self._under:
            highest = bottleneck_ns + self.least_until[:-1] - self.received
            last = np.searchsorted(self.least_until, highest, "right") - 1
            highest = bottleneck_ns + self.most_until[:-1] - self.received
            for power, lowest in reversed([*enumerate(self._negated.of_length)]):
                first = last - (1 << power) + 1
                is_over = (first > self.begins) & (-lowest[np.maximum(first, 0)] > highest)
                last = np.where(is_over, first - 1, last)
            most = self._most.between(self.begins + 1, np.maximum(last, self.begins + 1) + 1)
            self._under[bottleneck_ns] = last, np.flatnonzero((most > highest) & (last > self.begins))
        return self._under[bottleneck_ns]

    def _last_fitting(self, num_in_flight: int, limit: int) -> Int64Array:
        """For each first layer the last end of a stage that fits; the layer itself where none does."""
        key = num_in_flight, limit
        if key not in self._fitting:
            last = self.begins.copy()
            for power in reversed(range(self.kind.num_layers.bit_length())):
                longer = np.minimum(last + (1 << power), self.kind.num_layers)
                fits = self.peak_bytes(self.begins, np.maximum(longer, self.begins + 1), num_in_flight) <= limit
                last = np.where(fits, longer, last)
            self._fitting[key] = last
        return self._fitting[key]

    def last_fitting_from(self, begin: int, num_in_flight: int, limit: int) -> int:
        """The last end of a stage from one layer on that fits; the layer itself where none does."""
        resident, travelling, activations, workspace = self._listed
        last, free = begin, limit + resident[begin] + num_in_flight * activations[begin]
        for power in reversed(range(self.kind.num_layers.bit_length())):
            end = min(last + (1 << power), self.kind.num_layers)
            beside = min(travelling[end] - travelling[begin], self.kind.most_travelling) + max(workspace[begin:end])
            if resident[end] + num_in_flight * activations[end] + beside <= free:
                last = end
        return last

    @cached_property
    def _listed(self) -> tuple[list[int], ...]:
        """What stays, travels and is kept, until each layer, and workspaces: for single ranges faster than arrays."""
        until = self.resident_until, self.travelling_until, self.activations_until
        return *(sums.tolist() for sums in until), self.kind.workspace_bytes.tolist()


class _Bounds(NamedTuple):
    """What a stage may take at most. memory_limit: in place of the kind's own, if not 0."""

    bottleneck_ns: int
    num_in_flight: int
    memory_limit: int = 0


class _Ends(NamedTuple):
    """Where stages may end, by first layer: up to `last`, all but for the first layers `uneven`. is_none: first layers
    that allow none. places: of the ends, in tables of values (`_places`)."""

    last: Int64Array
    is_none: Int64Array
    places: tuple[Int64Array, Int64Array]
    uneven: Int64Array


def _until(values: Int64Array) -> Int64Array:
    """The sum of those before each position."""
    return np.concatenate([[0], np.cumsum(values)])


class _StageTable(NamedTuple):
    """For one number of stages and of devices, by first layer: the least sum, and the kind that gives it."""

    total: Int64Array
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

    def _least_sum(self, threshold: int, memory_limit: int = 0) -> _Under | None:
        """The choice of the least sum with a bottleneck of at most the threshold; None where there is none.

        memory_limit: in place of those of the kinds, if not 0.
        """
        under = [
            _Bounds(threshold, in_flight(self.schedule, count, self.microbatches) if count else 0, memory_limit)
            for count in range(self.max_stages + 1)
        ]
        tables = self._tables(under)
        count = min(range(1, self.max_stages + 1), key=lambda s: self._total(tables, s))
        total = self._total(tables, count)
        return None if total >= NEVER else _Under(*self._read(tables, under, count), total)

    def _total(self, tables: list[dict[int, _StageTable]], count: int) -> int:
        table = tables[count].get(self.num_devices)
        return int(NEVER) if table is None else int(table.total[0])

    def _tables(self, under: Sequence[_Bounds]) -> list[dict[int, _StageTable]]:
        """F(s, ·, d) within bounds of the first of so many stages, by number of stages and by devices."""
        end = np.full(self.num_layers + 1, NEVER)
        end[-1] = 0
        tables: list[dict[int, _StageTable]] = [{0: _StageTable(end, np.zeros(0, np.int64))}]
        for count in range(1, self.max_stages + 1):
            tables.append(self._extended(tables[-1], under[count], self.reachable[count]))
        return tables

    def _extended(self, behind: dict[int, _StageTable], under: _Bounds, reachable: set[int]) -> dict[int, _StageTable]:
        """One stage more, in front of those that are there."""
        found: dict[int, _StageTable] = {}
        for devices, table in behind.items():
            for kind, ranges in enumerate(self.ranges):
                total = devices + ranges.kind.num_devices
                if total in reachable:
                    least = np.append(ranges.least_ahead(table.total, under), NEVER)
                    new = _StageTable(least, np.full(self.num_layers, kind))
                    found[total] = _cheaper(found[total], new) if total in found else new
        return found

    def _read(
        self, tables: list[dict[int, _StageTable]], under: Sequence[_Bounds], count: int
    ) -> tuple[StageChoice, int]:  # fmt: skip
        """The stages behind an entry of the table, and their bottleneck."""
        stages: list[ChosenStage] = []
        begin, devices = 0, self.num_devices
        for number in range(count, 0, -1):
            kind = int(tables[number][devices].kind[begin])
            devices -= self.ranges[kind].kind.num_devices
            end = self.ranges[kind].end_ahead(begin, tables[number - 1][devices].total, under[number])
            stages.append(ChosenStage(begin, end, kind))
            begin = end
        bottleneck = max(int(self.ranges[k].bottleneck(begin, end)) for begin, end, k in stages)
        total = sum(int(self.ranges[k].time(begin, end)) for begin, end, k in stages)
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
        """The least limit under which there are stages, by halving; 0 if no submeshes tile."""
        most = in_flight(self.schedule, self.max_stages, self.microbatches)
        whole = np.array([0]), np.array([self.num_layers])
        low, high = 0, max(1, *(int(ranges.peak_bytes(*whole, most)[0]) for ranges in self.ranges))
        if self._least_sum(int(NEVER), high) is None:
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._has_stages(middle) else (middle, high)
        return high

    def _has_stages(self, limit: int) -> bool:
        """Whether there are stages within a limit, where submeshes tile.

        Of one kind each stage may take all that fits: that leaves the least for those behind it, and fewer layers, with
        no more in flight, take no more.
        """
        if len(self.ranges) > 1:
            return self._least_sum(int(NEVER), limit) is not None
        (ranges,), begin = self.ranges, 0
        for count in range(self.num_devices // ranges.kind.num_devices, 0, -1):
            end = ranges.last_fitting_from(begin, in_flight(self.schedule, count, self.microbatches), limit)
            if end in (begin, self.num_layers):
                return end > begin
            begin = end
        return False


def _reachable(sizes: set[int], num_devices: int, max_stages: int) -> list[set[int]]:
    """By number of stages: the numbers of devices behind which submeshes can still tile the rest."""
    forward: list[set[int]] = [{0}]
    for _ in range(max_stages):
        forward.append({total + size for total in forward[-1] for size in sizes if total + size <= num_devices})
    rest = set().union(*forward)  # what further stages may hold; none of them, too
    return [{total for total in totals if num_devices - total in rest} for totals in forward]


def _cheaper(one: _StageTable, other: _StageTable) -> _StageTable:
    """Of two tables the cheaper entry for each first layer."""
    better = other.total < one.total
    return _StageTable(
        np.where(better, other.total, one.total),
        np.where(better[:-1], other.kind, one.kind),
    )
