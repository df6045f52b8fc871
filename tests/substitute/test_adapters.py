"""Adapters on weights are taken apart: no gradient of a frozen weight is made, nor a weight anew in each step."""

from __future__ import annotations

from collections import Counter
from functools import cache

import torch
from torch import Tensor, nn

import autopar
from autopar.emit import emit
from autopar.ir.graph import Graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.program import PlannedProgram, model_state
from autopar.substitute import load_rules, packed, substituted
from autopar.substitute.lifting import lifted
from autopar.substitute.lowering import lowered
from autopar.substitute.matching import Matcher
from autopar.substitute.rewriting import rewritten
from autopar.trace import find_blocks, trace
from models import llama_lora
from tests.equivalence.harness import differences, run_rank, run_single

REGROUPED = "adapter-folded-scaled-reversed"
RULES = [rule for rule in load_rules() if rule.name.startswith("adapter-folded")]
CONFIG = llama_lora.Config(num_layers=1, adapts="weight")


@cache
def model() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return llama_lora.build(CONFIG), llama_lora.example_inputs(CONFIG)


def regrouped(graph: Graph) -> Graph:
    """x·(w + s·b·a)ᵀ → x·wᵀ + s·(x·aᵀ)·bᵀ, wherever it applies."""
    matcher, values = Matcher(next(rule for rule in RULES if rule.name == REGROUPED)), lifted(graph)
    while (match := next(iter(matcher.matches(values)), None)) is not None:
        after = rewritten(values, match)
        assert after is not None
        values = after
    return packed(lowered(values))


def products_of_weights(graph: Graph) -> list[str]:
    """For each product of two parameters, the part of the layer that it is in."""
    made = [node for node in graph.nodes if node.op == "aten.matmul.default"]
    paths = [node.scope.path for node in made if graph.stored_by_tensor.keys() >= set(node.operands)]
    return ["mlp" if any(name.endswith(".mlp") for name, _ in path) else "attention" for path in paths]


def test_the_search_takes_the_large_adapters_of_a_block_apart() -> None:
    with torch.device("meta"):
        config = llama_lora.llama_block(adapts="weight")
        graph = trace(llama_lora.build(config), llama_lora.example_inputs(config))
    blocks = find_blocks(graph)
    found = substituted(graph, blocks.paths, blocks.node_representative, RULES, load_profile("h100"), trains=True)
    assert {step.rule for step in found.best.steps} == {REGROUPED}
    assert found.best.cost_ns * 1.1 < found.before_ns
    assert Counter(products_of_weights(graph))["mlp"] == 3
    assert Counter(products_of_weights(found.best.graph))["mlp"] == 0


def test_the_program_trains_as_the_model_does_and_keeps_its_names() -> None:
    own, batch = model()
    graph = regrouped(trace(own, batch))
    assert not products_of_weights(graph)
    plan = template_of_graph(graph, autopar.Mesh("cpu", devices_per_node=1))
    source, state = emit(graph, plan), model_state(own)
    assert not differences(run_single(own, batch, ("adamw",)), run_rank(0, 1, source, state, batch, ("adamw",)))
    rank = PlannedProgram(graph, plan, source, state).build()
    torch.testing.assert_close(rank.full_state_dict(), own.state_dict(), rtol=0, atol=0)
    other = {name: torch.randn_like(tensor) for name, tensor in own.state_dict().items()}
    rank.load_full_state_dict(other)
    again = llama_lora.build(CONFIG)
    again.load_state_dict(rank.full_state_dict())
    torch.testing.assert_close(again.state_dict(), other, rtol=0, atol=0)
    torch.testing.assert_close(rank.train_step(**batch), again(**batch))
    trained = {name for name, parameter in own.named_parameters() if parameter.requires_grad}
    assert rank.full_gradients().keys() == trained and len(trained) == 14
