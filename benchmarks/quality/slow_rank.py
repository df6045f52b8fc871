"""Measured: what sizing stages by speed gains when two of three CPU ranks share a core.

    python -m benchmarks.quality.slow_rank [--rounds 8] [--output FILE]

Rank 0 has core 0 to itself, ranks 1 and 2 share core 1: two kinds of devices, planned for as a node of one core with
one rank and a node of one core with two (the shipped `cpu` template, of which only ratios matter here). A GPT of twelve
blocks is trained in three 1F1B stages of one rank each: of four blocks each, and sized by speed. Both programs are
built in the same three processes and timed in turns of `STEPS` steps, forward, backward and AdamW, as the slowest rank
needs for them; what other programs used of the machine meanwhile is noted. Compared are the medians of the third of the
rounds in which that was least.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import autopar
from autopar import runtime
from autopar.cost.files import profiles_folder
from autopar.pipeline import template_of_graph
from autopar.trace import trace
from benchmarks.accuracy.cpu import busy_seconds
from benchmarks.runtime.run import free_port, machine
from models import gpt

CONFIG = gpt.Config(num_layers=12, hidden_size=256, num_heads=4, seq_len=64, vocab_size=512, batch_size=16)
SPLITS = ("equal", "speed")
CORES, STEPS = (0, 1, 1), 2


def write_programs(folder: Path) -> dict[str, dict[str, Any]]:
    """Plans and emits both; blocks by rank and the predicted milliseconds of each."""
    data = json.loads((profiles_folder() / "cpu.json").read_text())
    data["facts"]["cores"] = 1
    for kind in ("alone", "sharing"):
        (folder / f"{kind}.json").write_text(json.dumps(data))
    mesh = autopar.Mesh([(str(folder / "alone.json"), 1, 1), (str(folder / "sharing.json"), 1, 2)])
    model, batch = gpt.build(CONFIG), gpt.example_inputs(CONFIG)
    graph, found = trace(model, batch), {}
    for split in SPLITS:
        plan = template_of_graph(graph, mesh, pp=3, microbatches=CONFIG.batch_size, split=split)
        (folder / f"{split}.py").write_text(autopar.parallelize(model, mesh, batch, plan=plan).source)
        blocks = {stage.first_rank: _blocks(plan, stage.nodes) for stage in plan.stages}
        found[split] = {
            "blocks": [blocks[r] for r in sorted(blocks)],
            "predicted_ms": plan.predicted.step_time_ns / 1e6,
        }
    return found


def _blocks(plan: autopar.Plan, nodes: Any) -> int:
    modules = {plan.scopes[node].split("|")[0] for node in nodes}
    return len({module.split(".")[1] for module in modules if module.startswith("layers.")})


def run_rank(rank: int, port: int, folder: Path, rounds: int) -> None:
    """Times both programs in turns on one rank; rank 0 writes the slowest rank's milliseconds a step."""
    from autopar.program import load_source

    warnings.simplefilter("ignore")
    os.sched_setaffinity(0, {CORES[rank]})
    torch.set_num_threads(1)
    runtime.keep_freed_memory()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(len(CORES)))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, batch = gpt.build(CONFIG), gpt.example_inputs(CONFIG)
    trainers = {}
    for split in SPLITS:
        built = runtime.build(load_source((folder / f"{split}.py").read_text()).Program)
        built.init_from(model, broadcast=False)
        trainers[split] = built, torch.optim.AdamW(built.parameters(), lr=1e-4)
    times: dict[str, list[tuple[float, float]]] = {split: [] for split in SPLITS}
    losses: dict[str, list[float]] = {split: [] for split in SPLITS}
    for _ in range(rounds):
        for split, (built, optimizer) in trainers.items():
            times[split].append(_timed(built, optimizer, batch, losses[split]))
    if rank == 0:
        (folder / "times.json").write_text(json.dumps({"times": times, "losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


def _timed(built: Any, optimizer: torch.optim.Optimizer, batch: Any, losses: list[float]) -> tuple[float, float]:
    """Milliseconds a step after one to warm up, and the share of the machine that other programs used."""
    _step(built, optimizer, batch, losses)
    dist.barrier()
    busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
    for _ in range(STEPS):
        _step(built, optimizer, batch, losses)
    elapsed, together = torch.tensor([time.perf_counter() - start]), torch.tensor([time.process_time() - own])
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    dist.all_reduce(together)
    others = (busy_seconds() - busy - together.item()) / elapsed.item() / (os.cpu_count() or 1)
    return elapsed.item() / STEPS * 1e3, max(0.0, others)


def _step(built: Any, optimizer: torch.optim.Optimizer, batch: Any, losses: list[float]) -> None:
    optimizer.zero_grad()
    losses.append(built.train_step(**batch).item())
    optimizer.step()


def main() -> None:
    """Plans, times, prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_programs(folder)
        mp.spawn(run_rank, (free_port(), folder, options.rounds), nprocs=len(CORES))
        found = json.loads((folder / "times.json").read_text())
    for split, row in rows.items():
        quiet = sorted(found["times"][split], key=lambda item: item[1])[: -(-options.rounds // 3)]
        row["measured_ms"] = statistics.median(ms for ms, _ in quiet)
        row["others"] = statistics.median(share for _, share in quiet)
        row["rounds"] = [(round(ms, 1), round(share, 3)) for ms, share in found["times"][split]]
        row["losses"] = found["losses"][split][:3]
        print(f"{split}: blocks by rank {row['blocks']}, measured {row['measured_ms']:.1f} ms a step "
              f"(others used {row['others']:.0%} of the machine), predicted {row['predicted_ms']:.1f}")  # fmt: skip
    gains = {what: rows["equal"][f"{what}_ms"] / rows["speed"][f"{what}_ms"] for what in ("measured", "predicted")}
    print(f"gain: measured {gains['measured']:.2f}, predicted {gains['predicted']:.2f}")
    record = {"command": "python -m benchmarks.quality.slow_rank", "date": str(datetime.date.today()),
              "machine": machine(), "gain": gains, "rows": rows}  # fmt: skip
    options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
