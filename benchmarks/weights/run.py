"""What a rank takes of memory to load a checkpoint of 2 GB over 4 ranks, beside its own share of the weights.

    python -m benchmarks.weights.run [--folder FOLDER]

Four layers of Llama-3-8B with a vocabulary of 32,000, 1.1 billion bfloat16 parameters, are planned on the meta device,
by tensor parallelism and by ZeRO-3. Their weights are written as two safetensors files with an index, of bytes that
each rank checks afterwards.
Peaks are the kernel's (VmHWM, with the pages of files that are mapped), against what the process had before it built
its part of the program. Writes results.md.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.facts import facts
from tests.rank_pool import RankPool

HERE = Path(__file__).parent
WORLD = 4
PLANS: dict[str, dict[str, Any]] = {"tp=4": {"tp": 4}, "dp=4, zero=3": {"dp": 4, "zero": 3}}


def planned(**choices: Any) -> str:
    """The program of a template's plan for such a model, on the meta device."""
    import transformers

    import autopar

    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14_336, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32_000, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        batch = {name: torch.zeros(4, 128, dtype=torch.int64) for name in ("input_ids", "labels")}
    mesh = autopar.Mesh("cpu", devices_per_node=WORLD)
    plan = autopar.template_plan(model, mesh, batch, **choices)
    return autopar.parallelize(model, mesh, batch, plan=plan).source


def written(source: str, folder: Path) -> int:
    """Writes the program's weights in two files, in the model's names; returns their bytes."""
    from safetensors.torch import save_file

    from autopar.program import load_source
    from autopar.runtime.declare import Program
    from autopar.runtime.local import declared_tensors
    from autopar.runtime.mesh import RankMesh

    program: type[Program] = load_source(source).Program
    mesh = RankMesh(tuple(_alone(program)), None, torch.device("cpu"))
    shapes = {
        name: holder.declared_parameters[attribute].shape
        for name, holder, attribute in declared_tensors(program(mesh))
        if attribute in holder.declared_parameters
    }
    names, files, total = list(shapes), {}, 0
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        tensors = {name: value_of(name, shapes[name]) for name in part}
        save_file(tensors, folder / file)
        files |= dict.fromkeys(part, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return total


def _alone(program: Any) -> Any:
    from autopar.runtime.mesh import Axis

    return (Axis(name, size, 0, None) for name, size in program.AXES.items())


def value_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose elements follow from its name and where they are."""
    seed = sum(name.encode()) % 97
    rows = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)) % 128
    columns = torch.arange(shape[-1]) % 251 if len(shape) > 1 else torch.zeros(1)
    return ((rows + columns + seed) % 256).to(torch.bfloat16).expand(shape).contiguous()


def load(number: int, world: int, source: str, folder: Path) -> dict[str, float]:
    """On each rank: builds, loads, and checks every element. Bytes."""
    from autopar import runtime as rt
    from autopar.program import load_source

    program = load_source(source).Program
    rt.build(program)  # process groups and what is imported late are no share of the weights
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    begin = time.perf_counter()
    rank = rt.build(program)
    told = rank.load_safetensors(folder)
    seconds = time.perf_counter() - begin
    peak = _memory("VmHWM") - before
    share = sum(item.local.nbytes for item in rank.stored_parameters.values())
    for name, item in rank.stored_parameters.items():
        from autopar.runtime.placement import local_slices

        whole = value_of(name, tuple(item.declared.shape))
        assert torch.equal(item.local, whole[local_slices(item.declared.shape, item.types, item.mesh.axes)]), name
    return {"share": share, "peak": peak, "read": told.read_bytes, "seconds": seconds}


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main(folder: Path) -> None:
    """Writes results.md."""
    lines, total = [], 0
    for name, choices in PLANS.items():
        source = planned(**choices)
        print(f"planned {name}", flush=True)
        total = total or written(source, folder)
        pool = RankPool(WORLD, timeout_s=500)
        found = pool.run(load, source, folder)
        pool.stop()
        for number, one in enumerate(found):
            more = one["peak"] / one["share"] - 1
            lines.append(
                f"| {name} | {number} | {one['share'] / 1e6:.1f} | {one['read'] / 1e6:.1f} | {one['peak'] / 1e6:.1f} | "
                f"{more:+.1%} | {one['seconds']:.1f} |"
            )
    told = facts("benchmarks.weights.run")
    text = [
        "# Memory of a rank that loads a checkpoint", "", f"`{told['command']}`, {told['machine']}, {told['date']}", "",
        f"{total / 1e9:.2f} GB of safetensors in two files, over {WORLD} ranks of one machine, in MB. Peak: of the",
        "kernel, over what the process had before. Every element is checked against what was written.", "",
        "| plan | rank | own share | read | peak | more than its share | seconds |",
        "|---|---|---|---|---|---|---|",
        *lines,
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
