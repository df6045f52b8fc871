"""One rank's part of a program of several stages: as `Rank`, over the stages that run here."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime import comm, randomness
from autopar.runtime.arrivals import FORWARD, Turn
from autopar.runtime.compiling import Compile
from autopar.runtime.copies import apart_of
from autopar.runtime.declare import Pipeline, Program
from autopar.runtime.errors import ProgramError
from autopar.runtime.host_link import HostLink
from autopar.runtime.inputs import check_unread, join_outputs, split_named
from autopar.runtime.local import Local
from autopar.runtime.mesh import Axis, RankMesh, make_submeshes, own_group, world_of
from autopar.runtime.pipeline_state import Catalog, PipelineState, find_ties, make_catalog
from autopar.runtime.rank import Microbatches, Rank
from autopar.runtime.scheduled import ScheduledStage, check_reach, foresee, make_schedule
from autopar.runtime.stashing import PIPEDREAM, Updates, WeightStash
from autopar.runtime.transport import Channel, Transport, find_channels, group_names, num_ranks


class PipelineRank(Rank):
    """A `Rank` whose parameters are those of its stages, and whose steps follow the pipeline's schedule."""

    def __init__(
        self, pipeline: type[Pipeline], device_mesh: DeviceMesh | None, device: torch.device | None, timeout_s: float,
        shared: Sequence[Local] = (),
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self.__dict__.update(_pipeline=pipeline, _arguments=(pipeline, device_mesh, device, timeout_s))
        count = max(stage.FIRST_RANK + num_ranks(stage) for stage in pipeline.STAGES)
        device, ranks = world_of(count, device_mesh, device, timeout_s)
        channels = find_channels(pipeline.STAGES)
        check_reach(pipeline.SCHEDULE, len({s.FIRST_RANK for s in pipeline.STAGES}) < len(pipeline.STAGES), channels)
        world, *others = (own_group((tuple(ranks),), timeout_s, purpose) for purpose in ("", *group_names(channels)))
        groups = {name: group for name, group in zip(group_names(channels), others, strict=True) if group is not None}
        assert world is not None and len(groups) == len(others), "every rank has a stage"
        meshes = _meshes(pipeline, device, timeout_s)
        catalog = make_catalog(pipeline, device)
        ties = find_ties(pipeline, catalog, timeout_s)
        parts = _locals(pipeline, meshes, catalog.tied_stages, shared)
        state = PipelineState(parts, catalog, pipeline.TIED, ties, world, device)
        self._take(list(parts.values()), state, _world_mesh(count, device, timeout_s), pipeline.TRAINING, not shared)
        transport = Transport(groups, pipeline.MICROBATCHES, device, timeout_s)
        stages = _scheduled(pipeline, parts, channels, transport)
        updates = _updates(pipeline, parts, stages)
        self.__dict__.update(
            _updates=updates, _catalog=catalog, _world=world, _transport=transport, _stages=stages,
            _step=make_schedule(pipeline.SCHEDULE, stages, pipeline.MICROBATCHES),
        )  # fmt: skip
        own = list(parts.values())
        self._take_others([PipelineRank(other, device_mesh, device, timeout_s, own) for other in pipeline.OTHERS])

    _pipeline: type[Pipeline]
    _arguments: tuple[Any, ...]
    _updates: Updates | None  # within a step, under PipeDream
    _catalog: Catalog
    _state: PipelineState
    _world: dist.ProcessGroup
    _transport: Transport
    _stages: list[ScheduledStage]

    @property
    def num_stages(self) -> int:
        """See `Rank.num_stages`."""
        return len(self._pipeline.STAGES)

    def _built_again(self) -> Rank:
        return PipelineRank(*self._arguments)

    @property
    def _declared(self) -> type[Program] | type[Pipeline]:
        return self._pipeline

    def _split(self, values: Mapping[str, Tensor], local: bool) -> list[Microbatches]:
        if randomness.is_exact():
            raise ProgramError(
                "expected a program of one stage to draw what a single device draws, found one of "
                f"{len(self._pipeline.STAGES)}, whose stages draw at the same time; use set_exact_dropout(False)"
            )
        parts = [split_named(type(part.program), values, part.mesh, local) for part in self._locals]
        if not local:
            check_unread(self._pipeline, values)
        return parts

    def update_with(self, optimizer: Any) -> None:
        """See `Rank.update_with`."""
        if self._updates is None:
            super().update_with(optimizer)
        else:
            self._updates.take(optimizer, [*self._state.parameters.values()])

    def _compile(self, compiler: Compile) -> None:
        if self._updates is not None:
            raise ProgramError(
                f"expected to compile a program that reads one version of its weights, found one under {PIPEDREAM}; "
                "run it as it is"
            )
        super()._compile(compiler)

    def _train(self, microbatches: list[Microbatches]) -> list[Tensor]:
        if self._updates is not None:
            self._updates.check([*self._state.parameters.values()])
        self._transport.forget()
        for stage, parts in zip(self._stages, microbatches, strict=True):
            stage.begin_step(parts)
        self._step()
        self._transport.finish()
        return [loss for stage in self._stages for loss in stage.losses]

    _step: Callable[[], None]

    def _finish(self, losses: list[Tensor]) -> Tensor:
        self._state.sum_ties()
        stage, position = self._pipeline.OUTPUTS[self._pipeline.LOSS_INDEX]
        dtype = self._pipeline.STAGES[stage].RESULTS[position]
        loss = super()._finish(losses) if losses else torch.empty((), dtype=dtype, device=self._mesh.device)
        return comm.broadcast(loss, self._catalog.first_ranks[stage], self._world)

    def unite_tied(self) -> None:
        """See `Rank.unite_tied`."""
        self._state.unite_ties()

    # Forward alone ----------------------------------------

    def _run(self, microbatches: list[Microbatches]) -> list[Any]:
        """Stage by stage, all microbatches. Returns what each stage here makes of the outputs of each microbatch."""
        self._transport.forget()
        found = []
        counts = zip(self._stages, map(len, microbatches), strict=True)
        foresee(self._stages, [Turn(s.stage_index, FORWARD, index) for s, count in counts for index in range(count)])
        for stage, parts in zip(self._stages, microbatches, strict=True):
            stage.begin_step(parts)
            found.append([self._run_microbatch_of(stage, index) for index in range(len(parts))])
        self._transport.finish()
        return found

    def _run_microbatch_of(self, stage: ScheduledStage, index: int) -> tuple[Any, ...]:
        results, sent, _ = stage.run_forward(index)
        stage.send_forward(index, [tensor.detach() for tensor in sent])
        return results

    def _join(self, outputs: list[Any]) -> Any:
        """Every rank gets what any stage has made."""
        made = {stage.stage_index: join_outputs(parts, ()) for stage, parts in zip(self._stages, outputs, strict=True)}
        whole = []
        for stage, position in self._pipeline.OUTPUTS:
            own = made[stage][position] if self._catalog.is_first_of(stage) else None
            whole.append(comm.broadcast_any(own, self._catalog.first_ranks[stage], self._world, self._mesh.device))
        return whole[0] if len(whole) == 1 else tuple(whole)


def _updates(pipeline: type[Pipeline], parts: Mapping[int, Local], stages: Sequence[ScheduledStage]) -> Updates | None:
    """Under PipeDream, what updates weights within a step; each stage keeps versions of them. Raises ProgramError for a
    program of several shapes of inputs."""
    algorithm = pipeline.STAGES[0].ALGORITHM
    if algorithm is None or algorithm.name != PIPEDREAM:
        return None
    if pipeline.OTHERS:
        raise ProgramError(f"expected inputs of one shape under {PIPEDREAM}, found several; plan without shapes=")
    updates = Updates()
    for part, stage in zip(parts.values(), stages, strict=True):
        stage.stash = WeightStash(part.uses, updates, pipeline.MICROBATCHES)
    return updates


def _meshes(pipeline: type[Pipeline], device: torch.device, timeout_s: float) -> list[RankMesh | None]:
    ranks = [range(stage.FIRST_RANK, stage.FIRST_RANK + num_ranks(stage)) for stage in pipeline.STAGES]
    submeshes = [(own, stage.AXES, stage.JOINED) for own, stage in zip(ranks, pipeline.STAGES, strict=True)]
    link, found = HostLink(device, pipeline.HOST_LINK), make_submeshes(submeshes, device, timeout_s)
    return [
        mesh and replace(mesh, link=link, apart=apart_of(stage))
        for mesh, stage in zip(found, pipeline.STAGES, strict=True)
    ]


def _world_mesh(count: int, device: torch.device, timeout_s: float) -> RankMesh:
    """What of the whole world a rank is asked for: how many ranks there are, and for how long they wait."""
    return RankMesh((Axis("stages", count, dist.get_rank(), None),), None, device, timeout_s)


def _locals(
    pipeline: type[Pipeline], meshes: list[RankMesh | None], tied: Container[str], shared: Sequence[Local]
) -> dict[int, Local]:  # fmt: skip
    """The stages that run on this rank, by their number."""
    found: dict[int, Local] = {}
    for number, (stage, mesh) in enumerate(zip(pipeline.STAGES, meshes, strict=True)):
        if mesh is not None:
            found[number] = Local(stage(mesh), mesh, number, [*shared, *found.values()], tied)
    return found


def _scheduled(
    pipeline: type[Pipeline], parts: Mapping[int, Local], channels: Sequence[Channel], transport: Transport
) -> list[ScheduledStage]:
    firsts = list(dict.fromkeys(stage.FIRST_RANK for stage in pipeline.STAGES))  # as a microbatch visits them
    loss_stage, loss_position = pipeline.OUTPUTS[pipeline.LOSS_INDEX]
    return [
        ScheduledStage(
            local, number, len(pipeline.STAGES), firsts.index(pipeline.STAGES[number].FIRST_RANK), len(firsts),
            transport, [channel for channel in channels if channel.target == number],
            [channel for channel in channels if channel.received.source == number],
            loss_position if number == loss_stage else None,
        )
        for number, local in parts.items()
    ]  # fmt: skip
