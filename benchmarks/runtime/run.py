"""Times one training step (forward and backward) of emitted programs beside what people use today.

    python -m benchmarks.runtime.run [--pairs dp zero3 tp single] [--rounds 30] [--programs FOLDER]

Each pair is timed interleaved in the same two gloo processes, one thread each: baseline, emitted, baseline, …; a
step is timed from one barrier to the next, with the same weights and the same global batch, no optimizer. Before,
the losses and all gradients of the two are compared. The pairs are
    dp      DistributedDataParallel                      (dp_view: with gradient_as_bucket_view, for information)
    zero3   fully_shard of each layer and of the root
    tp      parallelize_module: column and row pairs in attention and MLP, the embedding by rows, head and loss by
            classes (loss_parallel)
    single  the eager model, on one rank
Programs are planned by `autopar.template_plan`, or read as FOLDER/<pair>.py. Prints for each pair the medians, their
ratio, and the median and quartiles of the rounds' own ratios, which a change of load from outside disturbs less;
writes them to benchmarks/runtime/result.json with command, machine and date.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from models import gpt

CONFIG = gpt.Config(vocab_size=8192, seq_len=128, num_layers=8, hidden_size=512, num_heads=8, batch_size=4)
LIMITS: dict[str, float | None] = {"dp": 1.02, "dp_view": None, "zero3": 1.02, "tp": 1.0, "single": 1.03}
CHOICES: dict[str, dict[str, int]] = {
    "dp": {"dp": 2},
    "dp_view": {"dp": 2},
    "zero3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "single": {},
}
WARM_UP = 3

Step = Callable[[], Tensor]


def write_programs(folder: Path, pairs: list[str]) -> None:
    """Plans and emits the programs that the folder lacks."""
    import autopar

    torch.manual_seed(0)
    model, batch = gpt.build(CONFIG), gpt.example_inputs(CONFIG)
    for pair in pairs:
        path = folder / f"{pair}.py"
        if not path.exists():
            mesh = autopar.Mesh("cpu", devices_per_node=1 if pair == "single" else 2)
            plan = autopar.template_plan(model, mesh, batch, **CHOICES[pair])
            path.write_text(autopar.parallelize(model, mesh, batch, plan=plan).source)


def build_emitted(path: Path, model: nn.Module) -> Any:
    """This rank's part of the emitted program, with the weights of the model."""
    from autopar import runtime
    from autopar.program import load_source

    rank = runtime.build(load_source(path.read_text()).Program)
    rank.init_from(model)
    return rank


def emitted_step(rank: Any, batch: dict[str, Tensor]) -> Step:
    """One step of the emitted program, which takes its shard of the batch itself."""

    def step() -> Tensor:
        rank.zero_grad()
        loss: Tensor = rank.train_step(**batch)
        return loss

    return step


def model_step(model: nn.Module, batch: dict[str, Tensor]) -> Step:
    """One step of a module whose forward returns the loss."""

    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = model(**batch)
        loss.backward()
        return loss.detach()

    return step


def baseline_step(pair: str, model: gpt.GPT, batch: dict[str, Tensor]) -> Step:
    """One step of what the pair is compared with."""
    if pair == "single":
        return model_step(model, batch)
    shard = {name: tensor.chunk(2)[dist.get_rank()] for name, tensor in batch.items()}
    mesh = init_device_mesh("cpu", (2,))
    if pair in ("dp", "dp_view"):
        return model_step(DistributedDataParallel(model, gradient_as_bucket_view=pair == "dp_view"), shard)
    if pair == "zero3":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return model_step(fully_shard(model, mesh=mesh), shard)
    return tensor_parallel_step(model, mesh, batch)


def tensor_parallel_step(model: gpt.GPT, mesh: Any, batch: dict[str, Tensor]) -> Step:
    """Column and row pairs in each layer, split rows of the embedding, split classes in head and loss."""
    layer_plan = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, layer_plan)
    root_plan = {
        "embedding.token": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    step = model_step(parallelize_module(model, mesh, root_plan), batch)

    def with_split_loss() -> Tensor:
        with loss_parallel():
            return step()

    return with_split_loss


def check_equal(pair: str, model: nn.Module, rank: Any, baseline: Step, emitted: Step) -> None:
    """Asserts that both programs have computed the same loss and the same gradients."""
    expected, found = baseline(), emitted()
    expected = expected.full_tensor() if isinstance(expected, DTensor) else expected
    if pair in ("dp", "dp_view", "zero3"):  # each rank's loss is that of its shard
        dist.all_reduce(expected)
        expected = expected / dist.get_world_size()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    gradients = rank.full_gradients()
    for name, parameter in model.named_parameters():
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradients[name], whole, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def timed(step: Step) -> float:
    """Seconds from a barrier, through a step, to the next barrier."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def compare(pair: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Interleaved times of a pair on this rank, in milliseconds."""
    torch.manual_seed(0)
    model, batch = gpt.build(CONFIG), gpt.example_inputs(CONFIG)
    emitted = baseline = lambda: torch.zeros(())
    if pair != "single" or dist.get_rank() == 0:  # the other rank only keeps the barriers
        rank = build_emitted(folder / f"{pair}.py", model)
        emitted, baseline = emitted_step(rank, batch), baseline_step(pair, model, batch)
        check_equal(pair, model, rank, baseline, emitted)
    times: dict[str, list[float]] = {"baseline": [], "emitted": []}
    for index in range(WARM_UP + rounds):
        for name, step in (("baseline", baseline), ("emitted", emitted)):
            seconds = timed(step)
            if index >= WARM_UP:
                times[name].append(seconds * 1e3)
    return summary(times["baseline"], times["emitted"], LIMITS[pair])


def summary(baseline: list[float], emitted: list[float], limit: float | None) -> dict[str, Any]:
    """Medians and ratios of the times of all rounds."""
    medians = statistics.median(baseline), statistics.median(emitted)
    quartiles = statistics.quantiles([e / b for b, e in zip(baseline, emitted, strict=True)], n=4)
    return {
        "baseline_ms": round(medians[0], 2),
        "emitted_ms": round(medians[1], 2),
        "ratio_of_medians": round(medians[1] / medians[0], 4),
        "ratio_by_round": round(quartiles[1], 4),
        "quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "ratio_of_minima": round(min(emitted) / min(baseline), 4),
        "limit": limit,
    }


def run_rank(rank: int, port: int, pairs: list[str], folder: Path, rounds: int, path: str) -> None:
    """Times all pairs on one rank; rank 0 writes what it found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    results = {}
    for pair in pairs:
        results[pair] = compare(pair, folder, rounds)
        gc.collect()
        if rank == 0:
            print(row(pair, results[pair]), flush=True)
    if rank == 0:
        Path(path).write_text(json.dumps(results))
    dist.destroy_process_group()


def row(pair: str, found: dict[str, Any]) -> str:
    """One line of the table."""
    quartiles = " … ".join(f"{ratio:.3f}" for ratio in found["quartiles"])
    limit = "" if found["limit"] is None else f"   at most {found['limit']}"
    return (
        f"{pair:8s} baseline {found['baseline_ms']:8.1f} ms   emitted {found['emitted_ms']:8.1f} ms   medians "
        f"{found['ratio_of_medians']:.3f}   by round {found['ratio_by_round']:.3f} ({quartiles}){limit}"
    )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "load_average": [round(load, 1) for load in os.getloadavg()],  # above 2 × 1 thread: others ran meanwhile
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    """Plans, times, prints, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--programs", type=Path, default=None, help="folder with the programs, by pair")
    parser.add_argument("--result", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.programs or Path(temporary)
        write_programs(folder, options.pairs)
        found = Path(temporary) / "found.json"
        mp.spawn(run_rank, (free_port(), options.pairs, folder, options.rounds, str(found)), nprocs=2)
        results = json.loads(found.read_text())
    record = {
        "command": "python -m benchmarks.runtime.run " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "config": str(CONFIG),
        "rounds": options.rounds,
        "results": results,
    }
    options.result.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
