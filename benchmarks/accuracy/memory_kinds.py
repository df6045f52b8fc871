"""Tracked memory against predicted, for every kind of plan that two gloo ranks can run, on models of a few blocks.

    python -m benchmarks.accuracy.memory_kinds [--models gpt …] [--plans "dp zero3" …] [--again full …]

Run from the root of the repository. Kinds: data, tensor and sequence parallel, ZeRO 0 to 3, stages in every schedule,
in one to four microbatches, each with nothing, whole blocks, attention, cheap operators or named ones computed again;
also in bfloat16. Measured is the peak of each rank in a whole step (with AdamW), after a first step: every allocation
and release of torch's CPU allocator (lifetimes.py). Writes memory_kinds.json and memory_kinds.md, and ends with status
1 where a rank takes a byte more than was predicted for it.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import autopar
from autopar.emit import emit
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.recompute import operator_call, refusal_again
from autopar.ir.structure import block_paths
from autopar.microbatch import check_plan
from autopar.pipeline import simulated_step, template_of_graph
from autopar.program import model_state
from autopar.trace import trace
from benchmarks.accuracy.reports import write_report
from benchmarks.accuracy.stage_memory import measure_rank
from models import gpt, llama, moe
from tests.rank_pool import RankPool, pool

HERE = Path(__file__).parent
Batch = dict[str, Tensor]
Options = Mapping[str, Any]


class Kind(NamedTuple):
    """A model in a kind of plan of PLANS, with some of it computed again (AGAIN)."""

    model: str
    plan: str
    again: str

    def __str__(self) -> str:
        return f"{self.model} {self.plan} {self.again}"


# Models ----------------------------------------


def _own(module: Any, **sizes: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    def make() -> tuple[nn.Module, Batch]:
        config = module.Config(**sizes)
        return module.build(config), module.example_inputs(config)

    return make


_SIZES = {"num_layers": 4, "hidden_size": 48, "seq_len": 24, "vocab_size": 160, "batch_size": 8}
MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "gpt": _own(gpt, **_SIZES, num_heads=4, tie_head=True),
    "llama": _own(llama, **_SIZES, num_heads=4, num_kv_heads=2, mlp_size=112),
    "moe": _own(moe, **_SIZES, num_heads=4, num_experts=4),
}


@cache
def build(name: str) -> tuple[nn.Module, Batch]:
    """A model of MODELS with random weights, and its global batch; the same for the same name."""
    torch.manual_seed(0)
    return MODELS[name]()


@cache
def traced(name: str, precision: str | None) -> Graph:
    """The model's graph on its batch."""
    return trace(*build(name), compute_dtype=torch.bfloat16 if precision else None)


# Plans ----------------------------------------

_ONE_STAGE: dict[str, Options] = {
    "dp": {"dp": 2},
    **{f"dp zero{level}": {"dp": 2, "zero": level} for level in (1, 2, 3)},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
}
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "interleaved_zero_bubble", "zero_bubble_v")
PLANS: dict[str, Options] = {
    **_ONE_STAGE,
    **{f"{name} x2": {**options, "microbatches": 2} for name, options in _ONE_STAGE.items()},
    **{f"{name} bf16": {**options, "precision": "bf16"} for name, options in _ONE_STAGE.items()},
    **{f"pp {name}": {"pp": 2, "microbatches": 4, "schedule": name} for name in _SCHEDULES},
}
AGAIN = ("none", "full", "block", "selective", "named")


def planned(kind: Kind) -> tuple[Graph, Plan]:
    """The plan of a kind. Raises AutoparError where there is none."""
    options = PLANS[kind.plan]
    graph = traced(kind.model, options.get("precision"))
    recompute = "none" if kind.again == "named" else kind.again
    plan = template_of_graph(graph, autopar.Mesh("cpu", devices_per_node=2), **options, recompute=recompute)
    if kind.again == "named":
        plan = replace(plan, recompute=_named(graph, random.Random(str(kind))))
        check_plan(graph, plan)
    return graph, plan


def _named(graph: Graph, rng: random.Random) -> tuple[str, ...]:
    """A third of the operators that can run again by themselves."""
    blocks = block_paths(graph)
    able = [operator_call(node) for node in graph.nodes if refusal_again(graph, node, blocks) is None]
    return tuple(sorted(rng.sample(able, len(able) // 3)))


# Runs ----------------------------------------


@dataclass(frozen=True)
class Row:
    """The rank of a kind that is predicted lowest against what it takes."""

    kind: str
    rank: int
    predicted_bytes: int
    measured_bytes: int
    measured_in: str

    @property
    def spare_bytes(self) -> int:
        """Above zero where more was predicted than measured."""
        return self.predicted_bytes - self.measured_bytes

    @property
    def error(self) -> float:
        """The same, as a part of what was measured."""
        return self.spare_bytes / self.measured_bytes


def measure(kind: Kind, ranks: RankPool | None = None) -> Row:
    """Plans, runs, and puts both beside each other."""
    model, batch = build(kind.model)
    graph, plan = planned(kind)
    results = (ranks or pool(2)).run(measure_rank, emit(graph, plan), model_state(model) or {}, batch)
    timeline = simulated_step(graph, plan)
    lanes: Any = getattr(timeline, "lanes", None)
    predicted = {rank: lane.peak_bytes for lane in lanes for rank in lane.ranks} if lanes else {}
    of_rank = [predicted.get(rank, timeline.peak_bytes) for rank in range(len(results))]
    rank = min(range(len(results)), key=lambda number: of_rank[number] - results[number].peak_bytes)
    return Row(str(kind), rank, of_rank[rank], results[rank].peak_bytes, results[rank].peak_in)


def _kinds() -> Iterator[Kind]:
    for model in MODELS:
        for plan in PLANS:
            yield from (Kind(model, plan, again) for again in AGAIN)


KINDS = tuple(_kinds())


# Results ----------------------------------------


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    heads = ("model, plan, computed again", "rank", "predicted", "measured", "spare", "error", "measured in")
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for row in rows:
        cells = (
            row.kind, str(row.rank), f"{row.predicted_bytes:,}", f"{row.measured_bytes:,}", f"{row.spare_bytes:,}",
            f"{row.error:+.2%}", row.measured_in,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: list[Row]) -> tuple[str, bool]:
    """What was to be shown, in figures, and whether it holds."""
    under = [row for row in rows if row.spare_bytes < 0]
    mean = sum(abs(row.error) for row in rows) / len(rows)
    lowest, highest = min(rows, key=lambda row: row.error), max(rows, key=lambda row: row.error)
    text = (
        f"{len(rows)} plans: {len(under)} take more than predicted; mean absolute error {mean:.2%}, lowest "
        f"{lowest.error:+.3%} ({lowest.kind}), highest {highest.error:+.2%} ({highest.kind})."
    )
    return text, not under


def main() -> None:
    """Measures the kinds asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[*MODELS])
    parser.add_argument("--plans", nargs="*", default=[*PLANS])
    parser.add_argument("--again", nargs="*", default=[*AGAIN])
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    ranks, rows = RankPool(2, timeout_s=600), list[Row]()
    for kind in KINDS:
        if kind.model not in options.models or kind.plan not in options.plans or kind.again not in options.again:
            continue
        try:
            rows.append(measure(kind, ranks))
        except autopar.AutoparError as error:
            print(f"{kind}: no such plan ({error})", flush=True)
            continue
        print(f"{kind}: {rows[-1].spare_bytes:,} B, {rows[-1].error:+.2%} in {rows[-1].measured_in}", flush=True)
    write_report(options.output, "memory_kinds", rows, *(summary(rows)[0], table(rows)))
    ranks.stop()
    text, holds = summary(rows)
    print(text)
    sys.exit(not holds)


if __name__ == "__main__":
    main()
