"""Predicted throughput on unequal devices: the plan that is found beside the best of all equal splits.

    python -m benchmarks.quality.heterogeneous [--output FOLDER] [--only MODEL]

Mesh: a node of 8 A100 and a node of 8 V100. Models: GPTs in float16 with float32 master weights, on meta tensors.
An equal split gives every device the same share of the work. Tried are all of
    pp > 1   stages of equally many blocks on dp × tp devices of one kind each, in pp to 8·pp microbatches (powers of
             two), ZeRO stages 0 and 1, 1F1B, recomputation where it does not fit without
    pp = 1   dp × tp over all 16, as many rows for each: whoever is faster waits for the others; in 1 to 16 microbatches
The plan found is that of the search that `autopar.parallelize` makes for such meshes, within 20 s (on a machine that
does nothing else): the better of unequal shares of each batch (one stage) and of stages of one kind each. Nothing is
measured: profiles and links are the shipped ones, and links between the kinds are those of the slower.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.errors import InfeasibleError, PlanError
from autopar.ir import verifier
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import divisible
from autopar.ops import admits
from autopar.pipeline import placed, template_of_graph
from autopar.request import Request, SearchBudget
from autopar.show.text import share_lines
from autopar.trace import trace
from models import gpt

KINDS = ("a100", "v100")
MODELS = {
    "GPT-1.3B": gpt.Config(
        num_layers=24, hidden_size=2048, num_heads=16, seq_len=1024, vocab_size=51200, batch_size=128
    ),
    "GPT-2.6B": gpt.Config(
        num_layers=32, hidden_size=2560, num_heads=32, seq_len=1024, vocab_size=51200, batch_size=256
    ),
}
TARGET, SECONDS = 1.2, 20.0


def half(config: gpt.Config) -> tuple[torch.nn.Module, Any]:
    """The model in float16 on the meta device, and a batch."""
    with torch.device("meta"):
        model = gpt.build(config).to(torch.float16)
    return model, gpt.example_inputs(config)


def equal_splits(graph: Graph, num_layers: int) -> Iterator[dict[str, Any]]:
    """What to ask `template_of_graph` for."""
    for pp, tp, zero in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8), (0, 1)):
        fits = tp * pp <= 16 and num_layers % pp == 0 and (pp == 1 or 16 // pp >= tp)
        for count in (pp << n for n in range(5 if pp == 1 else 4)):
            if fits and divisible(graph, count):
                yield {"dp": 16 // pp // tp, "tp": tp, "pp": pp, "zero": zero, "microbatches": count}


def planned(graph: Graph, mesh: autopar.Mesh, asked: dict[str, Any]) -> Plan | None:
    """The template, recomputing only what makes it fit; None where it does not, or cannot be."""
    for recompute in ("none", "block", "full"):
        try:
            return template_of_graph(graph, mesh, optimizer="adamw_master", recompute=recompute, **asked)
        except InfeasibleError:
            continue
        except PlanError:
            return None
    return None


def blocks_of(plan: Plan) -> list[int]:
    """How many blocks each stage has."""
    modules = ({plan.scopes[node].split("|")[0] for node in stage.nodes} for stage in plan.stages)
    return [len({m.split(".")[1] for m in own if m.startswith("layers.")}) for own in modules]


def parts_of(plan: Plan) -> list[str]:
    """What each stage, or each kind of rank that shares the batch, has."""
    if len(plan.stages) == 1:
        return [line.split(": ", 1)[1] for line in share_lines(plan)] or ["equal shares"]
    return [
        f"{stage.ranks.start}-{stage.ranks.stop - 1}: {blocks} blocks"
        for stage, blocks in zip(plan.stages, blocks_of(plan), strict=True)
    ]


def best_of(plan: Plan, kind: str) -> float | None:
    """The least milliseconds of what the search has tried of one kind."""
    tried = [row.step_time_ns for row in plan.search.tried if row.setting is not None and row.setting.startswith(kind)]
    return min((time_ns / 1e6 for time_ns in tried if time_ns), default=None)


def row(name: str, config: gpt.Config) -> dict[str, Any]:
    """One model: the best equal split, the plan found, and their ratio."""
    model, batch = half(config)
    graph = trace(model, batch)
    began, best, count = time.perf_counter(), None, 0
    mesh = autopar.Mesh([(kind, 1, 8) for kind in KINDS])
    for asked in equal_splits(graph, config.num_layers):
        plan = planned(graph, mesh, asked)
        count += 1
        if plan is not None and (best is None or plan.predicted.step_time_ns < best[0].predicted.step_time_ns):
            best = plan, asked
        print(f"{name} {asked}: {'none' if plan is None else plan.predicted.step_time_ns / 1e6}", flush=True)
    assert best is not None, "some equal split fits"
    middle = time.perf_counter()
    request = Request(mesh, "train", "adamw_master", None, (), SearchBudget(SECONDS))
    found = placed(graph, request)
    verifier.verify(graph, found, admits)
    return {
        "model": name,
        "equal": best[1],
        "equal_ms": best[0].predicted.step_time_ns / 1e6,
        "equal_splits": count,
        "equal_seconds": round(middle - began, 1),
        "found": parts_of(found),
        "found_microbatches": found.microbatches,
        "found_axes": [[a.size for a in stage.axes if a.name != "microbatch"] for stage in found.stages],
        **{f"{kind}_ms": best_of(found, kind) for kind in ("shares", "stages")},
        "found_ms": found.predicted.step_time_ns / 1e6,
        "found_seconds": round(time.perf_counter() - middle, 1),
        "gain": best[0].predicted.step_time_ns / found.predicted.step_time_ns,
    }  # fmt: skip


def table(rows: list[dict[str, Any]], stamp: str) -> str:
    """The result as markdown."""
    lines = [
        "# Unequal devices: 8 A100 and 8 V100",
        "",
        f"`python -m benchmarks.quality.heterogeneous`, {stamp}. Predicted, not measured; throughput of the plan found",
        f"over that of the best equal split (target {TARGET}).",
        "",
        "| model | best equal split | ms | plan found | ms | gain | best shares | best stages |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        equal = ", ".join(f"{key}={value}" for key, value in r["equal"].items())
        found = "; ".join(r["found"]) + f"; {r['found_microbatches']} microbatches"
        lines.append(
            f"| {r['model']} | {equal} (best of {r['equal_splits']}) | {r['equal_ms']:.0f} | {found} | "
            f"{r['found_ms']:.0f} | {r['gain']:.2f} | {_ms(r['shares_ms'])} | {_ms(r['stages_ms'])} |"
        )
    return "\n".join(lines) + "\n"


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value:.0f}"


def main() -> None:
    """Runs all models, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--only", choices=MODELS, help="renews one row of the results")
    options = parser.parse_args()
    output, file = options.output, options.output / "heterogeneous.json"
    known = json.loads(file.read_text())["rows"] if file.exists() and options.only else []
    made = {r["model"]: r for r in known} | {
        name: row(name, config) for name, config in MODELS.items() if options.only in (None, name)
    }
    rows = [made[name] for name in MODELS if name in made]
    stamp = f"{datetime.date.today()}, {platform.machine()}, torch {torch.__version__}"
    file.write_text(json.dumps({"stamp": stamp, "rows": rows}, indent=1) + "\n")
    (output / "heterogeneous.md").write_text(table(rows, stamp))
    print(table(rows, stamp))


if __name__ == "__main__":
    main()
