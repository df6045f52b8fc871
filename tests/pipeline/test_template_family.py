"""No search returns what a template of one line beats."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import autopar
from autopar import Constraint, Plan, SearchBudget
from autopar.driver import Candidate, Context, Front, of_plan, outline_of, search
from autopar.families import Family, Template
from autopar.ir.graph import Graph
from autopar.passes.template import template
from autopar.pipeline import planned_jointly, template_of_graph
from autopar.request import Request
from autopar.trace import trace
from models import llama
from tests.oracles.frozen.cases import PROFILES

CONFIG = llama.Config(512, 64, 2, 256, 4, 4, 704, batch_size=8)
MESH = autopar.Mesh(PROFILES["h100"], nodes=2, devices_per_node=2)
BUDGET = SearchBudget(4.0, substitutions=False, proposals=0)


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        return trace(llama.build(CONFIG), llama.example_inputs(CONFIG))


def request(*rules: Constraint, limit: int | None = None) -> Request:
    return Request(MESH, "train", "adamw", limit, rules, BUDGET)


def with_templates(graph: Graph, plan: Plan, request: Request) -> Plan:
    """What a search answers that has found the plan before templates are looked at."""

    def place(front: Front, context: Context) -> list[Candidate]:
        return [of_plan(front.given, outline_of(plan), plan)]

    return search((place, template), graph, Context(request))[1]


def test_a_slow_plan_of_a_search_loses_to_each_faster_template(graph: Graph) -> None:
    slow = template_of_graph(graph, MESH, tp=4)
    found = with_templates(graph, slow, request())
    family = [template_of_graph(graph, MESH, dp=4 // tp, tp=tp, zero=zero) for tp, zero in product((1, 2), (0, 1, 3))]
    assert found.predicted.step_time_ns == min(plan.predicted.step_time_ns for plan in family)
    assert found.search.method.startswith("template dp=")
    rows = {row.template: row for row in found.search.tried}
    assert {"dp=4, zero=3", "dp=4, zero=1", "dp=4", "dp=2, tp=2, zero=3"} <= rows.keys()
    assert rows["dp=4, zero=3"].step_time_ns == family[2].predicted.step_time_ns


def test_a_search_is_never_slower_than_the_family_and_says_that_it_was_looked_at(graph: Graph) -> None:
    plan = planned_jointly(graph, request())[1]
    for tp, zero in product((1, 2), (0, 1, 3)):
        template = template_of_graph(graph, MESH, dp=4 // tp, tp=tp, zero=zero)
        assert plan.predicted.step_time_ns <= template.predicted.step_time_ns
    assert any(row.template for row in plan.search.tried)


def test_what_differs_from_the_fastest_in_one_thing_is_looked_at(graph: Graph) -> None:
    slow = template_of_graph(graph, MESH, tp=4)
    found = with_templates(graph, slow, request())
    grouped = template_of_graph(graph, MESH, dp=4, zero=1, hsdp=2)
    assert found.predicted.step_time_ns <= grouped.predicted.step_time_ns
    assert any(", hsdp=2" in (row.template or "") for row in found.search.tried)


def test_more_microbatches_may_be_faster_than_what_fits_in_fewer() -> None:
    """Large enough that computing again costs more than smaller operators do."""
    config = llama.Config(4096, 2048, 4, 2048, 16, 8, 5632, batch_size=16)
    with torch.device("meta"):
        model = llama.build(config).to(torch.bfloat16)
    large = trace(model, llama.example_inputs(config))
    fits = template_of_graph(large, MESH, dp=4, zero=1, microbatches=2)
    asked = request(limit=fits.predicted.peak_bytes)
    found = with_templates(large, template_of_graph(large, MESH, dp=4, zero=3, recompute="full"), asked)
    assert template_of_graph(large, MESH, dp=4, zero=1).predicted.peak_bytes > asked.memory_limit
    assert found.predicted.step_time_ns <= fits.predicted.step_time_ns


def test_a_template_that_does_not_fit_is_not_taken(graph: Graph) -> None:
    small = template_of_graph(graph, MESH, dp=4, zero=3)
    limit = small.predicted.peak_bytes * 9 // 10
    slow = replace(small, predicted=replace(small.predicted, step_time_ns=10**12))
    found = with_templates(graph, slow, request(limit=limit))
    assert found.stage.nodes is slow.stage.nodes or found.predicted.peak_bytes <= limit


@pytest.mark.parametrize(
    "rule",
    [Constraint("*", stages=2), Constraint("*", ("S(0)",), what="input", axis="d0"), Constraint("*", recompute="none")],
    ids=["stages", "an axis", "recomputation"],
)
def test_where_constraints_decide_what_templates_do_none_is_looked_at(graph: Graph, rule: Constraint) -> None:
    slow: Plan = template_of_graph(graph, MESH, tp=4)
    assert with_templates(graph, slow, request(rule)).search == slow.search


def test_templates_have_as_many_microbatches_as_are_pinned(graph: Graph) -> None:
    slow = template_of_graph(graph, MESH, tp=4, microbatches=2)
    assert with_templates(graph, slow, request(Constraint("*", microbatches=2))).microbatches == 2


def test_where_memory_limits_zero_2_is_looked_at_in_several_microbatches() -> None:
    config = replace(CONFIG, seq_len=512, batch_size=64)
    with torch.device("meta"):
        graph = trace(llama.build(config), llama.example_inputs(config))
    template = template_of_graph(graph, MESH, dp=4, zero=2, microbatches=4)
    limit = template.predicted.peak_bytes
    assert limit < template_of_graph(graph, MESH, dp=4, zero=3).predicted.peak_bytes
    slow = replace(template, predicted=replace(template.predicted, step_time_ns=10**12))
    found = with_templates(graph, slow, request(limit=limit))
    assert found.predicted.step_time_ns <= template.predicted.step_time_ns
    rows = {row.template: row for row in found.search.tried}
    assert rows["dp=4, zero=2, microbatches=4"].step_time_ns == template.predicted.step_time_ns


@pytest.mark.parametrize(("samples", "count"), [(64, 16), (36, 9)], ids=["more than eight", "no power of two"])
def test_templates_have_as_many_microbatches_as_it_takes(samples: int, count: int) -> None:
    """Of Llama-3-8B on 8 h100, 16 microbatches fit and 8 do not; those were the most that were looked at."""
    config = replace(CONFIG, seq_len=512, batch_size=samples)
    with torch.device("meta"):
        graph = trace(llama.build(config), llama.example_inputs(config))
    template = template_of_graph(graph, MESH, dp=4, zero=3, microbatches=count)
    limit = template.predicted.peak_bytes
    slow = replace(template, predicted=replace(template.predicted, step_time_ns=10**12))
    found = with_templates(graph, slow, request(limit=limit))
    assert found.predicted.step_time_ns <= template.predicted.step_time_ns
    rows = {row.template: row for row in found.search.tried}
    assert rows[f"dp=4, zero=3, microbatches={count}"].step_time_ns == template.predicted.step_time_ns


def test_templates_split_the_sequence_beside_tp(graph: Graph) -> None:
    slow = template_of_graph(graph, MESH, tp=4)
    slow = replace(slow, predicted=replace(slow.predicted, step_time_ns=10**12))
    found = with_templates(graph, slow, request())
    template = template_of_graph(graph, MESH, dp=2, tp=2, zero=1, sequence_parallel=True)
    assert found.predicted.step_time_ns <= template.predicted.step_time_ns
    assert any(row.template == "dp=2, tp=2, zero=1, sequence_parallel=True" for row in found.search.tried)


@pytest.fixture(scope="module")
def deep() -> Graph:
    """More layers than are looked at."""
    with torch.device("meta"):
        config = replace(CONFIG, num_layers=8)
        return trace(llama.build(config), llama.example_inputs(config))


def test_templates_of_deep_models_are_predicted_as_they_are_by_themselves(deep: Graph) -> None:
    slow = template_of_graph(deep, MESH, tp=4)
    slow = replace(slow, predicted=replace(slow.predicted, step_time_ns=10**12))
    found = with_templates(deep, slow, request())
    family = [template_of_graph(deep, MESH, dp=4 // tp, tp=tp, zero=zero) for tp, zero in product((1, 2), (0, 1, 3))]
    rows = {row.template: row for row in found.search.tried}
    for name, own in zip(("dp=4", "dp=4, zero=1", "dp=4, zero=3"), family, strict=False):
        assert rows[name].step_time_ns == own.predicted.step_time_ns
        assert rows[name].peak_bytes == own.predicted.peak_bytes
    assert found.predicted.step_time_ns <= min(plan.predicted.step_time_ns for plan in family)


def test_as_few_blocks_as_fit_are_computed_again(deep: Graph) -> None:
    apart = autopar.Mesh("h100", nodes=4, devices_per_node=1)  # no tensor parallelism across nodes
    whole = template_of_graph(deep, apart, dp=4, zero=3)
    every = template_of_graph(deep, apart, dp=4, zero=3, recompute="block")
    limit = whole.predicted.peak_bytes - (whole.predicted.peak_bytes - every.predicted.peak_bytes) * 3 // 8
    pinned, slow = Constraint("*", microbatches=1), replace(whole, recompute=every.recompute)
    slow = replace(slow, predicted=replace(slow.predicted, step_time_ns=10**12))
    found = with_templates(deep, slow, replace(request(pinned, limit=limit), mesh=apart))
    assert found.predicted.peak_bytes <= limit
    assert 0 < len(found.recompute) < len(every.recompute)
    assert found.predicted.step_time_ns < every.predicted.step_time_ns
    assert "blocks" in found.search.method


def test_all_blocks_computed_again_fit_though_many_times_the_memory_does_not() -> None:
    """What is not kept asks for nothing on top: a tenth of it would be more than there is."""
    config = replace(CONFIG, num_layers=24, seq_len=512, batch_size=32)
    with torch.device("meta"):
        large = trace(llama.build(config), llama.example_inputs(config))
    apart = autopar.Mesh("h100", nodes=4, devices_per_node=1)
    every = template_of_graph(large, apart, dp=4, zero=3, recompute="full")
    limit = every.predicted.peak_bytes * 11 // 10
    assert template_of_graph(large, apart, dp=4, zero=3).predicted.peak_bytes > 6 * limit
    slow = replace(every, predicted=replace(every.predicted, step_time_ns=10**12))
    found = with_templates(large, slow, replace(request(Constraint("*", microbatches=1), limit=limit), mesh=apart))
    assert found.predicted.step_time_ns <= every.predicted.step_time_ns


@pytest.mark.parametrize(
    ("zero", "tp", "sequence_parallel"), [(0, 1, False), (3, 1, False), (1, 2, True), (3, 2, False)]
)
def test_no_step_takes_less_than_is_said_at_least(deep: Graph, zero: int, tp: int, sequence_parallel: bool) -> None:
    choice = Template(4 // tp, tp, zero, sequence_parallel=sequence_parallel)
    family = Family(deep, template_of_graph(deep, MESH, tp=4), request())
    least_ns = family.place(choice).placements.least_step_ns()
    asked = {"dp": 4 // tp, "tp": tp, "zero": zero, "sequence_parallel": sequence_parallel}
    taken_ns = template_of_graph(deep, MESH, **asked).predicted.step_time_ns
    assert 0.5 * taken_ns < least_ns <= taken_ns


def test_no_template_that_takes_longer_at_least_is_played(deep: Graph) -> None:
    fast = template_of_graph(deep, MESH, dp=4)
    fast = replace(fast, predicted=replace(fast.predicted, step_time_ns=1))
    found = with_templates(deep, fast, request())
    assert found.stage.nodes is fast.stage.nodes
    rows = [row for row in found.search.tried if row.template]
    assert rows and all("at least" in str(row.infeasible) for row in rows)
