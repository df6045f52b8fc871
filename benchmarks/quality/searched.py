"""What the search finds, and what finding it takes: the step, processor time, and work that is counted.

    python -m benchmarks.quality.searched [--search fast] [--pair NAME]

The pairs of `benchmarks.quality.run`, and the models of `benchmarks.quality.heterogeneous` on their unequal mesh. To be
set beside the same of another tree, on the same idle machine: steps must not be longer, nor the processor's seconds
more. Counted are intra-op problems solved, simulations, and proposals of refinement; unlike
seconds, they do not depend on what else the machine does, but where a search ends by its time.
Written to searched.json, a row as soon as it is there; rows of other pairs are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import autopar
from autopar import planning
from autopar.intraop import Placements
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.pipeline import planned_jointly
from autopar.request import BUDGETS, Request
from autopar.simulate import Incremental
from autopar.trace import trace
from autopar.unequal import stages
from benchmarks.facts import facts
from benchmarks.quality import heterogeneous
from benchmarks.quality.run import PAIRS

FILE = Path(__file__).with_name("searched.json")
UNEQUAL = {f"{name}, a100 + v100": config for name, config in heterogeneous.MODELS.items()}


def _counted(counts: Counter[str], name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    counts[name] += 1
    return function(*args, **options)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts solved problems, and simulations of whole plans or of their differences."""
    counts = Counter[str]()
    asked: list[tuple[Any, str, str]] = [(Placements, "plan", "solved"), (Placements, "trade_offs", "solved")]
    asked += [(module, "simulate", "simulations") for module in (planning, stages)]
    asked += [(Incremental, "_played_now", "simulations")]
    with ExitStack() as stack:
        for owner, name, kind in asked:
            counted = partial(_counted, counts, kind, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, lambda *a, counted=counted, **o: counted(*a, **o)))
        yield counts


def _given(name: str) -> tuple[Graph, autopar.Mesh, str]:
    if name in PAIRS:
        build, mesh = PAIRS[name]
        return trace(*build()), mesh, "adamw"
    mesh = autopar.Mesh([(kind, 1, 8) for kind in heterogeneous.KINDS])
    return trace(*heterogeneous.half(UNEQUAL[name])), mesh, "adamw_master"


def row(name: str, search: str) -> dict[str, Any]:
    """One pair, traced before the clock starts."""
    graph, mesh, optimizer = _given(name)
    with counting() as counts:
        wall, processor = time.perf_counter(), time.process_time()
        plan: Plan = planned_jointly(graph, Request(mesh, "train", optimizer, None, (), BUDGETS[search]))[1]
        processor, wall = time.process_time() - processor, time.perf_counter() - wall
    refinement = plan.search.refinement
    return {
        "pair": name, "search": search, "step_time_ns": plan.predicted.step_time_ns,
        "peak_bytes": plan.predicted.peak_bytes, "processor_s": round(processor, 2), "wall_s": round(wall, 2),
        **counts, "proposals": refinement.proposals if refinement else 0, "method": plan.search.method,
    }  # fmt: skip


def main() -> None:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", choices=BUDGETS, default="default")
    parser.add_argument("--pair", action="append", choices=[*PAIRS, *UNEQUAL])
    options = parser.parse_args()
    known = json.loads(FILE.read_text())["rows"] if FILE.exists() else []
    rows = {one["pair"]: one for one in known}
    for name in options.pair or [*PAIRS, *UNEQUAL]:
        rows[name] = row(name, options.search)
        print(json.dumps(rows[name]), flush=True)
        told = {**facts("benchmarks.quality.searched"), "rows": [*rows.values()]}
        FILE.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
