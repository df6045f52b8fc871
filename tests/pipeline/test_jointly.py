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
from autopar.ir.graph import Graph
from autopar.jointly import (
    PlannedGraph,
    SearchSetting,
    entries_near,
    much_faster,
    planned_near,
    reported,
    setting_of,
    settings_near,
    taken,
)
from autopar.pipeline import placed, planned_jointly, with_templates
from autopar.planning import Request
from autopar.profiler import load_profile
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


def entry(num_steps: int, step_ns: int | None) -> PlannedGraph:
    """A plan of so long a step, or none, for a graph of so many substitutions."""
    steps: Any = (None,) * num_steps
    predicted = replace(plan().predicted, step_time_ns=step_ns or 0)
    return PlannedGraph(
        GraphCandidate(graph(), steps, 0), None, replace(plan(), predicted=predicted) if step_ns else None
    )


def test_the_simplest_graph_is_taken_of_those_that_a_profile_cannot_tell_apart() -> None:
    given, small, large, none = entry(0, 1000), entry(1, 985), entry(3, 970), entry(9, None)
    assert taken([given, small]) is given
    assert taken([given, small, none]) is given
    assert taken([given, small, large]) is small
    assert taken([entry(0, 1010), large, entry(3, 969)]).step_ns == 969
    assert taken([given, none]) is given


def test_a_graph_that_is_much_faster_is_planned_in_all_settings() -> None:
    given, near, fast = entry(0, 1000), entry(2, 920), entry(5, 900)
    assert much_faster([given, near]) is None
    assert much_faster([given, near, fast, entry(9, None)]) is fast.candidate


def row(mesh: str, step_ns: int, stages: int = 1, peak: int = 1, **others: Any) -> dict[str, Any]:
    return {"mesh": mesh, "stages": stages, "microbatches": 1, "step_time_ns": step_ns, "peak_bytes": peak, **others}


def test_the_fastest_graph_is_planned_however_long_it_was_looked_for() -> None:
    """On a busy host the search alone took all of the time, and what it had found was never planned."""
    fast, slow = entry(2, 900), entry(1, 950)
    plans = {len(each.candidate.steps): each.plan for each in (fast, slow)}
    settings = settings_near(plan())
    candidates = [fast.candidate, slow.candidate]
    found = entries_near(entry(0, 1000), candidates, settings, lambda it, _: plans[len(it.steps)], lambda: True)
    assert [len(each.candidate.steps) for each in found] == [0, 2]
    assert len(taken(found).candidate.steps) == 2


def test_settings_near_are_the_plan_s_own_and_the_next_best_that_fitted() -> None:
    one = plan()
    own, step_ns = setting_of(one), one.predicted.step_time_ns
    assert own is not None and own.stages == own.microbatches == 1
    rows = (
        row("2", step_ns + 3, stages=2),
        row("1 + 2", step_ns + 1, stages=3),
        row("9", step_ns + 1, peak=one.memory_limit + 1),
        row("8", 2 * step_ns),
        row("7", step_ns + 2),
        {"mesh": "6", "microbatches": 1, "infeasible": "too large"},
        row("5", step_ns + 4),
    )
    found = settings_near(replace(one, search=replace(one.search, tried=rows)))
    assert found == [own, SearchSetting("7", 1, 1), SearchSetting("2", 2, 1)]


@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_planned_near_a_plan_is_no_slower_than_it_for_the_same_graph(stages: int) -> None:
    rules = (Constraint(stages=stages),)
    found = plan(*rules)
    setting = setting_of(found)
    assert setting is not None and setting.stages == stages
    again = planned_near(graph(), found, setting, request(rules), load_profile("h100"))
    assert again is not None and again.predicted.step_time_ns <= found.predicted.step_time_ns
    nowhere = SearchSetting("64", 64, 1)
    assert planned_near(graph(), found, nowhere, request(rules), load_profile("h100")) is None


def test_near_is_as_good_as_everywhere_and_the_report_says_what_was_looked_at() -> None:
    near = chosen()
    everywhere = planned_jointly(graph(), request((), replace(BUDGET, everywhere=True)))[1]
    assert near.substitutions and near.predicted.step_time_ns <= 1.02 * everywhere.predicted.step_time_ns
    own_ns = with_templates(graph(), plan(), request()).predicted.step_time_ns
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
    given, lost = entry(0, 1000), entry(0, None)
    found = reported([given, lost], given, Rewrites((lost.candidate,), 5, 7, "all"), 0.5)
    assert found.search.rewriting is not None
    assert [one.outcome for one in found.search.rewriting.graphs] == ["taken", "nothing found that fits"]


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor"])
def test_parameters_stay_as_they_are_for_optimizers_that_would_notice(optimizer: str) -> None:
    assert any(candidate.graph.packed for candidate in rewrites(graph(), request()).candidates)
    asked = replace(request(), optimizer=optimizer)
    assert not any(candidate.graph.packed for candidate in rewrites(graph(), asked).candidates)
