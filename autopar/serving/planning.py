"""Plans of a served decoder: of a decode step, and under what it stores, of a prefill step of each prompt length.

decode, the step that runs most, is planned first; prefill steps store parameters and cache as it does, so that one set
of weights and one cache serve all (`_storing_as`), and place what is computed as is best for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from autopar.by_hand import template_of_graph
from autopar.errors import InternalError, PlanError
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.serving.cached import CACHE, CachedDecoder, checked_config
from autopar.serving.curve import BatchLatency, StepLatency
from autopar.substitute.heads import with_grouped_heads
from autopar.substitute.last_rows import with_rows_together
from autopar.trace import find_blocks, held_against_eager, trace

NOT_CHECKED = "no, check=False was asked for"


@dataclass(frozen=True)
class ServedLayout:
    """How ranks share a served decoder: dp × tp × pp, experts over ep of the ranks of dp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "ep": self.ep}
        return " × ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one device"


@dataclass(frozen=True)
class Steps:
    """The graph and the plan of the decode step, and of the prefill steps by their length."""

    layout: ServedLayout
    decode: tuple[Graph, Plan]
    prefill: Mapping[int, tuple[Graph, Plan]]

    @property
    def batch(self) -> int:
        """Slots."""
        graph, _ = self.decode
        return graph.tensors[graph.inputs[0]].shape[0]

    @property
    def peak_bytes(self) -> int:
        """Of the step that takes most, with the constants of the others, which stay."""
        every = [plan.predicted for _, plan in (self.decode, *self.prefill.values())]
        constants = [step.memory.get("constants", 0) for step in every]
        return max(step.peak_bytes + sum(constants) - own for step, own in zip(every, constants, strict=True))

    def latency(self) -> BatchLatency:
        """What is predicted of the steps."""
        prefill = {steps: _latency(plan) for steps, (_, plan) in self.prefill.items()}
        return BatchLatency(self.batch, _latency(self.decode[1]), prefill, self.peak_bytes, str(self.layout))


def _latency(plan: Plan) -> StepLatency:
    predicted = plan.predicted
    return StepLatency(predicted.step_time_ns, predicted.step_time_interval_ns)


def example(batch: int, steps: int, device: torch.device) -> dict[str, Tensor]:
    """Inputs of a step in which every sequence has as many new tokens as columns, from its first position on."""
    tokens = torch.arange(batch * steps, device=device).reshape(batch, steps) % 7
    starts = torch.zeros(batch, dtype=torch.int64, device=device)
    return {"tokens": tokens, "starts": starts, "lengths": starts + steps}


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """While inside, no parameter has a gradient: a served model is not trained, and its plans need not allow for it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@dataclass(frozen=True)
class StepGraph:
    """A step's graph, and what came of running it beside the decoder with its cache."""

    graph: Graph
    checked: str


def traced_steps(
    model: nn.Module, batch: int, max_length: int, prompt_lengths: Sequence[int], check: bool = True
) -> dict[int, StepGraph]:
    """The graph of each step by its columns, 1 for decode; with `check`, held against the decoder where it has weights.
    Raises TraceError, also where they differ, and PlanError."""
    decoder, found = CachedDecoder(model, batch, max_length), dict[int, StepGraph]()
    device = next(iter(model.parameters())).device
    for steps in (1, *prompt_lengths):
        inputs = example(batch, steps, device)
        graph = with_rows_together(with_grouped_heads(trace(decoder, inputs, mode="inference")))
        told = held_against_eager(decoder, graph, inputs, None, None) if check else NOT_CHECKED
        found[steps] = StepGraph(graph, told)
    return found


def planned_steps(
    traced: Mapping[int, StepGraph], model: nn.Module, mesh: Mesh, layout: ServedLayout,
    memory_limit: int | None = None,
    constraints: Sequence[Constraint] = (),
) -> Steps:  # fmt: skip
    """Plans of all steps in a layout. Raises PlanError and MeshError for one that the model does not go with, and
    InfeasibleError where the cache and the weights do not fit."""
    first = traced[1].graph
    rules = [*_of_cache(layout, cached_heads(first)), *constraints]
    check_layout(model, first, layout)
    sizes = _blocks_by_stage(first, layout.pp)

    def plan(step: StepGraph, own: Sequence[Constraint]) -> Plan:
        found = template_of_graph(
            step.graph, mesh, dp=layout.dp, tp=layout.tp, pp=layout.pp, ep=layout.ep, layers=sizes, mode="inference",
            optimizer=None, memory_limit=memory_limit, constraints=own,
        )  # fmt: skip
        return replace(found, checked_against_eager=step.checked)

    decode = plan(traced[1], rules)
    alike = [*rules, *_storing_as(first, decode)]
    prefill = {steps: (step.graph, plan(step, alike)) for steps, step in traced.items() if steps > 1}
    for graph, own in prefill.values():
        _check_alike((first, decode), (graph, own))
    return Steps(layout, (first, decode), prefill)


def check_layout(model: nn.Module, graph: Graph, layout: ServedLayout) -> None:
    """Raises PlanError for heads or sequences that ranks cannot share as they are."""
    config = checked_config(model)
    heads = int(config.num_attention_heads)
    batch = graph.tensors[graph.inputs[0]].shape[0]
    if heads % layout.tp:
        raise PlanError(f"expected tp that divides {heads} attention heads, found tp={layout.tp}; take a divisor")
    for kept in sorted(set(cached_heads(graph).values())):
        if kept % layout.tp and layout.tp % kept:
            raise PlanError(
                f"expected tp that divides {kept} key/value heads, of which each rank caches its own, or a multiple of "
                f"them, where each rank caches all, found tp={layout.tp}; take tp={_divisor(kept, layout.tp)} with "
                "more of dp or pp"
            )
    if layout.dp % layout.ep:
        raise PlanError(f"expected ep that divides dp={layout.dp}, found ep={layout.ep}; take a divisor")
    if batch % layout.dp:
        raise PlanError(f"expected a batch that dp={layout.dp} divides, found {batch}; take a multiple")


def _divisor(count: int, most: int) -> int:
    return next(size for size in range(min(count, most), 0, -1) if count % size == 0)


def cached_heads(graph: Graph) -> dict[str, int]:
    """By name of a buffer that is cached: its heads."""
    kept = [item for item in graph.stored if item.name.startswith(f"{CACHE}.")]
    return {item.name: graph.tensors[item.tensor].shape[1] for item in kept}


def _of_cache(layout: ServedLayout, heads: Mapping[str, int]) -> list[Constraint]:
    """Each rank of tp caches the heads that it computes, or all of them where they are fewer than ranks, of which each
    reads the one that its queries share; over dp, a template has sequences cached where they are."""
    types = {name: "S(1)" if count % layout.tp == 0 else "R" for name, count in heads.items()}
    if layout.tp == 1:
        return []
    if len(set(types.values())) == 1:
        return [Constraint(f"{CACHE}.*", (next(iter(types.values())),), what="stored", axis="tp")]
    return [Constraint(name, (type_,), what="stored", axis="tp") for name, type_ in types.items()]


def _storing_as(graph: Graph, plan: Plan) -> list[Constraint]:
    """That everything is stored as in a plan."""
    found: dict[Constraint, None] = {}
    for stage in plan.stages:
        for tensor, storage in stage.storage.items():
            for axis, type_ in zip(stage.axes, storage.placement, strict=True):
                item = graph.stored_by_tensor[tensor]
                if item.kind == "parameter" or item.name in graph.kept_in_parts:
                    found[Constraint(item.name, (str(type_),), what="stored", axis=axis.name)] = None
    return list(found)


def _check_alike(first: tuple[Graph, Plan], other: tuple[Graph, Plan]) -> None:
    """That two steps store the same in the same places: they run on one set of tensors."""
    stored = []
    for graph, plan in (first, other):
        stored.append(
            [
                {
                    item.name: (stage.first_rank, stage.axes, stage.storage[item.tensor].placement)
                    for item in graph.stored
                    if item.tensor in stage.storage and item.kind != "constant"
                }
                for stage in plan.stages
            ]
        )
    if stored[0] != stored[1]:
        pairs = [(a, b) for a, b in zip(*stored, strict=False)]
        odd = sorted(name for a, b in pairs for name in a.keys() | b.keys() if a.get(name) != b.get(name))
        raise InternalError(f"expected prefill to store what decode stores, found another placement of {odd[:3]}")


def _blocks_by_stage(graph: Graph, pp: int) -> tuple[int, ...] | None:
    """As many repeated blocks for each stage, equally for all steps; earlier stages have those that are left."""
    if pp == 1:
        return None
    count = sum(len(group) for group in find_blocks(graph).paths)
    return tuple(count // pp + (index < count % pp) for index in range(pp))
