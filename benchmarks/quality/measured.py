"""Measured on 4 CPU ranks: the plan that the default search finds, beside the templates that are predicted best.

    python -m benchmarks.quality.measured [--models gpt llama moe unet] [--templates 5] [--rounds 9] [--settling 30]

For this host's own `cpu` profile. Of the whole grid of templates (dp × tp × pp × microbatches up to 4 × ZeRO ×
schedule, without recomputation, which nothing here needs), all that fit are predicted, and the `--templates` best of
different predicted step times are emitted and timed in turns with the plan that was found (`benchmarks.side_by_side`).
So the best measured template is that of these; templates that are predicted slower are not run. Where the plan that was
found is one of them, line by line, there is one program, which is timed once: its ratio is that to itself, if no other
is faster.

The fastest of several in a few rounds is in part the luckiest. So the templates within `NEAR` of the fastest and the
plan that was found are timed again, in `--settling` rounds of their own, of which alone the best template and the ratio
are; the rounds that chose who takes part count no more.
Written to measured.json with command, machine and date.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.errors import AutoparError
from autopar.pipeline import planned_jointly, template_of_graph
from autopar.request import Request, SearchBudget
from autopar.trace import trace
from benchmarks.facts import facts, write_record
from benchmarks.quality.run import grid
from benchmarks.side_by_side import ratios, side_by_side
from models import gpt, llama, moe, unet

HERE = Path(__file__).parent
MESH = autopar.Mesh("cpu", devices_per_node=4)
MICROBATCHES = 4
FOUND = "found"
NEAR = 1.05
MODELS: dict[str, tuple[Any, Any]] = {
    "gpt": (gpt, gpt.Config(num_layers=4, hidden_size=256, num_heads=4, seq_len=64, vocab_size=2048)),
    "llama": (llama, llama.Config(num_layers=4, hidden_size=256, mlp_size=768, vocab_size=2048)),
    "moe": (moe, moe.Config(num_layers=4, hidden_size=256, num_heads=4, seq_len=64, vocab_size=2048)),
    "unet": (unet, unet.Config(image_size=16, base_channels=32)),
}


def build(name: str) -> tuple[torch.nn.Module, Any]:
    """The model and its batch."""
    torch.manual_seed(0)
    module, config = MODELS[name]
    return module.build(config), module.example_inputs(config)


def templates(graph: Any, count: int) -> list[tuple[str, autopar.Plan]]:
    """The best of the grid that fit, one for each predicted step time."""
    found: dict[int, tuple[str, autopar.Plan]] = {}
    for choice in grid(MESH):
        if choice["microbatches"] > MICROBATCHES or choice["recompute"] != "none":
            continue
        try:
            plan = template_of_graph(graph, MESH, **choice)
        except AutoparError:
            continue
        if plan.predicted.peak_bytes <= plan.memory_limit:
            text = ", ".join(f"{key}={value}" for key, value in choice.items() if key != "recompute")
            found.setdefault(plan.predicted.step_time_ns, (text, plan))
    return [found[step] for step in sorted(found)[:count]]


def measured(name: str, count: int, rounds: int, settling: int) -> dict[str, Any]:
    """One row."""
    model, batch = build(name)
    graph = trace(model, batch)
    ours = planned_jointly(graph, Request(MESH, "train", "adamw", None, (), SearchBudget()))[1]
    plans = {FOUND: ours, **dict(templates(graph, count))}
    sources = {key: autopar.parallelize(model, MESH, batch, plan=plan).source for key, plan in plans.items()}
    same = next((key for key, source in sources.items() if key != FOUND and source == sources[FOUND]), None)
    own = FOUND if same is None else same
    timed = {key: source for key, source in sources.items() if key == own or key != FOUND}
    times = side_by_side(partial(build, name), timed, MESH.num_devices, rounds)
    near = NEAR * min(times[key].median() for key in times if key != FOUND)
    again = {key: source for key, source in timed.items() if key == own or times[key].median() <= near}
    settled = side_by_side(partial(build, name), again, MESH.num_devices, settling) if len(again) > 1 else times
    best = min((key for key in again if key != FOUND), key=lambda key: settled[key].median())
    over = ratios(settled[own], settled[best])
    return {
        "model": name, "best_template": best, "found_is_template": same, "measured_ratio": statistics.median(over),
        "quartiles": statistics.quantiles(over, n=4),
        "predicted_ms": {key: plan.predicted.step_time_ns / 1e6 for key, plan in plans.items()},
        "measured_ms": {key: found.median() for key, found in times.items()},
        "settled_ms": {key: settled[key].median() for key in again},
        "others": {key: statistics.median(found.others) for key, found in times.items()},
    }  # fmt: skip


def main() -> None:
    """Measures the models, and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--templates", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--settling", type=int, default=30)
    options = parser.parse_args()
    rows = []
    for name in options.models:
        rows.append(measured(name, options.templates, options.rounds, options.settling))
        print(json.dumps(rows[-1], indent=1), flush=True)
    found = {"rounds": options.rounds, "settling": options.settling, "target": 1.03, "rows": rows}
    write_record(HERE / "measured", facts("benchmarks.quality.measured"), found)


if __name__ == "__main__":
    main()
