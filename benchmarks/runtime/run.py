"""Times one training step (forward and backward) of emitted programs beside what people use today.

    python -m benchmarks.runtime.run [--pairs dp zero3 tp single] [--rounds 30] [--alike] [--programs FOLDER]

Each program has two gloo processes of its own, one thread each, as its users run it: in one process, either would
find the memory that the other leaves, and their page faults differ by thousands a step. Programs take
turns, baseline, emitted, emitted, baseline, …, while the others' processes wait. The emitted one keeps its freed
memory, as train.py does; with --alike the baseline's processes do so, too. A step is timed from one barrier to
the next, with the same weights and the same global batch, no optimizer. Before, the losses and all gradients of the
two are compared. The pairs are
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
import json
import os
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

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

from autopar import runtime
from autopar.profiler.host import cpu_model
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


class Outcome(NamedTuple):
    """What a program's first step gave on a rank: its loss, and the whole gradients by parameter."""

    loss: Tensor
    gradients: dict[str, Tensor]


def first_outcome(pair: str, model: nn.Module, step: Step, rank: Any) -> Outcome:
    """Runs a step of the baseline, or of the emitted program if there is a `rank`."""
    loss = whole(step())
    if rank is not None:
        return Outcome(loss, rank.full_gradients())
    if pair in ("dp", "dp_view", "zero3"):  # each rank's loss is that of its shard
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return Outcome(loss, {name: whole(parameter.grad) for name, parameter in model.named_parameters()})


def whole(tensor: Tensor | None) -> Tensor:
    """The whole of a DTensor, or the tensor itself."""
    assert tensor is not None, "a parameter has no gradient"
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_equal(baseline: Outcome, emitted: Outcome) -> None:
    """Asserts that both programs have computed the same loss and the same gradients."""
    torch.testing.assert_close(emitted.loss, baseline.loss, rtol=1e-4, atol=1e-5)
    assert emitted.gradients.keys() == baseline.gradients.keys()
    for name, gradient in baseline.gradients.items():
        close = {"rtol": 1e-3, "atol": 1e-5, "msg": lambda text, name=name: f"{name}: {text}"}
        torch.testing.assert_close(emitted.gradients[name], gradient, **close)


def timed(step: Step) -> float:
    """Seconds from a barrier, through a step, to the next barrier."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def serve(
    rank: int, port: int, world: int, side: str, pair: str, folder: Path, keeps_memory: bool, pipe: Connection
) -> None:
    """One rank of one side: sends its first outcome, then the seconds of a step for each message, until None."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, batch = gpt.build(CONFIG), gpt.example_inputs(CONFIG)
    if keeps_memory:
        runtime.keep_freed_memory()
    built = build_emitted(folder / f"{pair}.py", model) if side == "emitted" else None
    step = baseline_step(pair, model, batch) if built is None else emitted_step(built, batch)
    outcome = first_outcome(pair, model, step, built)
    pipe.send(outcome if rank == 0 else None)
    while pipe.recv() is not None:
        pipe.send(timed(step))
    dist.destroy_process_group()


class Side:
    """The processes of one program; they wait while the other's run."""

    def __init__(self, side: str, pair: str, folder: Path, keeps_memory: bool) -> None:
        world, port, context = 1 if pair == "single" else 2, free_port(), mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, port, world, side, pair, folder, keeps_memory, theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def answers(self) -> list[Any]:
        """What each rank sends next."""
        return [pipe.recv() for pipe in self.pipes]

    def tell(self, message: str | None) -> None:
        """Sends a message to each rank."""
        for pipe in self.pipes:
            pipe.send(message)

    def milliseconds(self) -> float:
        """Of one step, as the first rank sees it."""
        self.tell("step")
        return float(self.answers()[0]) * 1e3

    def stop(self) -> None:
        """Ends the processes."""
        self.tell(None)
        for process in self.processes:
            process.join()


def compare(pair: str, folder: Path, rounds: int, alike: bool) -> dict[str, Any]:
    """Interleaved times of a pair, in milliseconds, after a check that both sides compute the same."""
    sides = {
        "baseline": Side("baseline", pair, folder, keeps_memory=alike),
        "emitted": Side("emitted", pair, folder, keeps_memory=True),
    }
    check_equal(*(side.answers()[0] for side in sides.values()))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(WARM_UP + rounds):
        for name in list(sides)[:: 1 if index % 2 else -1]:  # neither always comes first
            taken = sides[name].milliseconds()
            if index >= WARM_UP:
                times[name].append(taken)
    for side in sides.values():
        side.stop()
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
    return {
        "cpu": cpu_model(),
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
    parser.add_argument("--alike", action="store_true", help="the baseline keeps its freed memory, too")
    parser.add_argument("--programs", type=Path, default=None, help="folder with the programs, by pair")
    parser.add_argument("--result", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.programs or Path(temporary)
        write_programs(folder, options.pairs)
        results = {}
        for pair in options.pairs:
            results[pair] = compare(pair, folder, options.rounds, options.alike)
            print(row(pair, results[pair]), flush=True)
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
