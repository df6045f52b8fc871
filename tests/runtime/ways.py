"""A rank of a job in which the last rank differs from the others in one way."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from autopar import runtime as rt
from autopar.runtime import agreement

WAYS = {
    "another program": "found program.py of rank 0, another on rank 1",
    "another version of torch": r"found torch's version of rank 0, another on rank 1 \(1.13.0\)",
    "another version of Python": r"found Python's version of rank 0, another on rank 1 \(2.7\)",
    "another runtime": "found autopar.runtime of rank 0, another on rank 1",
    "another program file": "found program.py of rank 0, another on rank 1",
    "other weights": "the weights to be equal on all ranks, found .* of rank 0, another on rank 1",
    "another buffer": "the weights to be equal on all ranks, found scale of rank 0, another on rank 1",
    "weights set by hand": r"parameters and buffers to be equal on all ranks, found .* of rank 0, another on rank 1",
    "buffer set by hand": "parameters and buffers to be equal on all ranks, found scale of rank 0, another on rank 1",
    "another batch": "the batch to be equal on all ranks, found x of rank 0, another on rank 1",
    "shuffled batch": "the batch to be equal on all ranks, found x of rank 0, another on rank 1",
    "other targets": "the batch to be equal on all ranks, found y of rank 0, another on rank 1",
    "another shape": "the batch to be equal on all ranks, found x of rank 0, another on rank 1",
    "another dtype": "the batch to be equal on all ranks, found x of rank 0, another on rank 1",
    "another second batch": "the batch to be equal on all ranks, found x of rank 0, another on rank 1",
    "a part for the whole": r"found the value of local of rank 0, another on rank 1 \(True\)",
    "another part of the same rows": "the batch to be equal on all ranks, found x.* of rank 0, another on rank 1",
}
"""By way, what each rank is told."""


def program_of(folder: Path) -> Any:
    """The class of an emitted program."""
    spec = importlib.util.spec_from_file_location("program", folder / "program.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["program"] = module
    spec.loader.exec_module(module)
    return module.Program


def run(folder: Path, way: str) -> None:
    """Builds, loads and takes two steps; whatever is raised is raised here."""
    is_odd = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    odd = way if is_odd else ""
    if odd == "another version of torch":
        torch.__version__ = "1.13.0"  # type: ignore[assignment]
    elif odd == "another version of Python":
        old = SimpleNamespace(major=2, minor=7)
        agreement.sys = SimpleNamespace(version_info=old, modules=sys.modules)  # type: ignore[attr-defined]
    elif odd == "another runtime":
        agreement._runtime_digest = lambda: "other"  # type: ignore[assignment]
    elif odd == "another program file":
        text = (folder / "program.py").read_text().replace("tanh", "sigmoid")
        folder = folder / "changed"
        folder.mkdir(exist_ok=True)
        (folder / "program.py").write_text(text)
    program = program_of(folder / "other" if odd == "another program" else folder)
    rank = rt.build(program, device="cpu", timeout_s=60)
    weights = torch.load(folder / "weights.pt") if (folder / "weights.pt").exists() else {}
    if odd == "other weights":
        weights = {name: value + 1 if value.dim() > 1 else value for name, value in weights.items()}
    elif odd == "another buffer":
        weights["scale"][1] += 1
    rank.init_from(weights, broadcast=False)
    with torch.no_grad():
        if odd == "weights set by hand":
            next(iter(rank.stored_parameters.values())).local.add_(1.0)
        elif odd == "buffer set by hand":
            rank.get_buffer("scale").add_(1.0)
    part = way == "another part of the same rows"
    for step in range(2):
        batch = {"x": torch.ones(8, 8).cumsum(0), "y": torch.ones(8, 8)}
        if odd in ("another batch", "another part of the same rows") or (odd == "another second batch" and step):
            batch["x"][3] += 1
        elif odd == "shuffled batch":
            batch["x"] = batch["x"].flip(0)
        elif odd == "other targets":
            batch["y"][0] = 2
        elif odd == "another shape" or odd == "a part for the whole":
            batch = {name: value[:4] for name, value in batch.items()}
        elif odd == "another dtype":
            batch["x"] = batch["x"].double()
        rank.train_step(**batch, local=part or odd == "a part for the whole")


def tell(variables: Mapping[str, str], folder: Path, way: str, told: Connection) -> None:
    """What a process is for: sends what the rank that these environment variables make of it was told, and after how
    many seconds. folder: program.py, and in `other` that of another plan."""
    os.environ.update(variables)
    os.chdir(folder)
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        run(folder, way)
        told.send("told nothing")
    except rt.ProgramError as error:
        told.send(f"told after {time.monotonic() - began:.1f} s: {error}")
    except BaseException:
        told.send(traceback.format_exc())
