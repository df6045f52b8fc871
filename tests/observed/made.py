"""Traces as ranks would write them, of a run in which everything takes what a plan's simulation says, times factors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.schedule import BACKWARD, FORWARD
from autopar.observed.expected import expected
from autopar.observed.simulated import simulated
from autopar.runtime.ranges import MARK, in_ascii

STEPS = 4
WHOLE = 4096  # bytes of each collective that is made up


class Writer:
    """Events one after another on one thread."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now_ns = 0

    def begin(self, name: str, **args: Any) -> dict[str, Any]:
        """An event whose end `end` says."""
        event = {"ph": "X", "cat": "cpu_op", "name": name, "tid": 1, "ts": self.now_ns / 1000, "args": args}
        self.events.append(event)
        self.now_ns += 1
        return event

    def end(self, event: dict[str, Any], spent_ns: int | None = None) -> None:
        """spent_ns: that the range says it took of a processor."""
        if spent_ns is not None:
            self.end(self.begin(f"{MARK}spent {spent_ns}"))
        event["dur"] = (self.now_ns - round(event["ts"] * 1000)) / 1000
        self.now_ns += 1

    def wait(self, ns: int) -> None:
        """Time passes."""
        self.now_ns += ns


def write_run(
    folder: Path, graph: Graph, plan: Plan, told: Plan, factors: Mapping[str, float] | None = None,
    late_ns: Mapping[int, int] | None = None, host_ns: int = 0,
) -> Path:  # fmt: skip
    """Writes a trace for each rank. plan: whose simulation is what ran; told: the one that was predicted and emitted.
    factors: by what some statements take longer; late_ns: by rank, how long others wait for it at each collective."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = json.loads(json.dumps(expected(graph, told, told.timeline())))  # type: ignore[arg-type] # its own
    num_ranks = plan.mesh.num_devices
    for rank in range(num_ranks):
        writer = Writer()
        lane = next(lane for lane in simulated(plan.timeline()) if rank in lane.ranks)  # type: ignore[arg-type]
        spans = [_step(writer, lane, factors or {}, _waits(late_ns or {}, rank), host_ns, at) for at in range(STEPS)]
        lengths, busy = [list(column) for column in zip(*spans, strict=True)]
        data = {
            "traceEvents": writer.events,
            "autopar": {
                "expected": beside, "rank": rank, "num_ranks": num_ranks, "device": "cpu", "host": "host",
                "torch": "2.13", "plain_ns": lengths, "plain_process_ns": lengths,
                "plain_thread_ns": busy, "event_ns": 0.0, "slowdown": 1.0,
            },
        }  # fmt: skip
        (folder / f"rank_{rank:05d}.json").write_text(json.dumps(data))
    return folder


def _waits(late_ns: Mapping[int, int], rank: int) -> int:
    """How long a rank waits at a collective for the one that comes last."""
    return max(late_ns.values(), default=0) - late_ns.get(rank, 0)


def _step(
    writer: Writer, lane: Any, factors: Mapping[str, float], waits_ns: int, host_ns: int, at: int
) -> tuple[int, int]:
    """How long it is, and without what it stands still for."""
    began, stood = writer.now_ns, 0
    step = writer.begin(f"{MARK}step")
    names = [*dict.fromkeys([*(name for name, _ in lane.work), *lane.sent])]
    numbers = {name: 1000 * at + number for number, name in enumerate(names)}
    for name in names:
        statement = writer.begin(MARK + in_ascii(f"{name} | of.{name} | model.py:1"))
        own = writer.begin("aten::something", **{"Sequence number": numbers[name], "Fwd thread id": 0})
        spent = round(lane.work.get((name, FORWARD), 0) * factors.get(name, 1.0))
        writer.wait(spent)
        writer.end(own)
        if lane.sent.get(name):
            sent = writer.begin(f"{MARK}collective all_reduce | {WHOLE} | tp")
            writer.wait(lane.sent[name] + waits_ns)
            stood += lane.sent[name] + waits_ns
            writer.end(sent)
        writer.end(statement, spent)
    for name in reversed(names):
        spent = round(lane.work.get((name, BACKWARD), 0) * factors.get(name, 1.0))
        number = {"Sequence number": numbers[name], "Fwd thread id": 1}
        backward = writer.begin("autograd::engine::evaluate_function: SomethingBackward0", **number)
        writer.wait(spent)
        writer.end(backward)
    update = writer.begin(f"{MARK}optimizer")
    writer.wait(lane.optimizer_ns)
    writer.end(update, lane.optimizer_ns)
    writer.wait(host_ns)
    writer.end(step)
    return writer.now_ns - began, writer.now_ns - began - stood
