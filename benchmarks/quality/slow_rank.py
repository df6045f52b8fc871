"""Measured: what planning by speed gains when two of three CPU ranks share a core.

    python -m benchmarks.quality.slow_rank [--rounds 8] [--programs shares stages] [--output FILE]

Needs two cores that do nothing else. Rank 0 has core 0 to itself, ranks 1 and 2 share core 1: two kinds of devices,
planned for as a node with one rank and a node with two. How fast each kind is is measured under that pinning: all three
ranks train a smaller model of the same width at once, each by itself, and the shipped `cpu` profile is scaled to that.

A GPT of twelve blocks is trained in two ways, each in equal parts and by speed:
    shares   three ranks share each batch (data parallel): a third of the rows each, or as many as `split="speed"` finds
    stages   three 1F1B stages of one rank each: four blocks each, or as many as `split="speed"` finds
Sharing a batch is the cleaner of the two: both ranks of core 1 compute all the time. A stage that waits in its bubble
leaves the core to the other one, which then is as fast as rank 0: equal stages suffer less than is predicted.

All programs are built in the same three processes and timed in rounds, in turns of `STEPS` steps each (forward,
backward and AdamW, as the slowest rank needs for them), so that a drift of the machine hits all alike. What other
programs used of the machine meanwhile is noted. A gain is the median over rounds of equal over speed; it counts when in
enough rounds both of its turns were disturbed by at most `QUIET` of the machine, else it is called inconclusive.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import autopar
from autopar import runtime
from autopar.cost import load_profile
from autopar.cost.files import profiles_folder
from autopar.ir.graph import Graph
from autopar.pipeline import template_of_graph
from autopar.trace import trace
from benchmarks.accuracy.cpu import busy_seconds
from benchmarks.facts import facts
from benchmarks.runtime.run import free_port
from models import gpt

CONFIG = gpt.Config(num_layers=12, hidden_size=256, num_heads=4, seq_len=64, vocab_size=512, batch_size=24)
PROBE = replace(CONFIG, num_layers=2, batch_size=8)
ASKED: dict[str, dict[str, Any]] = {
    "shares": {"dp": 3},
    "stages": {"pp": 3, "microbatches": CONFIG.batch_size},
}
SPLITS = ("equal", "speed")
KINDS = ("alone", "sharing")
CORES, STEPS = (0, 1, 1), 2
QUIET, ENOUGH = 0.02, 4  # others' share of the machine in a turn; rounds that are so quiet

Turn = tuple[float, float]
"""Milliseconds a step, and the share of the machine that other programs used."""


# Planning ----------------------------------------


def probe_rank(rank: int, port: int, folder: Path, rounds: int) -> None:
    """Trains the probe on one rank by itself while the others do, and writes its milliseconds a step."""
    _join(rank, port)
    model, batch = gpt.build(PROBE), gpt.example_inputs(PROBE)
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(4):
            model.zero_grad()
            model(**batch).backward()
        times.append((time.perf_counter() - start) / 4 * 1e3)
    (folder / f"probe{rank}.json").write_text(json.dumps(statistics.median(times[1:])))
    dist.barrier()
    dist.destroy_process_group()


def write_profiles(folder: Path, measured_ms: Sequence[float]) -> None:
    """The shipped profile, as fast as each kind was with the probe."""
    data = json.loads((profiles_folder() / "cpu.json").read_text())
    data["facts"]["cores"] = None  # what sharing a core costs is in what was measured
    template = folder / "template.json"
    template.write_text(json.dumps(data))
    predicted_ms = predicted_probe_ms(str(template))
    for kind, ms in zip(KINDS, (measured_ms[0], statistics.mean(measured_ms[1:])), strict=True):
        facts = dict(data["facts"])
        slower = ms / predicted_ms
        facts["peak_flops"] = {dtype: rate / slower for dtype, rate in facts["peak_flops"].items()}
        facts["memory_bandwidth"] = facts["memory_bandwidth"] / slower
        (folder / f"{kind}.json").write_text(json.dumps({**data, "facts": facts}))


def predicted_probe_ms(profile: str) -> float:
    """Forward and backward pass of the probe on one device."""
    load_profile.cache_clear()
    graph = trace(gpt.build(PROBE), gpt.example_inputs(PROBE))
    breakdown = template_of_graph(graph, autopar.Mesh(profile), optimizer=None).predicted.breakdown
    return breakdown.compute_ns / 1e6


def write_programs(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Plans and emits all; by program, the parts of each rank and the predicted milliseconds."""
    mesh = autopar.Mesh([(str(folder / "alone.json"), 1, 1), (str(folder / "sharing.json"), 1, 2)])
    model, batch = gpt.build(CONFIG), gpt.example_inputs(CONFIG)
    graph, found = trace(model, batch), {}
    for name in names:
        for split in SPLITS:
            plan = template_of_graph(graph, mesh, split=split, **ASKED[name])
            (folder / f"{name}_{split}.py").write_text(autopar.parallelize(model, mesh, batch, plan=plan).source)
            found[f"{name}_{split}"] = {
                "parts": _parts(graph, plan), "predicted_ms": plan.predicted.step_time_ns / 1e6
            }  # fmt: skip
    return found


def _parts(graph: Graph, plan: autopar.Plan) -> list[int]:
    """Blocks of each rank's stage, or rows of each rank."""
    if plan.stages:
        blocks = {stage.first_rank: _blocks(plan, stage.nodes) for stage in plan.stages}
        return [blocks[rank] for rank in sorted(blocks)]
    (axis,) = plan.axes
    shares = axis.shares or (1,) * axis.size
    return [CONFIG.batch_size * share // sum(shares) for share in shares]


def _blocks(plan: autopar.Plan, nodes: Any) -> int:
    modules = {plan.scopes[node].split("|")[0] for node in nodes}
    return len({module.split(".")[1] for module in modules if module.startswith("layers.")})


# Measuring ----------------------------------------


def _join(rank: int, port: int) -> None:
    """Pins the rank, and joins the others."""
    warnings.simplefilter("ignore")
    os.sched_setaffinity(0, {CORES[rank]})
    torch.set_num_threads(1)
    runtime.keep_freed_memory()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(len(CORES)))
    dist.init_process_group("gloo")
    torch.manual_seed(0)


def run_rank(rank: int, port: int, folder: Path, rounds: int, names: Sequence[str]) -> None:
    """Times all programs in turns on one rank; rank 0 writes the slowest rank's milliseconds a step."""
    from autopar.program import load_source

    _join(rank, port)
    model, batch = gpt.build(CONFIG), gpt.example_inputs(CONFIG)
    trainers = {}
    for name in names:
        built = runtime.build(load_source((folder / f"{name}.py").read_text()).Program)
        built.init_from(model, broadcast=False)
        trainers[name] = built, torch.optim.AdamW(built.parameters(), lr=1e-4)
    times: dict[str, list[Turn]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, (built, optimizer) in trainers.items():
            times[name].append(_timed(built, optimizer, batch, losses[name]))
        if rank == 0:
            (folder / "times.json").write_text(json.dumps({"times": times, "losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


def _timed(built: Any, optimizer: torch.optim.Optimizer, batch: Any, losses: list[float]) -> Turn:
    """A turn, after one step to warm up."""
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


# Result ----------------------------------------


def gain_of(name: str, times: dict[str, list[Turn]], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Equal over speed, measured round by round, and predicted."""
    pairs = list(zip(*(times[f"{name}_{split}"] for split in SPLITS), strict=True))
    quiet = [pair for pair in pairs if max(others for _, others in pair) <= QUIET]
    counted = quiet if len(quiet) >= ENOUGH else pairs
    ratios = [equal[0] / speed[0] for equal, speed in counted]
    return {
        "measured": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "predicted": rows[f"{name}_equal"]["predicted_ms"] / rows[f"{name}_speed"]["predicted_ms"],
        "quiet_rounds": len(quiet),
        "rounds": len(pairs),
        "is_conclusive": len(quiet) >= ENOUGH,
    }


def main() -> None:
    """Measures the kinds, plans, times, prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--programs", nargs="+", choices=ASKED, default=list(ASKED))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        mp.spawn(probe_rank, (free_port(), folder, 4), nprocs=len(CORES))
        probe_ms = [json.loads((folder / f"probe{rank}.json").read_text()) for rank in range(len(CORES))]
        print(f"probe: {', '.join(f'{ms:.1f}' for ms in probe_ms)} ms a step by rank", flush=True)
        write_profiles(folder, probe_ms)
        rows = write_programs(folder, options.programs)
        mp.spawn(run_rank, (free_port(), folder, options.rounds, list(rows)), nprocs=len(CORES))
        found = json.loads((folder / "times.json").read_text())
    for name, row in rows.items():
        row["measured_ms"] = statistics.median(ms for ms, _ in found["times"][name])
        row["rounds"] = [(round(ms, 1), round(share, 3)) for ms, share in found["times"][name]]
        row["losses"] = found["losses"][name][:3]
        print(f"{name}: by rank {row['parts']}, measured {row['measured_ms']:.1f} ms a step, predicted "
              f"{row['predicted_ms']:.1f}")  # fmt: skip
    gains = {name: gain_of(name, found["times"], rows) for name in options.programs}
    for name, gain in gains.items():
        low, high = gain["range"]
        print(f"{name}: gain measured {gain['measured']:.2f} ({low:.2f} to {high:.2f}), predicted "
              f"{gain['predicted']:.2f}, {gain['quiet_rounds']} of {gain['rounds']} rounds quiet: "
              f"{'conclusive' if gain['is_conclusive'] else 'inconclusive'}")  # fmt: skip
    record = {**facts("benchmarks.quality.slow_rank"), "probe_ms": probe_ms, "gain": gains, "rows": rows}
    options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
