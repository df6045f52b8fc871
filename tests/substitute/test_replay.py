"""Substitutions in plans: found once a distinct block, listed, replayed exactly, refused when something changed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

import autopar
from autopar import Constraint, Plan, SearchBudget
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.substitute import GraphCandidate, load_rules, replayed, substituted
from autopar.substitute.joint import sums_weights
from autopar.substitute.rules.terms import Rule
from autopar.trace import find_blocks, trace
from models import gpt, llama, llama_lora
from tests.equivalence import planned, zoo

MODEL = "gpt"


FEW = ("merge-linears", "merge-affines", "adapter-folded-scaled", "scale-of-scale")


def few_rules() -> list[Rule]:
    return [rule for rule in load_rules() if rule.name in FEW]


def candidates(graph: Graph, rules: Sequence[Rule]) -> tuple[GraphCandidate, ...]:
    blocks, profile = find_blocks(graph), load_profile("h100")
    return substituted(graph, blocks.paths, blocks.node_representative, rules, profile, seconds=20.0).candidates


@cache
def best(name: str) -> GraphCandidate:
    return candidates(planned.graph(name), few_rules())[0]


def again(graph: Graph, candidate: GraphCandidate) -> Graph:
    blocks = find_blocks(graph)
    return replayed(graph, blocks.paths, blocks.node_representative, candidate.steps, load_rules())


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_replay_makes_the_same_graph(name: str) -> None:
    graph, found = planned.graph(name), best(name)
    assert found.steps
    assert again(graph, found) == found.graph
    assert found.graph.fingerprint != graph.fingerprint


def test_equal_blocks_are_rewritten_alike_and_stay_equal() -> None:
    found = best(MODEL)
    assert {step.modules for step in found.steps if step.modules != ("",)} == {("layers.0", "layers.1")}
    paths = find_blocks(found.graph).paths
    assert ("layers.0", "layers.1") in paths


def test_query_key_and_value_become_one_product() -> None:
    products = Counter(node.op for node in best(MODEL).graph.nodes)["aten.linear.default"]
    assert products < Counter(node.op for node in planned.graph(MODEL).nodes)["aten.linear.default"]
    assert "layers.0.attention.query_key_value.weight" in best(MODEL).graph.packed


def test_the_search_does_not_grow_with_depth() -> None:
    seen = []
    for num_layers in (2, 6):
        with torch.device("meta"):
            config = llama.Config(num_layers=num_layers)
            graph = trace(llama.build(config), llama.example_inputs(config))
        blocks = find_blocks(graph)
        found = substituted(graph, blocks.paths, blocks.node_representative, few_rules(), load_profile("h100"))
        seen.append((found.seen, [(step.rule, len(step.modules) // num_layers) for step in found.best.steps]))
    assert seen[0] == seen[1]


def test_a_rule_that_changed_is_refused() -> None:
    graph, found = planned.graph(MODEL), best(MODEL)
    steps = (replace(found.steps[0], statement="x => x"), *found.steps[1:])
    with pytest.raises(PlanError, match=r"expected the rule .*plan again"):
        again(graph, replace(found, steps=steps))
    with pytest.raises(PlanError, match="no such rule"):
        again(graph, replace(found, steps=(replace(found.steps[0], rule="unheard-of"),)))


def test_a_place_where_the_rule_does_not_apply_is_refused() -> None:
    graph, step = planned.graph(MODEL), best(MODEL).steps[0]
    for wrong in (
        replace(step, roots=step.roots[::-1]),
        replace(step, roots=(step.roots[0], "nothing")),
        replace(step, region="nothing"),
        replace(step, binding={**step.binding, "x": step.roots[0]}),
    ):
        with pytest.raises(PlanError, match="expected"):
            again(graph, GraphCandidate(graph, (wrong,), 0))


def test_a_plan_lists_its_substitutions_and_makes_the_same_program_again() -> None:
    model, batch = zoo.build(MODEL)
    budget = SearchBudget(seconds=4.0, stages=False, proposals=0)
    program = autopar.parallelize(model, autopar.Mesh("h100", devices_per_node=2), batch, search=budget)
    plan = Plan.from_json(program.plan.to_json())
    assert plan.substitutions == program.plan.substitutions != ()
    assert plan.search == program.plan.search
    assert autopar.parallelize(model, plan.mesh, batch, plan=plan).source == program.source
    autopar.verify(plan, model, batch)
    assert "rewritten" in str(plan)
    explained = plan.explain("layers.0.attention")
    assert f"substitution {plan.substitutions[0].rule}" in explained
    assert re.search(r"Of equal graphs, by a step: .*, taken; the graph as it is: .*, slower by", explained)
    lost = json.loads(plan.to_json()) | {"substitutions": []}
    with pytest.raises(PlanError):
        autopar.verify(Plan.from_json(json.dumps(lost)), model, batch)


def test_what_constraints_speak_of_stays() -> None:
    with torch.device("meta"):
        model, batch = gpt.build(gpt.Config()), gpt.example_inputs(gpt.Config())
    mesh, budget = autopar.Mesh("h100", devices_per_node=2), SearchBudget(4.0, stages=False, proposals=0)
    rules = [Constraint("layers.*.attention.key.weight", ("I",), "stored")]
    plan = autopar.parallelize(model, mesh, batch, search=budget, constraints=rules).plan
    assert "layers.0.attention.key.weight" in plan.parameters.values()
    touched = {value for step in plan.substitutions for value in step.binding.values()}
    assert "layers.0.attention.key.weight" not in touched


def test_what_constraints_say_of_one_layer_leaves_its_equals_alone_and_the_plan_is_replayed() -> None:
    """Layers that constraints told apart were once rewritten apart; replay, which knows no constraints, found none."""
    with torch.device("meta"):
        config = gpt.Config(num_layers=3)
        model, batch = gpt.build(config), gpt.example_inputs(config)
    mesh, budget = autopar.Mesh("h100", devices_per_node=2), SearchBudget(4.0, stages=False, proposals=0)
    rules = [Constraint("layers.1.attention.key.weight", ("I",), "stored")]
    plan = autopar.parallelize(model, mesh, batch, search=budget, constraints=rules).plan
    assert {step.modules for step in plan.substitutions} == {("layers.0", "layers.1", "layers.2")}
    assert {f"layers.{layer}.attention.key.weight" for layer in range(3)} <= {*plan.parameters.values()}
    autopar.verify(Plan.from_json(plan.to_json()), model, batch)


def test_templates_take_rewritten_graphs() -> None:
    plan = template_of_graph(best(MODEL).graph, autopar.Mesh("h100", devices_per_node=4), dp=2, tp=2)
    given = template_of_graph(planned.graph(MODEL), autopar.Mesh("h100", devices_per_node=4), dp=2, tp=2)
    assert plan.predicted.step_time_ns < given.predicted.step_time_ns


def test_weights_of_few_bits_are_not_added_up() -> None:
    rules = {rule.name: rule for rule in load_rules()}
    assert sums_weights(rules["adapter-folded-scaled"])
    assert sums_weights(rules["add-of-linears-of-one"])
    assert not sums_weights(rules["merge-linears"])
    assert not sums_weights(rules["linear-after-linear"])
    with torch.device("meta"):
        config = llama_lora.Config(num_layers=1)
        model, batch = llama_lora.build(config), llama_lora.example_inputs(config)
    for dtype in (None, torch.bfloat16):
        graph = trace(model, batch, compute_dtype=dtype)
        applied = {step.rule for candidate in candidates(graph, few_rules()) for step in candidate.steps}
        assert applied
        assert any(sums_weights(rules[name]) for name in applied) == (dtype is None)
