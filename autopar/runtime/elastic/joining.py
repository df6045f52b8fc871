"""Which program is taken by the processes that torchrun has started, and which of them run it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # torch lists no exports

from autopar.runtime.errors import ProgramError, WorldError

FILE = "elastic.json"


@dataclass(frozen=True, slots=True)
class ElasticRung:
    """A program for so many ranks. predicted_s: a step. written_s: a checkpoint."""

    ranks: int
    name: str
    program: Path
    predicted_s: float
    written_s: float


@dataclass(frozen=True, slots=True)
class ElasticSteps:
    """What `elastic.json` says: rungs, of many ranks first, and what a pause is made of: until processes have ended
    (ended_s), lost nodes are missed (noticed_s) and others have met (met_s, and polled_s until each knows it), as
    torchrun is told (`autopar launch --elastic`); bytes a second that a rank receives."""

    rungs: tuple[ElasticRung, ...]
    noticed_s: float
    met_s: float
    ended_s: float
    polled_s: float
    wire_bytes_s: float


def read_steps(folder: Path) -> ElasticSteps:
    """Reads it. Raises ProgramError for a folder that `autopar ladder --elastic` has not written."""
    path = folder / FILE
    try:
        data = json.loads(path.read_text("utf-8"))
        rungs = [
            ElasticRung(
                int(row["ranks"]), str(row["mesh"]), folder / str(row["program"]), float(row["predicted_s"]),
                float(row.get("written_s", 0.0)),
            )
            for row in data["rungs"]
        ]  # fmt: skip
        rest = (float(data[name]) for name in
                ("noticed_s", "met_s", "ended_s", "polled_s", "wire_bytes_s"))  # fmt: skip
        found = ElasticSteps(tuple(sorted(rungs, key=lambda rung: -rung.ranks)), *rest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProgramError(
            f"expected {path} as `autopar ladder --elastic` writes it, found none that can be read: {error!r}"
        ) from error
    if not found.rungs:
        raise ProgramError(f"expected at least one rung in {path}, found none")
    return found


def rung_for(rungs: Sequence[ElasticRung], count: int) -> ElasticRung:
    """The one of most ranks that so many processes are enough for. Raises WorldError where none is."""
    for rung in rungs:
        if rung.ranks <= count:
            return rung
    raise WorldError(
        f"expected at least {rungs[-1].ranks} processes for the smallest rung, {rungs[-1].name}, found {count}; start "
        "torchrun with --nnodes=MIN:MAX of no fewer, or add a smaller mesh to the ladder"
    )


def program_of(rung: ElasticRung) -> Any:
    """The program's class, of the file beside the ladder."""
    name = f"autopar_rung_{rung.ranks}"
    spec = importlib.util.spec_from_file_location(name, rung.program)
    if spec is None or spec.loader is None or not rung.program.is_file():
        raise ProgramError(f"expected the program of {rung.name} at {rung.program}, found none; write the ladder again")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.Program


def store_of_round(rank: int, size: int, timeout_s: float) -> Store | None:
    """The store that the processes of this start share, and no others; None for one process alone.

    Raises ProgramError where torchrun shares one store among all starts: what was lost would be found in it."""
    environment = os.environ
    if size == 1:
        return None
    uses_agents = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if uses_agents and int(environment.get("GROUP_WORLD_SIZE", "1")) > 1:
        raise ProgramError(
            "expected torchrun to make a store for each start of the processes, found one for all, which is lost with "
            "the node that has it, and which nodes that come later do not find; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, as `autopar launch --elastic` does"
        )
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    is_master = rank == 0 and not uses_agents
    store = TCPStore(address, port, size, is_master, timedelta(seconds=timeout_s), wait_for_workers=False)
    # Counts of restarts tell starts apart where one node has them all; nodes count each their own.
    return PrefixStore(f"elastic_{environment.get('TORCHELASTIC_RESTART_COUNT', '0') if uses_agents else 'all'}", store)


def start_program_group(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """torch's own process group, of those that run the program."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, store=PrefixStore("program", store), rank=rank, world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip


def default_folder(checkpoints: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """In the host's memory where there is a file system of it, by run: those that torchrun calls alike, and that keep
    checkpoints in one place."""
    run = f"{environment.get('TORCHELASTIC_RUN_ID', 'none')} {checkpoints.resolve()}"
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    return base / f"autopar-{os.getuid()}-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
