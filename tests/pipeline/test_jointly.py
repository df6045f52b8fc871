"""Equal graphs are planned near the plan of the model's own, and taken where a profile can tell them faster."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar import Constraint, Plan, SearchBudget
from autopar.clock import Clock
from autopar.driver import Candidate, Context, Front, of_plan, outline_of, search
from autopar.ir.graph import Graph
from autopar.ir.mesh import make_axes
from autopar.ir.outline import Outline
from autopar.microbatch import check_plan
from autopar.passes.place import place
from autopar.passes.rewrite import much_faster, planned_graphs, rewrite, settings_near
from autopar.passes.stage import stage
from autopar.passes.template import template
from autopar.pipeline import placed, planned_jointly
from autopar.request import Request
from autopar.rewrites import Rewrites, rewrites
from autopar.substitute import GraphCandidate
from autopar.trace import trace
from models import llama

CONFIG = llama.Config(512, 64, 2, 256, 4, 4, 704, batch_size=4)
MESH = autopar.Mesh("h100", devices_per_node=2)
BUDGET = SearchBudget(4.0, stages=False, proposals=0)


@cache
def graph() -> Graph:
    with torch.device("meta"):
        return trace(llama.build(CONFIG), llama.example_inputs(CONFIG))


@cache
def plan(*rules: Constraint) -> Plan:
    return placed(graph(), request(rules))


@cache
def chosen() -> Plan:
    """With the graph chosen, too."""
    return planned_jointly(graph(), request())[1]


def request(rules: tuple[Constraint, ...] = (), budget: SearchBudget = BUDGET) -> Request:
    return Request(MESH, "train", "adamw", None, rules, budget)


ANYWHERE = Outline(((),))


def planned_in(num_steps: int, step_ns: int | None, outline: Outline = ANYWHERE) -> tuple[Candidate, Candidate | None]:
    """A graph of so many substitutions that was open, and a plan of so long a step of it, or none."""
    steps: Any = (None,) * num_steps
    asked = Candidate(GraphCandidate(graph(), steps, 0))
    return asked, asked.planned(outline, step_ns, 1, lambda: plan()) if step_ns else None


def front_of(*pairs: tuple[Candidate, Candidate | None]) -> Front:
    """After these were looked at, the first of which is the model's own graph's."""
    front = Front(graph())
    front.given = pairs[0][0]
    front.begun = [asked for asked, _ in pairs]
    for _, found in pairs:
        if found is not None:
            front.add(found, "place")
    return front


def num_steps(found: Candidate | None) -> int:
    assert found is not None
    return len(found.variant.steps)


def test_the_simplest_graph_is_taken_of_those_that_a_profile_cannot_tell_apart() -> None:
    given, small, large, none = planned_in(0, 1000), planned_in(1, 985), planned_in(3, 970), planned_in(9, None)
    assert num_steps(front_of(given, small).best) == 0
    assert num_steps(front_of(given, small, none).best) == 0
    assert num_steps(front_of(given, small, large).best) == 1
    fastest = front_of(planned_in(0, 1010), large, planned_in(3, 969)).best
    assert fastest is not None and fastest.step_ns == 969
    assert num_steps(front_of(given, none).best) == 0


def test_a_graph_that_is_much_faster_is_planned_in_all_settings() -> None:
    given, near, fast = planned_in(0, 1000), planned_in(2, 920), planned_in(5, 900)
    assert much_faster(planned_graphs(front_of(given, near))) is None
    assert much_faster(planned_graphs(front_of(given, near, fast, planned_in(9, None)))) is fast[1]


def test_the_fastest_graph_is_planned_however_long_it_was_looked_for() -> None:
    """On a busy host the search alone took all of the time, and what it had found was never planned."""
    over = Clock(0.0, 0.0)
    front = Front(graph())
    first, later = Candidate(planned_in(2, None)[0].variant), Candidate(planned_in(1, None)[0].variant, clock=over)
    front.open = [first, later]
    assert [*front.in_turn(lambda outline: True)] == [first]
    assert front.begun == [first]


def setting(size: int, count: int = 1) -> Outline:
    return Outline((make_axes(("d0",), (size,)),) * count)


def test_settings_near_are_the_plan_s_own_and_the_next_best_that_fitted() -> None:
    asked, best = planned_in(0, 1000, setting(2))
    front = front_of((asked, best))
    alike = [(setting(2, 2), 1003), (setting(8), 2000), (setting(7), 1002), (setting(5), 1004)]
    mixed = Outline((setting(1).axes, setting(2).axes), 1), 1001
    for outline, step_ns in [mixed, *alike]:
        front.add(asked.planned(outline, step_ns, 1, lambda: plan()), "stage")
    assert settings_near(front) == [setting(2), setting(7), setting(2, 2)]


@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_planned_near_a_plan_is_no_slower_than_it_for_the_same_graph(stages: int) -> None:
    rules = (Constraint(stages=stages),)
    found = plan(*rules)
    context, front = Context(request(rules)), Front(graph())
    own = of_plan(front.given, outline_of(found), found)
    assert own.outline is not None and own.outline.num_submeshes == stages
    front.add(own, "place")
    near = [Candidate(front.given.variant, outline) for outline in (own.outline.setting, setting(64, 64))]
    front.open = near
    again = [*stage(front, context), *place(front, context)]
    assert {one.asked for one in again} == {near[0]}
    assert min(one.step_ns for one in again) <= found.predicted.step_time_ns


def test_near_is_as_good_as_everywhere_and_the_report_says_what_was_looked_at() -> None:
    near = chosen()
    everywhere = planned_jointly(graph(), request((), replace(BUDGET, everywhere=True)))[1]
    assert near.substitutions and near.predicted.step_time_ns <= 1.02 * everywhere.predicted.step_time_ns
    own_ns = search((stage, place, template), graph(), Context(request()))[1].predicted.step_time_ns
    for found in (near, everywhere):
        report = found.search.rewriting
        assert report is not None and report.seen > 1 and report.stop_reason
        given, *others = report.graphs
        assert given.rules == {} and given.step_time_ns == own_ns
        assert given.outcome.startswith("slower by") and [one.outcome for one in others].count("taken") == 1
    assert planned_jointly(graph(), request((), replace(BUDGET, substitutions=False)))[1].search.rewriting is None


def test_branches_are_set_beside_what_substitutions_gain_and_hide_neither() -> None:
    """Projections of one input may run side by side; merged, they take less yet."""
    beside = planned_jointly(graph(), request((), replace(BUDGET, substitutions=False)))[1]
    assert beside.stage.forks and beside.predicted.step_time_ns < plan().predicted.step_time_ns
    assert not chosen().stage.forks and chosen().predicted.step_time_ns < beside.predicted.step_time_ns


def test_the_search_for_graphs_is_deterministic() -> None:
    again = planned_jointly(graph(), request())[1]
    assert chosen().substitutions == again.substitutions and chosen().stages == again.stages


def test_an_interrupt_while_graphs_are_planned_ends_with_the_best_so_far() -> None:
    with torch.device("meta"):
        model, batch = llama.build(CONFIG), llama.example_inputs(CONFIG)
    lines = list[str]()

    def report(line: str) -> None:
        lines.append(line)
        if " on mesh " in line:
            os.kill(os.getpid(), signal.SIGINT)

    found = autopar.parallelize(model, MESH, batch, search=BUDGET, progress=report).plan
    assert sum(" on mesh " in line for line in lines) == 1
    assert found.search.stop_reason.startswith("interrupted") and found.search.rewriting is not None
    autopar.verify(found, model, batch)


def test_a_graph_for_which_nothing_fits_is_reported() -> None:
    front, context = front_of(planned_in(0, 1000), planned_in(0, None)), Context(request())
    front.round, front.kept["rewrite", front.given] = 5, (Rewrites((), 5, 7, "all"), Clock.of(0.0))
    assert [*rewrite(front, context)] == []
    assert context.rewriting is not None
    assert [one.outcome for one in context.rewriting().graphs] == ["taken", "nothing found that fits"]


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor"])
def test_parameters_stay_as_they_are_for_optimizers_that_would_notice(optimizer: str) -> None:
    assert any(candidate.graph.packed for candidate in rewrites(graph(), request()).candidates)
    asked = replace(request(), optimizer=optimizer)
    assert not any(candidate.graph.packed for candidate in rewrites(graph(), asked).candidates)


@pytest.mark.parametrize("stages", [1, 2])
def test_equal_graphs_are_planned_on_unequal_devices_too(stages: int) -> None:
    """Near the best plan of the model's own graph, shares of the batch or stages of one kind each."""
    mesh = autopar.Mesh([("a100", 1, 1), ("v100", 1, 1)])
    asked = replace(request((Constraint(stages=stages),)), mesh=mesh)
    whole, found = planned_jointly(graph(), asked)
    check_plan(whole, found)
    given, *others = found.search.rewriting.graphs if found.search.rewriting is not None else ()
    assert others and min(one.step_time_ns or 10**18 for one in others) < (given.step_time_ns or 0)
    assert found.substitutions and len(found.stages) == stages
