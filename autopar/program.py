"""What `parallelize` returns: a plan with its emitted source, ready to save, launch or build."""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from autopar.cost.compute import flops
from autopar.emit import StepFigures, emit, script, script_name
from autopar.errors import PlanError
from autopar.ir.faults import faults_told
from autopar.ir.graph import Graph
from autopar.ir.placement import R, S
from autopar.ir.plan import COMPILED, Plan, Stage
from autopar.ir.writing import write_whole
from autopar.observed.expected import expected
from autopar.profiler import profiles_of
from autopar.simulate import Timeline

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from autopar.runtime import Rank


class PlannedProgram:
    """A sharded program: its plan, its source, and the ways to run it."""

    def __init__(
        self, graph: Graph, plan: Plan, source: str, state: Mapping[str, Any] | None = None,
        others: Sequence[tuple[Graph, Plan]] = (), filling: Mapping[str, float | None] | None = None,
    ) -> None:  # fmt: skip
        """others, filling: steps of other shapes and what fills up short batches, as for `emit`."""
        self.plan = plan
        self._others, self._filling = others, filling or {}
        self.source = source
        self._graph = graph
        self._state = state

    @property
    def input_layout(self) -> dict[str, str]:
        """Each input's placement: what `train_step(local=True)` expects of this rank.

        On the mesh axes; of several microbatches, on these before: each rank has its rows of the
        first, then of the next. Of several stages: on the axes of each that reads it; other ranks may give None.
        """
        stages, names = self.plan.stages, self._graph.inputs
        if len(stages) == 1:
            return {self._graph.given_name(name): self._layout(name, stages[0]) for name in names}
        read = {name: [(index, stage) for index, stage in enumerate(stages) if name in stage.inputs] for name in names}
        return {
            self._graph.given_name(name): "; ".join(
                f"stage {index}: {self._layout(name, stage)}".rstrip() for index, stage in where
            )
            for name, where in read.items()
        }

    def _layout(self, name: str, stage: Stage) -> str:
        rows = S(0) if name in self.plan.microbatch_inputs else R
        return " ".join(map(str, [*[rows] * (self.plan.microbatches > 1), *stage.inputs[name]]))

    @faults_told()
    def save(self, folder: str | Path) -> Path:
        """Writes program.py, plan.json, train.py (of inference evaluate.py) and weights, each whole or not at all."""
        folder = Path(folder)
        write_whole(folder / "program.py", self.source)
        write_whole(folder / "plan.json", self.plan.to_json())
        write_whole(folder / script_name(self.plan), script(self.plan, _figures(self._graph, self.plan)))
        self._save_weights(folder)
        return folder

    def _save_weights(self, folder: Path) -> None:
        if self._state is not None:
            part = folder / "weights.pt.part"
            torch.save(dict(self._state), part)
            part.replace(folder / "weights.pt")

    @faults_told()
    def save_traced(self, folder: str | Path) -> Path:
        """Writes what `save` does, and what `autopar.runtime.recording` traces: the program with its statements named,
        and what is expected of them. Raises PlanError for a program whose blocks are compiled."""
        if self.plan.runs == COMPILED:
            raise PlanError(
                "expected a program whose operators run one by one, found one of compiled blocks, in which no event "
                "belongs to one statement; trace the plan of the program that is not compiled"
            )
        folder, timeline = self.save(folder), self.plan.timeline()
        assert isinstance(timeline, Timeline), "the simulator's own"
        source = emit(self._graph, self.plan, self._others, self._filling, is_traced=True)
        write_whole(folder / "traced.py", source)
        write_whole(folder / "expected.json", json.dumps(expected(self._graph, self.plan, timeline)))
        return folder

    @faults_told()
    def build(self, device_mesh: DeviceMesh | None = None, device: str | None = None) -> Rank:
        """This rank's nn.Module inside torchrun: real shards only, with the model's weights when it has any.

        Raises the runtime's WorldError when the number of processes is not the mesh's.
        """
        from autopar import runtime

        rank = runtime.build(load_source(self.source).Program, device_mesh, device=device)
        if self._state is not None:
            rank.init_from(self._state, broadcast=False)
        return rank


def _figures(graph: Graph, plan: Plan) -> StepFigures:
    """What a step's time is held against: of what is trained, the backward pass takes twice what the forward does."""

    def shapes(names: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(graph.tensors[name].shape for name in names)

    forward = sum(flops(node, shapes(node.operands), shapes(node.results)) for node in graph.nodes)
    largest = max(graph.parameters, key=lambda item: math.prod(graph.tensors[item.tensor].shape), default=None)
    dtype = "float32" if largest is None else graph.tensors[largest.tensor].dtype
    profiles = profiles_of(plan.mesh)
    peak = sum(
        group.num_devices * profiles[group.profile].shared_by(group.devices_per_node).peak_flops(dtype)
        for group in plan.mesh.groups
    )
    return StepFigures((3.0 if plan.mode == "train" else 1.0) * forward, peak, dtype)


def load_source(source: str) -> ModuleType:
    """Imports emitted source as a module of its own (through a file, so that tracebacks show its lines)."""
    folder = _sources(os.getpid())
    name = f"autopar_program_{folder.name.replace('-', '_')}_{next(_NUMBERS)}"
    path = folder / name / "program.py"
    path.parent.mkdir()
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_NUMBERS = itertools.count()


@cache
def _sources(process: int) -> Path:
    """The folder of a process's imported programs, there until that process ends: not when one ends that it forks."""
    folder = Path(tempfile.mkdtemp(prefix="autopar-"))
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == process else None)
    return folder


def model_state(model: nn.Module) -> dict[str, Any] | None:
    """The model's tensors by name, also the buffers that its state_dict leaves out; None when on meta."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    if not tensors or any(tensor.is_meta for tensor in tensors.values()):
        return None
    return {name: tensor.detach() for name, tensor in tensors.items()}
