"""Plans whose experts are sliced over ranks with tokens of their own, on loads that change within a step.

`python -m tests.equivalence.sliced` runs each plan with rows that travel, with slices that do, and with either as the
load asks for, and says what is wrong.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

import autopar
from autopar.by_hand import template_of_graph
from autopar.emit import emit
from autopar.ir.graph import Graph
from autopar.microbatch import check_plan
from autopar.rewrites import graph_of
from autopar.step import simulated_again
from autopar.trace import trace
from tests.equivalence.experts import MODELS, OPTIMIZERS, wrong_bytes
from tests.equivalence.harness import Tensors, differences, run_rank, run_single
from tests.rank_pool import pool

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "dp_x4": {"dp": 4},
    "ep": {"dp": 4, "ep": 2},
    "ep_chunks": {"dp": 4, "ep": 2, "exchange_chunks": 4},
    "zero3": {"dp": 4, "ep": 2, "zero": 3},
    "recomputed": {"dp": 2, "recompute": "full"},
    "pp": {"dp": 2, "pp": 2},
    "tp": {"dp": 2, "tp": 2},
    "both": {"dp": 4, "ep": 2, "exchange": "adaptive"},
    "both_zero3": {"dp": 4, "ep": 2, "exchange": "adaptive", "zero": 3},
    "both_recomputed": {"dp": 4, "ep": 2, "exchange": "adaptive", "recompute": "full"},
}

TABLES = dict.fromkeys(("ep", "ep_chunks", "zero3", "both", "both_zero3", "both_recomputed"), "0:tensor;32:data")
"""Where groups of ranks see loads that change; others have as many rows of their own at any time."""

EXCHANGES = "0:flat:1;36:flat:4"
"""Where rows are exchanged by load, too: the ranks of two groups, whose loads differ, take one way together."""

WAYS = ("tensor", "data", "adaptive")


@cache
def build() -> tuple[nn.Module, Tensors]:
    """Tokens below 21 go to experts 0 and 1 first, those from 42 on to others first, those between as it comes; each
    microbatch of a row a rank has one kind."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS["gpt_oss"](3))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.uniform_(0.5, 1.5)
        feature = model.get_input_embeddings().weight[:, 0]
        feature[:21], feature[21:42], feature[42:] = 4.0, 0.0, -4.0
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.router.weight"):
                parameter.mul_(0.3 / parameter.std())
                parameter[:, 0] = torch.tensor([20.0] * 2 + [0.0] * 6)
    tokens = torch.cat([torch.randint(*kind, (4, 8)) for kind in ((0, 21), (21, 42), (42, 64))])
    labels = tokens.clone()
    labels[0, :3] = -100
    return model, {"input_ids": tokens, "labels": labels}


@cache
def traced() -> Graph:
    return trace(*build())


@cache
def single() -> Any:
    return run_single(*build(), OPTIMIZERS)


def planned(name: str, experts: str) -> tuple[autopar.Plan, Graph]:
    """The template; by load with a table in the place of what is priced, where there is one."""
    asked = PLANS[name]
    world = asked["dp"] * asked.get("pp", 1) * asked.get("tp", 1)
    microbatches = 12 // asked["dp"]
    plan = template_of_graph(
        traced(), autopar.Mesh("cpu", 1, world), microbatches=microbatches, experts=experts, **asked
    )
    if experts != "adaptive" or name not in TABLES:
        return plan, graph_of(plan, traced())
    tables = {"slices-by-load": TABLES[name], "exchange-by-load": EXCHANGES}
    steps = [
        replace(one, binding={"table": tables[one.rule]}) if one.rule in tables else one for one in plan.substitutions
    ]
    graph = graph_of(replace(plan, substitutions=tuple(steps)), traced())
    plan = simulated_again(replace(plan, substitutions=tuple(steps), fingerprint=graph.fingerprint), graph)
    check_plan(graph, plan)
    return plan, graph


@contextmanager
def ways_noted() -> Iterator[list[str]]:
    """What travels on this rank, and in how many chunks rows come to it, time by time."""
    from autopar.runtime.lowering.sliced import SlicedExperts

    taken: list[str] = []
    plain = SlicedExperts.__init__

    def noting(self: Any, *args: Any) -> None:
        plain(self, *args)
        taken.extend((self.how, str(len(args[1]))))

    with mock.patch.object(SlicedExperts, "__init__", noting):
        yield taken


def job(rank: int, world: int, *args: Any) -> tuple[Any, list[str]]:
    with ways_noted() as taken:
        return run_rank(rank, world, *args), taken


def faults(name: str, experts: str) -> list[str]:
    """Runs a plan: what is out of tolerance, not as predicted, or not taken, one line each."""
    plan, graph = planned(name, experts)
    model, batch = build()
    state = {**model.state_dict(), **dict(model.named_buffers())}
    made = pool(plan.mesh.num_devices).run(job, emit(graph, plan), state, batch, OPTIMIZERS)
    results, taken = [one for one, _ in made], [set(own) & {"tensor", "data"} for _, own in made]
    chunks = {word for _, own in made for word in own} - {"tensor", "data"}
    found = differences(single(), results[0])
    if len({(loss.item(), norm.item()) for loss, _, norm, *_ in results}) > 1:
        found.append("ranks disagree about the loss or the norm")
    found += wrong_bytes(plan, graph, model, batch, [result[4] for result in results])
    if experts == "adaptive" and name.startswith("both") and chunks != {"1", "4"}:
        found.append(f"took {sorted(chunks)} chunks, not 1 and 4")
    wanted = {"tensor", "data"} if name in TABLES else set.union(*taken)
    expected = wanted if experts == "adaptive" else {experts}
    return found + [f"took {sorted(own)} of {sorted(expected)}" for own in (set.union(*taken),) if own != expected]


def main() -> int:
    """Proves each plan in each way; prints a line each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--plans", nargs="*", choices=PLANS, default=[*PLANS])
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=[*WAYS])
    options = parser.parse_args()
    wrong, every = 0, [*itertools.product(options.plans, options.ways)]
    for name, experts in every:
        found = faults(name, experts)
        wrong += bool(found)
        print(name, experts, found or "equal", flush=True)
    print(f"{wrong} wrong of {len(every)}")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
