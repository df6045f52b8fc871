"""Measures gloo between ranks of this host, and what a rank's runtime costs beside its operators: points as JSON.

Needs torch only and imports nothing of autopar, so the file can be copied to another machine and run there:
`OMP_NUM_THREADS=1 python -P measure_gloo.py > points.json`. `fit.py` turns the points into a profile.

The ranks are forked before this process has started any thread pool, so torch is imported once for all.
A collective's time is what it adds, by the wall clock, to a rank that computes before and after it, as in a training
step: waking gloo's threads beside busy ones, caches that hold other data, and waiting for the slower rank are part of
it, and multiply what a collective takes that follows another one at once. Times are medians: a step is the sum of what
usually happens, not of what happens at best. What a rank computes itself is timed by the CPU time of its thread.

Ranks that have computed for long wait longer for each other than those of which the collectives are measured: one of
them was interrupted, its core slower, its threads asleep. So what a collective adds is also measured by how long ranks
compute before it.

Who asks for a message that was sent before may be interrupted, while it holds the lock of the connection, by the thread
that is to take the message and tries the lock until the first one gets its core back. That happens in some cases and
then takes a scheduler's turn, so of these times the mean is told. So it is of what messages take of threads: whether
the sender's own thread copies one or gloo's does changes from one to the next, and a step is the sum of both.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from statistics import median_high
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

COLLECTIVE_BYTES = (1 << 10, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25)
RUNS = 7
NS_A_RUN, MOST_IN_A_RUN = 4e7, 6
RANKS = (2, 4)
WAITING_UNITS = (1, 3, 10, 24)  # of `_layer_part`, before each collective: the first is about what `_computation` takes
WAITING_BYTES = (1 << 10, 1 << 20)
MEETINGS, WAITING_ROUNDS = 6, 8
PASSING_BYTES = 1 << 21
PASS_UNITS = 8  # of `_layer_part`: what a stage's pass computes
MESSAGE_BYTES = (1 << 10, 1 << 17, 1 << 19, 1 << 21, 1 << 23)
MESSAGE_ROUNDS = 12
LATE_BYTES, LATE_RUNS = (1 << 17, 1 << 19, 1 << 21), 24
ALLOCATION = ((-1, (1 << 31) - 1), (-2, 1 << 26), (-3, 1 << 25))  # of mallopt(3): those of `runtime.allocation`
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def measure(report: Callable[[str], None]) -> dict[str, Any]:
    """Points of each collective among 2 and 4 ranks of this host, and of the runtime of one of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        report(f"gloo among {max(RANKS)} ranks")
        children = [_fork(rank, Path(folder)) for rank in range(max(RANKS))]
        failed = [child for child in children if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
        if failed:
            raise SystemExit(f"{len(failed)} of {max(RANKS)} gloo ranks failed")
        found: dict[str, Any] = json.loads((Path(folder) / "points.json").read_text())
        return found


def _fork(rank: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        _run_rank(rank, folder)
        status = 0
    finally:
        os._exit(status)


def keep_freed_memory() -> None:
    """As ranks that train do (`profiler.measure`)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda number, value: 0)  # glibc's
    for number, value in ALLOCATION:
        mallopt(ctypes.c_int(number), ctypes.c_int(value))


def _run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    address = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=max(RANKS))
    points: list[dict[str, Any]] = []
    shares: dict[int, float] = {}
    waits: dict[int, list[tuple[int, int]]] = {}
    messages: dict[str, Any] = {}
    for ranks in RANKS:
        group = dist.new_group(list(range(ranks)))
        if rank < ranks:
            points += [_measure_collective(kind, ranks, group) for kind in KINDS if kind != "send" or ranks == 2]
            shares[ranks] = _busy_share(group)
            waits[ranks] = measure_waits(ranks, group)
            if ranks == 2:
                messages = measure_messages(1 - rank, group) | {"late": measure_late(1 - rank, group)}
        dist.barrier()
    runtime = measure_runtime() | messages if rank < 2 else {}
    if rank == 0:
        found = {"collectives": points, "busy_share": shares, "waits": waits, "runtime": runtime}
        (folder / "points.json").write_text(json.dumps(found))
    dist.barrier()


# Collectives ----------------------------------------


def _collective(kind: str, num_bytes: int, ranks: int, group: Any) -> Callable[[], Any]:
    """The call, with buffers sized as `ir.redistribution.transfer_bytes` counts them."""
    elements = max(ranks, num_bytes // 4 // ranks * ranks)
    whole, part = torch.ones(elements), torch.ones(elements // ranks)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: _all_gather(whole, part, group=group),
        "reduce_scatter": lambda: _reduce_scatter(part, whole, ranks, group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        "send": lambda: _send_and_return(whole, group),
    }[kind]


# torch 2.13 renames the collective and deprecates the old name; 2.10 has the old name only.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _reduce_scatter(part: torch.Tensor, whole: torch.Tensor, ranks: int, group: Any) -> None:
    """As the runtime does it on gloo, whose own is several times slower."""
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole, group=group)
    parts = received.view(ranks, -1)
    torch.add(parts[0], parts[1], out=part)
    for other in parts[2:]:
        part.add_(other)


def _send_and_return(buffer: torch.Tensor, group: Any) -> None:
    """There and back between the group's first two ranks: two messages."""
    first, second = dist.get_process_group_ranks(group)[:2]
    if dist.get_rank() == first:
        dist.send(buffer, second, group=group)
        dist.recv(buffer, second, group=group)
    else:
        dist.recv(buffer, first, group=group)
        dist.send(buffer, first, group=group)


def _measure_collective(kind: str, ranks: int, group: Any) -> dict[str, Any]:
    """By size; fewer sizes among more ranks than cores, which take turns and are slow to measure."""
    points = []
    for num_bytes in COLLECTIVE_BYTES[:: 1 if ranks <= len(os.sched_getaffinity(0)) else 2]:
        duration = _added_ns(_collective(kind, num_bytes, ranks, group), group)
        points.append([num_bytes, max(1, duration // 2) if kind == "send" else duration])
    return {"collective": kind, "ranks": ranks, "points": points}


def _added_ns(call: Callable[[], Any], group: Any) -> int:
    """Nanoseconds that a call adds to a computation: the median over runs, which are equally long on all ranks."""
    compute = _computation()
    call()
    once = torch.tensor([float(_time_runs(call, 2))])
    dist.all_reduce(once, dist.ReduceOp.MAX, group=group)
    repeats = max(1, min(MOST_IN_A_RUN, int(NS_A_RUN / max(1.0, once.item()))))
    added = []
    for _ in range(RUNS):
        dist.barrier(group)
        alone = _time_runs(compute, repeats)
        dist.barrier(group)
        added.append(_time_runs(lambda: (compute(), call()), repeats) - alone)
    return max(1, median_high(added))


def _computation() -> Callable[[], Any]:
    """About two milliseconds of a layer: a product, and a pass over more than the first cache holds."""
    left, right, rows = torch.ones(256, 512), torch.ones(512, 512), torch.ones(1 << 19)
    return lambda: (torch.mm(left, right), rows.mul_(1.0))


def _time_runs(call: Callable[[], Any], repeats: int) -> int:
    start = time.perf_counter_ns()
    for _ in range(repeats):
        call()
    return (time.perf_counter_ns() - start) // repeats


def measure_waits(ranks: int, group: Any) -> list[tuple[int, int]]:
    """(ns that a rank computes before a collective, ns that this adds more than after the shortest computation).

    What it adds is a cycle's time by the clock less the CPU time of the rank's own thread for what it computes, of
    ranks that share cores as much longer as they do: waiting for the slowest rank, being interrupted by gloo's threads,
    and the collective. Means over all ranks and `MEETINGS`, since a step pays for all that happens to it; of these the
    median over rounds, in which the lengths take turns: over the half that other programs disturbed least.
    """
    calls = [_collective("all_reduce", size, ranks, group) for size in WAITING_BYTES]
    part, sharing = _layer_part(), max(1.0, ranks / len(os.sched_getaffinity(0)))
    rounds = []
    for _ in range(WAITING_ROUNDS):
        before = _others_seconds(group)
        pairs = [_mean_pair([_meet(call, part, units, sharing, group) for call in calls]) for units in WAITING_UNITS]
        rounds.append((_others_seconds(group) - before, pairs))
    quiet = [pairs for _, pairs in sorted(rounds)[: (WAITING_ROUNDS + 1) // 2]]
    found = [tuple(map(median_high, zip(*pairs, strict=True))) for pairs in zip(*quiet, strict=True)]
    return [(length, max(0, added - found[0][1])) for length, added in found]


def _others_seconds(group: Any) -> float:
    """CPU time that other programs than the ranks of a group have had so far of the cores that these may use."""
    own = torch.tensor([time.process_time()], dtype=torch.float64)
    dist.all_reduce(own, group=group)
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = map(str.split, Path("/proc/stat").read_text().splitlines())
    ticks = [map(int, fields) for name, *fields in lines if name in names]
    busy = sum(user + nice + system + irq + soft + steal for user, nice, system, _, _, irq, soft, steal, *_ in ticks)
    return busy / os.sysconf("SC_CLK_TCK") - own.item()


def _meet(call: Callable[[], Any], part: Callable[[], Any], units: int, sharing: float, group: Any) -> tuple[int, int]:
    """Mean nanoseconds over the ranks that each computes before a call, and that are added to that."""
    dist.barrier(group)
    call()
    computed, start = 0, time.perf_counter_ns()
    for _ in range(MEETINGS):
        began = time.thread_time_ns()
        for _ in range(units):
            part()
        computed += time.thread_time_ns() - began
        call()
    elapsed = time.perf_counter_ns() - start
    times = torch.tensor([computed, elapsed - sharing * computed], dtype=torch.float64)
    dist.all_reduce(times, group=group)
    length, added = (times / (MEETINGS * dist.get_world_size(group))).tolist()
    return round(length), round(added)


def _mean_pair(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(sum(column) // len(column) for column in zip(*pairs, strict=True))


def _layer_part() -> Callable[[], Any]:
    """About as long as `_computation`, over activations that together no cache of one core holds."""
    left, right = torch.ones(256, 512), torch.ones(512, 512)
    activations = [torch.ones(1 << 18) for _ in range(32)]
    order = cycle(activations)

    def compute() -> None:
        torch.mm(left, right)
        for _ in range(2):
            next(order).mul_(1.0)

    return compute


def _units(count: int) -> Callable[[], None]:
    """So many of `_layer_part` one after another."""
    compute = _layer_part()

    def run() -> None:
        for _ in range(count):
            compute()

    return run


def _busy_share(group: Any) -> float:
    """CPU time of gloo's threads over the time of the all-reduce that they work on: what compute loses then."""
    buffer = torch.ones(1 << 22)  # larger than the cache, as gradients are
    shares = []
    for _ in range(2 * RUNS):
        dist.barrier(group)
        worked, start = _network_ns(), time.perf_counter_ns()
        dist.all_reduce(buffer, group=group)
        elapsed = time.perf_counter_ns() - start
        shares.append((_network_ns() - worked) / elapsed)
    return min(1.0, median_high(shares))


# The runtime ----------------------------------------


def measure_runtime() -> dict[str, Any]:
    """Nanoseconds of what a rank does beside its operators, on tensors so small that only the call counts.

    optimizer: AdamW a parameter, plain and a DTensor. parameter: a gradient's hook, its copy to a bucket, its DTensor.
    convert: a parameter's shards packed, joined and copied. function: an autograd function in Python, forward and
    backward. branch: an operator with parameters in a backward pass in two parts, less its kernels: in the first part,
    in the second. pass: a stage's pass in a schedule of `torch.distributed.pipelining`.
    """
    mesh = init_device_mesh("cpu", (2,)) if dist.get_world_size() == 2 else _pair_mesh()
    return {
        "optimizer": _optimizer_ns(mesh),
        "parameter": _parameter_ns(mesh),
        "convert": _convert_ns(),
        "function": _function_ns(),
        "branch": _branch_ns(),
        "pass": _pass_ns(),
    }


def _pair_mesh() -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", [0, 1], _init_backend=False)


def measure_messages(peer: int, group: Any) -> dict[str, Any]:
    """What a message between passes takes of threads.

    send: of the sender's own to start it, (bytes, ns) by size, for what the network takes at once is copied. receive:
    of the receiver's to ask for one, and to take it when it is there. carry: of the network's threads at both ends,
    (bytes, ns). Sizes take turns. group: of two ranks.
    """
    others = _units(PASS_UNITS)
    buffers = {size: (torch.ones(size // 4), torch.empty(size // 4)) for size in MESSAGE_BYTES}
    times: dict[int, list[tuple[int, int, int]]] = {size: [] for size in MESSAGE_BYTES}
    for _ in range(1 + MESSAGE_ROUNDS):
        for size, (part, into) in buffers.items():
            times[size].append(_exchange_ns(part, into, others, peer, group))
    means = {
        size: [sum(column) // MESSAGE_ROUNDS for column in zip(*rows[1:], strict=True)] for size, rows in times.items()
    }
    return {
        "send": [[size, sent] for size, (sent, _, _) in means.items()],
        "receive": median_high([received for _, received, _ in means.values()]),
        "carry": [[size, carried] for size, (_, _, carried) in means.items()],
    }


def _exchange_ns(
    part: torch.Tensor, into: torch.Tensor, others: Callable[[], None], peer: int, group: Any
) -> tuple[int, int, int]:
    """A message each way between computations, CPU time: to send one, to receive one; of the network's threads."""
    asked_ns, coming = _after(others, partial(dist.irecv, into, peer, group=group))
    dist.barrier(group)
    others()
    carried_ns = _network_ns()
    sent_ns, going = _after(lambda: None, partial(dist.isend, part, peer, group=group))
    taken_ns, _ = _after(others, coming.wait)
    going.wait()
    return sent_ns, asked_ns + taken_ns, _network_ns() - carried_ns


def _network_ns() -> int:
    """CPU time of this process's other threads, which are gloo's."""
    return time.process_time_ns() - time.thread_time_ns()


def measure_late(peer: int, group: Any) -> int:
    """How long a thread stands still where it asks for a message that was sent before, while both ranks compute: the
    mean over messages and over the group's two ranks."""
    others, still = _units(PASS_UNITS), 0
    for num_bytes in LATE_BYTES:
        part, into = torch.ones(num_bytes // 4), torch.empty(num_bytes // 4)
        for number in range(2 * LATE_RUNS):
            dist.barrier(group)
            others()
            if (dist.get_rank() + number) % 2:
                sent = dist.isend(part, peer, group=group)
                others()
                others()
            else:
                others()
                began, worked = time.perf_counter_ns(), time.thread_time_ns()
                sent = dist.irecv(into, peer, group=group)
                still += time.perf_counter_ns() - began - (time.thread_time_ns() - worked)
                others()
            cast("Any", sent).wait()
    total = torch.tensor([float(still)], dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return max(0, round(total.item() / (2 * LATE_RUNS * len(LATE_BYTES))))


def _timed(call: Callable[[], Any], runs: int) -> int:
    """The median of the thread's CPU time, after other data have passed through the cache."""
    times, passing = [], torch.zeros(PASSING_BYTES, dtype=torch.uint8)
    for _ in range(runs):
        passing.add_(1)
        start = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - start)
    return median_high(times)


def _wrapped(local: torch.Tensor, mesh: Any) -> torch.Tensor:
    wrapped: torch.Tensor = DTensor.from_local(
        local, mesh, (Replicate(),), run_check=False, shape=local.shape, stride=local.stride()
    )
    return wrapped


def _optimizer_ns(mesh: Any, count: int = 16) -> list[int]:
    """A parameter's part of AdamW's step: a plain tensor's, and a DTensor's."""
    found = []
    for wrap in (lambda x: x, lambda x: _wrapped(x, mesh)):
        parameters = [torch.nn.Parameter(wrap(torch.ones(8))) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = wrap(torch.ones(8))
        optimizer = torch.optim.AdamW(parameters, foreach=False)
        optimizer.step()
        found.append(_timed(optimizer.step, 30) // count)
    return found


def _parameter_ns(mesh: Any, count: int = 64) -> int:
    """What one more gradient costs on its way home: the backward pass with hooks less that without."""
    times = []
    for hooked in (False, True):
        leaves = [torch.ones(8, requires_grad=True) for _ in range(count)]
        buffer = torch.empty(8 * count)
        for index, leaf in enumerate(leaves):
            if hooked:
                leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _home(buffer, 8 * index, mesh)
                )

        def step(leaves: list[torch.Tensor] = leaves) -> None:
            for leaf in leaves:
                leaf.grad = None
            torch.stack(leaves).sum().backward()  # type: ignore[no-untyped-call]

        times.append(_timed(step, 30) // count)
    return max(0, times[1] - times[0])


def _home(buffer: torch.Tensor, start: int, mesh: Any) -> Callable[[torch.Tensor], None]:
    def bring(leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        with torch.no_grad():
            part = buffer[start : start + 8].view(gradient.shape)
            part.copy_(gradient)
        _wrapped(part, mesh)

    return bring


def _convert_ns(count: int = 16) -> int:
    """What one more parameter costs in a gather: its shard packed, its columns joined and copied into place."""
    shards, leaves = [torch.ones(4, 2) for _ in range(count)], [torch.empty(4, 4) for _ in range(count)]

    def convert() -> None:
        flat = torch.cat([shard.reshape(-1) for shard in shards])
        gathered = torch.stack([flat, flat])
        for part, leaf in zip(torch.split(gathered, [8] * count, dim=1), leaves, strict=True):
            leaf.untyped_storage().resize_(64)
            joined = part.reshape(2, 4, 2).movedim(0, 1).reshape(4, 4).narrow(1, 0, 4).contiguous()
            leaf.copy_(joined)

    return _timed(convert, 30) // count


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind = kind
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _function_ns(count: int = 50) -> list[int]:
    """One autograd function in Python among many: forward, backward."""
    leaf, gradient = torch.ones(8, requires_grad=True), torch.ones(8)
    forward, backward = [], []
    for _ in range(30):
        start = time.thread_time_ns()
        result: Any = leaf
        for _ in range(count):
            result = _Same.apply(result, "same")  # type: ignore[no-untyped-call]
        middle = time.thread_time_ns()
        torch.autograd.grad(result, [leaf], gradient)
        forward.append(middle - start)
        backward.append(time.thread_time_ns() - middle)
    return [median_high(forward) // count, median_high(backward) // count]


def _branch_ns(count: int = 8) -> list[int]:
    """Of products with a bias, in two parts: a walk through their graph and gradients kept, then a call of autograd for
    each; less what the whole backward pass does for the same gradients."""
    first, second = zip(*(_parts_ns(count) for _ in range(30)), strict=True)
    return [max(0, median_high(part)) // count for part in (first, second)]


def _parts_ns(count: int) -> tuple[int, int]:
    x, gradient = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8)
    pairs = [[torch.ones(8, 8, requires_grad=True), torch.ones(8, requires_grad=True)] for _ in range(count)]
    edges, result = [], x
    for weight, bias in pairs:
        result = torch.nn.functional.linear(result, weight, bias)
        edges.append(get_gradient_edge(result))
    inputs_ns, _ = _once(lambda: torch.autograd.grad(result, [x], gradient, retain_graph=True))
    all_ns, _ = _once(lambda: torch.autograd.backward(result, gradient, retain_graph=True, inputs=[x, *chain(*pairs)]))
    walk_ns, _ = _once(lambda: _walk(edges[-1]))
    wanted: list[Any] = [x, *edges]
    first_ns, (_, *kept) = _once(lambda: torch.autograd.grad(result, wanted, gradient, retain_graph=True))
    for leaf in chain(*pairs):
        leaf.grad = None
    calls = [partial(torch.autograd.backward, [e], [g], inputs=p) for e, g, p in zip(edges, kept, pairs, strict=True)]
    second_ns = sum(_once(call)[0] for call in calls)
    return walk_ns + first_ns - inputs_ns, second_ns - (all_ns - inputs_ns)


class _SmallStage:
    """The only stage of a pipeline, as `runtime.scheduled` makes torch's schedules see one; its passes compute next to
    nothing. passing_ns: what it took to have other data pass through the cache."""

    stage_index, num_stages, group_rank, group_size = 0, 1, 0, 1
    is_first, is_last, has_backward, device = True, True, True, torch.device("cpu")

    def __init__(self) -> None:
        self.leaf, self.submod = torch.ones(8, requires_grad=True), torch.nn.Identity()
        self.ends: dict[int, Any] = {}
        self.others, self.passing_ns = _units(PASS_UNITS), 0

    def clear_runtime_states(self) -> None:
        self.output_chunks: list[torch.Tensor] = []

    def forward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._let_pass()
        result = self.leaf * 2.0
        self.ends[index] = get_gradient_edge(result), torch.ones_like(result)
        self.output_chunks.append(result.detach())
        return self.output_chunks[-1]

    def backward_one_chunk(self, index: int, **options: Any) -> None:
        self._let_pass()
        end, gradient = self.ends.pop(index)
        torch.autograd.backward([end], [gradient])
        self.leaf.grad = None

    def _let_pass(self) -> None:
        start = time.thread_time_ns()
        self.others()
        self.passing_ns += time.thread_time_ns() - start

    def _nothing(self, *args: Any, **options: Any) -> tuple[()]:
        return ()

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing
    scale_grads = perform_reduce_grad = _get_init_p2p_neighbors_ops = _nothing
    _prepare_forward_infra = _prepare_backward_infra = _nothing


def _pass_ns(count: int = 8) -> int:
    """A pass's part of a step of a schedule: what the schedule and autograd do for it."""
    from torch.distributed.pipelining import Schedule1F1B

    stage, target, times = _SmallStage(), torch.empty(count, 0), list[int]()
    schedule = Schedule1F1B(cast("Any", stage), count, loss_fn=lambda output, target: output, scale_grads=False)
    for _ in range(RUNS):
        stage.passing_ns = 0
        start = time.thread_time_ns()
        schedule.step(target=target)
        times.append(time.thread_time_ns() - start - stage.passing_ns)
    return median_high(times) // (2 * count)


def _once(call: Callable[[], Any]) -> tuple[int, Any]:
    """The thread's CPU time of a call after other data have passed through the cache, and its result."""
    return _after(lambda: torch.zeros(PASSING_BYTES, dtype=torch.uint8).add_(1), call)


def _after(others: Callable[[], Any], call: Callable[[], Any]) -> tuple[int, Any]:
    """The thread's CPU time of a call after others have filled the caches, and its result."""
    others()
    start = time.thread_time_ns()
    result = call()
    return time.thread_time_ns() - start, result


def _walk(root: Any) -> list[tuple[int | None, int]]:
    """Each edge of the graph from a node on, by number: how the runtime knows a graph again."""
    edges, number = [(root.node, root.output_nr)], dict[Any, int]()
    for node, _ in edges:
        if node is not None and node not in number:
            number[node] = len(number)
            edges += node.next_functions
    return [(number.get(node), position) for node, position in edges]


def main() -> None:
    """Prints the points as one JSON object; progress goes to stderr when that is a terminal."""
    warnings.simplefilter("ignore", FutureWarning)  # newer names of collectives that torch 2.10 lacks
    report = _report if sys.stderr.isatty() else (lambda text: None)
    found = measure(report)
    report("")
    json.dump(found, sys.stdout)


def _report(text: str) -> None:
    sys.stderr.write(f"\r\x1b[2Kmeasuring this host: {text}" if text else "\r\x1b[2K")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
