"""From a model, a batch and a plan to this process's rank: planned on the first process, told to all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.pipeline import parallelize, template_plan
from autopar.program import load_source, model_state
from autopar.runtime import ProgramError, Rank, build


@dataclass(frozen=True, slots=True)
class WantedPlan:
    """What a user says of the plan.

    plan: a Plan; the name of its file, which is written after a search where there is none; arguments of
    `template_plan`; or None, for a search. mesh: by default, the processes that run. options: of `parallelize`, such
    as precision, constraints and search.
    """

    plan: Plan | str | Path | Mapping[str, Any] | None = None
    mesh: Mesh | str | None = None
    options: Mapping[str, Any] | None = None

    def planned(
        self, model: nn.Module, inputs: Any, shapes: Sequence[Any], pad: Mapping[str, float] | None = None
    ) -> tuple[str, str]:  # fmt: skip
        """The program's source and the plan, in this process alone. shapes, pad: as for `parallelize`."""
        options = dict(self.options or {})
        plan, mesh = self._plan(model, inputs, options), self._mesh()
        if plan is not None:
            mesh = plan.mesh
            options = {name: options[name] for name in ("check",) if name in options}
        program = parallelize(model, mesh, inputs, plan=plan, shapes=shapes, pad=pad, **options)
        if isinstance(self.plan, (str, Path)) and plan is None:
            program.plan.save(self.plan)
        return program.source, program.plan.to_json()

    def _plan(self, model: nn.Module, inputs: Any, options: Mapping[str, Any]) -> Plan | None:
        if isinstance(self.plan, Mapping):
            return template_plan(model, self._mesh(), inputs, **{**options, **self.plan})
        if isinstance(self.plan, (str, Path)):
            return Plan.load(self.plan) if Path(self.plan).exists() else None
        return self.plan

    def _mesh(self) -> Mesh:
        if isinstance(self.mesh, str):
            return Mesh.parse(self.mesh)
        if self.mesh is not None:
            return self.mesh
        count = world_size()
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", count))
        if torch.cuda.is_available():
            raise PlanError('expected mesh="h100:1x8" or the like, which says what the GPUs are, found none')
        return Mesh("cpu", nodes=count // per_node, devices_per_node=per_node)


def world_size() -> int:
    """How many processes run together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def on_first(make: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """What the first process makes, on all. Where it fails, all raise."""
    if world_size() == 1:
        return make()
    told: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            told[0] = make()
        except Exception as error:  # the others wait for what is told
            failure, told[1] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(told, src=0)
    if failure is not None:
        raise failure
    if told[0] is None:
        raise PlanError(f"the first process could not plan: {told[1]}")
    found: tuple[str, ...] = told[0]
    return found


def on_all(make: Callable[[], None]) -> None:
    """Runs it on each process. Where it fails on any, all raise: none waits for that one."""
    failure: Exception | None = None
    try:
        make()
    except Exception as error:
        failure = error
    told: list[str | None] = [None if failure is None else f"{type(failure).__name__}: {failure}"]
    if world_size() > 1:
        told = [None] * world_size()
        dist.all_gather_object(told, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for number, text in enumerate(told):
        if text is not None:
            raise ProgramError(f"process {number} failed: {text}")


def built(source: str, model: nn.Module) -> Rank:
    """This process's rank, with the weights that the first process's model has."""
    rank = build(load_source(source).Program)
    state = model_state(model)
    if state is None:
        raise PlanError(
            "expected a model with weights, found one on the meta device; build it with weights on each process, or "
            "plan by autopar.parallelize and load with rank.load_safetensors"
        )
    rank.init_from(state, broadcast=world_size() > 1)
    return rank
