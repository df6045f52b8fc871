"""Weights, buffers and gradients of a program of several stages: what each rank has of them, and what all have.

A tensor in several stages is *tied*: each stores it, and gradients are summed over the stages once a step. The first
of them speaks for it in norms and state dicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.declare import Buffer, Parameter, Pipeline, Stage
from autopar.runtime.local import Local, declared_tensors
from autopar.runtime.mesh import Axis, RankMesh, own_group
from autopar.runtime.placement import local_slices
from autopar.runtime.state import ProgramState, combination, spread, total_power, whole_tensor
from autopar.runtime.stored import StoredParameter, gathered
from autopar.runtime.transport import num_ranks


@dataclass(frozen=True)
class Catalog:
    """What all stages store: each tensor's declaration in the first stage that has it, and the stages that do."""

    declared: Mapping[str, Parameter | Buffer]
    stages: Mapping[str, tuple[int, ...]]
    first_ranks: Sequence[int]  # of each stage
    rank: int

    def is_first_of(self, stage: int) -> bool:
        """Whether this rank is the first of the stage's."""
        return self.rank == self.first_ranks[stage]

    @property
    def tied_stages(self) -> dict[str, tuple[int, ...]]:
        """Trained tensors that stages on several submeshes store."""
        trained = [name for name, item in self.declared.items() if isinstance(item, Parameter) and item.requires_grad]
        found = {
            name: tuple({self.first_ranks[s]: s for s in reversed(self.stages[name])}.values()) for name in trained
        }
        return {name: tuple(sorted(stages)) for name, stages in found.items() if len(stages) > 1}


def make_catalog(pipeline: type[Pipeline], device: torch.device) -> Catalog:
    """Reads it off the stages' declarations; makes no tensor."""
    declared: dict[str, Parameter | Buffer] = {}
    stages: dict[str, list[int]] = {}
    for number, stage in enumerate(pipeline.STAGES):
        for name, holder, attribute in declared_tensors(stage(RankMesh((), None, device))):
            buffer = holder.declared_buffers.get(attribute)
            declared.setdefault(name, buffer or holder.declared_parameters[attribute])
            stages.setdefault(name, []).append(number)
    firsts = [stage.FIRST_RANK for stage in pipeline.STAGES]
    return Catalog(declared, {name: tuple(found) for name, found in stages.items()}, firsts, dist.get_rank())


@dataclass(frozen=True, slots=True, eq=False)
class TiedTensor:
    """A tied tensor, and the ranks that sum its gradient: those that hold equal parts of it, one of each submesh.

    Where submeshes store it unequally, its whole is summed over their first ranks. axis: None where this rank has no
    part in the sum.
    """

    name: str
    is_equal: bool
    axis: Axis | None


def find_ties(pipeline: type[Pipeline], catalog: Catalog, timeout_s: float) -> list[TiedTensor]:
    """All ties, with their groups, which all ranks make in the same order."""
    found = []
    for name, numbers in catalog.tied_stages.items():
        stages = [pipeline.STAGES[number] for number in numbers]
        placed = {(tuple(stage.AXES.values()), _stored(stage, name)) for stage in stages}
        count = num_ranks(stages[0]) if len(placed) == 1 else 1
        rows = tuple(tuple(stage.FIRST_RANK + k for stage in stages) for k in range(count))
        found.append(TiedTensor(name, len(placed) == 1, _axis(rows, timeout_s)))
    return found


def _stored(stage: type[Stage], name: str) -> str:
    mesh = RankMesh((), None, torch.device("cpu"))
    items = ((n, h.declared_parameters.get(a)) for n, h, a in declared_tensors(stage(mesh)))
    return next(item.stored for n, item in items if n == name and item is not None)


def _axis(rows: tuple[tuple[int, ...], ...], timeout_s: float) -> Axis | None:
    group = own_group(rows, timeout_s, "tied")
    if group is None:
        return None
    is_gloo = dist.get_backend(group) == "gloo"
    return Axis("stages", len(rows[0]), dist.get_group_rank(group, dist.get_rank()), group, is_gloo, timeout_s)


class PipelineState(ProgramState):
    """All tensors of a pipeline's stages on this rank; whole ones come from the first stage that stores them."""

    def __init__(
        self, parts: Mapping[int, Local], catalog: Catalog, tied: Mapping[str, str], ties: Sequence[TiedTensor],
        world: dist.ProcessGroup, device: torch.device,
    ) -> None:  # fmt: skip
        parameters = {name: item for part in reversed(list(parts.values())) for name, item in part.parameters.items()}
        buffers = {name: item for part in reversed(list(parts.values())) for name, item in part.buffers.items()}
        super().__init__(parameters, buffers, tied, RankMesh((), None, device))
        self._parts, self._catalog, self._ties, self._world = parts, catalog, ties, world

    @property
    def group(self) -> dist.ProcessGroup | None:
        """See `ProgramState.group`."""
        return self._world

    def source_of(self, name: str) -> int:
        """See `ProgramState.source_of`: the first rank of the first stage that stores it."""
        return self._catalog.first_ranks[self._catalog.stages[name][0]]

    def speaks_for(self, name: str) -> bool:
        """See `ProgramState.speaks_for`."""
        return self._catalog.stages[name][0] in self._parts

    def sum_ties(self) -> None:
        """Sums the step's gradients of tied parameters over their stages."""
        for tie in self._ties:
            parameter = self.parameters.get(tie.name)
            if parameter is not None:
                if parameter.gradient is None:
                    parameter.gradient = torch.zeros_like(parameter.local)
                _sum(parameter, parameter.gradient, tie)

    @torch.no_grad()
    def unite_ties(self) -> None:
        """Gives tied parameters everywhere the values that the first stage has."""
        for tie in self._ties:
            parameter = self.parameters.get(tie.name)
            if parameter is not None:
                if self._catalog.stages[tie.name][0] not in self._parts:
                    parameter.local.zero_()
                _sum(parameter, parameter.local, tie)

    @torch.no_grad()
    def _whole_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of all stages, each from the stage that speaks for it."""
        known = frozenset[str]().union(*comm.gather_objects(list(tensors), self._world))
        full = {}
        for name in filter(known.__contains__, self._catalog.declared):
            stage, declared = self._catalog.stages[name][0], self._catalog.declared[name]
            if stage in self._parts:
                whole = whole_tensor(tensors[name])
            else:
                whole = torch.empty(declared.shape, dtype=declared.dtype, device=self.mesh.device)
            full[name] = comm.broadcast(whole, self._catalog.first_ranks[stage], self._world)
        return full

    def _declared(self) -> dict[str, Parameter | Buffer]:
        return dict(self._catalog.declared)

    def _broadcast(self, tensor: Tensor, declared: Parameter | Buffer) -> Tensor:
        whole = torch.empty(declared.shape, dtype=declared.dtype, device=self.mesh.device)
        source = dist.get_global_rank(self._world, 0)
        return comm.broadcast(whole.copy_(tensor), source, self._world)

    def _total_power(self, norm_type: float) -> Tensor:
        combine, operation = combination(norm_type)
        powers = [self._power_of(number, part, norm_type) for number, part in self._parts.items()]
        counted = [
            p for (number, _), p in zip(self._parts.items(), powers, strict=True) if self._catalog.is_first_of(number)
        ]
        total: Tensor = combine(torch.stack([torch.zeros_like(powers[0]), *counted]))
        comm.reduce_over(total, operation, self._world)
        return total

    def _power_of(self, number: int, part: Local, norm_type: float) -> Tensor:
        own = [item for name, item in part.parameters.items() if self._catalog.stages[name][0] == number]
        return total_power(own, part.mesh, norm_type)


@torch.no_grad()
def _sum(parameter: StoredParameter, local: Tensor, tie: TiedTensor) -> None:
    """Sums what stages hold of a parameter or its gradient, in place.

    Where they store it unequally, the whole is summed, then each takes its part.
    """
    if tie.is_equal and tie.axis is not None:
        summed = local.to(parameter.mesh.device)
        comm.all_reduce(summed, tie.axis)
        if summed is not local:
            local.copy_(summed)
        return
    mesh = parameter.mesh
    whole = gathered(local, parameter.declared.shape, parameter.types, mesh)
    if tie.axis is not None:
        comm.all_reduce(whole, tie.axis)
    spread(whole, mesh)
    local.copy_(whole[local_slices(parameter.declared.shape, parameter.types, mesh.axes)])
