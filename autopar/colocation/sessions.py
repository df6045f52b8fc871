"""What is packed, and on what: sessions, the curves of their models, and kinds of hosts. Plain frozen data.

session   a model that is asked so many times a second, and answers within a bound
curve     how long the model takes for a batch, and what memory, by batch: one program a point; requests run in the
          smallest that holds them, filled up
host      the devices that a model runs on at a time, such as one, or two with tensor parallelism: a mesh
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from autopar.errors import PlanError
from autopar.ir.mesh import Mesh, checked
from autopar.profiler import load_profile

SECOND_NS = 10**9


class BatchPoint(NamedTuple):
    """A program of so many requests: what it takes from begin to answer, and bytes a device at its peak."""

    batch: int
    latency_ns: int
    peak_bytes: int = 0


@dataclass(frozen=True)
class BatchCurve:
    """Programs of one model on one kind of host, of small batches first. What takes longer than one of a larger batch
    and as much memory is left out. Raises PlanError where there is none, or one that is no program."""

    points: tuple[BatchPoint, ...]

    def __post_init__(self) -> None:
        points = [BatchPoint(*point) for point in self.points]
        wrong = [p for p in points if p.batch < 1 or not 0 < p.latency_ns < SECOND_NS * 10**6 or p.peak_bytes < 0]
        if wrong or not points or len({p.batch for p in points}) < len(points):
            found = wrong[0] if wrong else f"{len(points)} points"
            raise PlanError(f"expected points of batch, ns and bytes above 0, each batch once, found {found}")
        kept = list[BatchPoint]()
        for point in sorted(points, reverse=True):
            if not any(p.latency_ns <= point.latency_ns and p.peak_bytes <= point.peak_bytes for p in kept):
                kept.append(point)
        object.__setattr__(self, "points", tuple(reversed(kept)))

    def of(self, requests: int) -> BatchPoint | None:
        """The fastest program that holds so many; None where none does."""
        return min((p for p in self.points if p.batch >= requests), key=lambda p: p.latency_ns, default=None)

    def up_to(self, batch: int) -> BatchCurve:
        """Without the programs of larger batches."""
        return BatchCurve(tuple(point for point in self.points if point.batch <= batch))

    def within(self, capacity_bytes: int) -> tuple[BatchPoint, ...]:
        """The programs that take no more memory."""
        return tuple(point for point in self.points if point.peak_bytes <= capacity_bytes)


@dataclass(frozen=True)
class ServingSession:
    """A model under load. rate_s: requests a second. bound_ns: from a request's arrival to its answer. curves: by name
    of a kind of host. Raises PlanError for what is none."""

    name: str
    rate_s: float
    bound_ns: int
    curves: Mapping[str, BatchCurve]

    def __post_init__(self) -> None:
        for name in ("rate_s", "bound_ns"):
            if not 0 < getattr(self, name) < math.inf:
                raise PlanError(f"session {self.name}: expected {name} above 0, found {getattr(self, name)!r}")
        if not self.curves:
            raise PlanError(f"session {self.name}: expected a curve of at least one kind of host, found none")


@dataclass(frozen=True)
class HostKind:
    """Devices that run one program at a time. capacity_bytes: of each device. price: of a host an hour, if it is known.
    available: hosts, as many as are asked for where not said."""

    name: str
    devices: int
    capacity_bytes: int
    price: float | None = None
    available: int | None = None


def host_of(mesh: Mesh | str, price: float | None = None, available: int | None = None) -> HostKind:
    """A mesh, such as "h100:1x2", as a kind of host, with what its profile leaves of each device's memory. price: of a
    device an hour. Raises MeshError."""
    found = checked(Mesh.parse(mesh) if isinstance(mesh, str) else mesh)
    capacity = min(load_profile(g.profile).shared_by(g.devices_per_node).usable_bytes for g in found.groups)
    whole = None if price is None else price * found.num_devices
    return HostKind(str(mesh), found.num_devices, capacity, whole, available)


class StepsCurve(Protocol):
    """A curve of a decoder's steps by batch, such as `autopar.serving.LatencyCurve`."""

    @property
    def points(self) -> Sequence[Any]:
        """Dataclasses, with the fields of curve.json."""


def request_curve(
    steps: StepsCurve | Iterable[Mapping[str, Any]], prompt_length: int | None = None, new_tokens: int = 0
) -> BatchCurve:
    """The curve of requests to a decoder, from that of its steps: a `ServedProgram`'s curve, or what its curve.json
    holds.

    A batch of prompts is filled in steps, in chunks of the longest that there is, the first token comes with the last
    of these, and each further one takes a decode step of the whole batch. prompt_length: None where the cache holds it
    already. The upper end of a step's interval counts, where there is one. Raises PlanError where nothing is asked for,
    or no batch is served.
    """
    if not new_tokens and prompt_length is None:
        raise PlanError("expected a prompt_length, new_tokens, or both, found neither")
    found = list[BatchPoint]()
    points: Iterable[Mapping[str, Any]] = steps if isinstance(steps, Iterable) else map(asdict, steps.points)
    for point in points:
        if point.get("decode") is not None:
            prefill = {int(length): _upper_ns(step) for length, step in point["prefill"].items()}
            filled = 0 if prompt_length is None else _filled_ns(prefill, prompt_length)
            count = new_tokens if prompt_length is None else max(0, new_tokens - 1)
            found.append(
                BatchPoint(point["batch"], filled + count * _upper_ns(point["decode"]), point["peak_bytes"])
            )  # fmt: skip
    return BatchCurve(tuple(found))


def _upper_ns(step: Mapping[str, Any]) -> int:
    interval = step.get("interval_ns")
    return int(step["predicted_ns"] if interval is None else max(step["predicted_ns"], interval[1]))


def _filled_ns(prefill: Mapping[int, int], prompt_length: int) -> int:
    """Of a prompt, in chunks of the longest and one of the shortest that holds the rest."""
    if not prefill:
        raise PlanError("expected prefill steps on the curve, since prompts are to be filled in, found none")
    longest = max(prefill)
    whole, rest = divmod(prompt_length, longest)
    last = min((length for length in prefill if length >= rest), default=longest)
    return whole * prefill[longest] + (prefill[last] if rest else 0)
