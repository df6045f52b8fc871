"""Plans and profiles of every form, which are then changed: each with what is needed to emit, run and simulate it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cost.files import profiles_folder
from autopar.emit import emit
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.pipeline import template_of_graph
from autopar.program import model_state
from autopar.rewrites import graph_of
from autopar.trace import trace
from tests.branches import cases as branches
from tests.oracles.frozen.cases import PROFILES


class Layer(nn.Module):
    """A block of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Small(nn.Module):
    """Blocks with a tied pair and a buffer: names of every kind are in its plans."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.token, self.layers = nn.Embedding(16, 8), nn.ModuleList(Layer() for _ in range(blocks))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.token(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


class Pairs(nn.Module):
    """Matrix products of one input, which a search stores packed and multiplies at once."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.query(x) * self.key(x) + self.value(x)).square().mean()


@dataclass(eq=False)
class Base:
    """A plan with its model; the graph is traced once."""

    name: str
    model: nn.Module
    batch: dict[str, Tensor]
    make: Callable[[Base], Plan]
    mode: str = "train"

    @cached_property
    def graph(self) -> Graph:
        return trace(self.model, self.batch, mode=self.mode)

    @cached_property
    def plan(self) -> Plan:
        return self.make(self)

    @cached_property
    def text(self) -> str:
        return self.plan.to_json()

    @cached_property
    def source(self) -> str:
        return emit(graph_of(self.plan, self.graph), self.plan)

    @cached_property
    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in (model_state(self.model) or {}).items()}

    @cached_property
    def expected(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (of inference: the output) and gradients on one device."""
        self.model.zero_grad()
        loss = self.model(**self.batch)
        if self.mode == "inference":
            return loss.detach(), {}
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}


def _small() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    return Small(), {name: torch.randint(16, (12,), generator=generator) for name in ("tokens", "labels")}


def _template(devices: int | autopar.Mesh, **choices: Any) -> Callable[[Base], Plan]:
    mesh = autopar.Mesh("cpu", devices_per_node=devices) if isinstance(devices, int) else devices
    return lambda base: template_of_graph(base.graph, mesh, mode=base.mode, **choices)


def _searched(base: Base) -> Plan:
    """With everything that a search reports, and packed parameters."""
    budget = autopar.SearchBudget(4.0, proposals=60)
    mesh = autopar.Mesh("h100", devices_per_node=2)
    return autopar.parallelize(base.model, mesh, base.batch, search=budget).plan


def _forked(base: Base) -> Plan:
    return branches.in_branches(
        base.graph, _template(2, tp=2)(base), branches.forks(base.graph, "tp", (0, 1))
    )  # fmt: skip


@cache
def plans() -> dict[str, Base]:
    """By name. Meshes are of at most four ranks, which run as threads."""
    three = autopar.Mesh([(PROFILES["a100"], 1, 2), (PROFILES["v100"], 1, 1)])  # of unlike speeds, which do not change
    two = autopar.Mesh([("a100", 1, 1), ("v100", 1, 1)])
    model, batch, _ = branches.case("scaled")
    generator = torch.Generator().manual_seed(2)
    rows = {"x": torch.randn(512, 64, generator=generator)}
    found = [
        Base("one device", *_small(), _template(1)),
        Base("one stage", *_small(), _template(4, dp=2, tp=2, zero=3)),
        Base("microbatches", *_small(), _template(2, dp=2, microbatches=2, zero=2, recompute="full")),
        Base("inference", *_small(), _template(2, tp=2), "inference"),
        Base("stages", *_small(), _template(2, pp=2, microbatches=2)),
        Base("unequal stages", *_small(), _template(two, pp=2, microbatches=2)),
        Base("shares", *_small(), _template(three, dp=3, split="speed")),
        Base("forks", model, batch, _forked),
        Base("searched", Pairs(), rows, _searched),
    ]  # fmt: skip
    return {base.name: base for base in found}


@cache
def profiles() -> dict[str, str]:
    """The text of shipped profiles, and of one with every block that a profile may have."""
    texts = {name: profiles_folder().joinpath(f"{name}.json").read_text() for name in ("h100", "a100", "v100", "cpu")}
    whole = json.loads(texts["cpu"])
    source = {"kind": "measured", "source": "a host", "date": "2026-11-23"}
    whole["facts"] |= {"cores": 2, "overlap_slowdown": 1.5}
    whole["host"] = {
        "operator_ns": 900,
        "gradient_ns": 800,
        "collective_ns": 4000,
        "pass_ns": 9000,
        "provenance": source,
    }
    whole["runtime"] = {
        "optimizer_ns": [50_000, 150_000], "parameter_ns": 36_000, "convert_ns": 15_000, "function_ns": [4_700, 3_000],
        "branch_ns": [6_800, 94_000], "pass_ns": 180_000, "send_ns": [[1024, 120_000], [131_072, 170_000]],
        "receive_ns": 160_000, "late_ns": 760_000, "carry_ns": [[1024, 33_000], [131_072, 92_000]],
        "provenance": source,
    }  # fmt: skip
    whole["waits"] = [{"level": "intra_node", "ranks": 2, "points": [[1000, 0], [2000, 5]], "provenance": source}]
    grid = {"axes": [[16.0, 64.0], [32.0, 512.0], [32.0, 512.0]], "rates": [0.02] * 8, "provenance": source}
    whole["tables"] = [{"name": name, **grid} for name in ("NT", "NN", "TN")]
    whole["links"][0]["low_latency"] = {"alpha_ns": 2000, "share": 0.5}
    whole["operators"][0]["call_ns"] = [4000, 6000]
    whole["operators"][0]["points"] = [
        {"op": "mm", "shape": [8, 8, 8], "dtype": dtype, "forward_ns": 900, "backward_ns": 1800}
        for dtype in ("float32", "bfloat16")
    ]
    texts["whole"] = json.dumps(whole)
    return texts
