"""What the delta simulation is tried on: models, plans to begin with, and devices of all kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import autopar
from autopar.cost import Profile
from autopar.cost.profile import Host, Provenance, Waits
from autopar.ir.plan import Plan
from autopar.pipeline import template_of_graph
from autopar.planning import DividedGraph, divided
from autopar.profiler import load_profile
from autopar.trace import find_blocks, trace
from models import bert, gpt, llama, mlp, moe, unet, wide_resnet

SOURCE = Provenance("assumed", "for the sake of trying", "2026-11-22")
SLOW_HOST = Host(5000, 8000, 9000, 20000, provenance=SOURCE)
WAITS = Waits("intra_node", 2, ((10_000, 5_000), (1_000_000, 400_000)), SOURCE)


class Case(NamedTuple):
    """A model with a template plan. slowdown: of compute while a collective is in flight; waits: of ranks."""

    model: Any
    config: Any
    template: Mapping[str, Any]
    profile: str = "a100"
    slowdown: float = 1.2
    host: Host | None = None
    waits: Waits | None = None


def _gpt(layers: int = 4, hidden: int = 256, tied: bool = False) -> gpt.Config:
    return gpt.Config(512, 64, num_layers=layers, hidden_size=hidden, num_heads=8, batch_size=64, tie_head=tied)


CASES: dict[str, Case] = {
    "gpt, data and tensor, 2 microbatches": Case(gpt, _gpt(6), {"dp": 4, "tp": 2, "microbatches": 2}, slowdown=1.0),
    "gpt, large": Case(gpt, _gpt(6, 1024), {"dp": 4, "tp": 2}, slowdown=1.3),
    "gpt, data": Case(gpt, _gpt(6), {"dp": 8, "microbatches": 2}),
    "gpt, tied, 4 microbatches": Case(gpt, _gpt(tied=True), {"dp": 8, "microbatches": 4}, "h100", 1.5),
    "gpt, blocks computed again": Case(
        gpt, _gpt(), {"dp": 2, "tp": 4, "recompute": "block", "sequence_parallel": True}
    ),
    "gpt, all computed again": Case(gpt, _gpt(), {"dp": 2, "tp": 4, "recompute": "full", "microbatches": 2}),
    "gpt, slow host": Case(gpt, _gpt(), {"dp": 2, "tp": 4, "microbatches": 2}, host=SLOW_HOST),
    "gpt, CPU": Case(gpt, _gpt(), {"dp": 2, "tp": 2}, "cpu", waits=WAITS),
    "gpt, CPU, ZeRO-3": Case(gpt, _gpt(), {"dp": 4, "zero": 3}, "cpu", waits=WAITS),
    "gpt, CPU, sequences, blocks computed again": Case(
        gpt, _gpt(), {"tp": 4, "sequence_parallel": True, "recompute": "block", "microbatches": 2}, "cpu", waits=WAITS
    ),
    "gpt, ZeRO-1": Case(gpt, _gpt(), {"dp": 8, "zero": 1, "microbatches": 2}),
    "gpt, ZeRO-2": Case(gpt, _gpt(4, 512), {"dp": 4, "tp": 2, "zero": 2, "microbatches": 2}),
    "gpt, ZeRO-3": Case(gpt, _gpt(4, 512), {"dp": 8, "zero": 3, "microbatches": 2}),
    "gpt, tied, ZeRO-3, all computed again": Case(
        gpt, _gpt(4, 512, True), {"dp": 4, "tp": 2, "zero": 3, "recompute": "full", "microbatches": 2}, "h100"
    ),
    "gpt, inference": Case(gpt, _gpt(), {"dp": 2, "tp": 4, "mode": "inference", "optimizer": None}),
    "moe": Case(moe, moe.Config(num_layers=4, batch_size=16), {"dp": 4, "tp": 2}),
    "wide_resnet": Case(wide_resnet, wide_resnet.Config(depths=(3, 3), batch_size=16), {"dp": 4, "tp": 2}),
    "mlp": Case(mlp, mlp.Config(), {"dp": 4, "tp": 2}),
    "llama": Case(llama, llama.Config(num_layers=4), {"dp": 2, "tp": 2}),
    "bert": Case(bert, bert.Config(), {"dp": 2, "tp": 2}),
    "unet": Case(unet, unet.Config(), {"dp": 2, "tp": 2}),
}


class Start(NamedTuple):
    """One microbatch's graph with its parts, a plan for it, and the devices."""

    part: DividedGraph
    plan: Plan
    profile: Profile


def start(case: Case, num_nodes: int = 1) -> Start:
    """The case's template plan; its memory limit is lifted, since fitting is not the question."""
    with torch.device("meta"):
        model, inputs = case.model.build(case.config), case.model.example_inputs(case.config)
        graph = trace(model, inputs, mode=case.template.get("mode", "train"))
    num_devices = case.template.get("dp", 1) * case.template.get("tp", 1)
    mesh = autopar.Mesh(case.profile, num_nodes, num_devices // num_nodes)
    plan = template_of_graph(graph, mesh, memory_limit=10**13, **case.template)
    part = divided(graph, find_blocks(graph), plan.microbatches)
    profile = load_profile(case.profile)
    facts = replace(profile.facts, overlap_slowdown=case.slowdown)
    waits = {(case.waits.level, case.waits.ranks): case.waits} if case.waits else profile.waits
    return Start(part, plan, replace(profile, facts=facts, host=case.host or profile.host, waits=waits, _shared={}))
