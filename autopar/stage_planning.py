"""The search over stages: submesh size, logical shape, microbatches, schedule and recomputation; the best are simulated.

    setting = (submesh size, logical shape, B)    → placements along time against memory      `intraop.trade_offs`
    variant = (placements, recomputation)         → what each layer costs, played alone       `simulate.layer_costs`
    stages of a variant by schedule               → estimated step time                       `interop.best_stages`
    the best few                                  → plans of the whole model, simulated       `_Planner.built`

All but the last happens on a short graph (`interop.fold`), so the number of solves does not grow with depth. For each
logical shape the number of microbatches climbs from where the bubble is small, for as long as the estimate gets better.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from autopar.cost import Profile
from autopar.errors import InfeasibleError, PlanError
from autopar.interop import ChosenStage, Folded, StageKind, best_stages, block_layers, fold, in_flight
from autopar.interop.submeshes import logical_shapes, submesh_sizes
from autopar.intraop import TradeOff
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Plan
from autopar.planning import Part, Place, Request, divided, microbatch_counts
from autopar.progress import Report, reporting
from autopar.simulate import predict, simulate
from autopar.simulate.layers import LayerCost, layer_costs
from autopar.staging import cut
from autopar.template import template_recompute
from autopar.trace import Blocks

FINALISTS = 4
"""Plans that are built for the whole model and simulated; more where these do not fit."""
_VARIANTS = 4
"""Choices of placements along time against memory."""
_HOPELESS = 1.5
"""A setting whose costs without any overlap are so many times the best estimate is not looked at further."""
_CHUNKS = (2, 4)
RECOMPUTE = ("none", "block", "full")


@dataclass(frozen=True, eq=False)
class Setting:
    """Equal submeshes of one logical shape, and the number of microbatches."""

    axes: LogicalMesh
    num_devices: int
    num_stages: int
    microbatches: int


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to run the model, with its estimates: ns a step and the largest peak in bytes a device."""

    setting: Setting
    choice: TradeOff
    recompute: str
    schedule: str
    stage_of_layer: tuple[int, ...]
    step_ns: int
    peak_bytes: int
    lower_bound_ns: int

    @property
    def row(self) -> dict[str, Any]:
        """For `SearchReport.tried`."""
        sizes = "x".join(str(axis.size) for axis in self.setting.axes) or "1"
        return {
            "mesh": sizes, "stages": self.setting.num_stages, "microbatches": self.setting.microbatches,
            "schedule": self.schedule, "recompute": self.recompute, "estimated_ns": self.step_ns,
            "estimated_bytes": self.peak_bytes,
        }  # fmt: skip


def best_staged_plan(
    graph: Graph, blocks: Blocks, request: Request, profile: Profile, progress: Report | None
) -> Plan:  # fmt: skip
    """The fastest plan that fits, of one stage or several on equal submeshes.

    Raises InfeasibleError naming the smallest memory limit that can be met.
    """
    planner = _Planner(graph, blocks, request, profile)
    with reporting(progress, len(planner.shapes)) as report:
        found = planner.search(report)
    return planner.best(found)


class _Planner:
    def __init__(self, graph: Graph, blocks: Blocks, request: Request, profile: Profile) -> None:
        self.graph, self.blocks, self.request, self.profile = graph, blocks, request, profile
        self.paths = [path for group in blocks.paths for path in group]
        self.layers = block_layers(graph, self.paths)
        self.folded: Folded = fold(graph, blocks, self.layers)
        self.shared = profile.shared_by(request.mesh.devices_per_node)
        self.limit = request.memory_limit or self.shared.usable_bytes
        self.started = time.monotonic()
        self.best_ns = 2**62
        self.short_part, self.part, self.short_place = (
            cache(self._short_part),
            cache(self._part),
            cache(self._short_place),
        )

    def _short_part(self, microbatches: int) -> Part:
        return replace(divided(self.folded.graph, self.blocks, microbatches), copies=self.folded.copies)

    def _part(self, microbatches: int) -> Part:
        return divided(self.graph, self.blocks, microbatches)

    def _short_place(self, axes: LogicalMesh, microbatches: int) -> Place:
        return Place(self.short_part(microbatches), axes, self.request, self.profile)

    @cached_property
    def counts(self) -> list[int]:
        """Numbers of microbatches that are possible, ascending."""
        return microbatch_counts(self.folded.graph, self.request)

    @cached_property
    def shapes(self) -> list[tuple[int, LogicalMesh]]:
        """Submesh sizes with logical shapes; where stages are pinned, those of so many."""
        mesh = self.request.mesh
        pinned = {c.stages for c in self.request.constraints if c.stages is not None}
        most = max(1, self.layers.count) if self.request.mode == "train" else 1
        sizes = [n for n in submesh_sizes(mesh, most) if not pinned or {mesh.num_devices // n} == pinned]
        if not sizes:
            raise PlanError(
                f"expected a number of stages that {mesh} and {self.layers.count} layers allow, found "
                f"{' and '.join(map(str, sorted(pinned)))}; relax the constraint"
            )
        return [(size, axes) for size in sizes for axes in logical_shapes(size, mesh.devices_per_node)]

    @cached_property
    def recomputations(self) -> Mapping[str, tuple[str, ...]]:
        """Module paths by name; those that the model has nothing for are left out."""
        if self.request.mode != "train":
            return {"none": ()}
        found = {}
        for name in RECOMPUTE:
            try:
                found[name] = template_recompute(self.graph, self.paths, name)
            except PlanError:
                continue
        return found

    # Search ----------------------------------------

    def search(self, report: Report) -> list[Candidate]:
        """Everything that was looked at in time, the fastest by estimate first."""
        found: list[Candidate] = []
        deadline = self.started + self.request.budget.seconds
        for size, axes in self.shapes:
            if found and time.monotonic() > deadline:
                break
            here = self._climb(size, axes)
            found += here
            best = min((c for c in here if c.peak_bytes <= self.limit), key=lambda c: c.step_ns, default=None)
            what = f"{best.step_ns / 1e6:.3f} ms" if best else "nothing better that fits"
            report(f"{self.request.mesh.num_devices // size} stages of {[a.size for a in axes]}: {what}")
        found.sort(key=lambda candidate: candidate.step_ns)
        return found

    def _climb(self, size: int, axes: LogicalMesh) -> list[Candidate]:
        """Up from the first count whose bubble is small, as long as it gets better; then down from there."""
        stages = self.request.mesh.num_devices // size
        start = next((n for n, count in enumerate(self.counts) if count >= 4 * (stages - 1)), len(self.counts) - 1)
        found: list[Candidate] = []

        def go(numbers: Sequence[int], best: int) -> int:
            for number in numbers:
                here = self._candidates(Setting(axes, size, stages, self.counts[number]))
                found.extend(here)
                least = min((c.step_ns for c in here if c.peak_bytes <= self.limit), default=2**62)
                if best < 2**62 and least >= best:
                    break
                best = min(best, least)
            return best

        best = go(range(start, len(self.counts)), 2**62)
        go(range(start - 1, -1, -1), best)
        return found

    def _candidates(self, setting: Setting) -> list[Candidate]:
        """Every variant and schedule of a setting, unless its costs say that none can be among the best."""
        place = self.short_place(setting.axes, setting.microbatches)
        budget, stages, count = self.request.budget, setting.num_stages, setting.microbatches
        try:
            choices = place.placements.trade_offs(min(stages, count), 1, budget.seconds, budget.seed)
            if choices[0].cost_ns / stages * (count + stages - 1) / count > _HOPELESS * self.best_ns:
                return []
            choices = place.placements.trade_offs(min(stages, count), _VARIANTS, budget.seconds, budget.seed)
        except InfeasibleError:
            return []
        found = [
            candidate
            for choice in choices
            for recompute in self.recomputations
            for candidate in self._staged(setting, place, choice, recompute)
        ]
        fitting = [candidate.step_ns for candidate in found if candidate.peak_bytes <= self.limit]
        self.best_ns = min([self.best_ns, *fitting])
        return found

    def _staged(self, setting: Setting, place: Place, choice: TradeOff, recompute: str) -> Iterator[Candidate]:
        """The variant's best stages under each schedule."""
        kind = self._kind(setting, place, choice, recompute)
        stages, count = setting.num_stages, setting.microbatches
        for schedule in ("1f1b", "gpipe") if stages > 1 else ("1f1b",):
            try:
                found = best_stages([kind], self.request.mesh.num_devices, count, schedule)
            except InfeasibleError as error:
                if error.smallest_bytes is None:
                    continue
                free = replace(kind, memory_limit=error.smallest_bytes)
                found = best_stages([free], self.request.mesh.num_devices, count, schedule)
            chosen = found.best.stages
            of_layer = tuple(n for n, stage in enumerate(chosen) for _ in range(stage.begin, stage.end))
            peak = _peak(kind, chosen, count, schedule)
            yield Candidate(
                setting, choice, recompute, schedule, of_layer, found.best.step_ns, peak, found.lower_bound_ns
            )
        yield from self._interleaved(setting, kind, choice, recompute)

    def _interleaved(
        self, setting: Setting, kind: StageKind, choice: TradeOff, recompute: str
    ) -> Iterator[Candidate]:  # fmt: skip
        """Equal chunks, each submesh with several in turn."""
        stages, count, layers = setting.num_stages, setting.microbatches, self.layers.count
        for chunks in _CHUNKS:
            if stages < 2 or layers % (stages * chunks) or count % stages:
                continue
            of_layer = tuple(layer * stages * chunks // layers for layer in range(layers))
            step, peak = _interleaved_estimate(kind, of_layer, stages, chunks, count)
            yield Candidate(setting, choice, recompute, "interleaved", of_layer, step, peak, step)

    def _kind(self, setting: Setting, place: Place, choice: TradeOff, recompute: str) -> StageKind:
        """What each layer of the whole model costs with these placements."""
        short, part = self.folded, place.part
        again = self.recomputations[recompute]
        draft = replace(place.placements.draft, recompute=again)
        plan = place.placements.placed(draft, part.graph, choice.choice)
        count = max(1, short.layers.count)
        members = self._short_members
        firsts = [layer * setting.num_devices % self.request.mesh.num_devices for layer in range(count)]
        costs = layer_costs(part.graph, cut(part.graph, plan, members, firsts, "1f1b"), self.shared)
        return _stage_kind([costs[layer] for layer in short.layer_of or (0,)], setting.num_devices, self.limit)

    @cached_property
    def _short_members(self) -> Mapping[str, tuple[int, ...]]:
        layers = self.folded.layers
        if not layers.count:
            return {node.name: (0,) for node in self.graph.nodes}
        return layers.members(self.folded.graph, range(layers.count))

    # The best few, simulated ----------------------------------------

    def best(self, found: Sequence[Candidate]) -> Plan:
        """The fastest by simulation of the best that fit."""
        tried: list[dict[str, Any]] = []
        plans: list[tuple[Plan, Candidate]] = []
        for candidate in _distinct(found, self.limit):
            row = candidate.row
            tried.append(row)
            plan = self.built(candidate)
            row |= {"step_time_ns": plan.predicted.step_time_ns, "peak_bytes": plan.predicted.peak_bytes}
            if plan.predicted.peak_bytes <= self.limit:
                plans.append((plan, candidate))
            if len(plans) == FINALISTS or len(tried) == 4 * FINALISTS:
                break
        if not plans:
            raise InfeasibleError("nothing fits")  # TODO
        plan, candidate = min(plans, key=lambda pair: pair[0].predicted.step_time_ns)
        return self._stated(plan, candidate, tried)

    def built(self, candidate: Candidate) -> Plan:
        """One microbatch's plan of the whole model, simulated."""
        setting = candidate.setting
        place = Place(self.part(setting.microbatches), setting.axes, self.request, self.profile)
        short = self.short_place(setting.axes, setting.microbatches)
        draft = replace(place.draft(), recompute=self.recomputations[candidate.recompute])
        plan = short.placements.placed(draft, place.part.graph, candidate.choice.choice)
        if setting.num_stages > 1:
            plan = self._cut(plan, candidate, place.part.graph)
        return replace(plan, predicted=predict(simulate(place.part.graph, plan, self.shared)))

    def _cut(self, plan: Plan, candidate: Candidate, graph: Graph) -> Plan:
        members = self.layers.members(graph, candidate.stage_of_layer)
        size = candidate.setting.num_devices
        firsts = [n * size % self.request.mesh.num_devices for n in range(max(candidate.stage_of_layer) + 1)]
        return cut(graph, plan, members, firsts, candidate.schedule)

    def _stated(self, plan: Plan, candidate: Candidate, tried: Sequence[Mapping[str, Any]]) -> Plan:
        """The plan for the step, on all axes."""
        return plan


def _stage_kind(costs: Sequence[LayerCost], num_devices: int, limit: int) -> StageKind:
    columns = {name: np.array([getattr(cost, name) for cost in costs]) for name in LayerCost._fields}
    return StageKind(
        key=None,
        num_devices=num_devices,
        time_ns=columns["forward_ns"] + columns["backward_ns"],
        receive_ns=columns["receive_ns"],
        once_ns=columns["optimizer_ns"],
        reduce_ns=columns["reduce_ns"],
        hide_ns=columns["hide_ns"],
        resident_bytes=columns["resident_bytes"],
        activation_bytes=columns["activation_bytes"],
        workspace_bytes=columns["workspace_bytes"],
        memory_limit=limit,
    )


def _peak(kind: StageKind, stages: Sequence[ChosenStage], microbatches: int, schedule: str) -> int:
    """The largest of the stages' peaks in bytes a device."""
    peaks = []
    for number, (begin, end, _) in enumerate(stages):
        flying = in_flight(schedule, len(stages) - number, microbatches)
        stays = kind.resident_bytes[begin:end].sum() + kind.workspace_bytes[begin:end].max()
        peaks.append(int(stays + flying * kind.activation_bytes[begin:end].sum()))
    return max(peaks)


def _interleaved_estimate(
    kind: StageKind, chunk_of_layer: Sequence[int], stages: int, chunks: int, microbatches: int
) -> tuple[int, int]:
    """Step time and peak of equal chunks in turn: the bubble is that of 1f1b over the number of chunks.

    T = B · t + (P − 1) · t / chunks + e   with t, e of the slowest submesh (Megatron-LM, SC'21, section 2.2.2).
    """
    of_layer = np.array(chunk_of_layer)
    steps, peaks = [], []
    for submesh in range(stages):
        own = of_layer % stages == submesh
        first = own & (np.diff(of_layer, prepend=-1) > 0)
        one = int(kind.time_ns[own].sum() + kind.receive_ns[first].sum())
        once = int(kind.once_ns[own].sum() + max(0, kind.reduce_ns[own].sum() - kind.hide_ns[own].sum()))
        steps.append(microbatches * one + (stages - 1) * one // chunks + once)
        flying = in_flight("interleaved", stages - submesh, microbatches, chunks, stages)
        stays = int(kind.resident_bytes[own].sum() + kind.workspace_bytes[own].max())
        peaks.append(stays + flying * int(kind.activation_bytes[own].sum()) // chunks)
    return max(steps), max(peaks)


def _distinct(found: Sequence[Candidate], limit: int) -> list[Candidate]:
    """Those that fit by estimate, the fastest first; of equal estimates on one setting one."""
    kept: dict[Any, Candidate] = {}
    for candidate in found:
        if candidate.peak_bytes <= limit:
            kept.setdefault((candidate.setting, candidate.step_ns), candidate)
    return list(kept.values())
