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

All programs are timed in turns (`benchmarks.side_by_side`). A gain is the median over rounds of equal over speed; it
counts when in enough rounds both of its turns were disturbed by at most `QUIET` of the machine, else it is called
inconclusive.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import autopar
from autopar.cost.files import profiles_folder
from autopar.ir.graph import Graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.trace import trace
from benchmarks.facts import facts, write_record
from benchmarks.runtime.run import free_port
from benchmarks.side_by_side import ENOUGH, QUIET, Times, join, leave, ratios, side_by_side
from models import gpt

CONFIG = gpt.Config(num_layers=12, hidden_size=256, num_heads=4, seq_len=64, vocab_size=512, batch_size=24)
PROBE = replace(CONFIG, num_layers=2, batch_size=8)
ASKED: dict[str, dict[str, Any]] = {
    "shares": {"dp": 3},
    "stages": {"pp": 3, "microbatches": CONFIG.batch_size},
}
SPLITS = ("equal", "speed")
KINDS = ("alone", "sharing")
CORES = (0, 1, 1)


# Planning ----------------------------------------


def probe_rank(rank: int, port: int, folder: Path, rounds: int) -> None:
    """Trains the probe on one rank by itself while the others do, and writes its milliseconds a step."""
    join(rank, len(CORES), port, CORES)
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
    leave()


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


def built() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model that is trained, and its batch."""
    return gpt.build(CONFIG), gpt.example_inputs(CONFIG)


def programs(folder: Path, names: Sequence[str]) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """The sources of all; by program, the parts of each rank and the predicted milliseconds."""
    mesh = autopar.Mesh([(str(folder / "alone.json"), 1, 1), (str(folder / "sharing.json"), 1, 2)])
    model, batch = built()
    graph, sources, found = trace(model, batch), {}, {}
    for name in names:
        for split in SPLITS:
            plan = template_of_graph(graph, mesh, split=split, **ASKED[name])
            sources[f"{name}_{split}"] = autopar.parallelize(model, mesh, batch, plan=plan).source
            found[f"{name}_{split}"] = {
                "parts": _parts(graph, plan), "predicted_ms": plan.predicted.step_time_ns / 1e6
            }  # fmt: skip
    return sources, found


def _parts(graph: Graph, plan: autopar.Plan) -> list[int]:
    """Blocks of each rank's stage, or rows of each rank."""
    if len(plan.stages) > 1:
        blocks = {stage.first_rank: _blocks(plan, stage.nodes) for stage in plan.stages}
        return [blocks[rank] for rank in sorted(blocks)]
    (axis,) = plan.stage.axes
    shares = axis.shares or (1,) * axis.size
    return [CONFIG.batch_size * share // sum(shares) for share in shares]


def _blocks(plan: autopar.Plan, nodes: Any) -> int:
    modules = {plan.scopes[node].split("|")[0] for node in nodes}
    return len({module.split(".")[1] for module in modules if module.startswith("layers.")})


# Result ----------------------------------------


def gain_of(name: str, times: Mapping[str, Times], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Equal over speed, measured round by round, and predicted."""
    equal, speed = (times[f"{name}_{split}"] for split in SPLITS)
    pairs = list(zip(ratios(equal, speed), map(max, equal.others, speed.others), strict=True))
    quiet = [ratio for ratio, others in pairs if others <= QUIET]
    counted = quiet if len(quiet) >= ENOUGH else [ratio for ratio, _ in pairs]
    return {
        "measured": statistics.median(counted),
        "range": [min(counted), max(counted)],
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
        sources, rows = programs(folder, options.programs)
        times = side_by_side(built, sources, len(CORES), options.rounds, CORES)
    for name, row in rows.items():
        found = times[name]
        row["measured_ms"] = statistics.median(found.ms)
        row["rounds"] = [(round(ms, 1), round(share, 3)) for ms, share in zip(found.ms, found.others, strict=True)]
        row["losses"] = found.losses[:3]
        print(f"{name}: by rank {row['parts']}, measured {row['measured_ms']:.1f} ms a step, predicted "
              f"{row['predicted_ms']:.1f}")  # fmt: skip
    gains = {name: gain_of(name, times, rows) for name in options.programs}
    for name, gain in gains.items():
        low, high = gain["range"]
        print(f"{name}: gain measured {gain['measured']:.2f} ({low:.2f} to {high:.2f}), predicted "
              f"{gain['predicted']:.2f}, {gain['quiet_rounds']} of {gain['rounds']} rounds quiet: "
              f"{'conclusive' if gain['is_conclusive'] else 'inconclusive'}")  # fmt: skip
    told = facts("benchmarks.quality.slow_rank")
    write_record(options.output, told, {"probe_ms": probe_ms, "gain": gains, "rows": rows})


if __name__ == "__main__":
    main()
