"""Measures collectives between the ranks that torchrun started, along the axes of meshes: prints points as JSON.

Needs torch only and imports nothing of autopar, so the file can be copied to a cluster and run there, on GPUs (NCCL) or
CPUs (gloo): `torchrun --nproc-per-node 8 measure_links.py [--mesh 2x4] [--points FILE] [--seconds 120] > points.json`.
`autopar profile --links points.json --into PROFILE` puts what it found into a profile.

Along an axis all groups measure at the same time, as they do in a training step, so the links that they share are
shared. A group is told by how many nodes it spans and its ranks in each. On a CPU a collective's time is what it adds
to a rank that computes before and after it; on a GPU that of many in the stream, one after another. Of each size the
median over windows counts, and of the ranks the mean. Sizes grow until the next would exceed the time or memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median_high
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

REVISION = 1  # of the sweep: points of another one do not mix
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
SIZES = tuple(1 << power for power in (10, 13, 15, 17, 19, 21, 23, 25, 27, 28, 29, 30))
WINDOWS = 7
NS_A_WINDOW, MOST_IN_A_WINDOW = 2e7, 50
MEMORY_SHARE = 0.25  # of what is free, for the buffers of all ranks of a node

# torch 2.13 renames these collectives and deprecates the old names; 2.10 has the old names only.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GroupSpan(NamedTuple):
    """Over which links a group goes: the nodes that it spans, and its ranks in each."""

    nodes: int
    inside: int


class RankWorld(NamedTuple):
    """Where this process is among the ranks: its device, the node of each rank, and ranks in its own node."""

    device: torch.device
    node_of: tuple[int, ...]
    local: int

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def span(self, ranks: Sequence[int]) -> GroupSpan:
        nodes = [self.node_of[rank] for rank in ranks]
        return GroupSpan(len({*nodes}), len(ranks) // len({*nodes}))

    def agree(self, value: float, how: Any) -> float:
        """The same number on every rank, so that all go on or stop."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, how)
        return float(tensor.item())


def join() -> RankWorld:
    """Joins the other ranks. Raises SystemExit where no torchrun started this process."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SystemExit(
            "expected to run under torchrun with at least 2 ranks, found one process; start it with "
            "torchrun --nproc-per-node N"
        )
    is_cuda, local = torch.cuda.is_available(), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if is_cuda else "gloo")
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, int(os.environ.get("GROUP_RANK", "0")))
    return RankWorld(device, tuple(nodes), local)


# Groups ----------------------------------------


def default_meshes(world_size: int, local: int) -> list[tuple[int, ...]]:
    """Axes of every size inside a node that divides it, across the nodes, and over both."""
    inside = [(world_size // size, size) for size in range(2, local + 1) if local % size == 0]
    across = [(world_size // local, local), (world_size,)] if world_size > local else []
    return [*inside, *across]


def parse_mesh(text: str) -> tuple[int, ...]:
    """Reads "2x4": sizes of axes, the outer one first. Raises ArgumentTypeError for anything else."""
    try:
        shape = tuple(int(part) for part in text.split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"expected sizes of axes such as 2x4, found {text!r}")
    return shape


def groups(world: RankWorld, meshes: Sequence[tuple[int, ...]]) -> Iterator[tuple[GroupSpan, Any]]:
    """This rank's group along each axis that goes over links which no axis before it does, with its span."""
    known: set[GroupSpan] = set()
    for shape in meshes:
        mesh = init_device_mesh(world.device.type, shape)
        for axis, size in enumerate(shape):
            group = mesh.get_group(axis)
            span = world.span(dist.get_process_group_ranks(group))
            spans: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(spans, tuple(span))
            if size > 1 and len(set(spans)) == 1 and span not in known:
                known.add(span)
                yield span, group


# Timing ----------------------------------------


def collective(kind: str, num_bytes: int, group: Any, device: torch.device) -> Callable[[], Any]:
    """The call, with float32 buffers sized as a plan counts bytes: the whole tensor, of which a rank has a part."""
    ranks = dist.get_world_size(group)
    elements = max(ranks, num_bytes // 4 // ranks * ranks)
    whole, part = torch.ones(elements, device=device), torch.ones(elements // ranks, device=device)
    other = torch.empty_like(whole)
    scatter = _reduce_scatter if device.type == "cuda" else _scattered_sum
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: _all_gather(other, part, group=group),
        "reduce_scatter": lambda: scatter(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send": lambda: _there_and_back(whole, group),
    }[kind]


def _scattered_sum(part: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
    """As the runtime does it on gloo, whose own reduce-scatter is several times slower."""
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole, group=group)
    torch.sum(received.view(-1, part.numel()), dim=0, out=part)


def _there_and_back(buffer: torch.Tensor, group: Any) -> None:
    """Between the group's first two ranks: two messages, one after the other."""
    first, second = dist.get_process_group_ranks(group)[:2]
    if dist.get_rank() == first:
        dist.send(buffer, second, group=group)
        dist.recv(buffer, second, group=group)
    elif dist.get_rank() == second:
        dist.recv(buffer, first, group=group)
        dist.send(buffer, first, group=group)


class Stopwatch:
    """Nanoseconds that a call takes in a row of calls."""

    def __init__(self, world: RankWorld) -> None:
        self._world = world
        self._operands = (torch.ones(256, 512), torch.ones(512, 512)) if world.device.type == "cpu" else None

    def time_ns(self, call: Callable[[], Any]) -> int:
        """The median over windows, which are equally long on all ranks; of the ranks the mean."""
        call()
        once = self._world.agree(self._run(call, 2), dist.ReduceOp.MAX)
        repeats = max(1, min(MOST_IN_A_WINDOW, int(NS_A_WINDOW / max(1.0, once))))
        found = median_high([self._window(call, repeats) for _ in range(WINDOWS)])
        return max(1, round(self._world.agree(found, dist.ReduceOp.SUM) / dist.get_world_size()))

    def _window(self, call: Callable[[], Any], repeats: int) -> int:
        operands = self._operands
        dist.barrier()
        if operands is None:
            return self._run(call, repeats)
        alone = self._run(lambda: torch.mm(*operands), repeats)
        dist.barrier()
        return self._run(lambda: (torch.mm(*operands), call()), repeats) - alone

    def _run(self, call: Callable[[], Any], repeats: int) -> int:
        self._wait()
        start = time.perf_counter_ns()
        for _ in range(repeats):
            call()
        self._wait()
        return (time.perf_counter_ns() - start) // repeats

    def _wait(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()


def most_bytes(world: RankWorld) -> float:
    """What a buffer may take: three of them, of each rank of a node, in a share of the free memory."""
    if world.device.type == "cuda":
        free = torch.cuda.mem_get_info()[0] / 1.0
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world.local
    return world.agree(MEMORY_SHARE * free / 3, dist.ReduceOp.MIN)


# The sweep ----------------------------------------


class KeptLinkPoints:
    """Points by key that are measured already, on rank 0 in a file if one is named; the same on every rank."""

    def __init__(self, path: Path | None, host: dict[str, Any], rank: int) -> None:
        self.path = path if rank == 0 else None
        found: list[Any] = [self._read(host) if rank == 0 else None]
        dist.broadcast_object_list(found)
        if isinstance(found[0], str):
            raise SystemExit(found[0])
        self.points: dict[str, list[list[int]]] = found[0]

    def _read(self, host: dict[str, Any]) -> dict[str, Any] | str:
        """Lines that cannot be read, as a run that was stopped may leave one, are measured again."""
        path = self.path
        lines = path.read_text(errors="replace").splitlines() if path is not None and path.exists() else []
        if lines and _parsed(lines[0]) != host:
            return (
                f"expected {path} to hold points of {json.dumps(host)}, found {lines[0][:500]}: points of different "
                "machines, devices or versions do not mix; name another file, or remove this one"
            )
        rows = [row for row in map(_parsed, lines[1:]) if isinstance(row, list) and len(row) == 2]
        found = {key: points for key, points in rows if isinstance(key, str)}
        damaged = len(lines) - 1 - len(found)
        if damaged > 0:
            print(f"{path}: {damaged} lines cannot be read, and are measured again", file=sys.stderr)
        if path is not None and damaged:
            path.write_text("".join(json.dumps(row) + "\n" for row in (host, *found.items())))
        return found

    def add(self, key: str, points: list[list[int]]) -> None:
        self.points[key] = points
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps([key, points]) + "\n")


def _parsed(line: str) -> Any:
    """None where it is no JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def measure(
    world: RankWorld,
    meshes: Sequence[tuple[int, ...]],
    seconds: float,
    kept: KeptLinkPoints,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Points of each collective over each kind of group. Every rank calls it, with equal arguments."""
    watch, most, found = Stopwatch(world), most_bytes(world), []
    spans = list(groups(world, meshes))
    tasks = [(span, group, kind) for span, group in spans for kind in KINDS if kind != "send" or _is_first(span, spans)]
    deadline = time.monotonic() + seconds
    for number, (span, group, kind) in enumerate(tasks):
        ranks = 2 if kind == "send" else span.nodes * span.inside
        key = f"{kind} {span.nodes}x{span.inside}"
        report(f"{number + 1} of {len(tasks)}: {kind} among {span.nodes} × {span.inside} ranks")
        if key not in kept.points:
            share = max(0.0, deadline - time.monotonic()) / (len(tasks) - number)
            kept.add(key, _points(world, kind, group, most, share, watch))
        inside = min(span.inside, ranks) if kind == "send" else span.inside
        found.append(
            {"collective": kind, "nodes": ranks // inside, "inside": inside, "points": kept.points[key]}
        )  # fmt: skip
    return found


def _is_first(span: GroupSpan, spans: Sequence[tuple[GroupSpan, Any]]) -> bool:
    """Whether a message over this level of links is measured here: between neighbours of the first group of its kind,
    all in one node or all in nodes of their own."""
    same = [other for other, _ in spans if (other.nodes == 1) == (span.nodes == 1) and 1 in other]
    return bool(same) and same[0] == span


def _points(
    world: RankWorld, kind: str, group: Any, most: float, seconds: float, watch: Stopwatch
) -> list[list[int]]:  # fmt: skip
    """(bytes, ns) by size, at least two; until the next size, which takes in proportion, would go beyond the time."""
    points: list[list[int]] = []
    begin = time.monotonic()
    for num_bytes in SIZES:
        before = time.monotonic()
        duration = watch.time_ns(collective(kind, num_bytes, group, world.device))
        points.append([num_bytes, max(1, duration // 2) if kind == "send" else duration])
        larger = next((size for size in SIZES if size > num_bytes), 0)
        spent, last = time.monotonic() - begin, time.monotonic() - before
        longest = max(NS_A_WINDOW, duration * larger / num_bytes)  # of the next size's windows
        ahead = max(last, 2 * (WINDOWS + 1) * longest * 1e-9)
        goes_on = bool(larger) and larger <= most and (spent + ahead <= seconds or len(points) < 2)
        if not world.agree(float(goes_on), dist.ReduceOp.MIN):
            break
    return points


def host_facts(world: RankWorld) -> dict[str, Any]:
    """What points must agree in to be of one profile."""
    is_cuda = world.device.type == "cuda"
    name = torch.cuda.get_device_name() if is_cuda else _cpu_name()
    return {
        "device_type": world.device.type, "device": name, "torch": torch.__version__, "backend": dist.get_backend(),
        "ranks": dist.get_world_size(), "local": world.local, "node": platform.node(), "revision": REVISION,
    }  # fmt: skip


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def run(meshes: Sequence[tuple[int, ...]], seconds: float, points: Path | None) -> dict[str, Any] | None:
    """Measures; the points and where they are from on rank 0, None on the others."""
    warnings.simplefilter("ignore", FutureWarning)  # newer names of collectives that torch 2.10 lacks
    world = join()
    try:
        host = host_facts(world)
        wanted = list(meshes) or default_meshes(dist.get_world_size(), world.local)
        report = _report if world.rank == 0 and sys.stderr.isatty() else (lambda text: None)
        found = measure(world, wanted, seconds, KeptLinkPoints(points, host, world.rank), report)
        report("")
        return {"host": host, "collectives": found} if world.rank == 0 else None
    finally:
        dist.destroy_process_group()


def _report(text: str) -> None:
    sys.stderr.write(f"\r\x1b[2Kmeasuring links: {text}" if text else "\r\x1b[2K")
    sys.stderr.flush()


def main() -> None:
    """Prints the points as one JSON object, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=parse_mesh, action="append", default=[], help="sizes of axes, such as 2x4")
    parser.add_argument("--seconds", type=float, default=120.0, help="about how long it may take")
    parser.add_argument("--points", type=Path, help="keep points here, and go on from those that are there")
    options = parser.parse_args()
    found = run(options.mesh, options.seconds, options.points)
    if found is not None:
        json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
