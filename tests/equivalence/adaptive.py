"""Plans that exchange tokens as the load asks for, on loads that change within a step: what ranks compute and send.

`python -m tests.equivalence.adaptive` runs each plan and says what is wrong.
"""

from __future__ import annotations

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
from autopar.ir.exchange_table import ExchangeTable
from autopar.ir.graph import Graph
from autopar.microbatch import check_plan
from autopar.rewrites import graph_of
from autopar.step import simulated_again
from autopar.trace import trace
from tests.equivalence.experts import MODELS, OPTIMIZERS, wrong_bytes
from tests.equivalence.harness import Tensors, differences, run_rank, run_single
from tests.rank_pool import pool

Ways = list[tuple[str, int]]

TABLES = {
    2: "0:flat:2;27:flat:1;31:flat:4",
    4: "0:two-level:2;34:flat:4;40:two-level:1;55:flat:1",
}
"""By ranks that share the experts: each row is one that the loads of some microbatch ask for."""

PLANS: dict[str, dict[str, Any]] = {
    "ep": {"dp": 2, "ep": 2},
    "two_levels": {"dp": 4, "ep": 4},
    "recomputed": {"dp": 4, "ep": 4, "recompute": "full"},
    "zero3": {"dp": 4, "ep": 4, "zero": 3},
    "pp": {"dp": 2, "ep": 2, "pp": 2},
    "tp": {"dp": 2, "ep": 2, "tp": 2},
}


@cache
def build() -> tuple[nn.Module, Tensors]:
    """Tokens below 21 go to experts 0 and 1 first, those from 42 on to others first, those between as it comes; each
    microbatch of a row a rank has one kind."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS["qwen3_moe"](3))
    with torch.no_grad():
        feature = model.get_input_embeddings().weight[:, 0]
        feature[:21], feature[21:42], feature[42:] = 4.0, 0.0, -4.0
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
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


def planned(name: str, table: str = "") -> tuple[autopar.Plan, Graph]:
    """The template, with this table in the place of those that are priced."""
    asked = PLANS[name]
    world = asked["dp"] * asked.get("pp", 1) * asked.get("tp", 1)
    mesh = autopar.Mesh("cpu", 2, world // 2)
    microbatches = 12 // asked["dp"]
    plan = template_of_graph(traced(), mesh, exchange="adaptive", microbatches=microbatches, **asked)
    steps = [replace(one, binding={"table": table or one.binding["table"]}) for one in plan.substitutions]
    graph = graph_of(replace(plan, substitutions=tuple(steps)), traced())
    plan = simulated_again(replace(plan, substitutions=tuple(steps), fingerprint=graph.fingerprint), graph)
    check_plan(graph, plan)
    return plan, graph


@contextmanager
def ways_noted() -> Iterator[Ways]:
    """The ways that this rank takes inside."""
    from autopar.runtime.lowering.exchange import SeenLoad

    taken: Ways = []
    plain = SeenLoad.__init__

    def noting(self: Any, *args: Any) -> None:
        plain(self, *args)
        taken.append((self.how, self.chunks))

    with mock.patch.object(SeenLoad, "__init__", noting):
        yield taken


def job(rank: int, world: int, *args: Any) -> tuple[Any, Ways]:
    with ways_noted() as taken:
        return run_rank(rank, world, *args), taken


def faults(name: str) -> list[str]:
    """Runs a plan: what is out of tolerance, not as predicted, or not taken alike, one line each."""
    table = TABLES[PLANS[name]["ep"]]
    plan, graph = planned(name, table)
    model, batch = build()
    state = {**model.state_dict(), **dict(model.named_buffers())}
    made = pool(plan.mesh.num_devices).run(job, emit(graph, plan), state, batch, OPTIMIZERS)
    results, taken = [one for one, _ in made], [own for _, own in made]
    found = differences(single(), results[0])
    found += wrong_bytes(plan, graph, model, batch, [result[4] for result in results])
    return found + _not_taken(name, table, plan.microbatches, taken)


def _not_taken(name: str, table: str, microbatches: int, taken: list[Ways]) -> list[str]:
    """Where ranks of a group took other ways than each other, or not all of the table within the first of 7 steps."""
    layers, passes = (1 if "pp" in PLANS[name] else 2), (2 if "recompute" in PLANS[name] else 1)
    found = [f"rank took {len(own)} ways" for own in taken if len(own) != 7 * microbatches * layers * passes]
    groups = {"pp": ((0, 1), (2, 3)), "tp": ((0, 2), (1, 3))}.get(name, (tuple(range(len(taken))),))
    found += [f"ranks {group} took other ways" for group in groups if any(taken[i] != taken[group[0]] for i in group)]
    every = {(how, chunks) for _, how, chunks in ExchangeTable.parse(table).ways}
    first = {way for own in taken for way in own[: len(own) // 7]}
    return found + ([] if first == every else [f"of {sorted(every)} took {sorted(first)}"])


if __name__ == "__main__":
    for name in PLANS:
        print(name, faults(name) or "equal", flush=True)
