"""Random programs under random plans of several stages; and what these have found, each with a small program."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from autopar.emit import emit
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.schedule import SCHEDULES
from autopar.pipeline import simulated_step, template_of_graph
from autopar.profiler import profiles_of
from autopar.staging import cut
from tests.equivalence.predicted import bytes_by_submesh
from tests.random_programs import run
from tests.random_programs.cases import Written, code, outcome
from tests.random_programs.check import Subject, plan_problems
from tests.random_programs.gloo import run_on_gloo
from tests.random_programs.programs import Leaf

SEED = 30_000


@pytest.mark.sweep
def test_random_stages_on_threads() -> None:
    """20 cases; `python -m tests.random_programs.run --stages --seed 30000` runs the same, and more."""
    cases = list(itertools.islice(run._cases(SEED, stages=True), 20))
    for case in cases:
        text = outcome(case)
        assert not text, f"{case.name}: {text}\n{code(case, text)}"
    assert {case.choices.schedule for case in cases} == SCHEDULES.keys()  # type: ignore[union-attr]


@pytest.mark.sampled(only=("30002.0", "30006.1"))
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["30002.0", "30004.1", "30006.1"])
def test_random_stages_on_gloo(name: str) -> None:
    """Two chunks on each of three ranks, with recomputation; on three ranks and on one, with backward passes in two
    parts; in a V from the last rank to the first, with some of them in two."""
    assert outcome(run._named(name, stages=True), run_on_gloo) == ""


# what random stages have found

CHAIN = """
import torch
from torch import nn

class Twice(nn.Module):
    def forward(self, x):
        return x * 2.0

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.twice = Twice()
    def forward(self, i0):
        return FORWARD
"""


def chain(forward: str) -> Subject:
    """Two linear maps of eight samples, and a block without parameters."""
    source = CHAIN.replace("FORWARD", forward)
    return Subject(Written(source, (Leaf("i0", "float", (8, 4)),), False, 0))  # type: ignore[arg-type]


def staged(
    subject: Subject, ends: tuple[int, ...], shapes: tuple[dict[str, Any], ...] = ({}, {}), schedule: str = "gpipe",
    firsts: tuple[int, ...] | None = None, microbatches: int = 1, also: dict[str, tuple[int, ...]] | None = None,
) -> Plan:  # fmt: skip
    """Stages that end behind so many nodes, each planned as a template on a submesh of its own.

    also: the stages of some nodes.
    """
    graph = subject.graph
    sizes = [shape.get("dp", 1) * shape.get("tp", 1) for shape in shapes]
    plans = [
        template_of_graph(graph, Mesh("cpu", 1, size), microbatches=microbatches, **shape)
        for size, shape in zip(sizes, shapes, strict=True)
    ]
    members = {node.name: (sum(n >= end for end in ends),) for n, node in enumerate(graph.nodes)} | (also or {})
    firsts = firsts or tuple(sum(sizes[:index]) for index in range(len(sizes)))
    mesh = Mesh("cpu", devices_per_node=sum(sizes))
    return cut(graph, plans, members, firsts, schedule, mesh, profiles_of(mesh))


@pytest.mark.parametrize("schedule", ["zero_bubble", "interleaved"])
def test_the_first_stage_on_the_last_rank(schedule: str) -> None:
    """The runtime took submeshes in the order of their ranks for torch's order of stages, which is the schedule's."""
    subject = chain("self.b(self.a(i0)).square().mean()")
    plan = staged(subject, (1,), schedule=schedule, firsts=(1, 0), microbatches=2)
    assert plan_problems(subject, plan) == []


def test_no_gradient_comes_back_of_what_leads_to_none() -> None:
    """Zeros were sent for what the later stage detaches, and not foretold."""
    subject = chain("((y := self.a(i0)).sum() + (self.b(y.detach() * 2.0) * y.detach()).sum())")
    names = [node.name for node in subject.graph.nodes]
    cut_at = names.index(next(name for name in names if name.startswith("detach")))
    plan = staged(subject, (cut_at,))
    assert plan_problems(subject, plan) == []
    assert "has_gradient=False" in emit(subject.graph, plan)


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_a_stage_that_no_gradient_reaches(schedule: str) -> None:
    """The simulator knew no second part of its backward pass; the runtime gathered parameters for it."""
    subject = chain("self.b(self.a(i0).detach()).sum()")
    plan = staged(subject, (1,), ({"dp": 2, "zero": 3}, {"dp": 2}), schedule, microbatches=2)
    assert plan_problems(subject, plan) == []
    assert simulated_step(subject.graph, staged(subject, (1,), schedule=schedule)).step_time_ns > 0


def test_a_stage_that_runs_no_operator() -> None:
    """The simulator asked the first of its operators in which module all of them are."""
    subject = chain("self.b(self.a(i0)).sum()")
    plan = staged(subject, (1, 1), ({}, {}, {}))
    assert not plan.stages[1].nodes
    assert plan_problems(subject, plan) == []
    assert simulated_step(subject.graph, plan).step_time_ns > 0


def test_a_block_that_runs_in_a_stage_where_nothing_reads_it() -> None:
    """Its call was written with nothing on the left."""
    subject = chain("(self.b(self.twice(i0)) * i0).sum()")
    plan = staged(subject, (2,), also={"mul": (0, 1)})
    assert plan_problems(subject, plan) == []


def test_what_is_gathered_again_for_the_gradient_of_what_is_redistributed_to_leave() -> None:
    """The bytes of a parameter that a block uses again in its backward pass were foretold as if it were used once."""
    subject = chain("self.b(self.a(i0)).square().sum()")
    plan = staged(subject, (1,), ({"dp": 2, "zero": 3}, {"tp": 2}), microbatches=2)
    assert plan_problems(subject, plan) == []


def test_nobody_redistributes_what_nobody_reads() -> None:
    """A tensor that leaves whole for one stage and cut for another of other axes goes cut to both."""
    subject = chain("(self.b(y := self.a(i0)) * y).sum()")
    plan = staged(subject, (1, 2), ({"dp": 2}, {}, {"dp": 3}))
    reads = {(r.tensor, r.target) for stage in plan.stages for r in stage.redistributes}
    assert len(reads) == sum(len(stage.redistributes) for stage in plan.stages)
    assert plan_problems(subject, plan) == []


def test_what_is_made_for_the_whole_step_travels_whole() -> None:
    """Each microbatch reads a slice of it, and the slice was foretold to travel."""
    subject = chain("(torch.cat([self.a.weight, self.a.weight]) * self.b(i0)).sum()")
    plan = staged(subject, (1,), ({}, {"dp": 2}), microbatches=2)
    assert plan_problems(subject, plan) == []


def test_the_busiest_rank_of_a_step_is_not_that_of_each_transfer() -> None:
    """The most that some rank sends in each transfer was added up, where these are different ranks."""
    assert outcome(run._named("80024.1", stages=True)) == ""


@pytest.mark.parametrize("zero", [0, 3])
def test_what_is_tied_on_unequal_submeshes(zero: int) -> None:
    """The whole gradients that each submesh gathers and spreads were neither counted nor foretold."""
    subject = chain("self.a(self.b(self.a(i0))).square().sum()")
    plan = staged(subject, (2,), ({"dp": 3, "zero": zero}, {"dp": 2, "tp": 2, "zero": zero}))
    assert plan_problems(subject, plan) == []
    assert bytes_by_submesh(plan, subject.graph)[0][1]["broadcast"] == (16 + 4) * 8


def test_a_parameter_that_nobody_reads_is_in_the_first_stage() -> None:
    """No stage stored it, so that a model's state did not load."""
    subject = chain("self.b(i0).sum()")
    plan = staged(subject, (1,))
    assert {"a.weight", "a.bias"} <= plan.stages[0].storage.keys()
    assert plan_problems(subject, plan) == []


def test_gradients_that_wait_are_not_summed_twice() -> None:
    """Batch statistics were summed over ranks for the gradient of what was received, and again for those that wait."""
    source = CHAIN.replace("FORWARD", "self.norm(self.a(i0)).square().sum()")
    source = source.replace("self.twice = Twice()", "self.norm = nn.BatchNorm1d(4)")
    subject = Subject(Written(source, (Leaf("i0", "float", (8, 4)),), False, 0))  # type: ignore[arg-type]
    plan = staged(subject, (1,), ({}, {"dp": 2}), "zero_bubble")
    assert plan_problems(subject, plan) == []
