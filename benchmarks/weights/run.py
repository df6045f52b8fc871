"""What a rank takes of memory to load a checkpoint of 2 GB over 4 ranks, beside its own share of the weights.

    python -m benchmarks.weights.run [--folder FOLDER]

Four layers with the shapes of Llama-3-8B's and an embedding and a head of 32,000 rows, 1.1 billion bfloat16 parameters,
are stored as tensor parallelism stores them, and as ZeRO-3 does. Their weights are two safetensors files with an index;
each rank checks every element of its own. Peaks are the kernel's (VmHWM, with the pages of files that are mapped),
against what the process had before it built its part of the program. Writes results.md.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from autopar import runtime as rt
from benchmarks.facts import facts
from tests.rank_pool import RankPool

HERE = Path(__file__).parent
WORLD = 4
WIDTH, INNER, KEYS, ROWS, LAYERS = 4096, 14_336, 1024, 32_000, 4
#: each parameter's shape, and how tensor parallelism stores it
LAYER = {
    "q": ((WIDTH, WIDTH), "S(0)"), "k": ((KEYS, WIDTH), "S(0)"), "v": ((KEYS, WIDTH), "S(0)"),
    "o": ((WIDTH, WIDTH), "S(1)"), "gate": ((INNER, WIDTH), "S(0)"), "up": ((INNER, WIDTH), "S(0)"),
    "down": ((WIDTH, INNER), "S(1)"), "norm": ((WIDTH,), "I"),
}  # fmt: skip
SHAPES = {f"layer_{number}_{name}": told for number in range(LAYERS) for name, told in LAYER.items()}
SHAPES |= {"embedding": ((ROWS, WIDTH), "S(0)"), "head": ((ROWS, WIDTH), "S(0)")}
PLANS = ("tp=4", "dp=4, zero=3")


def program(plan: str, names: Collection[str] = SHAPES) -> type[rt.Program]:
    """A program that stores parameters, and does nothing with them."""

    class Stores(rt.Program):
        AXES = {"axis": WORLD}  # noqa: RUF012

        def __init__(self, mesh: rt.RankMesh) -> None:
            super().__init__(mesh)
            for name in names:
                shape, stored = SHAPES[name]
                placed = stored if plan == "tp=4" else "S(0)"
                setattr(self, name, rt.Parameter(shape, torch.bfloat16, stored=placed, uses=(placed,)))

    return Stores


def write(folder: Path) -> int:
    """Writes the weights in two files; returns their bytes."""
    from safetensors.torch import save_file

    names, files, total = list(SHAPES), {}, 0
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        tensors = {name: values(name, tuple(slice(0, size) for size in SHAPES[name][0])) for name in part}
        save_file(tensors, folder / file)
        files |= dict.fromkeys(part, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return total


def values(name: str, region: tuple[slice, ...]) -> Tensor:
    """A slice of a tensor whose elements follow from its name and where they are."""
    seed = sum(name.encode()) % 97
    first, *rest = (torch.arange(part.start, part.stop, dtype=torch.int16) for part in region)
    rows = (first % 127 + seed).to(torch.bfloat16)
    return rows if not rest else rows[:, None] + (rest[0] % 29).to(torch.bfloat16)


def load(number: int, world: int, plan: str, folder: Path) -> dict[str, float]:
    """On each rank: builds, loads, and checks every element. Bytes and seconds."""
    from autopar.runtime.placement import local_slices

    rt.build(program(plan, ["layer_0_norm"]))  # groups and what is imported late are no share of the weights
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    begin = time.perf_counter()
    rank = rt.build(program(plan))
    told = rank.load_safetensors(folder)
    seconds = time.perf_counter() - begin
    peak = _memory("VmHWM") - before
    stored = rank.stored_parameters
    share = sum(item.local.nbytes for item in stored.values())
    for name, item in stored.items():
        expected = values(name, local_slices(item.declared.shape, item.types, item.mesh.axes))
        assert torch.equal(item.local, expected), name
    return {"share": share, "peak": peak, "read": told.read_bytes, "seconds": seconds}


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main(folder: Path) -> None:
    """Writes results.md."""
    total, lines, pool = write(folder), [], RankPool(WORLD, timeout_s=900)
    for plan in PLANS:
        for number, one in enumerate(pool.run(load, plan, folder)):
            figures = " | ".join(f"{one[key] / 1e6:.1f}" for key in ("share", "read", "peak"))
            lines.append(
                f"| {plan} | {number} | {figures} | {one['peak'] / one['share'] - 1:+.1%} | {one['seconds']:.1f} |"
            )
    pool.stop()
    told = facts("benchmarks.weights.run")
    text = [
        "# Memory of a rank that loads a checkpoint", "", f"`{told['command']}`, {told['machine']}, {told['date']}", "",
        f"{total / 1e9:.2f} GB of safetensors in two files, over {WORLD} ranks of one machine, in MB. Peak: the",
        "kernel's, over what the process had before. Every element is checked against what was written.", "",
        "| stored as | rank | own share | read | peak | more than its share | seconds |",
        "|---|---|---|---|---|---|---|", *lines,
    ]  # fmt: skip
    (HERE / "results.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for the checkpoint; else a temporary one")
    given = parser.parse_args().folder
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        main(given or Path(temporary))
