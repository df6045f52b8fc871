"""Plans whose hottest experts have a replica on every rank that shares them, on loads that change within a step: what
ranks compute and send.

`python -m tests.equivalence.replicas` runs each model, plan and number of replicas, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from autopar.rewrites import graph_of
from autopar.trace import trace
from tests.equivalence.experts import MODELS, OPTIMIZERS, wrong_bytes
from tests.equivalence.harness import Tensors, differences, run_rank, run_single
from tests.rank_pool import pool

NAMES = ("qwen3_moe", "mixtral", "deepseek", "gpt_oss")
COUNTS = (1, 3)

PLANS: dict[str, dict[str, Any]] = {
    "ep": {"dp": 2, "ep": 2},
    "ep_x4": {"dp": 4, "ep": 4},
    "chunks": {"dp": 2, "ep": 2, "exchange_chunks": 4},
    "two_levels": {"dp": 4, "ep": 4, "exchange": "two-level"},
    "dp": {"dp": 4, "ep": 2},
    "zero3": {"dp": 4, "ep": 2, "zero": 3},
    "recomputed": {"dp": 2, "ep": 2, "recompute": "full"},
    "pp": {"dp": 2, "ep": 2, "pp": 2},
    "tp": {"dp": 2, "ep": 2, "tp": 2},
    "over_cp": {"cp": 2, "ep": 2},
}


@cache
def build(name: str) -> tuple[nn.Module, Tensors]:
    """Tokens below 21 go to the first experts, those from 42 on to the last, those between as it comes; each microbatch
    of a row a rank has one kind, so that other experts are the hottest."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](3 if name != "mixtral" else 2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.uniform_(0.5, 1.5)
        feature = model.get_input_embeddings().weight[:, 0]
        feature[:21], feature[21:42], feature[42:] = 4.0, 0.0, -4.0
        for path, parameter in model.named_parameters():
            if path.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter.mul_(0.3 / parameter.std())
                parameter[:, 0] = torch.linspace(20.0, -20.0, len(parameter))
    tokens = torch.cat([torch.randint(*kind, (4, 8)) for kind in ((0, 21), (21, 42), (42, 64))])
    labels = tokens.clone()
    labels[0, :3] = -100
    return model, {"input_ids": tokens, "labels": labels}


@cache
def traced(name: str) -> Graph:
    return trace(*build(name))


@cache
def single(name: str) -> Any:
    return run_single(*build(name), OPTIMIZERS)


@cache
def planned(name: str, plan_name: str, replicas: int) -> tuple[autopar.Plan, Graph]:
    """The template, read back from its text."""
    asked = PLANS[plan_name]
    world = asked.get("dp", 1) * asked.get("pp", 1) * asked.get("tp", 1) * asked.get("cp", 1)
    nodes = 2 if "exchange" in asked else 1
    mesh, microbatches = autopar.Mesh("cpu", nodes, world // nodes), 12 // asked.get("dp", 2)
    plan = template_of_graph(traced(name), mesh, microbatches=microbatches, replicas=replicas, **asked)
    plan = autopar.Plan.from_json(plan.to_json())
    return plan, graph_of(plan, traced(name))


@contextmanager
def replicas_noted() -> Iterator[list[tuple[int, ...]]]:
    """Which experts have replicas on this rank, time by time."""
    from autopar.runtime.lowering.replicas import HotExperts

    taken: list[tuple[int, ...]] = []
    plain = HotExperts.__init__

    def noting(self: Any, *args: Any) -> None:
        plain(self, *args)
        taken.append(tuple(self.experts.tolist()))

    with mock.patch.object(HotExperts, "__init__", noting):
        yield taken


def job(rank: int, world: int, *args: Any) -> tuple[Any, list[tuple[int, ...]]]:
    with replicas_noted() as taken:
        return run_rank(rank, world, *args), taken


def faults(name: str, plan_name: str, replicas: int) -> list[str]:
    """Runs a plan: what is out of tolerance, or not as predicted, one line each."""
    plan, graph = planned(name, plan_name, replicas)
    source = emit(graph, plan)
    if f"replicas={replicas}" not in source:
        return ["the program has no replicas"]
    model, batch = build(name)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    made = pool(plan.mesh.num_devices).run(job, source, state, batch, OPTIMIZERS)
    results, taken = [one for one, _ in made], [own for _, own in made]
    found = differences(single(name), results[0])
    if len({(loss.item(), norm.item()) for loss, _, norm, *_ in results}) > 1:
        found.append("ranks disagree about the loss or the norm")
    found += wrong_bytes(plan, graph, model, batch, [result[4] for result in results])
    noted = [own for own in taken if own]  # some stages have no experts
    if not noted or any(len(set(own)) < 2 or {len(one) for one in own} != {replicas} for own in noted):
        found.append(f"the same experts are hottest all the time: {taken}")
    return found


if __name__ == "__main__":
    for model_name in NAMES:
        for plan in PLANS:
            for count in COUNTS:
                print(model_name, plan, count, faults(model_name, plan, count) or "equal", flush=True)
