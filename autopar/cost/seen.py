"""What runs of programs have shown a profile to take otherwise: calls, collectives, updates and the host, as seen.

What was seen counts as it was seen. What is alike (the same operator in the same dtype and direction; the same
collective among as many ranks) takes as much longer than it is priced as its neighbours in size did, between two of
them in proportion, in logarithms; the less, the further it is from the nearest, and from four times its size on
nothing:

    log factor(x) = max(0, 1 − |x − nearest| / log 4) · interpolation of log(seen / priced) at x

with x the logarithm of the nanoseconds that a call is priced at without this, or of a collective's bytes. An operator
that was not seen follows those of its family, whose curve it shares. Each call takes beside that what the host was seen
to spend around statements: Python, autograd, launches. Ranks that share cores with as many others as when it was seen
are alone in taking it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from autopar.cost.provenance import Provenance
from autopar.ops.work import WorkKey

REACH = math.log(4.0)

Ratios = tuple[tuple[float, float], ...]
"""(x, log(seen / priced)), by x."""


@dataclass(frozen=True)
class SeenCall:
    """An operator's call: nanoseconds forward and backward, None where it was not seen; in `count` steps."""

    call: WorkKey
    forward_ns: int | None
    backward_ns: int | None
    ranks_sharing: int
    count: int
    provenance: Provenance

    @property
    def spent_ns(self) -> tuple[int | None, int | None]:
        """Forward and backward."""
        return self.forward_ns, self.backward_ns


@dataclass(frozen=True)
class SeenCollective:
    """A collective among `ranks` ranks, of which `inside` share a node, that stopped them."""

    collective: str
    ranks: int
    inside: int
    num_bytes: int
    duration_ns: int
    ranks_sharing: int
    count: int
    provenance: Provenance


@dataclass(frozen=True)
class SeenUpdate:
    """An optimizer's update, and what the profile has it take without this."""

    priced_ns: int
    duration_ns: int
    ranks_sharing: int
    count: int
    provenance: Provenance


@dataclass(frozen=True)
class SeenGradients:
    """What a rank's runtime does with the gradients of a step that go home, and what the profile has it take without
    this."""

    priced_ns: int
    duration_ns: int
    ranks_sharing: int
    count: int
    provenance: Provenance


@dataclass(frozen=True)
class SeenHost:
    """What a step takes of the host that belongs to no statement, by the calls of the step."""

    call_ns: int
    ranks_sharing: int
    count: int
    provenance: Provenance


@dataclass(frozen=True, eq=False)
class SeenRuns:
    """All of it. Compared by identity, as the profile that has it."""

    calls: tuple[SeenCall, ...] = ()
    collectives: tuple[SeenCollective, ...] = ()
    updates: tuple[SeenUpdate, ...] = ()
    hosts: tuple[SeenHost, ...] = ()
    gradients: tuple[SeenGradients, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.calls or self.collectives or self.updates or self.hosts or self.gradients)

    def host_ns(self, ranks_sharing: int) -> int:
        """What each call takes of the host beside itself, forward and backward each."""
        return next((item.call_ns for item in self.hosts if item.ranks_sharing == ranks_sharing), 0)

    def of_gradients(self, ranks_sharing: int) -> float:
        """How many times longer it takes to take a gradient that goes home than it is priced."""
        own = [item for item in self.gradients if item.ranks_sharing == ranks_sharing and item.priced_ns]
        return sum(item.duration_ns for item in own) / sum(item.priced_ns for item in own) if own else 1.0

    @cached_property
    def by_call(self) -> dict[tuple[WorkKey, int], SeenCall]:
        """By the call and how many ranks share the host's cores."""
        return {(item.call, item.ranks_sharing): item for item in self.calls}

    @cached_property
    def alike(self) -> dict[tuple[str, str, int], list[SeenCall]]:
        """Calls by operator, dtype and ranks that share the host's cores."""
        found = defaultdict(list)
        for item in self.calls:
            found[item.call.op, item.call.dtype, item.ranks_sharing].append(item)
        return dict(found)

    @property
    def provenance(self) -> str:
        """Where all of it comes from."""
        every: tuple[Any, ...] = (*self.calls, *self.collectives, *self.updates, *self.hosts, *self.gradients)
        return "; ".join(dict.fromkeys(str(item.provenance) for item in every))


NOTHING_SEEN = SeenRuns()


def log_factor(points: Ratios, x: float) -> float:
    """By how much something of that size is taken to differ from its price: see above."""
    if not points:
        return 0.0
    weight = 1.0 - min(abs(x - at) for at, _ in points) / REACH
    return max(0.0, weight) * _between(points, x)


def _between(points: Ratios, x: float) -> float:
    if x <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[-1][1]


def in_order(pairs: Iterable[tuple[float, float]]) -> Ratios:
    """Points by x, one for each: the mean where several have it."""
    by_x: dict[float, list[float]] = defaultdict(list)
    for x, ratio in pairs:
        by_x[round(x, 6)].append(ratio)
    return tuple((x, sum(by_x[x]) / len(by_x[x])) for x in sorted(by_x))


def merged(before: SeenRuns, now: SeenRuns) -> SeenRuns:
    """Both; what both have seen is the mean, weighted by how many steps it was seen in."""
    return SeenRuns(
        tuple(_merged(before.calls, now.calls, lambda one: (one.call, one.ranks_sharing))),
        tuple(
            _merged(
                before.collectives, now.collectives,
                lambda one: (one.collective, one.ranks, one.inside, one.num_bytes, one.ranks_sharing),
            )
        ),
        tuple(_merged(before.updates, now.updates, lambda one: (one.priced_ns, one.ranks_sharing))),
        tuple(_merged(before.hosts, now.hosts, lambda one: one.ranks_sharing)),
        tuple(_merged(before.gradients, now.gradients, lambda one: (one.priced_ns, one.ranks_sharing))),
    )  # fmt: skip


def _merged(before: Sequence[Any], now: Sequence[Any], key: Any) -> list[Any]:
    known = {key(item): item for item in before}
    for item in now:
        old = known.get(key(item))
        known[key(item)] = item if old is None else _joined(old, item)
    return list(known.values())


def _joined(old: Any, new: Any) -> Any:
    """Times are those of fields that end with _ns; what is the same of both stays."""
    fields = {
        name: _mean(getattr(old, name), value, old.count, new.count) if name.endswith("_ns") else value
        for name, value in vars(new).items()
    }
    return type(new)(**{**fields, "count": old.count + new.count})


def _mean(old: int | None, new: int | None, old_count: int, new_count: int) -> int | None:
    if old is None or new is None:
        return new if old is None else old
    logs = (old_count * math.log(max(old, 1)) + new_count * math.log(max(new, 1))) / (old_count + new_count)
    return round(math.exp(logs))


# As JSON ----------------------------------------


def seen_from_json(data: dict[str, Any]) -> SeenRuns:
    """Of a profile's JSON, which its schema has checked."""
    kinds: tuple[tuple[str, Any], ...] = (
        ("calls", SeenCall), ("collectives", SeenCollective), ("updates", SeenUpdate), ("hosts", SeenHost),
        ("gradients", SeenGradients),
    )  # fmt: skip
    return SeenRuns(**{name: tuple(_read(kind, item) for item in data.get(name, ())) for name, kind in kinds})


def _read(kind: Any, item: dict[str, Any]) -> Any:
    fields = {**item, "provenance": Provenance(**item["provenance"])}
    if "call" in fields:
        fields["call"] = call_from_json(fields["call"])
    return kind(**fields)


def seen_to_json(seen: SeenRuns) -> dict[str, Any]:
    """The inverse of `seen_from_json`."""
    return {
        "calls": [{**_written(item), "call": call_to_json(item.call)} for item in seen.calls],
        "collectives": list(map(_written, seen.collectives)),
        "updates": list(map(_written, seen.updates)),
        "hosts": list(map(_written, seen.hosts)),
        "gradients": list(map(_written, seen.gradients)),
    }


def _written(item: Any) -> dict[str, Any]:
    return {**vars(item), "provenance": dict(vars(item.provenance))}


def call_to_json(call: WorkKey) -> dict[str, Any]:
    """A call as JSON data."""
    return {name: _plain(value) for name, value in call._asdict().items()}


def call_from_json(data: dict[str, Any]) -> WorkKey:
    """The inverse. Raises TypeError for what is none."""
    return WorkKey(**{name: _frozen(value) for name, value in data.items()})


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value
