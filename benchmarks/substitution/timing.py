"""Programs of one rank: emitted from a graph, compared with the model, and timed in turns."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

import autopar
from autopar.emit import emit
from autopar.ir.graph import Graph
from autopar.pipeline import template_of_graph
from autopar.program import PlannedProgram, model_state
from tests.equivalence.step import Comparison, Step, compare, step_alone

WARM_UP = 2
ROUND_S = 0.2  # at least, of a program's turn: short steps are repeated
Batch = Mapping[str, Tensor]
Call = Callable[[], Any]


def program_of(graph: Graph, model: nn.Module, mode: str) -> PlannedProgram:
    """The emitted program of a graph for one rank, with the model's weights."""
    plan = template_of_graph(graph, autopar.Mesh("cpu", devices_per_node=1), mode=mode, memory_limit=1 << 50)
    return PlannedProgram(graph, plan, emit(graph, plan), model_state(model))


def compare_with_model(rank: Any, model: nn.Module, batch: Batch, mode: str) -> Comparison:
    """One step (or forward pass) of a program beside the model's own; leaves both as they were but for buffers."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if mode == "train":
        alone = step_alone(model, dict(batch))
        loss = rank.train_step(**batch)
        known = dict(rank.named_buffers())
        buffers = {name: value for name, value in rank.full_state_dict().items() if name in known}
        found = Step(loss, rank.full_gradients(), buffers, Counter())
    else:
        alone, found = (Step(_loss(each(**batch)), {}, {}, {}) for each in (model, rank))
    model.load_state_dict(state)
    model.zero_grad()
    return compare(alone, [found], {})


def _loss(output: Any) -> Tensor:
    """Of a model that returns the loss alone, first of several, or by name."""
    first = output[0] if isinstance(output, tuple) else output["loss"] if isinstance(output, Mapping) else output
    return first.detach()


def call_of(rank: Any, batch: Batch, mode: str) -> Call:
    """One step without optimizer, or one forward pass, of a program."""
    if mode != "train":
        return lambda: rank(**batch)

    def step() -> None:
        rank.zero_grad()
        rank.train_step(**batch)

    return step


class Times(NamedTuple):
    """Milliseconds of each round: of the processor, which other programs stretch least, and of the wall."""

    cpu: list[float]
    wall: list[float]

    def __add__(self, more: Times) -> Times:  # type: ignore[override]
        """These rounds and more."""
        return Times([*self.cpu, *more.cpu], [*self.wall, *more.wall])


def times(calls: list[Call], rounds: int) -> list[Times]:
    """Of each call in each round, in turns; every second round goes backwards, so that none is always first."""
    slowest_s = max(_once(call, 1)[1] for call in calls * WARM_UP) / 1e3
    repeats = max(1, math.ceil(ROUND_S / slowest_s))
    found = [Times([], []) for _ in calls]
    for index in range(rounds):
        gc.collect()
        for number in range(len(calls))[:: 1 if index % 2 else -1]:
            for column, taken in zip(found[number], _once(calls[number], repeats), strict=True):
                column.append(taken)
    return found


def _once(call: Call, repeats: int) -> tuple[float, float]:
    """Mean milliseconds, of processor and wall, of some calls."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.process_time() - cpu) / repeats * 1e3, (time.perf_counter() - wall) / repeats * 1e3


def gain(before: list[float], after: list[float]) -> tuple[float, tuple[float, float]]:
    """How many times faster: the median of the rounds' own ratios, and their quartiles."""
    low, middle, high = statistics.quantiles([b / a for b, a in zip(before, after, strict=True)], n=4)
    return middle, (low, high)


def interval_of_gain(before: list[float], after: list[float]) -> tuple[float, float]:
    """Between which the true median of the ratios lies, with a confidence of 95%: order statistics, whose places are
    binomial (in its normal approximation)."""
    ratios = sorted(b / a for b, a in zip(before, after, strict=True))
    outside = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
    return ratios[outside], ratios[-1 - outside]
