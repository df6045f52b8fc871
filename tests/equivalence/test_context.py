"""Sequences that are split over ranks: planned by hand, run, and equal to one device; nothing is silently otherwise."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import autopar
from autopar.contexts import for_sequences, gathered, in_rings, with_contexts
from autopar.driver import Context, Front, of_plan, outline_of
from autopar.errors import AutoparError, PlanError
from autopar.families import Family, named
from autopar.passes.contexts import contexts
from autopar.passes.rings import rings
from autopar.pipeline import template_of_graph
from autopar.request import BUDGETS, Request
from autopar.rewrites import graph_of
from autopar.runtime.lowering.parts import PartCall, PartQueries, part_gradients, part_over
from autopar.simulate import predict
from autopar.substitute.sequences import over_rings
from autopar.template import CONTEXTS, attention_nodes
from autopar.trace import trace
from autopar.tunables import BOUND_SEQUENCE, LONG_SEQUENCE
from models import gpt, llama
from tests.equivalence import pipelines
from tests.equivalence.hard import Tensors, assert_equal, operands_of, template
from tests.equivalence.hard_jobs import saved_bytes, saved_on_rank
from tests.rank_pool import pool
from tests.traced import traced_once

pytestmark = pytest.mark.ranks
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 128, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


def hugging_face(config: Any, length: int) -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(0, 128, (2, length))
    labels = tokens.clone()
    labels[0, :5] = -100  # ranks hold unequal counts
    return model, {"input_ids": tokens, "labels": labels}


SINKS: dict[str, Any] = {
    "head_dim": 8, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2,
    "attn_implementation": "eager", "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
"""Every other layer sees five positions, the others all before; both with sinks."""
PACKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "hf_llama_packed": (transformers.LlamaConfig, {}),
    "hf_mistral_packed": (transformers.MistralConfig, {"sliding_window": 5}),
    "hf_gpt_oss_packed": (transformers.GptOssConfig, SINKS),
}


@cache
def built(name: str, length: int = 16) -> tuple[nn.Module, Tensors]:
    """A small model, and a batch of two sequences."""
    torch.manual_seed(0)
    if name == "hf_llama":
        return hugging_face(transformers.LlamaConfig(**SIZES), length)
    if name == "hf_qwen3":
        return hugging_face(transformers.Qwen3Config(head_dim=8, **SIZES), length)
    if name == "hf_mistral":
        return hugging_face(transformers.MistralConfig(sliding_window=5, **SIZES), length)
    if name == "hf_gpt_oss":
        return hugging_face(transformers.GptOssConfig(**SINKS, **SIZES), length)
    if name in PACKED:
        config, options = PACKED[name]
        model, batch = hugging_face(config(**SIZES, **options), length)
        positions = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)])
        return model, batch | {"position_ids": positions.expand(2, -1).contiguous()}
    module: Any = {"gpt": gpt, "llama": llama}[name]
    config = module.Config(batch_size=2, seq_len=length, num_heads=4, hidden_size=32)
    return module.build(config), module.example_inputs(config)


CASES = [
    ("gpt", 16, {"cp": 2}),
    ("gpt", 15, {"cp": 4}),  # 4, 4, 4 and 3 positions
    ("llama", 16, {"cp": 4}),
    ("llama", 14, {"cp": 2, "tp": 2}),
    ("gpt", 16, {"cp": 2, "dp": 2, "zero": 3}),
    ("hf_llama", 16, {"cp": 2, "dp": 2}),
    ("hf_qwen3", 16, {"cp": 2, "zero": 3}),
    ("hf_llama", 15, {"cp": 2, "tp": 2, "recompute": "full"}),
    ("hf_mistral", 16, {"cp": 2}),  # each position sees five
    ("hf_llama_packed", 16, {"cp": 4}),  # two documents in each sequence
    ("hf_mistral_packed", 18, {"cp": 2, "tp": 2}),
    ("hf_gpt_oss", 16, {"cp": 2}),
    ("hf_gpt_oss", 15, {"cp": 4}),
    ("hf_gpt_oss_packed", 16, {"cp": 2, "tp": 2}),
]


IN_TURN = [(*case, CONTEXTS[number % 3]) for number, case in enumerate(CASES)]
"""Each case in one way; `python -m tests.equivalence.contexts` has all."""

RINGS = [
    ("gpt", 15, {"cp": 4}), ("hf_mistral", 16, {"cp": 2}), ("hf_llama_packed", 16, {"cp": 4}),
    ("hf_mistral", 15, {"cp": 4}), ("hf_mistral_packed", 18, {"cp": 4}),
    ("hf_gpt_oss", 16, {"cp": 2, "tp": 2}), ("hf_gpt_oss_packed", 15, {"cp": 4}),
]  # fmt: skip


@pytest.mark.sampled(
    only=(
        "gpt-16-{'cp': 2}-gather",
        "hf_llama-15-{'cp': 2, 'tp': 2, 'recompute': 'full'}-ring",
        "hf_qwen3-16-{'cp': 2, 'zero': 3}-gather",
        "hf_mistral-16-{'cp': 2}-heads",
        "hf_llama_packed-16-{'cp': 4}-ring",
    )
)
@pytest.mark.parametrize(
    ("name", "length", "choices", "context"), [*IN_TURN, *((*case, "ring") for case in RINGS)], ids=str
)
def test_a_split_sequence_computes_the_same(name: str, length: int, choices: dict[str, Any], context: str) -> None:
    model, batch = built(name, length)
    program = template(model, batch, context=context, **choices)
    assert_equal(model, batch, program)
    assert ("ring=True" in program.source) == (context == "ring")
    assert ("rt.window_attention" in program.source) == ("mistral" in name or "gpt_oss" in name)
    assert ("sinks=" in program.source) == ("gpt_oss" in name)


def test_a_stage_of_a_pipeline_is_split_by_positions() -> None:
    found = pipelines.faults("llama", "pp_cp", "1f1b")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("context", CONTEXTS)
def test_activations_of_two_ranks_are_a_half(context: str) -> None:
    """What autograd keeps, seen when it is."""
    model, batch = built("llama", 96)
    program = template(model, batch, cp=2, context=context)
    of_ranks = pool(2).run(saved_on_rank, program.source, dict(model.state_dict()), batch)
    whole = saved_bytes(model.parameters(), lambda: model(**batch))
    assert [round(2 * kept / whole, 2) for kept in of_ranks] == pytest.approx([1, 1], abs=0.05)


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (2, 0, 4, 8), (2, 2, 0, 8)])
def test_a_rank_without_a_sample_head_or_query_computes_nothing(shape: tuple[int, ...]) -> None:
    """Found by a random program: torch's kernel on CPUs divides by the number of samples, and the process ends."""
    query, key, call = torch.randn(shape), torch.randn(*shape[:2], 4, 8), PartCall(False, 1.0)
    part = part_over(query, key, key, call)
    found = part_gradients(PartQueries(query, part.result, part.result, part.sums), key, key, call)
    assert [x.shape for x in found] == [query.shape, key.shape, key.shape]
    assert not any(x.any() for x in found)


class Images(nn.Module):
    """Attention over what comes of no dim of an input by itself, after a class token; to some keys where these are
    fewer; by a lone position where there is one."""

    def __init__(self, keys: int | None = None) -> None:
        super().__init__()
        self.project, self.keys = nn.Linear(8, 24), keys
        self.token, self.table = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(17, 8))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = torch.cat([self.token.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1) + self.table
        query, key, value = self.project(x).unflatten(-1, (3, 1, 8)).unbind(2)
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        few, is_causal = slice(self.keys), self.keys is not None
        made = F.scaled_dot_product_attention(query, key[:, :, few], value[:, :, few], is_causal=is_causal)
        return made.square().mean()


@pytest.mark.parametrize("context", ["gather", "ring"])
def test_positions_begin_where_queries_come_of_them(context: str) -> None:
    """17 on two ranks: 9 and 8. The table that is added to them is read by position."""
    torch.manual_seed(0)
    model, batch = Images(), {"x": torch.randn(2, 8, 4, 4)}
    program = template(model, batch, cp=2, context=context)
    (added,) = (one for one in operands_of(program, "aten.add.Tensor") if "S(0)" in one)
    assert added == ["S(1)", "S(0)"]
    assert_equal(model, batch, program)


@pytest.mark.parametrize(
    ("model", "shape", "options", "said"),
    [
        (Images(keys=3), (2, 8, 8), {}, "as many keys as queries"),
        (Images(), (2, 1, 8), {}, "fewer ranks for cp"),
        (nn.Linear(4, 4), (2, 8, 4), {}, "expected attention with cp=2"),
        (Images(), (2, 8, 8), {"context": "circle"}, "expected context as one of gather, ring, heads"),
    ],
)
def test_what_cannot_be_split_is_refused(model: nn.Module, shape: Any, options: Any, said: str) -> None:
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    loss = None if isinstance(model, Images) else torch.sum
    with pytest.raises(PlanError, match=said):
        autopar.template_plan(model, mesh, (torch.randn(shape),), cp=2, loss_fn=loss, **options)


def test_what_the_search_looks_at_computes_the_same() -> None:
    """Templates that split long sequences, of one sample, which no two ranks can share otherwise."""
    config = gpt.Config(num_layers=2, seq_len=32, batch_size=1)
    model, batch = gpt.build(config), gpt.example_inputs(config)
    request = Request(autopar.Mesh("cpu", devices_per_node=4), "train", "adamw", None, (), BUDGETS["fast"])
    graph, steps = for_sequences(trace(model, batch))
    family = Family(graph, None, request)
    for tp, cp in ((1, 4), (2, 2)):
        family.look_at_context(1, tp, cp, ("gather", "heads"))
    assert {"zero=3, cp=4", "tp=2, zero=3, cp=2"} <= {row.template for row in family.rows}
    best = min(
        (place.part.with_traffic(named(name, plan)) for _, name, place, plan in family.found),
        key=lambda plan: plan.predicted.step_time_ns,
    )
    plan = autopar.Plan.from_json(replace(best, substitutions=steps).to_json())
    assert_equal(model, batch, autopar.parallelize(model, plan.mesh, batch, plan=plan))


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_constraint_says_how_attention_runs(context: Any) -> None:
    """Of one sample, whose one head nobody can share: split by positions, or not at all."""
    config = gpt.Config(num_layers=1, seq_len=16, batch_size=1, num_heads=1)
    model, batch = gpt.build(config), gpt.example_inputs(config)
    graph, steps, rules = with_contexts(trace(model, batch), [autopar.Constraint("*", context=context)])
    node = attention_nodes(graph)[0]
    assert dict(node.kwargs).get("ring", False) == (context == "ring")
    assert steps[-1].rule == ("ring-attention" if context == "ring" else "split-sequence")
    assert [rule.allow for rule in rules] == ([("S(0)", "S(1)", "S(3)", "R", "I", "P")] if context == "heads" else [])
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    along = autopar.Constraint(node.results[0], ("S(2)",), what="tensor", stages=1)
    rows = [autopar.Constraint("*", context=context), along]
    if context == "heads":
        with pytest.raises(AutoparError):
            autopar.parallelize(model, mesh, batch, constraints=rows, search="fast")
        return
    program = autopar.parallelize(model, mesh, batch, constraints=rows, search="fast")
    assert program.source.count("rt.context_attention") == 1
    assert program.source.count("ring=True") == (context == "ring")
    assert_equal(model, batch, program)


def test_a_constraint_about_no_attention_is_refused() -> None:
    with pytest.raises(PlanError, match="found none that 'nothing' matches"):
        with_contexts(trace(*built("gpt")), [autopar.Constraint("nothing", context="ring")])


def test_long_sequences_are_split_by_any_search() -> None:
    """Of one sample, that no two ranks can share otherwise; shorter ones where memory binds alone."""
    plans = []
    for length in (LONG_SEQUENCE, LONG_SEQUENCE // 2):
        config = gpt.Config(num_layers=1, seq_len=length, batch_size=1, num_heads=1)
        with torch.device("meta"):
            model, batch = gpt.build(config), gpt.example_inputs(config)
        mesh = autopar.Mesh("h100", devices_per_node=2)
        plans.append(autopar.parallelize(model, mesh, batch, search="fast", check=False))
    told = [any("cp=2" in (row.template or "") for row in program.plan.search.tried) for program in plans]
    assert told == [True, False]
    assert ["rt.context_attention" in program.source for program in plans] == [True, False]
    predicted = plans[0].plan.predicted
    assert predict(plans[0].plan.simulator(plans[0].plan)).step_time_ns == predicted.step_time_ns


def test_where_nothing_fits_the_graph_whose_sequences_may_be_split_is_planned_too() -> None:
    """As the model's own is, in one stage and in several."""
    request = Request(autopar.Mesh("cpu", devices_per_node=4), "train", "adamw", None, (), BUDGETS["fast"])
    rules = []
    for length in (BOUND_SEQUENCE, BOUND_SEQUENCE // 2):
        config = gpt.Config(num_layers=1, seq_len=length, batch_size=2, num_heads=1, hidden_size=16)
        front = Front(trace(gpt.build(config), gpt.example_inputs(config)))
        assert front.next_round()
        opened = [*contexts(front, Context(request))]
        assert all(one.made is None and one.outline is None for one in opened)
        rules.append([{step.rule for step in one.variant.steps} for one in opened])
    assert len(rules[0]) == 1 and "split-sequence" in rules[0][0]
    assert not rules[1]


def test_stages_that_a_search_finds_split_sequences() -> None:
    """Where attention is pinned to be split: the cut, the schedule, axes and all other placements are found."""
    config = gpt.Config(num_layers=4, seq_len=16, batch_size=4, num_heads=1)
    model, batch = gpt.build(config), gpt.example_inputs(config)
    mesh, budget = autopar.Mesh("cpu", devices_per_node=4), autopar.SearchBudget(30.0, substitutions=False, proposals=0)
    with traced_once():
        made = [node.results[0] for node in attention_nodes(for_sequences(trace(model, batch))[0])]
        rules = [autopar.Constraint(name, ("S(2)",), what="tensor") for name in made]
        rules += [autopar.Constraint("*", context="ring", stages=2, microbatches=2)]
        program = autopar.parallelize(model, mesh, batch, constraints=rules, search=budget, check=False)
    stages = program.plan.stages
    assert len({stage.first_rank for stage in stages}) == 2 and program.plan.microbatches == 2
    assert "ring=True" in program.source
    split = [str(stage.nodes[name].results[0][0]) for stage in stages for name in made if name in stage.nodes]
    assert split == ["S(2)"] * 4
    assert_equal(model, batch, program)


def test_rings_are_taken_back() -> None:
    """Keys that pass in rings are gathered again by the operator of before; a mask goes back to torch's own."""
    for name in ("llama", "hf_mistral"):
        told, _ = for_sequences(trace(*built(name)))
        names = over_rings(told)
        back = gathered(in_rings(told, names)[0], names)[0]
        assert [node.op for node in attention_nodes(back)] == [node.op for node in attention_nodes(told)]
        assert not any(dict(node.kwargs).get("ring") for node in back.nodes)


def test_the_best_plan_passes_keys_around_where_that_is_faster() -> None:
    """And only there: what is found is what the simulator says of it."""
    config = gpt.Config(num_layers=1, seq_len=LONG_SEQUENCE, batch_size=1)
    with torch.device("meta"):
        model, batch = gpt.build(config), gpt.example_inputs(config)
    graph, mesh = trace(model, batch), autopar.Mesh("h100", devices_per_node=2)
    found = {}
    for context in ("gather", "ring"):
        plan = template_of_graph(graph, mesh, cp=2, context=context)
        front, own = Front(graph_of(plan, graph)), Context(Request(mesh, "train", "adamw", None, (), BUDGETS["fast"]))
        front.add(of_plan(front.given, outline_of(plan), plan), "template")
        front.opened = []
        others = [one.plan for one in rings(front, own)]
        found[context] = plan.predicted.step_time_ns, [one.predicted.step_time_ns for one in others]
    (gather_ns, rings_ns), (ring_ns, gathers_ns) = found["gather"], found["ring"]
    assert rings_ns == ([ring_ns] if ring_ns < gather_ns else [])
    assert gathers_ns == ([gather_ns] if gather_ns < ring_ns else [])
    assert gather_ns != ring_ns
