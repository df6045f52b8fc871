"""Recomputation by operator beside that by module, on two gloo ranks at one memory limit.

    python -m benchmarks.recomputation.run [--limit 0.8]

The model is a GPT in data parallelism of two; the limit is a part of the peak of the plan that keeps everything. By
module ("full", "block") and by operator (the two levels that the search has), as few layers compute again as fit, and
of what fits the fastest by prediction is run. Measured is the processor time of a step of a rank, which other processes
change little; steps of both programs take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import autopar
from autopar.cost.compute import node_time_ns
from autopar.ir.graph import Graph, Node
from autopar.ir.plan import Plan
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.program import load_source, model_state
from autopar.show.text import recompute_text
from autopar.trace import trace
from autopar.zero import joined, selective_levels
from models import gpt
from tests.rank_pool import pool

CONFIG = gpt.Config(num_layers=8, hidden_size=256, num_heads=8, seq_len=256, vocab_size=1024, batch_size=8)
STEPS = 9
KINDS = {"module": ("block", "full"), "operator": ("selective", "extensive")}


def forward_ns(graph: Graph, node: Node) -> int:
    """Of an operator on one device."""
    operands, results = (tuple(graph.tensors[n].shape for n in names) for names in (node.operands, node.results))
    return node_time_ns(node, operands, results, graph.tensors, load_profile("cpu"))[0]


def best_at(graph: Graph, plans: dict[str, Plan], kinds: Iterable[str], limit: int) -> Plan:
    """The fastest by prediction that fits, with as few layers computed again as that takes."""
    found = []
    for kind in filter(plans.__contains__, kinds):
        for count in range(CONFIG.num_layers + 1):
            layers = tuple(f"layers.{number}" for number in range(count))
            again = tuple(
                n for n in plans[kind].recompute if n.startswith(tuple(f"{path}." for path in layers)) or n in layers
            )
            plan = replace(plans[kind], recompute=again)
            timeline = plan.timeline()
            if timeline.peak_bytes <= limit:
                found.append((timeline.step_time_ns, len(found), replace(plan, memory_limit=limit)))
                break
    return min(found)[2]


def measured_steps(
    rank: int, world: int, sources: list[str], state: dict[str, Any], batch: dict[str, Any]
) -> list[float]:
    """The median processor time of a step of each program, in seconds."""
    from autopar import runtime as rt

    programs = []
    for source in sources:
        programs.append(rt.build(load_source(source).Program))
        programs[-1].init_from(state, broadcast=False)
    times: list[list[float]] = [[] for _ in programs]
    for _ in range(STEPS):
        for built, own in zip(programs, times, strict=True):
            built.zero_grad()
            started = time.process_time()
            built.train_step(**batch)
            own.append(time.process_time() - started)
    return [statistics.median(own[1:]) for own in times]


def main() -> None:
    """Prints a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=0.8)
    torch.manual_seed(0)
    model, batch = gpt.build(CONFIG), gpt.example_inputs(CONFIG)
    mesh, graph = autopar.Mesh("cpu", devices_per_node=2), trace(model, batch)
    plans = {kind: template_of_graph(graph, mesh, dp=2, recompute=kind) for kind in ("none", "block", "full")}
    layers = [f"layers.{number}" for number in range(CONFIG.num_layers)]
    levels = selective_levels(graph, layers, partial(forward_ns, graph), "cpu")
    plans |= {name: replace(plans["none"], recompute=joined(again)) for name, again in levels.items()}
    limit = int(plans["none"].predicted.peak_bytes * parser.parse_args().limit)
    chosen = [best_at(graph, plans, kinds, limit) for kinds in KINDS.values()]
    programs = [autopar.parallelize(model, mesh, batch, plan=plan) for plan in chosen]
    results = pool(2).run(measured_steps, [p.source for p in programs], model_state(model) or {}, batch)
    print(f"limit {limit / 1e6:.1f} MB of {plans['none'].predicted.peak_bytes / 1e6:.1f} MB")
    for number, (name, plan) in enumerate(zip(KINDS, chosen, strict=True)):
        timeline, seconds = plan.timeline(), max(result[number] for result in results)
        print(
            f"by {name}: {recompute_text(plan)}; predicted {timeline.step_time_ns / 1e6:.1f} ms in "
            f"{timeline.peak_bytes / 1e6:.1f} MB, measured {seconds * 1e3:.1f} ms of a rank's processor"
        )


if __name__ == "__main__":
    main()
