"""From an emitted program to this rank's part of it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime import agreement
from autopar.runtime.copies import apart_of
from autopar.runtime.declare import Pipeline, Program
from autopar.runtime.ending import await_gloo_at_exit
from autopar.runtime.errors import WorldError
from autopar.runtime.host_link import HostLink
from autopar.runtime.mesh import TIMEOUT_S, make_rank_mesh, start_process_group
from autopar.runtime.rank import Rank
from autopar.runtime.servers import start_workers, summing_groups


def build(
    program: type[Program] | type[Pipeline],
    device_mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    timeout_s: float = TIMEOUT_S,
    rank_type: type[Rank] = Rank,
) -> Rank:
    """Builds this rank's part of an emitted program, with its real shards only, not yet loaded (NaN).

    Under torchrun, the process group and the device mesh are made where they are not given. A program of one
    rank needs neither; one of several stages takes any device mesh over all of its ranks. A rank that does not answer
    for `timeout_s` seconds is given up (CollectiveError). Raises WorldError when the processes that run are not the
    mesh of the program.
    """
    await_gloo_at_exit()
    device = torch.device(device) if device is not None else None
    count = _num_ranks(program)
    has_servers = not issubclass(program, Pipeline) and program.SERVERS is not None
    if has_servers:
        assert issubclass(program, Program), "pipelines have none"
        start_workers(program, "gloo", timeout_s)
    if count > 1:
        start_process_group(device, timeout_s)
        agreement.check_program(program, count)
    if issubclass(program, Pipeline):
        from autopar.runtime.pipeline import PipelineRank  # torch's schedules take a while to import

        return PipelineRank(program, device_mesh, device, timeout_s)
    mesh = make_rank_mesh(program.AXES, device_mesh, device, timeout_s, program.JOINED)
    link = HostLink(mesh.device, program.HOST_LINK)
    if has_servers and mesh.device.type != "cpu":
        raise WorldError(
            f"expected CPU ranks, whose gradients servers can read, found {mesh.device}; give device='cpu'"
        )
    servers = summing_groups(program, timeout_s) if has_servers else {}
    mesh = replace(mesh, shares=program.SHARES, apart=apart_of(program), link=link, servers=servers)
    return rank_type(program(mesh), mesh)


def _num_ranks(program: type[Program] | type[Pipeline]) -> int:
    if issubclass(program, Pipeline):
        return max(stage.FIRST_RANK + math.prod(stage.AXES.values()) for stage in program.STAGES)
    return math.prod(program.AXES.values())
