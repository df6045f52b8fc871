"""A ladder as JSON, checked against a published schema, for schedulers and for reading it again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files
from itertools import permutations
from typing import Any

from autopar.ir import reading
from autopar.ladders.capacity import Capacity
from autopar.ladders.rungs import KNEE, Ladder, Rung

VERSION = 1


@lru_cache(maxsize=1)
def ladder_schema() -> Any:
    """The JSON Schema of ladders (`autopar/ladders/ladder.schema.json`)."""
    return json.loads(files("autopar.ladders").joinpath("ladder.schema.json").read_text(encoding="utf-8"))


def ladder_json(ladder: Ladder) -> str:
    """The ladder as JSON text, ending in a newline."""
    data = {
        "autopar_ladder": VERSION,
        "model": ladder.model,
        "rungs": [_rung(ladder, rung) for rung in ladder.rungs],
        "knees": [
            {"kind": kind, "global_batch": batch, "devices": ladder.knee(kind, batch).devices, "share": KNEE}
            for kind, batch in ladder.curves
        ],
        "fronts": [
            {"global_batch": batch, "meshes": [str(rung.mesh) for rung in ladder.front(batch)]}
            for batch in sorted({rung.global_batch for rung in ladder.fitting})
        ],
    }
    data["transitions"] = [*_transitions(ladder)]
    if ladder.capacity is not None:
        data["capacity"] = _capacity(ladder.capacity)
    reading.validate(data, reading.validator(ladder_schema()))
    return json.dumps(data, indent=1) + "\n"


def _rung(ladder: Ladder, rung: Rung) -> dict[str, Any]:
    own: dict[str, Any] = {
        "mesh": rung.mesh.to_json(), "kind": rung.kind, "devices": rung.devices, "global_batch": rung.global_batch,
        "price_per_hour": rung.price, "tokens_per_sample": rung.tokens_per_sample,
    }  # fmt: skip
    if rung.plan is None:
        return {**own, "refusal": rung.refusal}
    told = rung.plan.predicted
    interval, faster = told.step_time_interval_ns, ladder.overtaken_by(rung)
    return {
        **own, "plan": f"plans/{rung.name}.json", "how": rung.how, "step_time_ns": told.step_time_ns,
        "step_time_interval_ns": None if interval is None else list(interval), "bound_ns": rung.bound_ns,
        "samples_per_second": rung.samples_s, "tokens_per_second": rung.tokens_s,
        "efficiency": ladder.efficiency(rung), "overtaken_by_devices": None if faster is None else faster.devices,
        "peak_bytes": told.peak_bytes, "limit_bytes": rung.plan.memory_limit,
        "fits_probability": told.fits_probability, "money_per_sample": rung.money_per_sample,
        "state_bytes": rung.state_bytes,
    }  # fmt: skip


def _transitions(ladder: Ladder) -> Iterator[dict[str, Any]]:
    for batch in sorted({rung.global_batch for rung in ladder.rungs}):
        for old, new in permutations(ladder.neighbours(batch), 2):
            found = ladder.transition(old, new)
            yield {
                "from": str(old.mesh), "to": str(new.mesh), "global_batch": batch,
                "wire_bytes": found.moves.total_bytes,
                "most_received_bytes": max(found.moves.received),
                "lost_bytes": found.moves.lost_bytes, "wire_s": found.wire_s, "written_s": found.written_s,
                "read_bytes": sum(found.moves.read_bytes), "read_s": found.read_s,
            }  # fmt: skip


def _capacity(found: Capacity) -> dict[str, Any]:
    needs = found.needs
    return {
        "tokens": needs.tokens, "jobs": needs.jobs, "deadline_hours": needs.deadline, "budget": needs.budget,
        "objective": found.objective, "hours": found.hours, "money": found.money, "proof": found.proof,
        "lacks": found.lacks,
        "taken": [
            {"mesh": str(rung.mesh), "global_batch": rung.global_batch, "meshes": meshes, "jobs": jobs}
            for rung, meshes, jobs in found.taken
        ],
    }  # fmt: skip
