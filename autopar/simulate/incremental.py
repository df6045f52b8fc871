"""Simulates plans that differ little from those before: what is the same as in an earlier plan is not played again.

A stage's graph is cut into segments (`segments`), each of which is lowered by itself (`parts`) and played on from where
those before have left the streams (`part_player`). A segment with equal placements in an equal context is lowered once,
and one that begins in an equal state is played once, wherever in the model it is and in whichever plan. FlexFlow's
delta simulation (MLSys'19, 5.3) updates the times of tasks that a change reaches; here these are segments, and those
that a change reaches without a difference are not played again either.

A full simulation is this one with nothing known. A stage whose parts depend on each other in ways that are not followed
(`Unsupported`) is one segment. Ranks of a stage that are unlike are lanes of their own (`unlike`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from contextlib import suppress

from autopar.clock import worked
from autopar.collector import without_collector
from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.schedule import SCHEDULES
from autopar.ir.stages import stage_graph
from autopar.ops.copies import without_sums
from autopar.simulate.facts import graph_facts
from autopar.simulate.lowering import devices_per_node, sent_values
from autopar.simulate.operator_prices import PriceTable
from autopar.simulate.orders import Unsupported
from autopar.simulate.overlap import AS_EMITTED, Overlap, Sums
from autopar.simulate.parted import PartedStage, PartlySplitStage
from autopar.simulate.passes import Beyond
from autopar.simulate.schedule import PlayedStep, play_stages, profiles_of_stages
from autopar.simulate.timeline import Timeline
from autopar.simulate.unlike import play_unlike
from autopar.simulate.variants import KnownParts, SentValues, Variants
from autopar.simulate.wrapping import wrapping_module
from autopar.tunables import PLAY_S

KEPT_PLANS = 4
KEPT_VARIANTS = 4  # of each stage
KEPT_GRAPHS = 1 << 7  # of stages


class Incremental:
    """Simulates plans one after another."""

    def __init__(
        self, graph: Graph, profile: Profile | Mapping[str, Profile], overlap: Overlap = AS_EMITTED,
        in_parts: bool = True, may_split: bool = False,
    ) -> None:  # fmt: skip
        """profile, overlap: as in `simulate`. in_parts: whether stages are cut at all. may_split: plans come with
        backward passes in one part and in two, which are to share what is known."""
        self.graph, self.profile, self._overlap = graph, profile, overlap
        self._in_parts, self._may_split = in_parts and overlap.sums is not Sums.LATE, may_split
        self._played: OrderedDict[int, tuple[Plan, PlayedStep | Timeline]] = OrderedDict()
        self._variants: OrderedDict[Hashable, Variants] = OrderedDict()
        self._known: dict[Hashable, KnownParts] = {}  # of stages that are alike
        self._prices: dict[Hashable, PriceTable] = {}  # of stages on equal axes
        self.num_whole = 0  # stages that were played in one part, though they could be cut

    def step_time_ns(self, plan: Plan, until_ns: float = math.inf) -> int:
        """As `simulate(graph, plan, profile).step_time_ns`; where that is above `until_ns`, it or something between."""
        try:
            return self._play(plan, until_ns).step_time_ns
        except Beyond as beyond:
            return beyond.least_ns

    def peak_bytes(self, plan: Plan) -> int:
        """As `simulate(graph, plan, profile).peak_bytes`."""
        return self.timeline(plan).peak_bytes

    def excess_bytes(self, plan: Plan, limit_bytes: int) -> int:
        """How much the peak is above a limit; where it is far below, memory is not added up moment by moment."""
        played = self._play(plan)
        if isinstance(played, PlayedStep) and _most_bytes(played) <= limit_bytes:
            return 0
        return max(0, self.peak_bytes(plan) - limit_bytes)

    def timeline(self, plan: Plan) -> Timeline:
        """As `simulate(graph, plan, profile)`. Raises PlanError as that does."""
        played = self._play(plan)
        return played.timeline if isinstance(played, PlayedStep) else played

    def _play(self, plan: Plan, until_ns: float = math.inf) -> PlayedStep | Timeline:
        known = self._played.get(id(plan))
        if known is None:
            with without_collector():
                known = self._played[id(plan)] = plan, self._played_now(plan, until_ns)
            if len(self._played) > KEPT_PLANS:
                self._played.popitem(last=False)
        return known[1]

    def _played_now(self, plan: Plan, until_ns: float) -> PlayedStep | Timeline:
        worked(PLAY_S)
        if len(plan.stages) == 1 and (plan.stage.forks or ranks_differ(plan)):
            own = self.profile
            known = own if isinstance(own, Mapping) else {group.profile: own for group in plan.mesh.groups}
            return play_unlike(self.graph, plan, known, self._overlap)
        return play_stages(self.graph, plan, self.stages(plan), profiles_of_stages(plan, self.profile), until_ns)

    def stages(self, plan: Plan) -> list[PartedStage]:
        """The plan's stages, ready to be played."""
        profiles = profiles_of_stages(plan, self.profile)
        return [self._stage(plan, index, profile) for index, profile in enumerate(profiles)]

    def _stage(self, plan: Plan, index: int, profile: Profile) -> PartedStage:
        """In parts, if it can be cut."""
        sent = sent_values(self.graph, plan, index)
        graph = self._stage_graph(plan, index, sent)
        if self._in_parts and not plan.copied_out:  # what is copied out in one part comes back in another
            with suppress(Unsupported):
                return self._parted(plan, index, graph, profile, True, sent)
        self.num_whole += self._in_parts and not plan.copied_out
        return self._parted(plan, index, graph, profile, False, sent)

    def _parted(
        self, plan: Plan, index: int, graph: Graph, profile: Profile, is_cut: bool, sent: SentValues
    ) -> PartedStage:  # fmt: skip
        """As its backward passes come: in two parts, in one, or some in the one way and some in the other."""
        row, part = SCHEDULES[plan.schedule], plan.parts[index]
        is_split = len(plan.stages) > 1 and row.splits_backward
        own = self._variants_of(plan, index, graph, profile, is_cut, is_split)
        if not (is_split and row.splits_some):
            return PartedStage(own, part, sent)
        whole = PartedStage(self._variants_of(plan, index, graph, profile, is_cut, is_split, in_one=True), part, sent)
        return PartlySplitStage(own, part, sent, whole)

    def _variants_of(
        self, plan: Plan, index: int, graph: Graph, profile: Profile, is_cut: bool, is_split: bool, in_one: bool = False
    ) -> Variants:  # fmt: skip
        """What is known of stages of that graph, on such axes. in_one: as in `Variants`."""
        part, per_node, is_stage = plan.parts[index], devices_per_node(plan, index), len(plan.stages) > 1
        may_split = is_split or (self._may_split and is_stage)
        prices = part.axes, part.blocks, part.optimizer, per_node, profile
        alike = prices, part.microbatches, part.copied_out, part.mode, is_stage, may_split, plan.runs
        wrapping = wrapping_module(self.graph, graph_facts(self.graph, profile.device_type)) if is_cut else ""
        if wrapping and any(storage.regather for storage in part.storage.values()):
            wrapping = ""
        key = id(graph), is_cut, is_split, in_one, part.recompute, wrapping, alike
        found = self._variants.get(key)
        if found is None or found.is_full:
            found = self._variants[key] = Variants(
                self.graph, graph, part, profile, per_node, is_cut, is_split, self._overlap,
                self._known_parts(alike, prices), may_split, in_one=in_one, wrapping=wrapping,
            )  # fmt: skip
            if len(self._variants) > KEPT_VARIANTS * len(plan.stages):
                self._variants.popitem(last=False)
        return found

    def _known_parts(self, alike: Hashable, prices: Hashable) -> KnownParts:
        known = self._known.get(alike)
        if known is None or known.is_full:
            table = self._prices.setdefault(prices, PriceTable()) if known is None else PriceTable()
            known = self._known[alike] = KnownParts(table, self._overlap.packing)
        return known

    def _stage_graph(self, plan: Plan, index: int, sent: SentValues) -> Graph:
        """One graph for equal stages, whatever their placements."""
        if len(plan.stages) == 1:
            return self.graph
        stage, firsts = plan.stages[index], tuple([stage.first_rank for stage in plan.stages])
        leaves = tuple([(name, is_answered) for (name, _), is_answered in sent.items()])
        key = index, firsts, tuple(stage.inputs), tuple(stage.nodes), tuple(stage.storage), leaves
        known: OrderedDict[Hashable, Graph] = self.graph.found.setdefault(("stages", ""), OrderedDict())
        if key not in known:
            known[key] = stage_graph(self.graph, plan, index)
            if len(known) > KEPT_GRAPHS:
                known.popitem(last=False)
        return known[key]


def simulate(
    graph: Graph, plan: Plan, profile: Profile | Mapping[str, Profile], overlap: Overlap = AS_EMITTED
) -> Timeline:
    """One step of the plan: what runs when, what it sends, what memory it takes. Deterministic.

    graph, plan: of one microbatch; played are `plan.microbatches`. Every rank of a submesh does the same; simulated is
    its first, which has the longest slices; where ranks are unlike, one of each kind (`unlike`).
    profile: of the devices; by the name that the mesh has for them where they are of several kinds
    (`profiler.profiles_of`). overlap: what is sent beside computation, by default as in emitted programs.
    Of a plan whose copies of the parameters meet by an algorithm, a step in which they do not.
    Raises PlanError for a plan that lacks a redistribution.
    """
    return Incremental(graph, profile, overlap).timeline(without_sums(plan))


def simulate_whole(graph: Graph, plan: Plan, profile: Profile | Mapping[str, Profile]) -> Timeline:
    """As `simulate`, each stage in one part: what the joined ones must agree with."""
    return Incremental(graph, profile, in_parts=False).timeline(without_sums(plan))


def ranks_differ(plan: Plan) -> bool:
    """Whether ranks of one stage differ, in their devices or in their shares."""
    return not plan.mesh.is_homogeneous or any(axis.shares for axis in plan.stage.axes)


def _most_bytes(step: PlayedStep) -> float:
    """At least the peak of a step in parts: every part of a pass at its own fullest, as if that were at one time."""
    most = 0
    for submesh in step.submeshes:
        held = 0
        for stage in (step.stages[number].player for number in submesh.stages):
            held += stage.variants.resident_bytes(stage.plan, stage.joined.parts)
        held += sum([played.rise_bytes * count for played, count in submesh.played.items()])
        beside = (piece for piece in submesh.pieces if not piece.tasks)
        most = max(most, held + sum([max(0, size) for piece in beside for _, size, _, _ in piece.changes]))
    return most
