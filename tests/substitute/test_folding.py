"""What is made of parameters alone is computed once in inference, by the block that stores them, and again when they
are loaded anew."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import runtime as rt
from autopar.emit import emit
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.structure import constant_tensors
from autopar.pipeline import template_of_graph
from autopar.program import PlannedProgram, load_source, model_state
from autopar.trace import trace
from models import llama_lora
from tests.rank_pool import pool
from tests.substitute.rewriting import LINEAR, Rewriter

Tensors = dict[str, Tensor]
CONFIG = llama_lora.Config(num_layers=3)


def adapters_merged(graph: Graph) -> Graph:
    """x·wᵀ + s·(x·aᵀ)·bᵀ → x·(w + s·b·a)ᵀ"""
    rewriter = Rewriter(graph)
    for total in (node for node in graph.nodes if node.op == "aten.add.Tensor"):
        makers = [graph.producers.get(name) for name in total.operands]
        if [maker.op if maker else "" for maker in makers] == [LINEAR, "aten.mul.Tensor"]:
            base, scaled = makers
            assert base is not None and scaled is not None
            up = graph.producers[scaled.operands[0]]
            down = graph.producers[up.operands[0]]
            _merge(rewriter, total, base, scaled, up.operands[1], down.operands[1])
    return rewriter.done()


def _merge(rewriter: Rewriter, total: Node, base: Node, scaled: Node, up: str, down: str) -> None:
    shape = rewriter.shape(base.operands[1])
    product = rewriter.node("aten.mm.default", (Ref(up), Ref(down)), total, [shape])
    times = rewriter.node("aten.mul.Tensor", (Ref(product.results[0]), scaled.args[1]), total, [shape])
    weight = rewriter.node("aten.add.Tensor", (Ref(base.operands[1]), Ref(times.results[0])), total, [shape])
    made = [rewriter.shape(total.results[0])]
    linear = rewriter.node(LINEAR, (Ref(base.operands[0]), Ref(weight.results[0])), total, made, total.results)
    rewriter.graph_with(total, [product, times, weight, linear])


@cache
def adapted() -> tuple[nn.Module, dict[str, Tensor], Graph]:
    torch.manual_seed(0)
    model, batch = llama_lora.build(CONFIG), llama_lora.example_inputs(CONFIG)
    return model, batch, adapters_merged(trace(model, batch, mode="inference"))


def program(graph: Graph, model: nn.Module, **choices: Any) -> PlannedProgram:
    mesh = autopar.Mesh("cpu", devices_per_node=choices.get("dp", 1) * choices.get("tp", 1))
    plan = template_of_graph(graph, mesh, mode="inference", optimizer=None, **choices)
    return PlannedProgram(graph, plan, emit(graph, plan), model_state(model))


def test_merged_adapters_are_computed_once() -> None:
    model, batch, graph = adapted()
    constant = constant_tensors(graph)
    assert all(constant.issuperset(node.results) for node in graph.nodes if node.op == "aten.mm.default")
    planned = program(graph, model)
    rank = planned.build()
    expected = model(**batch).detach()
    with Merges() as merges:
        for _ in range(3):
            torch.testing.assert_close(rank(**batch), expected)
    assert merges.count == 7 * CONFIG.num_layers
    assert "*(Layer_1(mesh) for _ in range(2))" in planned.source, "equal blocks are one class, and compute their own"


def test_compiled_blocks_find_what_they_keep() -> None:
    model, batch, graph = adapted()
    rank, expected = program(graph, model).build(), model(**batch).detach()
    rank.compile(backend="eager")
    for factor in (1, 1, 2):
        rank.load_full_state_dict({name: t * factor for name, t in model.state_dict().items()})
        changed = {name: t * factor for name, t in model.state_dict().items()}
        torch.testing.assert_close(rank(**batch), with_state(model, changed, batch))
    assert not torch.equal(rank(**batch), expected)


class Merges(TorchDispatchMode):
    """Counts products of adapters with each other."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith("mm") and args[0].shape[1] == CONFIG.rank and args[1].shape[0] == CONFIG.rank:
            self.count += 1
        return func(*args, **(kwargs or {}))


def other_state(model: nn.Module) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(t.shape, generator=generator) / 10 for name, t in model.state_dict().items()}


def with_state(model: nn.Module, state: Tensors, batch: Tensors) -> Tensor:
    with torch.no_grad():
        found: Tensor = functional_call(model, state, kwargs=batch)
    return found


def forward_twice(rank: int, world: int, source: str, states: list[Tensors], batch: Tensors, folder: str) -> Any:
    """With each state, the last of which comes from a checkpoint; then with a parameter changed by hand."""
    built = rt.build(load_source(source).Program)
    found = []
    for number, state in enumerate(states):
        built.load_full_state_dict(state)
        if number == len(states) - 1:
            rt.save_checkpoint(folder, built, step=1)
            built.load_full_state_dict(states[0])
            built(**batch)
            rt.load_checkpoint(folder, built)
        found += [built(**batch), built(**batch)]
    with rt.count_bytes() as counted:
        built(**batch)
    with torch.no_grad():
        dict(built.named_parameters())["layers.0.mlp.up.up.weight"].mul_(2)
    return [*found, built(**batch)], built.full_state_dict(), _by_collective(counted)


def _by_collective(counted: Any) -> dict[str, int]:
    sent = Counter[str]()
    for (collective, _), size in counted.items():
        sent[collective] += size
    return dict(sent)


@pytest.mark.ranks
@pytest.mark.parametrize("choices", [{"dp": 1}, {"tp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_what_is_loaded_anew_is_computed_anew(choices: dict[str, Any], tmp_path: Path) -> None:
    model, batch, graph = adapted()
    planned = program(graph, model, **choices)
    states = [model.state_dict(), other_state(model), {n: -t for n, t in other_state(model).items()}]
    expected = [with_state(model, state, batch) for state in states for _ in range(2)]
    last = {**states[-1], "layers.0.mlp.up.up.weight": states[-1]["layers.0.mlp.up.up.weight"] * 2}
    expected.append(with_state(model, last, batch))
    assert any("S" in str(item.placement) for item in planned.plan.stage.storage.values()) == (choices != {"dp": 1})
    predicted = {kind: size for kind, size in planned.plan.predicted.comm_bytes.items() if size}
    for found, state, sent in pool(planned.plan.mesh.num_devices).run(
        forward_twice, planned.source, states, batch, str(tmp_path)
    ):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(state, last)
        assert sent == predicted, "of a step that finds it in place"


class Compressed(nn.Module):
    """A weight that is kept small, and is large while it is used; a small sum of two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.randint(-9, 9, (16, 16), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(16, 1))
        self.shift, self.more = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.small.float() * self.scale
        return nn.functional.linear(x, weight, self.shift + self.more) + weight.sum()


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_what_is_larger_than_what_it_is_made_of_is_not_kept(mode: str) -> None:
    """A decompressed weight is made anew by each step, its sum with it; in training everything is."""
    model, batch = Compressed(), {"x": torch.randn(4, 16)}
    graph = trace(model, batch, mode=mode, loss_fn=torch.sum if mode == "train" else None)
    folded = constant_tensors(graph) - {item.tensor for item in graph.stored}
    assert sorted(graph.producers[name].op for name in folded) == (["aten.add.Tensor"] if mode == "inference" else [])
    if mode == "inference":
        rank = program(graph, model).build()
        for _ in range(2):
            torch.testing.assert_close(rank(**batch), model(**batch).detach())
