"""Sessions read from JSON, and packings written as JSON, each as a published schema says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from autopar.colocation.packing import HostPacking, PackedHost
from autopar.colocation.sessions import BatchCurve, BatchPoint, HostKind, ServingSession, host_of, request_curve
from autopar.colocation.windows import BatchingWindow
from autopar.errors import PlanError
from autopar.ir import reading

VERSION = 1


class AskedPacking(NamedTuple):
    """What `pack` is called with."""

    sessions: list[ServingSession]
    hosts: list[HostKind]
    percentile: float | None


@lru_cache(maxsize=1)
def sessions_schema() -> Any:
    """The JSON Schema of what is asked (`autopar/colocation/sessions.schema.json`)."""
    return _schema("sessions.schema.json")


@lru_cache(maxsize=1)
def packing_schema() -> Any:
    """The JSON Schema of packings (`autopar/colocation/packing.schema.json`)."""
    return _schema("packing.schema.json")


def _schema(name: str) -> Any:
    return json.loads(files("autopar.colocation").joinpath(name).read_text(encoding="utf-8"))


def read_sessions(path: str | Path) -> AskedPacking:
    """Sessions and hosts of a file; curves that it names by file are read beside it. Raises PlanError where it is not
    as its schema says."""
    path = Path(path)
    data = _parsed(path)
    try:
        reading.validate(data, reading.validator(sessions_schema()))
    except reading.MalformedError as error:
        raise PlanError(f"{path}: {error}") from None
    hosts = [_host(name, own) for name, own in data["hosts"].items()]
    sessions = [
        ServingSession(
            one["name"], one["rate_per_second"], round(one["bound_ms"] * 1e6),
            {kind: _curve(curve, path.parent) for kind, curve in one["curves"].items()},
        )
        for one in data["sessions"]
    ]  # fmt: skip
    percentile = data.get("percentile", 0.99) if data.get("arrivals", "random") == "random" else None
    return AskedPacking(sessions, hosts, percentile)


def _parsed(path: Path) -> Any:
    try:
        return reading.parsed(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"{path}: {error}") from None


def _host(name: str, own: Mapping[str, Any]) -> HostKind:
    """As the file says it; what it does not say of a mesh is its profile's."""
    price, available = own.get("price_per_device_hour"), own.get("available")
    if "capacity_bytes" not in own or "devices" not in own:
        return host_of(name, price, available)
    whole = None if price is None else price * own["devices"]
    return HostKind(name, own["devices"], own["capacity_bytes"], whole, available)


def _curve(own: Any, folder: Path) -> BatchCurve:
    if isinstance(own, list):
        return BatchCurve(tuple(BatchPoint(p["batch"], p["latency_ns"], p.get("peak_bytes", 0)) for p in own))
    points = _parsed(folder / own["file"])
    try:
        return request_curve(points, own.get("prompt_length"), own.get("new_tokens", 0))
    except (TypeError, KeyError, AttributeError) as error:
        raise PlanError(f"{folder / own['file']}: expected a curve.json of a served program, found {error!r}") from None


def packing_json(packing: HostPacking) -> str:
    """The packing as JSON text, ending in a newline."""
    data = {
        "autopar_packing": VERSION, "unit": packing.unit, "cost": packing.cost, "bound": packing.bound,
        "greedy_cost": packing.greedy_cost, "is_proved": packing.is_proved, "percentile": packing.percentile,
        "lacks": list(packing.lacks), "hosts": [_packed(host) for host in packing.hosts],
    }  # fmt: skip
    reading.validate(data, reading.validator(packing_schema()))
    return json.dumps(data, indent=1) + "\n"


def _packed(host: PackedHost) -> dict[str, Any]:
    runs = [{**run._asdict(), "window": None if run.window is None else _window(run.window)} for run in host.runs]
    return {
        "kind": host.kind, "count": host.count, "period_ns": host.period_ns, "busy_share": host.busy_share,
        "peak_bytes": host.peak_bytes, "runs": runs,
    }  # fmt: skip


def _window(window: BatchingWindow) -> dict[str, Any]:
    return {name: getattr(window, name) for name in ("batch", "wait_ns", "worst_ns", "mean_batch", "busy_share")}
