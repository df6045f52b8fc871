"""The model as a chain of layers: what each costs, run in one way or another, found on a short graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.clock import worked
from autopar.collector import cached_method
from autopar.cost import Profile
from autopar.expert_parallel import expert_parameters
from autopar.interop import Folded, Layers, StageKind, balanced_layers, block_layers, fold
from autopar.intraop import Sends, TradeOff
from autopar.ir.constraint import may_run
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import Axis
from autopar.ir.structure import batch_inputs
from autopar.microbatch import batch_types
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.planning import DividedGraph, Place, divided, microbatch_counts
from autopar.request import Request
from autopar.simulate import Incremental
from autopar.simulate.alone import LayerCost, layer_costs
from autopar.simulate.cores import part_of_step, sharing_of
from autopar.staged.ends import ModelEnds, ends_of
from autopar.staged.ways import EstimatedStages, Setting, StageStrategy
from autopar.staging import cut, node_times_ns
from autopar.template import template_constraints
from autopar.trace import Blocks
from autopar.tunables import CORE_STEPS, KIND_S, MOST_LAYERS, PEAK_SLACK
from autopar.zero import joined, pinned_modules, priced_levels, recomputable


class RecomputationLevel(NamedTuple):
    """A recomputation beside the one that computes least again: of its activations what is kept, of its time what is
    taken, and of a layer's activations what a pass has more beside what is kept."""

    kept: float
    times: float
    beside: float = 0.0


class Layered:
    """A model, what was asked of it, and the problems that were built for it, each once.

    limit: bytes a device. admitted: estimates up to so many bytes are simulated. constants_once: see `layer_costs`.
    """

    def __init__(
        self, graph: Graph, blocks: Blocks, request: Request, profile: Profile, constants_once: bool = False
    ) -> None:  # fmt: skip
        self.constants_once = constants_once
        self.graph, self.blocks, self.request, self.profile = graph, blocks, request, profile
        self.paths = [path for group in blocks.paths for path in group]
        self.shared = profile.shared_by(request.mesh.devices_per_node)
        self.layers = block_layers(graph, self.paths)
        self.folded: Folded = fold(graph, blocks, self.layers)
        if self.layers.count < 2:
            self.layers = balanced_layers(
                graph, node_times_ns(graph, self.shared), min(MOST_LAYERS, 2 * request.mesh.num_devices)
            )
            self.folded = Folded(graph, self.layers, tuple(range(self.layers.count)))
        self._least_again: dict[tuple[Setting, TradeOff], StageKind] = {}
        self.levels: dict[
            str, RecomputationLevel
        ] = {}  # what is known of each recomputation, those that were looked at
        self.limit = request.memory_limit or self.shared.usable_bytes
        self.admitted = int(self.limit * PEAK_SLACK)

    @cached_method
    def computed(self, num_devices: int, microbatches: int) -> StageKind:
        """What each layer costs at least on so many devices: what it computes, shared out evenly, and no memory."""
        graph = self.short_part(microbatches).graph
        times, found = node_times_ns(graph, self.shared), np.zeros(max(1, self.folded.layers.count), np.int64)
        for name, time_ns in times.items():
            found[self._short_members[name][0]] += time_ns // num_devices
        times_ns = found[np.array(self.folded.layer_of or (0,))]
        nothing = dict.fromkeys(StageKind.columns(), np.zeros_like(times_ns))
        return StageKind("computed", num_devices, memory_limit=self.admitted, **nothing | {"time_ns": times_ns})

    @cached_method
    def short_part(self, microbatches: int) -> DividedGraph:
        return replace(divided(self.folded.graph, self.blocks, microbatches), copies=self.folded.copies)

    @cached_method
    def part(self, microbatches: int) -> DividedGraph:
        return divided(self.graph, self.blocks, microbatches)

    @cached_method
    def _layer_simulator(self, microbatches: int) -> Incremental:
        """Of the short graph's layers, each in one part, as they are run in one way and another."""
        return Incremental(self.short_part(microbatches).graph, self.shared, in_parts=False, may_split=True)

    @cached_method
    def short_place(
        self, axes: LogicalMesh, microbatches: int, zero: int | None, splits_sequence: bool,
        sharing: tuple[str, ...] = (),
    ) -> Place:  # fmt: skip
        part, request = self.short_part(microbatches), self.request
        if zero is not None:
            made = batch_types(part.graph).items()
            batch = {name: type_ for name, type_ in made if self.blocks.representative_tensor(name) == name}
            rules = template_constraints(
                part.graph, axes, zero, splits_sequence, tuple(self.paths), batch, sharing=sharing, kept=self.blocks
            )
            request = replace(request, constraints=(*request.constraints, *rules))
        strictly = zero is not None and bool(splits_sequence or sharing)  # others may break some to save memory
        return Place(part, axes, request, self.profile, self._sends(axes), strictly=strictly)

    def place_of(self, setting: Setting) -> Place:
        """The intra-op problem of the short graph."""
        return self.short_place(
            setting.axes, setting.microbatches, setting.zero, setting.splits_sequence, setting.sharing
        )

    def fastest(self, setting: Setting, work_s: float, seed: int) -> TradeOff:
        """The placements of a setting that take least time, whatever memory they take."""
        return self.place_of(setting).placements.trade_offs(1, work_s, seed).fastest()

    def _sends(self, axes: LogicalMesh) -> Sends | None:
        """Every border of layers is one of stages, as often as there are fewer of these."""
        size, mesh = math.prod(axis.size for axis in axes), self.request.mesh
        stages = mesh.num_devices // size
        if stages == 1:
            return None
        times = (stages - 1) / (self.layers.count - 1)
        distance = 1 if stages * size <= mesh.devices_per_node else mesh.devices_per_node
        return Sends(Axis("stages", 2, distance), dict.fromkeys(self._crossing, times))

    @cached_property
    def ends(self) -> ModelEnds | None:
        """The model's ends as layers, where they can be."""
        return ends_of(self.graph, self.layers, self.path_of_layer, self.blocks.paths) if self.paths else None

    def layers_of(self, candidate: EstimatedStages) -> tuple[Layers, Callable[[StageStrategy], StageKind]]:
        """What its stages are made of, and what each of these layers costs."""
        ends = self.ends
        if ends is None or len(candidate.stage_of_layer) < ends.layers.count:
            return self.layers, self.kind
        return ends.layers, lambda way: ends.kind(self.kind(way))

    @cached_property
    def _crossing(self) -> list[str]:
        """Tensors that a layer makes and a later one reads."""
        graph, members = self.folded.graph, self._short_members
        return [
            name
            for node in graph.nodes
            for name in node.results
            if any(members[user.name][-1] > members[node.name][-1] for user, _ in graph.consumers[name])
        ]

    def part_of_step(self, schedule: str, submeshes: int, microbatches: int, times: Sequence[int]) -> float:
        """How much of its estimate a step takes: less than all where ranks share cores, which some leave to others.

        times: of each stage, relative to each other.
        """
        sharing = sharing_of([self.shared])
        if sharing is None or submeshes == 1:
            return 1.0
        parts = tuple(max(1, round(CORE_STEPS * time / max(1, *times))) for time in times)
        return part_of_step(sharing, schedule, submeshes, microbatches, self.request.mode == "train", parts)

    def in_time(self, candidate: EstimatedStages) -> EstimatedStages:
        """A candidate that was estimated as if no rank left its core to others, with that.

        Stages of other sizes may leave each other more: as much as all cores, which is what the bound allows for.
        """
        sharing = sharing_of([self.shared])
        if sharing is None or candidate.num_submeshes == 1:
            return candidate
        part = self.part_of_candidate(candidate)
        step, last = round(part * candidate.step_ns), round(part * candidate.last_ns)
        bound = candidate.lower_bound_ns * sharing.cores // sharing.ranks
        return replace(candidate, step_ns=step, lower_bound_ns=min(step, bound), last_ns=last)

    @property
    def shares_cores(self) -> bool:
        """Whether ranks share cores."""
        return sharing_of([self.shared]) is not None

    def part_of_candidate(self, candidate: EstimatedStages) -> float:
        """As `part_of_step`."""
        if not self.shares_cores:
            return 1.0
        of_layer, (_, kind) = np.array(candidate.stage_of_layer), self.layers_of(candidate)
        times = [int(kind(way).time_ns[of_layer == n].sum()) for n, way in enumerate(candidate.ways)]
        return self.part_of_step(candidate.schedule, candidate.num_submeshes, candidate.microbatches, times)

    @cached_method
    def parameter_bytes(self, of_experts: bool) -> npt.NDArray[np.int64]:
        """Of each layer, those of the parameters that it is the first to read: of its experts, or of all else."""
        graph, found = self.folded.graph, np.zeros(max(1, self.folded.layers.count), np.int64)
        for stored in graph.stored:
            readers = [node.name for node, _ in graph.consumers[stored.tensor]]
            layers = [self._short_members[name][0] for name in readers if name in self._short_members]
            if layers and stored.requires_grad and (stored.name in self._experts) == of_experts:
                found[min(layers)] += graph.tensors[stored.tensor].num_bytes
        of_layer: npt.NDArray[np.int64] = found[np.array(self.folded.layer_of or (0,))]
        return of_layer

    @cached_property
    def _experts(self) -> set[str]:
        return expert_parameters(self.folded.graph)

    @cached_property
    def num_experts(self) -> int:
        """Of the layer that has fewest; none where tokens are not routed."""
        return min((int(node.args[7]) for node in self.graph.nodes if node.op == ROUTED_EXPERTS), default=0)

    @cached_property
    def counts(self) -> list[int]:
        """Numbers of microbatches that are possible, ascending."""
        return [*microbatch_counts(self.folded.graph, self.request)]

    @cached_property
    def batch(self) -> int:
        """Samples of a step; one where the model has no batch."""
        names = batch_inputs(self.graph)
        return self.graph.tensors[names[0]].shape[0] if names else 1

    @cached_property
    def recomputations(self) -> Mapping[str, tuple[str, ...]]:
        """What is computed again, as plans say it, by name, the least first; what there is none of is left out.

        Where constraints say what is computed again, that alone.
        """
        if self.request.mode != "train":
            return {"none": ()}
        pinned = pinned_modules(recomputable(self.graph, self.paths), self.request.constraints)
        if pinned is not None:
            return {"pinned": pinned}
        levels = priced_levels(self.graph, self.paths, self.shared)
        return {name: joined(groups) for name, groups in levels.items()}

    @cached_property
    def path_of_layer(self) -> list[str]:
        """The module path of each layer's block."""
        paths, found = set(self.paths), {}
        for node in self.graph.nodes:
            layer = self.layers.fixed.get(node.name)
            if layer is not None and layer not in found:
                found[layer] = node.scope.outermost(paths) or ""
        return [found[layer] for layer in sorted(found)]

    def modules_again(self, recompute: tuple[str, ...]) -> tuple[str, ...]:
        """The modules to compute again when each layer has a recomputation by name."""
        if len(set(recompute)) == 1:
            return self.recomputations[recompute[0]]
        name_of = dict(zip(self.path_of_layer, recompute, strict=True))
        return tuple(
            module
            for path, name in name_of.items()
            for module in self.recomputations[name]
            if f"{module}.".startswith(f"{path}.")
        )

    @cached_method
    def kind(self, way: StageStrategy) -> StageKind:
        """What each layer of the whole model costs when it is run so."""
        worked(KIND_S)
        short, setting, place = self.folded, way.setting, self.place_of(way.setting)
        part = place.part
        draft = replace(place.placements.draft, recompute=self.recomputations[way.recompute])
        plan = place.placements.placed(draft, part.graph, way.choice.choice)
        count = max(1, short.layers.count)
        firsts = [layer * setting.num_devices % self.request.mesh.num_devices for layer in range(count)]
        cut_plan = cut(part.graph, plan, self._short_members, firsts, "1f1b")
        splits = self.may_wait(setting.num_stages, way.recompute)
        costs = layer_costs(self._layer_simulator(setting.microbatches), cut_plan, splits, self.constants_once)
        every = [costs[layer] for layer in short.layer_of or (0,)]
        columns = {name: np.array([getattr(cost, name) for cost in every]) for name in LayerCost._fields}
        kind = StageKind(
            key=way,
            num_devices=setting.num_devices,
            time_ns=columns["forward_ns"] + columns["backward_ns"],
            receive_ns=columns["receive_ns"],
            travel_ns=columns["travel_ns"],
            once_ns=columns["optimizer_ns"],
            reduce_ns=columns["reduce_ns"],
            hide_ns=columns["hide_ns"],
            last_ns=columns["last_ns"],
            begin_bytes=columns["begin_bytes"],
            resident_bytes=columns["resident_bytes"],
            gradient_bytes=columns["gradient_bytes"],
            travelling_bytes=columns["travelling_bytes"],
            most_travelling_bytes=columns["most_travelling_bytes"],
            activation_bytes=columns["activation_bytes"],
            workspace_bytes=columns["workspace_bytes"],
            waiting_bytes=columns["waiting_bytes"],
            second_bytes=columns["second_bytes"],
            split_ns=columns["split_ns"],
            memory_limit=self.admitted,
        )
        self._note_level(way, kind)
        return kind

    def _note_level(self, way: StageStrategy, kind: StageKind) -> None:
        """Compares what layers cost with what they do in the same placements with least computed again, once."""
        if way.recompute == next(iter(self.recomputations)):
            self._least_again[way.setting, way.choice] = kind
            self.levels.setdefault(way.recompute, RecomputationLevel(1.0, 1.0))
        elif way.recompute not in self.levels and (least := self._least_again.get((way.setting, way.choice))):
            kept, times = (
                float(getattr(kind, name).sum() / max(1, getattr(least, name).sum()))
                for name in ("activation_bytes", "time_ns")
            )
            beside = float(kind.workspace_bytes.max() - least.workspace_bytes.max())
            self.levels[way.recompute] = RecomputationLevel(kept, times, beside / max(1, least.activation_bytes.max()))

    def allows(self, candidate: EstimatedStages) -> bool:
        """Whether constraints allow its schedule and number of chunks, which matter where stages are several."""
        submeshes = candidate.num_submeshes
        chunks = len(candidate.ways) // submeshes
        return submeshes == 1 or may_run(self.request.constraints, candidate.schedule, chunks)

    def may_wait(self, num_stages: int, recompute: str) -> bool:
        """Whether gradients of stored tensors may wait on so many stages that compute this again."""
        return self.request.mode == "train" and num_stages > 1 and not self.recomputations[recompute]

    @cached_property
    def _short_members(self) -> Mapping[str, tuple[int, ...]]:
        layers = self.folded.layers
        if not layers.count:
            return {node.name: (0,) for node in self.graph.nodes}
        return layers.members(self.folded.graph, range(layers.count))
