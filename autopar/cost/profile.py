"""A cost profile: what one kind of device and its links can do, each block with its source.

time of an operator  `compute.node_time_ns`: a roofline under the efficiency curves, plus launch cost
time of a collective `collectives.collective_time_ns`: measured points where there are some, else α-β formulas

The file form is `cost_profiles/profile.schema.json`. Rates are a second, times integer nanoseconds.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from autopar.cost.device import DeviceMemory as DeviceMemory
from autopar.cost.files import SCHEMA, profiles_folder
from autopar.cost.host_memory import HostMemory as HostMemory
from autopar.cost.host_memory import simulated_host
from autopar.cost.provenance import Provenance as Provenance
from autopar.cost.residuals import Residual as Residual
from autopar.cost.residuals import residual_of
from autopar.cost.seen import NOTHING_SEEN, Ratios, SeenRuns, seen_from_json, seen_to_json
from autopar.cost.steps import WholeSteps as WholeSteps
from autopar.cost.tables import Table as Table
from autopar.cost.tables import read_tables, write_table
from autopar.errors import ProfileError
from autopar.ir import reading
from autopar.ir.servers import ServerHosts

FORMAT = 2
LEVELS = INSIDE, ACROSS = "intra_node", "inter_node"
NO_OVERLAP = 16.0  # compute all but stands still while a collective is in flight
#: families that a profile may know apart from a wider one
LIKE = {
    "gelu": "transcendental", "gelu_tanh": "transcendental", "silu": "transcendental",
    "rms_norm": "normalization", "batch_norm": "normalization", "batch_norm_inference": "pointwise",
    "max_pool": "reduction", "avg_pool": "reduction", "column_sum": "reduction", "straight_copy": "copy",
    "einsum": "matmul",
}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What the device is. Launch and view costs are (forward, backward); FLOP/s by dtype.

    sustained_clock: the share of their measured pace that products, attention and convolutions keep in whole training
    steps, where power and heat hold the clock down; kernels are measured in bursts.
    """

    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    capacity_bytes: int
    reserve_bytes: int
    launch_ns: tuple[int, int]
    view_ns: tuple[int, int]
    provenance: Provenance
    cores: int | None = None
    overlap_slowdown: float = 1.0
    sustained_clock: float = 1.0


@dataclass(frozen=True)
class Host:
    """What a process spends to keep a device of its own busy, while that computes: nanoseconds a launch.

    operator_ns: an operator of the forward pass; gradient_ns: a kernel of the backward pass; collective_ns: a
    collective; pass_ns: before the first operator of a forward or backward pass.
    """

    operator_ns: int
    gradient_ns: int
    collective_ns: int
    pass_ns: int
    provenance: Provenance


@dataclass(frozen=True)
class Curve:
    """The share of peak that a kernel reaches, by its work; time is interpolated between knots in log-log."""

    knots: tuple[tuple[float, float], ...]

    @cached_property
    def _logs(self) -> tuple[list[float], list[float]]:
        return (
            [math.log(work) for work, _ in self.knots],
            [math.log(work / efficiency) for work, efficiency in self.knots],
        )

    def effective_work(self, work: float) -> float:
        """The work that a kernel at full peak would do in the same time: work / efficiency(work)."""
        if work <= 0:
            return 0.0
        return math.exp(interpolate(*self._logs, math.log(work)))


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear through the points; outside them of slope 1 (in logs: proportional to the work)."""
    right = bisect_right(xs, x)
    if right == 0:
        return ys[0] + (x - xs[0])
    if right == len(xs):
        return ys[-1] + (x - xs[-1])
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


@dataclass(frozen=True)
class Point:
    """One measured operator: times without launch cost; `backward_ns` None when it has no gradient."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    forward_ns: int
    backward_ns: int | None


@dataclass(frozen=True)
class OperatorCurve:
    """Efficiency of a family of operators, against peak FLOP/s (`compute`) or memory bandwidth (`memory`).

    `call_ns`: what a call costs however little it works, (forward, backward); None where it is `Facts.launch_ns`.
    """

    family: str
    bound: str
    forward: Curve
    backward: Curve
    provenance: Provenance
    residual: float | None = None
    points: tuple[Point, ...] = ()
    call_ns: tuple[int, int] | None = None

    @cached_property
    def dtype_ratios(self) -> Mapping[str, tuple[float, float]]:
        """By dtype, how long its operators take over equal ones in float32: geometric means, (forward, backward)."""
        known = {(point.op, point.shape): point for point in self.points if point.dtype == "float32"}
        pairs = [(point, known[point.op, point.shape]) for point in self.points if (point.op, point.shape) in known]
        found: dict[str, list[tuple[float, float]]] = {}
        for point, like in pairs:
            durations = point.forward_ns, like.forward_ns, point.backward_ns or 0, like.backward_ns or 0
            if point.dtype != "float32" and min(durations) > 0:
                logs = math.log(durations[0] / durations[1]), math.log(durations[2] / durations[3])
                found.setdefault(point.dtype, []).append(logs)
        return {
            dtype: (math.exp(sum(a for a, _ in logs) / len(logs)), math.exp(sum(b for _, b in logs) / len(logs)))
            for dtype, logs in found.items()
        }


@dataclass(frozen=True)
class Runtime:
    """What a rank's runtime does beside operators and collectives, in nanoseconds of its thread.

    `optimizer_ns`: a parameter's part of the update (of a plain tensor, of a DTensor). `parameter_ns`: a gradient's
    hook and its wrapping. `convert_ns`: a parameter's way through a gather. `function_ns`: a redistribution as an
    autograd function, (forward, backward). `branch_ns`: what an operator with parameters takes longer where its
    backward pass is made in two parts, beside kernels: in the first its gradient is kept, in the second autograd is
    called for it. `pass_ns`: a pass of a pipeline's stage, beside what it computes: of the schedule, and of autograd.
    `send_ns`: to start to send a message, (bytes, ns) by size; `receive_ns`: to ask for one and to take it; `late_ns`:
    how long it stands still besides where it asks for one that was sent before; `carry_ns`: what the network's threads
    take for a message at both ends, (bytes, ns) by size. Profiles that do not say these have none.
    """

    optimizer_ns: tuple[int, int]
    parameter_ns: int
    convert_ns: int
    function_ns: tuple[int, int]
    provenance: Provenance
    branch_ns: tuple[int, int] = (0, 0)
    pass_ns: int = 0
    send_ns: tuple[tuple[int, int], ...] = ()
    receive_ns: int = 0
    late_ns: int = 0
    carry_ns: tuple[tuple[int, int], ...] = ()

    def around_pass_ns(self, sent: Sequence[int], num_received: int) -> int:
        """What a stage's pass takes of its rank's thread beside what it computes. sent: bytes of each message, of which
        the network takes no more at once than of the largest that was measured."""
        return self.pass_ns + sum(_by_size(self.send_ns, size) for size in sent) + num_received * self.receive_ns

    def carrying_ns(self, sent: Sequence[int]) -> int:
        """What the network's threads take for messages of so many bytes, at both ends: of those larger than any that
        was measured, in proportion."""
        largest = self.carry_ns[-1][0] if self.carry_ns else 1
        return sum(round(_by_size(self.carry_ns, size) * max(1.0, size / largest)) for size in sent)


def _by_size(points: Sequence[tuple[int, int]], num_bytes: int) -> int:
    """Nanoseconds of a message: between measured sizes in a straight line; beyond them those of the nearest. None were
    measured: 0."""
    if not points:
        return 0
    sizes, times = zip(*points, strict=True)
    return round(interpolate(sizes, times, min(max(num_bytes, sizes[0]), sizes[-1])))


@dataclass(frozen=True)
class Protocol:
    """Another way to use a link: `alpha_ns` a message, at a `share` of the link's bandwidth."""

    alpha_ns: float
    share: float


@dataclass(frozen=True)
class Link:
    """A network level: `alpha_ns` a message, `bandwidth` bytes a second that one device can send.

    Optional: `start_ns` of any collective; `low_latency`, a protocol of cheaper messages and less bandwidth;
    `pass_bandwidth`, at which a rank passes once over its own bytes; `bandwidth_by_ranks`, where the wiring gives
    groups of different size different bandwidth; `node_bandwidth`, what all devices of a node can send together;
    `network`, a name that tells a level's links apart where a device is sold with several.
    """

    level: str
    alpha_ns: float
    bandwidth: float
    provenance: Provenance
    start_ns: float = 0
    low_latency: Protocol | None = None
    pass_bandwidth: float | None = None
    bandwidth_by_ranks: tuple[tuple[int, float], ...] = ()
    node_bandwidth: float | None = None
    network: str = ""

    def bandwidth_of(self, ranks: int) -> float:
        """Bytes a second within a group of so many ranks of this level."""
        return dict(self.bandwidth_by_ranks).get(ranks, self.bandwidth)


@dataclass(frozen=True)
class Interference:
    """While a collective of a level is in flight beside computation, how many times longer both take."""

    level: str
    compute: float
    collective: float
    provenance: Provenance


@dataclass(frozen=True)
class CollectiveCall:
    """What calling a collective from torch takes the host, which is in no other figure: until it runs on the wire."""

    collective_ns: int
    provenance: Provenance


@dataclass(frozen=True)
class CollectivePoints:
    """Measured (bytes, ns) of a collective among `ranks` ranks of one level. library: the one release that they are of
    ("nccl-2.23"), which has protocols of its own; empty for those that serve where none is stated."""

    collective: str
    level: str
    ranks: int
    points: tuple[tuple[int, int], ...]
    provenance: Provenance
    residual: float | None = None
    library: str = ""

    @property
    def place(self) -> tuple[str, str, int]:
        """What a profile looks it up by."""
        return self.collective, self.level, self.ranks


@dataclass(frozen=True, eq=False)
class Waits:
    """How long `ranks` ranks of one level wait at a collective that stops them, beside what it takes after a short
    computation: points (nanoseconds that they have computed since they met, nanoseconds)."""

    level: str
    ranks: int
    points: tuple[tuple[int, int], ...]
    provenance: Provenance

    def after(self, length_ns: int) -> int:
        """Between the points in proportion; before the first its wait, after the last that one's."""
        points = self.points
        if length_ns >= points[-1][0]:
            return points[-1][1]
        right = bisect_right(points, (length_ns, -1))
        if right == 0:
            return points[0][1]
        (begin, low), (end, high) = points[right - 1 : right + 1]
        return low + (high - low) * (length_ns - begin) // (end - begin)

    def slowed(self, times: float) -> Waits:
        """Where everything takes so many times as long."""
        return replace(self, points=tuple((round(length * times), round(ns * times)) for length, ns in self.points))


@dataclass(frozen=True, eq=False)
class Profile:
    """What the cost model knows of a device. Compared by identity, so that costs can be memoised on it."""

    name: str
    title: str
    device_type: str
    facts: Facts
    operators: Mapping[str, OperatorCurve]
    links: Mapping[str, Link]
    collectives: Mapping[tuple[str, str, int], CollectivePoints]
    aliases: tuple[str, ...] = ()
    host: Host | None = None  # None: operators cost their launch and nothing else
    tables: Mapping[str, Table] = field(default_factory=dict)
    runtime: Runtime | None = None
    waits: Mapping[tuple[str, int], Waits] = field(default_factory=dict)
    interference: Mapping[str, Interference] = field(default_factory=dict)  # by level; {}: `Facts.overlap_slowdown`
    call: CollectiveCall | None = None
    memory: DeviceMemory | None = None  # None: a device holds what is allocated and the stated reserve
    host_memory: HostMemory | None = None  # None: of a CPU a simulated one, of others not known (`beside`)
    steps: WholeSteps | None = None  # None: predictions of whole steps were not checked
    other_links: tuple[Link, ...] = ()  # of other networks
    other_collectives: tuple[CollectivePoints, ...] = ()  # of single releases of the library
    residuals: tuple[Residual, ...] = ()  # (): predictions were not checked against measurements
    seen: SeenRuns = NOTHING_SEEN  # what runs have shown to take otherwise
    servers: ServerHosts | None = None  # of the mesh that its device is in
    ranks_sharing: int = 1  # ranks on one host that this profile is already slowed down for
    _shared: dict[int, Profile] = field(default_factory=dict, repr=False)

    @cached_property
    def seen_ratios(self) -> dict[Any, Ratios]:
        """How much longer than priced runs have shown what to take, of what was asked for."""
        return {}

    @property
    def usable_bytes(self) -> int:
        """The default memory limit of a device, of what is allocated: as much as leaves it room for all else that a
        process takes (`DeviceMemory`), or its capacity less the stated reserve."""
        if self.memory is not None:
            return self.memory.usable_bytes(self.facts.capacity_bytes)
        return self.facts.capacity_bytes - self.facts.reserve_bytes

    @cached_property
    def beside(self) -> HostMemory | None:
        """The host's memory that a rank may use beside its device's: as stated, else of a CPU a simulated one, as large
        as the device's. None where nothing is known of it."""
        if self.host_memory is not None or self.device_type != "cpu":
            return self.host_memory
        return simulated_host(self.facts.capacity_bytes)

    def link(self, level: str) -> Link:
        """The level's link, or the only one that the profile has."""
        return self.links.get(level) or next(iter(self.links.values()))

    @cached_property
    def slowdowns(self) -> Mapping[str, float]:
        """How many times longer compute takes while a collective of a level is in flight, without levels of 1.0."""
        found = dict.fromkeys(LEVELS, self.facts.overlap_slowdown)
        found |= {name: max(found[name], item.compute) for name, item in self.interference.items()}
        return {name: slowdown for name, slowdown in found.items() if slowdown > 1.0}

    def beside_compute(self, level: str) -> float:
        """How many times longer a collective of a level takes while its ranks compute."""
        return self.interference[level].collective if level in self.interference else 1.0

    def on(self, network: str) -> Profile | None:
        """The device with the links of that network, and its name at the end of its own; None where it has none."""
        links = {link.level: link for link in self.other_links if link.network == network}
        others = [self.links[level] for level in links] + [link for link in self.other_links if link.network != network]
        name = f"{self.name}-{network}"
        shown = {**self.links, **links}
        return replace(self, name=name, links=shown, other_links=tuple(others), _shared={}) if links else None

    def with_library(self, library: str) -> Profile:
        """The device under one release of its library of collectives ("nccl-2.23"): with the points that are of it in
        the place of the usual ones. The same where the profile has none."""
        own = {item.place: item for item in self.other_collectives if item.library == library}
        return replace(self, collectives={**self.collectives, **own}, _shared={}) if own else self

    def curve(self, family: str) -> OperatorCurve:
        """The family's curve, or that of the family that it is like; else it is taken for a pointwise operator."""
        return self.operators.get(family) or self.operators.get(LIKE.get(family, "")) or self.operators["pointwise"]

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s for a dtype; the slowest known rate when the profile does not list it."""
        rates = self.facts.peak_flops
        return rates.get(dtype) or min(rates.values())

    def residual(self, family: str, kind: str, predicted_ns: float) -> Residual | None:
        """How far predictions of such calls were from measurements: of operators of a dtype, of collectives of a level.
        None where none of the family was checked."""
        return residual_of(self.residuals, family, self.alike(kind), predicted_ns)

    def alike(self, dtype: str) -> tuple[str, ...]:
        """Itself, and the other dtype of two bytes where the device multiplies both as fast."""
        other = {"float16": "bfloat16", "bfloat16": "float16"}.get(dtype, "")
        rates = self.facts.peak_flops
        return (dtype, other) if other in rates and rates[other] == rates.get(dtype) else (dtype,)

    def shared_by(self, devices_per_node: int) -> Profile:
        """The profile as seen by one of `devices_per_node` ranks on one host.

        Differs only where ranks share cores (`facts.cores`) and there are more ranks than cores: then each
        computes that many times slower, has that much less memory, and no core left to communicate meanwhile.
        """
        slowdown = devices_per_node / self.facts.cores if self.facts.cores else 1.0
        if slowdown <= 1.0 or self.ranks_sharing > 1:
            return self
        if devices_per_node not in self._shared:
            self._shared[devices_per_node] = replace(
                self,
                facts=_slowed(self.facts, slowdown),
                operators={
                    name: replace(curve, call_ns=curve.call_ns and _slowed_pair(curve.call_ns, slowdown))
                    for name, curve in self.operators.items()
                },
                tables={name: table.slowed(slowdown) for name, table in self.tables.items()},
                runtime=self.runtime and _slowed_runtime(self.runtime, slowdown),
                ranks_sharing=devices_per_node,
                _shared={},
            )
        return self._shared[devices_per_node]

    def slower(self, times: float) -> Profile:
        """The profile of a device that computes so many times slower, and holds and sends as much."""
        facts = _slowed(self.facts, times)
        return replace(
            self,
            facts=replace(
                facts, capacity_bytes=self.facts.capacity_bytes, overlap_slowdown=self.facts.overlap_slowdown
            ),
            operators={
                name: replace(curve, call_ns=curve.call_ns and _slowed_pair(curve.call_ns, times))
                for name, curve in self.operators.items()
            },
            tables={
                name: replace(table, unit_ns=table.unit_ns * times, least_ns=table.least_ns * times)
                for name, table in self.tables.items()
            },
            runtime=self.runtime and _slowed_runtime(self.runtime, times),
            _shared={},
        )

    @property
    def provenance(self) -> dict[str, str]:
        """The source of each block, for plans and reports."""
        blocks: dict[str, Provenance] = {"facts": self.facts.provenance}
        blocks |= {"memory": self.memory.provenance} if self.memory else {}
        blocks |= {"host_memory": self.host_memory.provenance} if self.host_memory else {}
        blocks |= {"steps": self.steps.provenance} if self.steps else {}
        blocks |= {"host": self.host.provenance} if self.host else {}
        blocks |= {f"operators/{name}": curve.provenance for name, curve in self.operators.items()}
        blocks |= {f"tables/{name}": table.provenance for name, table in self.tables.items()}
        blocks |= {"runtime": self.runtime.provenance} if self.runtime else {}
        blocks |= {f"links/{name}": link.provenance for name, link in self.links.items()}
        blocks |= {"/".join(map(str, ("collectives", *k))): c.provenance for k, c in self.collectives.items()}
        blocks |= {"/".join(map(str, ("waits", *key))): item.provenance for key, item in self.waits.items()}
        blocks |= {f"interference/{name}": item.provenance for name, item in self.interference.items()}
        blocks |= {"call": self.call.provenance} if self.call else {}
        found = {name: str(block) for name, block in blocks.items()}
        return found | ({"seen": self.seen.provenance} if self.seen else {})

    def sources(self, families: Collection[str], levels: Collection[str]) -> dict[str, str]:
        """The source of each block that serves operators of these families and links of these levels."""
        wanted = {"facts", "host", "memory", "steps", "seen"}
        wanted |= {f"operators/{self.curve(family).family}" for family in families}
        known = [table for table in self.tables.values() if table.family in families]
        wanted |= {f"tables/{table.name}" for table in known if self.tables.get(table.like or "") not in known}
        wanted |= {f"links/{self.link(level).level}" for level in levels}
        wanted |= {f"interference/{level}" for level in levels}
        found = {name: source for name, source in self.provenance.items() if name in wanted}
        measured = [item for (_, level, _), item in self.collectives.items() if level in levels]
        found |= {f"collectives/{item.collective}": str(item.provenance) for item in measured}
        waits = [item for item in self.waits.values() if item.level in levels]
        return found | {f"waits/{item.ranks} ranks": str(item.provenance) for item in waits}


def _slowed(facts: Facts, slowdown: float) -> Facts:
    return replace(
        facts,
        capacity_bytes=max(facts.reserve_bytes + 1, round(facts.capacity_bytes / slowdown)),
        overlap_slowdown=max(facts.overlap_slowdown, NO_OVERLAP),
        peak_flops={dtype: rate / slowdown for dtype, rate in facts.peak_flops.items()},
        memory_bandwidth=facts.memory_bandwidth / slowdown,
        launch_ns=_slowed_pair(facts.launch_ns, slowdown),
        view_ns=_slowed_pair(facts.view_ns, slowdown),
    )


def _slowed_pair(pair: tuple[int, int], slowdown: float) -> tuple[int, int]:
    return round(pair[0] * slowdown), round(pair[1] * slowdown)


_PAIRS, _BY_SIZE = ("optimizer_ns", "function_ns", "branch_ns"), ("send_ns", "carry_ns")
_TIMES = ("parameter_ns", "convert_ns", "pass_ns", "receive_ns", "late_ns")


def _slowed_runtime(runtime: Runtime, slowdown: float) -> Runtime:
    now: dict[str, Any] = vars(runtime)
    found: dict[str, Any] = {name: _slowed_pair(now[name], slowdown) for name in _PAIRS}
    found |= {name: round(now[name] * slowdown) for name in _TIMES}
    found |= {name: tuple((size, round(ns * slowdown)) for size, ns in now[name]) for name in _BY_SIZE}
    return replace(runtime, **found)


def host_of(profile: Profile) -> HostMemory:
    """What a device may use of its host. Raises ProfileError where its profile does not say."""
    if profile.beside is None:
        raise ProfileError(
            f"expected host_memory in the profile {profile.name}, which says what the host holds and how fast its link "
            "is, found none; add it to the profile's file, or keep everything on the device"
        )
    return profile.beside


def read_profile(path: Path) -> Profile:
    """Reads a profile's JSON file. Raises ProfileError naming the file, and the field where one is wrong."""
    try:
        data = reading.parsed(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, reading.MalformedError) as error:
        raise ProfileError(f"expected the JSON file of a cost profile at {path}, found none: {error}") from error
    return profile_from_json(data, str(path))


@cache
def device_type_of(name: str) -> str:
    """ "cpu" or "cuda", of a profile by its name in a mesh. Raises ProfileError for a file that is none."""
    if name.endswith(".json"):
        return read_profile(Path(name)).device_type
    return "cpu" if name == "cpu" else "cuda"


def profile_from_json(data: Mapping[str, Any], origin: str, is_ours: bool = False) -> Profile:
    """Reads and checks a profile. Raises ProfileError naming `origin` and the offending field. is_ours: it is shipped,
    and known to be of the format: a third of a second is not spent on that again."""
    if not is_ours:
        _check_form(data, origin)
    operators = [_read_operator(item) for item in data["operators"]]
    links = [_read_link(item) for item in data["links"]]
    first: dict[str, Link] = {}
    for link in links:
        first.setdefault(link.level, link)
    collectives = [CollectivePoints(**_fields(item)) for item in data["collectives"]]
    profile = Profile(
        name=data["name"],
        title=data["title"],
        device_type=data["device_type"],
        facts=Facts(**_fields(data["facts"])),
        operators={item.family: item for item in operators},
        links=first,
        other_links=tuple(item for item in links if item is not first[item.level]),
        collectives={item.place: item for item in collectives if not item.library},
        other_collectives=tuple(item for item in collectives if item.library),
        aliases=tuple(data.get("aliases", ())),
        host=Host(**_fields(data["host"])) if data.get("host") else None,
        tables=read_tables(data.get("tables", ()), origin),
        runtime=Runtime(**_fields(data["runtime"])) if data.get("runtime") else None,
        waits={(item["level"], item["ranks"]): Waits(**_fields(item)) for item in data.get("waits", ())},
        interference={item["level"]: Interference(**_fields(item)) for item in data.get("interference", ())},
        call=CollectiveCall(**_fields(data["call"])) if data.get("call") else None,
        memory=DeviceMemory(**_fields(data["memory"])) if data.get("memory") else None,
        host_memory=HostMemory(**_fields(data["host_memory"])) if data.get("host_memory") else None,
        steps=WholeSteps(**_fields(data["steps"])) if data.get("steps") else None,
        residuals=tuple(Residual(**_fields(item)) for item in data.get("residuals", ())),
        seen=seen_from_json(data["seen"]) if data.get("seen") else NOTHING_SEEN,
    )
    _check(profile, origin)
    return profile


def _check_form(data: Mapping[str, Any], origin: str) -> None:
    """That the data are a profile's, field by field. Raises ProfileError."""
    if isinstance(data, Mapping) and data.get("format", FORMAT) != FORMAT:
        raise ProfileError(
            f"{origin}: expected a cost profile of format {FORMAT}, found format {data['format']}; measure it anew "
            "with `autopar profile`, or write it anew after the files of cost_profiles/"
        )
    try:
        reading.check(data)
        reading.validate(data, _validator())
        for field_name, key in _KEYS.items():
            _check_keys(data.get(field_name) or (), field_name, key)
    except reading.MalformedError as error:
        raise ProfileError(f"{origin} is no cost profile: {error}") from None


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """The inverse of `profile_from_json`."""
    return {
        "format": FORMAT,
        "name": profile.name,
        "aliases": list(profile.aliases),
        "title": profile.title,
        "device_type": profile.device_type,
        "facts": asdict(profile.facts),
        "memory": profile.memory and asdict(profile.memory),
        **({"host_memory": asdict(profile.host_memory)} if profile.host_memory else {}),
        "steps": profile.steps and asdict(profile.steps),
        "host": profile.host and asdict(profile.host),
        "operators": [_write_operator(item) for item in profile.operators.values()],
        "runtime": profile.runtime and asdict(profile.runtime),
        "call": profile.call and asdict(profile.call),
        "collectives": [_write_points(item) for item in (*profile.collectives.values(), *profile.other_collectives)],
        **{name: [asdict(item) for item in getattr(profile, name).values()] for name in _KEYS if name not in _OWN},
        "links": [asdict(link) for link in (*profile.links.values(), *profile.other_links)],
        "tables": [write_table(item) for item in profile.tables.values()],
        "residuals": [asdict(item) for item in profile.residuals],
        **({"seen": seen_to_json(profile.seen)} if profile.seen else {}),
    }


@cache
def _validator() -> Any:
    return reading.validator(json.loads((profiles_folder() / SCHEMA).read_text()))


#: what tells the items of a list apart
_KEYS = {
    "operators": ("family",), "links": ("level", "network"), "collectives": ("collective", "level", "ranks", "library"),
    "tables": ("name",), "waits": ("level", "ranks"), "interference": ("level",),
    "residuals": ("family", "kind", "from_ns"),
}  # fmt: skip
_OWN = ("operators", "links", "collectives", "tables", "residuals")  # are written in their own way


def _check_keys(items: Iterable[Mapping[str, Any]], name: str, key: tuple[str, ...]) -> None:
    known: set[tuple[Any, ...]] = set()
    for number, item in enumerate(items):
        own = tuple(item.get(part, "") for part in key)
        if own in known:
            raise reading.MalformedError((name, number), f"one item for each {' and '.join(key)}", f"{own} twice")
        known.add(own)


def _fields(item: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a block: lists as tuples."""
    return {**_frozen(item), "provenance": Provenance(**item["provenance"])}


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _frozen(item) for name, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _read_operator(item: Mapping[str, Any]) -> OperatorCurve:
    fields = _fields(item)
    points = tuple(Point(**point) for point in fields.get("points", ()))
    curves = {side: Curve(fields[side]) for side in ("forward", "backward")}
    return OperatorCurve(**{**fields, **curves, "points": points, "call_ns": fields.get("call_ns") or None})


def _read_link(item: Mapping[str, Any]) -> Link:
    fast = item.get("low_latency")
    return Link(**{**_fields(item), "low_latency": fast and Protocol(**fast)})


def _write_points(item: CollectivePoints) -> dict[str, Any]:
    return {name: value for name, value in asdict(item).items() if name != "library" or value}


def _write_operator(item: OperatorCurve) -> dict[str, Any]:
    return {**asdict(item), "forward": item.forward.knots, "backward": item.backward.knots}


_FASTEST = 10**5  # bytes a nanosecond: no link of today has a hundredth


def _check(profile: Profile, origin: str) -> None:
    """What the schema cannot say: work increases, time never falls, the families all lean on are there."""
    facts = profile.facts
    if facts.capacity_bytes <= facts.reserve_bytes:
        raise ProfileError(
            f"{origin}: at /facts/capacity_bytes: expected more than the reserve of {facts.reserve_bytes} bytes, found "
            f"{facts.capacity_bytes}"
        )
    if profile.usable_bytes <= 0:
        raise ProfileError(
            f"{origin}: at /memory: expected to leave room for tensors in /facts/capacity_bytes of "
            f"{facts.capacity_bytes}, found that it takes all"
        )
    for missing in {"pointwise", "matmul"} - set(profile.operators):
        raise ProfileError(f"{origin}: expected a curve of the operator family {missing!r}, found none")
    for operator in profile.operators.values():
        for curve in (operator.forward, operator.backward):
            times = [(work, work / efficiency) for work, efficiency in curve.knots]
            _check_increasing(times, f"{origin}: {operator.family}")
    for measured in (*profile.collectives.values(), *profile.other_collectives):
        where = f"{origin}: {measured.collective} of {measured.ranks}"
        _check_increasing(measured.points, where)
        for size, duration in measured.points:
            if size > _FASTEST * duration:
                raise ProfileError(f"{where}: expected a time in nanoseconds, found {duration} for {size} bytes")
    for waits in profile.waits.values():
        _check_increasing(waits.points, f"{origin}: waits of {waits.ranks}")
    for name in _BY_SIZE if profile.runtime else ():
        sizes = [size for size, _ in getattr(profile.runtime, name)]
        if any(right <= left for left, right in pairwise(sizes)):
            raise ProfileError(f"{origin}: at /runtime/{name}: expected sizes that increase, found {sizes}")


def _check_increasing(points: Sequence[tuple[float, float]], where: str) -> None:
    for (x, y), (next_x, next_y) in pairwise(points):
        if next_x <= x or next_y < y * 0.999999:
            raise ProfileError(f"{where}: expected more work to take more time, found {next_x:g} after {x:g}")
