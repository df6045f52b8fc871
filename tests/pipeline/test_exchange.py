"""How tokens travel to experts is chosen by price: which ranks share the experts, and how many chunks there are."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers

import autopar
from autopar.by_hand import template_of_graph
from autopar.cost.exchanges import CHUNKS, LOADS, placed_experts
from autopar.driver import Context, Front, of_plan, outline_of
from autopar.emit import emit
from autopar.errors import PlanError
from autopar.families import faster_templates
from autopar.ir.exchange_table import ExchangeTable
from autopar.ir.graph import Graph
from autopar.microbatch import check_plan
from autopar.ops.experts import ROUTED_EXPERTS, table_of, with_routing
from autopar.passes.exchange import adapt, exchange, exchanges_tokens, experts, replicate
from autopar.passes.shared_experts import likely_replicas
from autopar.profiler import profiles_of
from autopar.quantiles import with_p99
from autopar.request import Request, budget_of
from autopar.rewrites import graph_of, in_chunks, with_slices
from autopar.trace import trace

MESH = autopar.Mesh("v100", nodes=2, devices_per_node=4)


@cache
def graph(tokens: int = 1_024, sequences: int = 8) -> Graph:
    """One layer of 16 wide experts, without weights."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=1_024, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8,
        moe_intermediate_size=1_024, num_experts=16, num_experts_per_tok=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
        ids = torch.zeros(sequences, tokens, dtype=torch.int64)
    return trace(model, {"input_ids": ids, "labels": ids})


def request() -> Request:
    return Request(MESH, "train", "adamw", None, (), budget_of("fast"), None)


def in_turn(traced: Graph, **options: Any) -> tuple[Front, Any, list[Any]]:
    """What the pass makes of a template."""
    plan = template_of_graph(traced, MESH, **options)
    front = Front(traced)
    start = of_plan(front.given, outline_of(plan), plan)
    front.add(start, "template")
    return front, start, [*exchange(front, Context(request()))]


def chunks_of(one: Graph) -> int:
    return next(dict(node.kwargs).get("chunks", 1) for node in one.nodes if node.op == ROUTED_EXPERTS)


def test_chunks_are_as_many_as_are_fastest() -> None:
    """By price, which the simulator agrees with; well typed, and replayed from its file."""
    front, start, (one,) = in_turn(graph(), dp=8, ep=8)
    chunks, plan = chunks_of(one.graph), replace(one.plan, substitutions=one.variant.steps)
    by_hand = {count: template_of_graph(graph(), MESH, dp=8, ep=8, exchange_chunks=count) for count in (1, 2, 4, 8)}
    fastest = min(by_hand, key=lambda count: by_hand[count].predicted.step_time_ns)
    assert chunks == fastest > 1 and one.step_ns < start.step_ns
    check_plan(one.graph, plan)
    again = graph_of(autopar.Plan.from_json(plan.to_json()), graph())
    assert again.fingerprint == one.graph.fingerprint
    assert plan.timeline is not None and plan.predicted.comm_bytes["exchange"] > 0
    assert by_hand[chunks].predicted.step_time_ns == one.step_ns
    assert by_hand[chunks].predicted.comm_bytes == plan.predicted.comm_bytes
    front.add(one, "exchange")
    assert not [*exchange(front, Context(request()))]  # they are not cut twice


def test_few_tokens_travel_at_once() -> None:
    _, _, found = in_turn(graph(8), dp=8, ep=8)
    assert not found


def test_where_no_token_travels_nothing_is_cut() -> None:
    _, start, found = in_turn(graph(), dp=8)
    assert not exchanges_tokens(start.graph, start.plan) and not found


def test_templates_that_share_experts_are_played() -> None:
    """Those of a node, of all nodes at once, and in two levels; each in the number of chunks that is fastest, of which
    it is the plan that one line makes."""
    rows, found = faster_templates(graph(), None, request(), experts=16)
    looked = {row.template for row in rows if row.template}
    assert any("ep=4" in name for name in looked) and any("exchange=two-level" in name for name in looked)
    cut = 0
    for one in found:
        own, stated = in_chunks(graph(), one.template.exchange_chunks)[0], one.told(one.made())
        check_plan(own, stated)
        assert exchanges_tokens(own, one.plan) and stated.predicted.comm_bytes["exchange"] > 0
        asked = {item.name: getattr(one.template, item.name) for item in fields(one.template)} | {"hsdp": 1}
        by_hand = {n: template_of_graph(graph(), MESH, **asked | {"exchange_chunks": n}) for n in (1, 2, 4, 8)}
        steps = {n: plan.predicted.step_time_ns for n, plan in by_hand.items()}
        assert one.plan.predicted.step_time_ns == steps[one.template.exchange_chunks] == min(steps.values())
        assert stated.predicted.comm_bytes == by_hand[one.template.exchange_chunks].predicted.comm_bytes
        cut += one.template.exchange_chunks > 1
    assert cut


def test_a_search_takes_a_template_in_chunks_as_its_own() -> None:
    """Well typed, and replayed from its file; it is not cut twice."""
    front = Front(graph())
    found = [*experts(front, Context(request()))]
    for one in found:
        front.add(one, "experts")
    best = front.best
    assert best is not None and chunks_of(best.graph) > 1
    plan = replace(best.plan, substitutions=best.variant.steps)
    check_plan(graph_of(autopar.Plan.from_json(plan.to_json()), graph()), plan)
    assert not [*exchange(front, Context(request()))]


# Replicas ----------------------------------------


def p99_ns(plan: autopar.Plan, of: Graph) -> int:
    return with_p99(plan, of).predicted.step_time_p99_ns or 0


@pytest.mark.parametrize("routing", [autopar.Routing.power_law(1.2), autopar.Routing.histogram([20, *[1] * 15])])
def test_replicas_are_taken_where_some_experts_are_hot(routing: autopar.Routing) -> None:
    """They make the step faster, in the mean and at the 99th percentile; priced anew, no other number is taken."""
    traced = with_routing(graph(), routing)
    plan = template_of_graph(traced, MESH, dp=8, ep=8)
    front, context = Front(traced), Context(request())
    start = of_plan(front.given, outline_of(plan), plan)
    front.add(start, "template")
    (one,) = replicate(front, context)
    assert one.step_ns < start.step_ns and p99_ns(one.plan, one.graph) < 0.8 * p99_ns(plan, traced)
    check_plan(one.graph, one.plan)
    by_hand = template_of_graph(traced, MESH, dp=8, ep=8, replicas=one.variant.steps[0].binding["replicas"])
    assert by_hand.predicted.comm_bytes == one.plan.predicted.comm_bytes
    assert by_hand.predicted.peak_bytes == one.plan.predicted.peak_bytes
    front.add(one, "replicate")
    assert front.best is one and not [*replicate(front, context)] and not [*adapt(front, context)]
    assert likely_replicas(traced, 4) > 0


def sliced_graph(tokens: int) -> Graph:
    """One layer of 16 experts whose hidden values can be sliced, without weights, under a power law."""
    config = transformers.GptOssConfig(
        vocab_size=256, hidden_size=512, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8, head_dim=64,
        intermediate_size=1_024, num_local_experts=16, num_experts_per_tok=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(config)
        ids = torch.zeros(8, tokens, dtype=torch.int64)
    return with_routing(trace(model, {"input_ids": ids, "labels": ids}), autopar.Routing.power_law(1.2))


def test_rows_or_slices_travel_as_the_loads_ask_for() -> None:
    """Few rows always do; of more, the plan has a table, and is the faster for it."""
    for tokens, rules in ((64, []), (512, ["slices-by-load"])):
        sliced, _ = with_slices(sliced_graph(tokens), "tensor")
        plan = template_of_graph(sliced, MESH, dp=8, ep=4, experts="tensor")
        front = Front(sliced)
        start = of_plan(front.given, outline_of(plan), replace(plan, substitutions=()))
        front.add(start, "template")
        found = [*adapt(front, Context(request()))]
        assert [step.rule for one in found for step in one.variant.steps] == rules
        for one in found:
            assert one.step_ns < start.step_ns
            check_plan(one.graph, one.plan)


def test_one_call_has_both_tables() -> None:
    """They are in the plan, which is replayed from its file, told, and in the program."""
    traced = sliced_graph(512)
    plan = template_of_graph(traced, MESH, dp=8, ep=4, exchange="adaptive", experts="adaptive")
    assert sorted(step.rule for step in plan.substitutions) == ["exchange-by-load", "slices-by-load"]
    again = autopar.Plan.from_json(plan.to_json())
    assert graph_of(again, traced).fingerprint == plan.fingerprint
    source = emit(graph_of(again, traced), again)
    assert "rt.LoadTable(" in source and "rt.SlicesByLoad(((0, 'tensor'), (" in source
    assert str(plan).count("rows ×1") >= 1


def test_experts_that_are_as_busy_as_others_have_no_replicas() -> None:
    front, start, _ = in_turn(graph(), dp=8, ep=8)
    assert not [*replicate(front, Context(request()))] and likely_replicas(start.graph, 4) == 0


# By load ----------------------------------------


def table(plan: autopar.Plan) -> ExchangeTable:
    """That of the one layer, of the graph that the plan's file says."""
    again = graph_of(autopar.Plan.from_json(plan.to_json()), graph())
    assert again.fingerprint == plan.fingerprint
    found = next(table_of(node) for node in again.nodes if node.op == ROUTED_EXPERTS)
    assert found is not None
    return found


def test_a_table_has_the_cheapest_way_at_each_load() -> None:
    """It is in the plan, as text that a person can read, and every way fits in the memory that is predicted."""
    plan = template_of_graph(graph(), MESH, dp=8, ep=8, exchange="adaptive")
    found = table(plan)
    assert len(found.ways) > 1 and f"exchange    {found} ×1" in str(plan)
    (placed,) = placed_experts(graph(), plan, profiles_of(MESH)).values()
    ways = [(how, chunks) for how in ("flat", "two-level") for chunks in CHUNKS]
    for times in LOADS[:8]:
        rows = round(placed.even_rows * times)
        assert placed.price_ns(rows, *found.at(rows)[1:]) <= min(placed.price_ns(rows, *way) for way in ways) * 1.011
    fixed = template_of_graph(graph(), MESH, dp=8, ep=8, exchange="two-level", exchange_chunks=found.chunks)
    assert [stage.axes for stage in plan.stages] == [stage.axes for stage in fixed.stages]
    assert plan.predicted.peak_bytes >= fixed.predicted.peak_bytes  # flat, on one axis, gradients are summed otherwise


def test_loads_that_ask_for_several_ways_are_worth_a_table() -> None:
    """The pass takes it where it gains in the mean of what the routing draws, and not where loads are alike."""
    skewed = with_routing(graph(), autopar.Routing.power_law(1.2))
    for traced, is_worth in ((graph(), False), (skewed, True)):
        plan = template_of_graph(traced, MESH, dp=8, ep=8)
        front = Front(traced)
        front.add(of_plan(front.given, outline_of(plan), plan), "template")
        found = [*adapt(front, Context(request()))]
        print(plan.predicted.step_time_ns, [one.step_ns for one in found])
        assert bool(found) == is_worth
        for one in found:
            check_plan(one.graph, replace(one.plan, substitutions=one.variant.steps))


def test_what_is_left_to_the_load_is_not_said_twice() -> None:
    with pytest.raises(PlanError, match="which says how many, found 4"):
        template_of_graph(graph(), MESH, dp=8, ep=8, exchange="adaptive", exchange_chunks=4)
