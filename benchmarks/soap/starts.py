"""The SOAP search from two starts, beside what placements and stages (ILP and DP) find: five models on 4, 16 and 64.

    python -m benchmarks.soap.starts [--models gpt lstm ...] [--proposals 10000] [--seconds 60]

For each model and number of `h100` devices (8 a node; data sheets and published points), in bfloat16, trained with
AdamW, with one global batch for all:

    placed      the plan of ILP and DP, within the default budget; its predicted step
    refined     the SOAP search from it: predicted step, and what it changed
    from dp     the SOAP search from data parallelism over all devices, over `placed`: what a chain finds by itself of
                plans of one stage; it looks for no stages

Written to starts.json and starts.md with command, machine and date. Results depend on the machine only where a chain
ends by its time limit, which its stop reason says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

import autopar
from autopar.ir import verifier
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ops import admits
from autopar.pipeline import placed, template_of_graph
from autopar.profiler import load_profile
from autopar.refinement import refined
from autopar.request import Request, SearchBudget
from autopar.trace import find_blocks, trace
from benchmarks.facts import facts, write_record
from models import gpt, inception, lstm, moe, wide_resnet

HERE = Path(__file__).parent
DEVICES = (4, 16, 64)
_GPT = {"hidden_size": 1024, "num_heads": 16, "seq_len": 512, "vocab_size": 32_000, "batch_size": 64}
MODELS: dict[str, tuple[Any, Any]] = {
    "wide_resnet": (wide_resnet, wide_resnet.Config((3, 4, 6, 3), 64, 2, True, 1, True, 224, 1000, 256)),
    "gpt": (gpt, gpt.Config(num_layers=12, **_GPT)),
    "lstm": (lstm, lstm.Config(vocab_size=10_000, seq_len=12, hidden_size=1500, batch_size=128)),
    "inception": (inception, inception.inception_v3(256)),
    "moe": (moe, moe.Config(num_layers=8, **_GPT, num_experts=16)),
}


def graph_of(name: str) -> Graph:
    """The model's graph in bfloat16; nothing is allocated."""
    module, config = MODELS[name]
    with torch.device("meta"):
        model = module.build(config)
    batch = tree_map(lambda tensor: tensor.to("meta"), module.example_inputs(config))
    return trace(model, batch, compute_dtype=torch.bfloat16)


def mesh_of(devices: int) -> autopar.Mesh:
    """Of nodes of eight."""
    per_node = min(devices, 8)
    return autopar.Mesh("h100", nodes=devices // per_node, devices_per_node=per_node)


def compared(name: str, graph: Graph, devices: int, proposals: int, seconds: float) -> dict[str, Any]:
    """One row."""
    mesh, blocks = mesh_of(devices), find_blocks(graph)
    budget = SearchBudget(20.0, proposals=proposals, refine_seconds=seconds)
    request = Request(mesh, "train", "adamw", None, (), budget, "bf16")
    profile = load_profile(mesh.profile)

    def refine(plan: Plan) -> Plan:
        found = refined(graph, blocks, request, profile, plan)
        verifier.verify(graph, found, admits)
        return found

    seconds_of = dict[str, float]()
    own = _timed(seconds_of, "placing", lambda: placed(graph, request))
    better = _timed(seconds_of, "refining", lambda: refine(own))
    data_parallel = template_of_graph(graph, mesh, dp=devices, precision="bf16")
    from_dp = _timed(seconds_of, "from dp", lambda: refine(data_parallel))
    return {
        "model": name, "devices": devices, "operators": len(graph.nodes), "mesh": _outline(own),
        "placed": _figures(own), "refined": _figures(better), "data_parallel": _figures(data_parallel),
        "from_dp": _figures(from_dp), "seconds": seconds_of,
        "gain": 1 - better.predicted.step_time_ns / own.predicted.step_time_ns,
        "from_dp_over_placed": from_dp.predicted.step_time_ns / own.predicted.step_time_ns,
        "refinement": _report(better), "refinement_from_dp": _report(from_dp),
    }  # fmt: skip


def _timed(seconds: dict[str, float], name: str, make: Callable[[], Plan]) -> Plan:
    begun = time.perf_counter()
    plan = make()
    seconds[name] = round(time.perf_counter() - begun, 2)
    return plan


def _outline(plan: Plan) -> str:
    axes = "x".join(str(axis.size) for axis in plan.stages[0].axes if axis.name != "microbatch") or "1"
    stages = f"{len(plan.stages)} stages of {axes}" if len(plan.stages) > 1 else axes
    return f"{stages}, {plan.microbatches} microbatches"


def _figures(plan: Plan) -> dict[str, Any]:
    """The predicted step and where it goes, in ns."""
    return {"step_time_ns": plan.predicted.step_time_ns, **asdict(plan.predicted.breakdown), "mesh": _outline(plan)}


def _report(plan: Plan) -> Mapping[str, Any] | None:
    report = plan.search.refinement
    return None if report is None else {k: v for k, v in asdict(report).items() if k != "trace"}


def _row_text(row: Mapping[str, Any]) -> str:
    def ms(name: str) -> str:
        return f"{row[name]['step_time_ns'] / 1e6:.3f}"

    before, after = row["placed"], row["refined"]
    exposed = (before["exposed_communication_ns"] - after["exposed_communication_ns"]) / 1e6
    compute = (before["compute_ns"] - after["compute_ns"]) / 1e6
    made = row["refinement"]["proposals"] if row["refinement"] else 0
    stop = row["refinement"]["stop_reason"] if row["refinement"] else "not refined"
    return (
        f"| {row['model']} | {row['devices']} | {row['mesh']} | {ms('placed')} | {ms('refined')} | {row['gain']:.2%} | "
        f"{exposed:+.3f} | {compute:+.3f} | {ms('data_parallel')} | {ms('from_dp')} | "
        f"{row['from_dp_over_placed']:.3f} | {made:,}: {stop} |"
    )


HEAD = """
| model | devices | placed as | placed, ms | refined, ms | gain | exposed communication less, ms | compute less, ms \
| data parallel, ms | from it, ms | over placed | proposals |
|---|---|---|---|---|---|---|---|---|---|---|---|""".strip()


def main() -> None:
    """Runs what is asked for, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--devices", nargs="+", type=int, default=[*DEVICES])
    parser.add_argument("--proposals", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    rows = []
    for name in options.models:
        graph = graph_of(name)
        for devices in options.devices:
            rows.append(compared(name, graph, devices, options.proposals, options.seconds))
            print(_row_text(rows[-1]), flush=True)
            _write(rows)
    print(_summary(rows))


def _summary(rows: list[dict[str, Any]]) -> str:
    gains = sum(row["gain"] > 0 for row in rows)
    near = sum(row["from_dp_over_placed"] <= 1.02 for row in rows)
    return (
        f"From the plan of ILP and DP a strict gain in {gains} of {len(rows)} (target: 3); from data parallelism, in "
        f"one stage, within 2% of that plan, or better, in {near} of {len(rows)}."
    )


def _write(rows: list[dict[str, Any]]) -> None:
    """What there is so far."""
    text = "\n".join([_summary(rows), "", HEAD, *map(_row_text, rows)])
    write_record(HERE / "starts", facts("benchmarks.soap.starts"), {"rows": rows}, text)


if __name__ == "__main__":
    main()
