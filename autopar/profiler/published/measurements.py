"""Tables of measured collectives: a row is one size of one collective among the ranks of one or several nodes.

Columns: gpu, op, gpus, nodes, dtype, message_bytes, time_us, and if there are link and software; `message_bytes` is the
larger one of a rank's input and output. A table of all-reduces inside a node may have the columns of
github.com/VIA-Research/vTrain's instead: gpu, n_gpus, bytes, time_ns_in_place.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

COLUMNS = {"gpu", "op", "gpus", "nodes", "dtype", "message_bytes", "time_us"}
VTRAIN = {"gpu", "n_gpus", "bytes", "time_ns_in_place"}
OTHER_NAMES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
    "sendrecv": "send", "send_recv": "send", "p2p": "send",
}  # fmt: skip
"""Of collectives, as nccl-tests and others call them."""


class Measurement(NamedTuple):
    """One row of a table."""

    gpu: str
    op: str
    ranks: int
    nodes: int
    dtype: str
    num_bytes: int
    time_ns: float
    software: str
    link: str = ""

    @property
    def library(self) -> str:
        """The release of the library that ran it, such as nccl-2.23; empty where it is not stated."""
        found = re.search(r"\bnccl-\d+\.\d+", self.software)
        return found[0] if found else ""


def read_measurements(path: Path) -> list[Measurement]:
    """The rows of a table that have a size and a time. Raises ValueError naming the columns that it lacks."""
    packed = path.read_bytes()
    text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode("utf-8-sig")
    reader = csv.DictReader(io.StringIO(text))
    found = set(reader.fieldnames or ())
    if found >= VTRAIN:
        return [_of_vtrain(row) for row in reader]
    missing = COLUMNS - found
    if missing:
        raise ValueError(f"{path}: expected the columns {sorted(missing)}, found {reader.fieldnames}")
    return [_measurement(row) for row in reader if _is_whole(row)]


def _is_whole(row: Mapping[str, str]) -> bool:
    """Whether a row says a time of a message among ranks that its nodes share evenly: some published figures are of
    bandwidth alone, or of a range of nodes."""
    try:
        gpus, nodes, size, time_us = (float(row[name]) for name in ("gpus", "nodes", "message_bytes", "time_us"))
    except (TypeError, ValueError):
        return False
    is_even = 1 <= nodes <= gpus < math.inf and nodes % 1 == 0 and gpus % nodes == 0
    return is_even and 0 < size < math.inf and 0 < time_us < math.inf


def _measurement(row: Mapping[str, str]) -> Measurement:
    counts = int(float(row["gpus"])), int(float(row["nodes"]))
    size, time_ns = round(float(row["message_bytes"])), 1000 * float(row["time_us"])
    gpu, op, dtype, software, link = (
        (row.get(name) or "").strip() for name in ("gpu", "op", "dtype", "software", "link")
    )
    return Measurement(gpu, OTHER_NAMES.get(op.lower(), op), *counts, dtype, size, time_ns, software, link)


def _of_vtrain(row: Mapping[str, str]) -> Measurement:
    counts = int(row["n_gpus"]), int(row["bytes"]), float(row["time_ns_in_place"])
    return Measurement(row["gpu"], "all_reduce", counts[0], 1, "float32", *counts[1:], "NCCL in place, vTrain")


def named(rows: Sequence[Measurement]) -> str:
    """The software that measured them."""
    return ", ".join(sorted({f"{row.software} {row.dtype}".strip() for row in rows}))


def today() -> str:
    """As provenance has it."""
    return datetime.date.today().isoformat()
