"""Predicted against tracked peaks of random plans: what a rank takes at its highest point is never above prediction.

    python -m tests.equivalence.peaks [--models llama-small hf_bert …] [--plans 10] [--seed 1] [--ranks 2]

Any rule of each operator, any storage, any way between placements, recomputation (`random_programs.plans`): that finds
what plans that people run do not do. Models are those of `benchmarks.accuracy.pairs`, whose tensors are large enough
that small overheads do not decide, and those of the zoo. Ends with 1 where a peak is above its prediction by more than
a thousandth and 2 KiB.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from torch import nn

from autopar.emit import emit
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.program import model_state
from autopar.step import simulated_again
from autopar.trace import trace
from benchmarks.accuracy.lifetimes import Lifetimes, live_storages, track
from benchmarks.accuracy.memory import own_shard
from benchmarks.accuracy.pairs import MODELS, build_model
from tests.equivalence import zoo
from tests.equivalence.harness import Tensors
from tests.random_programs.plans import make_plan, random_plan
from tests.rank_pool import RankPool

SLACK, SLACK_BYTES = 0.001, 2048
NAMES = (*MODELS, *zoo.NAMES, *zoo.STEP_NAMES)


@dataclass(frozen=True)
class Peak:
    """Of one plan: bytes predicted, and of the rank that takes most, with what these are."""

    case: str
    plan: Plan
    source: str
    measured: Lifetimes

    @property
    def predicted_bytes(self) -> int:
        return self.plan.predicted.peak_bytes

    @property
    def short_bytes(self) -> int:
        """By which the prediction is too low, beside the slack."""
        slack = SLACK * self.measured.peak_bytes + SLACK_BYTES
        return round(self.measured.peak_bytes - self.predicted_bytes - slack)

    def __str__(self) -> str:
        error = self.predicted_bytes / self.measured.peak_bytes - 1
        return (
            f"{self.case}: predicted {self.predicted_bytes:,}, measured {self.measured.peak_bytes:,} ({error:+.2%}) "
            f"in {self.measured.peak_in}"
        )


@cache
def subject(name: str) -> tuple[nn.Module, Tensors, Graph]:
    """A model, its batch and graph."""
    model, batch = build_model(name) if name in MODELS else zoo.build(name)
    return model, batch, trace(model, batch)


def measure(rank: int, world: int, source: str, state: Tensors, batch: Tensors) -> Lifetimes:
    """Memory of the second step with AdamW on one rank."""
    import torch

    from autopar import runtime as rt
    from autopar.program import load_source

    before = live_storages()
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4)
    shard = own_shard(built, batch)

    def step() -> None:
        built.train_step(*shard, local=True)
        optimizer.step()

    step()
    optimizer.zero_grad()
    return track(step, before)


def peaks(name: str, count: int, seed: int, ranks: RankPool) -> Iterator[Peak]:
    """Of random plans of a model that verify and can be emitted."""
    model, batch, graph = subject(name)
    state = model_state(model) or {}
    sizes = ((2,),) if ranks.world == 2 else ((2, 2), (4,))
    for number in range(seed, seed + count):
        rng = random.Random(f"{name}.{number}")
        choices = random_plan(graph, rng.choice(sizes), rng)
        if choices is None:
            continue
        try:
            plan = replace(make_plan(graph, choices)[0], optimizer="adamw")
            plan = simulated_again(plan, graph)
            source = emit(graph, plan)
        except AutoparError as error:
            print(f"{name}.{number}: {error}", flush=True)
            continue
        found = ranks.run(measure, source, state, batch)
        yield Peak(f"{name}.{number}", plan, source, max(found, key=lambda one: one.peak_bytes))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--plans", type=int, default=10, help="how many of each model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--show", action="store_true", help="what memory is at the peak of a plan that takes more")
    arguments = parser.parse_args()
    ranks, short, count, above = RankPool(arguments.ranks), 0, 0, 0.0
    for name in arguments.models:
        for peak in peaks(name, arguments.plans, arguments.seed, ranks):
            count += 1
            above += peak.predicted_bytes / peak.measured.peak_bytes - 1
            if peak.short_bytes > 0:
                short += 1
                print(peak, flush=True)
                if arguments.show:
                    print(peak.plan.predicted.memory, *peak.measured.at_peak, peak.source, sep="\n")
    mean = above / max(1, count)
    print(f"{count} random plans on {arguments.ranks} ranks: {short} take more than predicted; mean error {mean:+.2%}")
    return 1 if short else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore")
    sys.exit(main())
