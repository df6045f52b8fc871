"""The plan that the search finds beside the best of the whole grid of templates, by predicted step time.

    python -m benchmarks.quality.run [--pair NAME] [--seconds 120]

For each (model, mesh): every dp × tp × pp of powers of two, 1, 2, 4, … microbatches up to `MICROBATCHES`, ZeRO 0, 1
and 3, no and full recomputation, and every schedule, as `autopar.template_plan` makes them, on one trace. Only those
that fit count. Templates are run in the order of what each takes at least (`bound.py`), until the next cannot be
faster than the best that fits: then that is the best of the whole grid, whatever was not run. Where that takes longer
than `--seconds` a pair, the table says so. Models are on the meta device; profiles a100, h100 and v100 are data sheets
and published points, cpu was measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.errors import AutoparError
from autopar.ir import verifier
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.schedule import SCHEDULES
from autopar.ops import admits
from autopar.pipeline import planned, template_of_graph
from autopar.request import Request, SearchBudget
from autopar.trace import trace
from benchmarks.facts import facts
from benchmarks.quality.bound import Bound
from models import dit, gpt, llama, mlp, moe, unet, wide_resnet

MICROBATCHES = 32
SEARCH_SECONDS = 40.0  # at most; of the wall, on a machine that may be busy
HERE = Path(__file__).parent
Pair = tuple[Callable[[], tuple[Any, Any]], autopar.Mesh]


def _built(module: Any, **sizes: Any) -> Callable[[], tuple[Any, Any]]:
    def build() -> tuple[Any, Any]:
        config = module.Config(**sizes)
        with torch.device("meta"):
            model = module.build(config)
        inputs = module.example_inputs(config)
        return model, torch.utils._pytree.tree_map(lambda tensor: tensor.to("meta"), inputs)

    return build


_GPT = {"num_layers": 8, "hidden_size": 512, "num_heads": 8, "seq_len": 256, "vocab_size": 8192, "batch_size": 32}
_WIDE = {"num_layers": 8, "hidden_size": 4096, "num_heads": 32, "seq_len": 1024, "vocab_size": 32_000}
_LLAMA = {"num_layers": 8, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 8, "mlp_size": 5632, "seq_len": 1024,
          "vocab_size": 32_000}  # fmt: skip
PAIRS: dict[str, Pair] = {
    "gpt, 4 cpu": (_built(gpt, **_GPT), autopar.Mesh("cpu", devices_per_node=4)),
    "llama, 4 cpu": (_built(llama, num_layers=4, hidden_size=256, mlp_size=768, vocab_size=4096, batch_size=16),
                     autopar.Mesh("cpu", devices_per_node=4)),
    "moe, 4 cpu": (_built(moe, num_layers=4, hidden_size=256, num_heads=8, seq_len=64, vocab_size=4096, batch_size=16),
                   autopar.Mesh("cpu", devices_per_node=4)),
    "mlp, 4 cpu": (_built(mlp), autopar.Mesh("cpu", devices_per_node=4)),
    "unet, 4 cpu": (_built(unet, image_size=16, base_channels=32), autopar.Mesh("cpu", devices_per_node=4)),
    "wide_resnet, 8 a100": (_built(wide_resnet, depths=(2, 2), base_channels=64, image_size=64, batch_size=64),
                            autopar.Mesh("a100", devices_per_node=8)),
    "dit, 8 a100": (_built(dit, num_layers=8, hidden_size=512, num_heads=8, image_size=32, batch_size=64),
                    autopar.Mesh("a100", devices_per_node=8)),
    "gpt, 2x4 v100": (_built(gpt, **_GPT | {"hidden_size": 1024, "num_heads": 16}),
                      autopar.Mesh("v100", nodes=2, devices_per_node=4)),
    "gpt wide, 2x8 v100": (_built(gpt, **_WIDE, batch_size=64), autopar.Mesh("v100", nodes=2, devices_per_node=8)),
    "llama, 4x8 a100": (_built(llama, **_LLAMA, batch_size=128), autopar.Mesh("a100", nodes=4, devices_per_node=8)),
    "gpt wide, 8x8 h100": (_built(gpt, **_WIDE, batch_size=256), autopar.Mesh("h100", nodes=8, devices_per_node=8)),
    "llama, 128x8 h100": (_built(llama, **_LLAMA | {"num_layers": 16}, batch_size=2048),
                          autopar.Mesh("h100", nodes=128, devices_per_node=8)),
}  # fmt: skip


def grid(mesh: autopar.Mesh) -> list[dict[str, Any]]:
    """Every template."""
    found = []
    powers = [1 << n for n in range(mesh.num_devices.bit_length())]
    microbatches = [n for n in powers if n <= MICROBATCHES]
    for dp, tp in itertools.product(powers, powers):
        if mesh.num_devices % (dp * tp) or tp > mesh.devices_per_node:
            continue
        pp = mesh.num_devices // (dp * tp)
        for count, zero, recompute in itertools.product(microbatches, (0, 1, 3) if dp > 1 else (0,), ("none", "full")):
            for schedule in SCHEDULES if pp > 1 else ("1f1b",):
                found.append({"dp": dp, "tp": tp, "pp": pp, "microbatches": count, "zero": zero,
                              "recompute": recompute, "schedule": schedule})  # fmt: skip
    return found


def compared(name: str, seconds: float) -> dict[str, Any]:
    """One pair's row."""
    build, mesh = PAIRS[name]
    graph = trace(*build())
    started = time.perf_counter()
    budget = SearchBudget(SEARCH_SECONDS, stages=True)
    ours = planned(graph, Request(mesh, "train", "adamw", None, (), budget))
    planning = time.perf_counter() - started
    verifier.verify(graph, ours, admits)
    started = time.perf_counter()
    bound = Bound(graph, mesh)
    every = [(bound.least_ns(choice), choice) for choice in grid(mesh)]
    choices = sorted(((ns, choice) for ns, choice in every if ns is not None), key=lambda pair: pair[0])
    best, fitting, ran, is_whole = None, 0, 0, False
    for least_ns, choice in choices:
        if is_whole := best is not None and least_ns >= best[0]:
            break
        if time.perf_counter() > started + seconds:
            break
        ran += 1
        plan = _template(graph, mesh, choice)
        if plan is not None:
            fitting += 1
            step_ns = plan.predicted.step_time_ns
            assert step_ns >= least_ns, f"{choice}: {step_ns} ns is less than the bound, {least_ns} ns"
            best = min(best or (step_ns, choice), (step_ns, choice), key=lambda pair: pair[0])
    else:
        is_whole = True
    row = {
        "pair": name, "planning_seconds": round(planning, 2), "step_ms": ours.predicted.step_time_ns / 1e6,
        "plan": _described(ours), "peak_bytes": ours.predicted.peak_bytes, "memory_limit": ours.memory_limit,
        "templates": len(every), "possible": len(choices), "ran": ran, "fitting": fitting, "is_whole": is_whole,
        "next_bound_ms": None if is_whole else choices[ran][0] / 1e6,
    }  # fmt: skip
    if best is not None:
        row |= {"best_template_ms": best[0] / 1e6, "template": best[1],
                "ratio": ours.predicted.step_time_ns / best[0]}  # fmt: skip
    return row


def _template(graph: Graph, mesh: autopar.Mesh, choice: dict[str, Any]) -> Plan | None:
    """None for what does not fit, or is not possible (a batch, or blocks, that do not divide)."""
    try:
        return template_of_graph(graph, mesh, **choice)
    except AutoparError:
        return None


def _described(plan: Plan) -> str:
    parts = plan.stages
    sizes = "x".join(str(axis.size) for axis in parts[0].axes if axis.name != "microbatch") or "1"
    again = f", {len(plan.recompute)} recomputed" if plan.recompute else ""
    order = f", {plan.schedule}" if len(parts) > 1 else ""
    return f"{len(parts)} stages of {sizes}, {plan.microbatches} microbatches{order}{again}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", choices=PAIRS, action="append", help="only these; results of others are kept")
    parser.add_argument("--seconds", type=float, default=120.0, help="for the grid of one pair")
    options = parser.parse_args()
    path = HERE / "results.json"
    rows = {row["pair"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    rows = {name: row for name, row in rows.items() if "is_whole" in row}
    for name in options.pair or PAIRS:
        rows[name] = compared(name, options.seconds)
        print(json.dumps(rows[name]), flush=True)
        report = {
            **facts("benchmarks.quality.run"), "seconds_a_pair": options.seconds,
            "rows": [rows[pair] for pair in PAIRS if pair in rows],
        }  # fmt: skip
        path.write_text(json.dumps(report, indent=1) + "\n")
        (HERE / "results.md").write_text(_table(report))


def _table(report: dict[str, Any]) -> str:
    rows = report["rows"]
    good = sum(row.get("ratio", 0.0) <= 1.0 for row in rows)
    whole = sum(row.get("is_whole", False) for row in rows)
    lines = [
        f"command: {report['command']}  ", f"machine: {report['machine']}  ", f"date: {report['date']}", "",
        f"Predicted steps: in {good} of {len(rows)} pairs the plan found is no slower than the best template that ran.",
        f"For {whole} of them that is the best of the whole grid: what was not run takes at least as long, by a bound,",
        "or is not possible (blocks, samples or heads that do not divide). For the others the next bound is given.", "",
        "| pair | found, ms | best template, ms | ratio | templates | run (fit) | the rest takes at least, ms | found "
        "| template |",
        "|------|-----------|-------------------|-------|-----------|-----------|-----------------------------|-------"
        "|----------|",
    ]  # fmt: skip
    for row in rows:
        best = f"{row['best_template_ms']:.3f} | {row['ratio']:.3f}" if "ratio" in row else "none fits | –"
        template = ", ".join(f"{key}={value}" for key, value in row.get("template", {}).items())
        lines.append(
            f"| {row['pair']} | {row['step_ms']:.3f} | {best} | {row['templates']} | {row['ran']} ({row['fitting']}) "
            f"| {'the best' if row['is_whole'] else format(row['next_bound_ms'], '.3f')} | {row['plan']} | {template} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
