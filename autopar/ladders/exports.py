"""A ladder as schedulers take it: one exporter for each form of what they know of a job. All are plain JSON.

    optimus, pollux       the speed of a step as a function of devices and batch, fitted, with its error    `forms`
    synergy, liquid       the table itself: throughput and memory by devices and batch; who asks for less is looked up
    gandiva, antman       what a job leaves of its devices: memory, and the parts of a second in which they compute and
                          their links are busy; when it gives back most memory (between steps), and what pausing takes
    tiresias              what a job holds and for how long, and what taking it away costs: no speed is known
    hare                  what a step takes on each kind of device, and what changing the job there takes

Times are seconds, memory bytes a device. A pause is: the step under way, state written, state read again and a first
step as long as `restart_s`, on what the user says of storage (`StateStore`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

from autopar.cost.profile import ACROSS, INSIDE
from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.ladders.forms import fitted, points_of
from autopar.ladders.rungs import Ladder, Rung
from autopar.ladders.stores import StateStore

VERSION = 1
COMPUTE = "compute"


class DeviceUse(NamedTuple):
    """Of the fullest device of a rung: shares of a step in which it computes, and in which the links inside a node and
    across nodes are busy for it; bytes that it has at most, between steps, and that are left of it."""

    compute_share: float
    inside_share: float
    across_share: float
    peak_bytes: int
    resting_bytes: int
    left_bytes: int


def usage(rung: Rung) -> DeviceUse:
    """Raises PlanError where a rung has no plan, or one that was read from a file."""
    plan, step_ns = _plan(rung), rung.step_ns
    timeline: Any = plan.timeline()
    busy: dict[str, int] = {}
    for (_, stream), spent in timeline.work_ns().items():
        busy[stream] = max(busy.get(stream, 0), spent)
    shares = {stream: min(1.0, spent / step_ns) for stream, spent in busy.items()}
    held = [bytes_ for _, bytes_ in timeline.memory]
    return DeviceUse(
        shares.get(COMPUTE, 0.0), shares.get(INSIDE, 0.0), shares.get(ACROSS, 0.0), timeline.peak_bytes,
        held[-1] if held else 0, max(0, plan.memory_limit - timeline.peak_bytes),
    )  # fmt: skip


def pause_s(rung: Rung, store: StateStore) -> tuple[float, float]:
    """Seconds to stop with a checkpoint, half a step in the mean included, and to begin again from it."""
    nodes = rung.mesh.nodes
    stop = rung.step_ns / 2e9 + rung.state_bytes / (nodes * store.write_bytes_s)
    return stop, rung.state_bytes / (nodes * store.read_bytes_s) + store.restart_s


def exported(ladder: Ladder, scheduler: str, store: StateStore | None = None) -> str:
    """The ladder as JSON for a scheduler. Raises PlanError for one that is not known, naming those that are, and for a
    ladder of which no rung has a plan, naming why."""
    if scheduler not in EXPORTERS:
        raise PlanError(f"expected a scheduler as one of {', '.join(EXPORTERS)}, found {scheduler!r}")
    if not ladder.fitting:
        told = "; ".join(f"{rung.mesh}: {rung.refusal}" for rung in ladder.rungs) or "it has no rungs"
        raise PlanError(f"expected a rung that has a plan, for a scheduler to read, found none: {told}")
    data = {"autopar_export": VERSION, "scheduler": scheduler, "model": ladder.model}
    return json.dumps({**data, **EXPORTERS[scheduler](ladder, store or StateStore())}, indent=1) + "\n"


def _plan(rung: Rung) -> Plan:
    if rung.plan is None:
        raise PlanError(f"expected a plan on {rung.mesh}, found none: {rung.refusal}")
    return rung.plan


def _form(name: str) -> Callable[[Ladder, StateStore], dict[str, Any]]:
    def export(ladder: Ladder, store: StateStore) -> dict[str, Any]:
        kinds = sorted({rung.kind for rung in ladder.fitting})
        forms = {kind: fitted(points_of(ladder, kind), name, kind) for kind in kinds}
        return {
            "kinds": {
                kind: {
                    "parameters": dict(form.parameters), "mean_error": form.error[0], "largest_error": form.error[1],
                    "devices": sorted({rung.devices for rung in ladder.fitting if rung.kind == kind}),
                    "batches": sorted({rung.global_batch for rung in ladder.fitting if rung.kind == kind}),
                }
                for kind, form in forms.items()
            }
        }  # fmt: skip

    return export


def _table(ladder: Ladder, store: StateStore) -> dict[str, Any]:
    rows = [
        {
            "kind": rung.kind, "devices": rung.devices, "nodes": rung.mesh.nodes, "global_batch": rung.global_batch,
            "samples_s": rung.samples_s, "memory_bytes": _plan(rung).predicted.peak_bytes,
            "limit_bytes": _plan(rung).memory_limit,
            "sent_bytes_s": sum(_plan(rung).predicted.comm_bytes.values()) * 1e9 / rung.step_ns,
        }
        for rung in ladder.fitting
    ]  # fmt: skip
    return {"rows": rows}


def _packing(ladder: Ladder, store: StateStore) -> dict[str, Any]:
    return {"rows": [_row(rung) | usage(rung)._asdict() | _pause(rung, store) for rung in ladder.fitting]}


def _service(ladder: Ladder, store: StateStore) -> dict[str, Any]:
    return {"rows": [_row(rung) | _pause(rung, store) for rung in ladder.fitting], "store": asdict(store)}


def _kinds(ladder: Ladder, store: StateStore) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for rung in sorted(ladder.fitting, key=lambda rung: -rung.step_ns):  # of equal devices the fastest mesh stays
        own = rows.setdefault(f"{rung.devices} devices, batch {rung.global_batch}", {})
        own[rung.kind] = {"step_s": rung.step_ns / 1e9, "switch_s": sum(pause_s(rung, store))}
    return {"tasks": rows}


def _row(rung: Rung) -> dict[str, Any]:
    return {
        "kind": rung.kind, "devices": rung.devices, "global_batch": rung.global_batch, "step_s": rung.step_ns / 1e9,
    }  # fmt: skip


def _pause(rung: Rung, store: StateStore) -> dict[str, Any]:
    stop, again = pause_s(rung, store)
    return {"state_bytes": rung.state_bytes, "stop_s": stop, "resume_s": again}


EXPORTERS: dict[str, Callable[[Ladder, StateStore], dict[str, Any]]] = {
    "optimus": _form("optimus"),
    "pollux": _form("pollux"),
    "synergy": _table,
    "liquid": _table,
    "gandiva": _packing,
    "antman": _packing,
    "tiresias": _service,
    "hare": _kinds,
}
"""By the names of the schedulers whose decisions can be made from them."""
