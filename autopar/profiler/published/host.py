"""The host's memory and the link to it, as `measure_gpu` found them: copies of pinned memory, updates there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from autopar.cost.host_memory import HostMemory
from autopar.cost.profile import Profile
from autopar.cost.provenance import Provenance

_COPY_NS = 10_000  # where copies of a few bytes were not measured


def with_host_memory(folder: Path, profile: Profile, date: str) -> Profile:
    """With what the folder's `device.json` says of its host. The one process that was measured had all of the host's
    memory bandwidth: updates get a GPU's part of it. Without such a file, or of an earlier form: as it was."""
    path = folder / "device.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    copies, host = found.get("copies", {}), found.get("host", {})
    if not {"to_device", "from_device"} <= set(copies) or not {"memory_bytes", "gpus", "update"} <= set(host):
        return profile
    gpus = max(1, int(host["gpus"]))
    text = f"pinned copies of 256 MiB and a fused AdamW of the host, shared by {gpus} GPUs, torch {found.get('torch')}"
    memory = HostMemory(
        capacity_bytes=int(host["memory_bytes"]) // gpus,
        down_bandwidth=float(copies["from_device"]),
        up_bandwidth=float(copies["to_device"]),
        copy_ns=round(host["copy_us"] * 1000) if "copy_us" in host else _COPY_NS,
        update_bandwidth=float(host["update"]) / gpus,
        provenance=Provenance("measured", text, date),
    )
    return replace(profile, host_memory=memory, _shared={})
