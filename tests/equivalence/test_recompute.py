"""Recomputed programs compute what the model computes, draw the same random numbers again, send what was predicted."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar.ir.recompute import operator_call, refusal_again
from autopar.ir.structure import block_paths
from autopar.pipeline import template_of_graph
from autopar.simulate import traffic
from autopar.trace import trace
from models import gpt
from tests.equivalence import planned, zoo
from tests.equivalence.hard import state_of, template
from tests.equivalence.hard_jobs import exact_steps
from tests.equivalence.harness import Tensors, differences, run_rank, run_single
from tests.equivalence.recomputing import counted_step, drawn_steps
from tests.equivalence.test_hard_dropout import LossOnly, eager_steps
from tests.rank_pool import pool

pytestmark = pytest.mark.ranks

CHOICES: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp_sequence": {"tp": 2, "sequence_parallel": True},
    "zero3": {"dp": 2, "zero": 3},
    "zero3_tp": {"dp": 2, "tp": 2, "zero": 3},
}
#: every pair of model, plan, kind and number of microbatches is in some case
CASES = [
    ("gpt", "dp", "block", 1), ("gpt", "tp_sequence", "full", 1), ("gpt", "zero3", "full", 2),
    ("gpt", "zero3_tp", "block", 2), ("llama", "dp", "full", 2), ("llama", "tp_sequence", "block", 2),
    ("llama", "zero3", "block", 1), ("llama", "zero3_tp", "full", 1), ("moe", "dp", "full", 1),
    ("moe", "tp_sequence", "full", 2), ("moe", "zero3", "block", 2), ("moe", "zero3_tp", "full", 1),
    ("hf_bert", "dp", "block", 2), ("hf_bert", "tp_sequence", "full", 1), ("hf_bert", "zero3", "full", 1),
    ("hf_bert", "zero3_tp", "block", 2), ("wide_resnet", "zero3", "full", 1), ("gpt", "zero3_tp", "selective", 2),
    ("llama", "tp_sequence", "selective", 2), ("moe", "zero3", "selective", 1), ("hf_bert", "dp", "selective", 2),
    ("wide_resnet", "zero3", "selective", 1),
]  # fmt: skip


@cache
def single(model_name: str) -> Any:
    return run_single(*zoo.build(model_name), ("sgd",))


@pytest.mark.sampled
@pytest.mark.parametrize(("model_name", "choice", "recompute", "microbatches"), CASES)
def test_recomputed_program_equals_model(model_name: str, choice: str, recompute: str, microbatches: int) -> None:
    model, batch = zoo.build(model_name)
    choices = {**CHOICES[choice], "recompute": recompute, "microbatches": microbatches}
    program = planned.program(model_name, planned.template(model_name, **choices))
    assert ("rt.remade(" if recompute == "selective" else "rt.recomputed(") in program.source and program.plan.recompute
    results = pool(program.plan.mesh.num_devices).run(run_rank, program.source, state_of(model), batch, ("sgd",))
    found = differences(single(model_name), results[0])
    assert not found, "\n".join(found)
    assert {loss.item() for loss, *_ in results} == {results[0][0].item()}
    assert results[0][4] == {kind: size for kind, size in program.plan.predicted.comm_bytes.items() if size}


@pytest.mark.parametrize("stages", [1, 2])
def test_blocks_of_which_some_compute_their_attention_again_share_a_class(stages: int) -> None:
    """And are told when they are made; the program computes what the model does."""
    model, batch = zoo.build("gpt")
    choices = {"dp": 2} if stages == 1 else {"pp": 2}
    every = planned.template("gpt", **choices, recompute="block", microbatches=2)
    plan = replace(every, recompute=every.recompute[:1])
    program = planned.program("gpt", plan)
    assert re.search(r"rt.recomputed\(self.(\w+), (.*)\) if self.again else self.\1\(\2\)", program.source)
    assert "(mesh, True)" in program.source and "(mesh, False)" in program.source
    assert program.source.count("\nclass") == planned.program("gpt", every).source.count("\nclass")
    results = pool(2).run(run_rank, program.source, state_of(model), batch, ("sgd",))
    found = differences(single("gpt"), results[0])
    assert not found, "\n".join(found)


# Random numbers ----------------------------------------


def dropped_gpt() -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    config = gpt.Config(vocab_size=64, seq_len=16, hidden_size=32, num_layers=2, num_heads=2, batch_size=4, dropout=0.2)
    return gpt.build(config), gpt.example_inputs(config)


def dropped_bert() -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=96,
        max_position_embeddings=16,
    )  # fmt: skip
    ids = torch.randint(0, 96, (4, 12))
    return LossOnly(transformers.BertForMaskedLM(config).train()), {"input_ids": ids, "labels": ids}


MODELS = {"gpt": dropped_gpt, "bert": dropped_bert}


@pytest.mark.sampled(
    only=(
        "gpt-{'dp': 2, 'recompute': 'full', 'microbatches': 2}",
        "gpt-{'tp': 2, 'sequence_parallel': True, 'recompute': 'selective', 'microbatches': 2}",
        "bert-{'dp': 2, 'tp': 2, 'zero': 3, 'recompute': 'block', 'microbatches': 2}",
    )
)
@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("gpt", {"dp": 2, "recompute": "full", "microbatches": 2}),
        ("gpt", {"tp": 2, "sequence_parallel": True, "recompute": "block"}),
        ("bert", {"dp": 2, "zero": 3, "recompute": "full"}),
        ("bert", {"dp": 2, "tp": 2, "zero": 3, "recompute": "block", "microbatches": 2}),
        ("gpt", {"tp": 2, "sequence_parallel": True, "recompute": "selective", "microbatches": 2}),
        ("bert", {"dp": 2, "zero": 3, "recompute": "selective", "microbatches": 2}),
    ],
    ids=str,
)
def test_exact_mode_draws_what_one_device_draws(name: str, choices: dict[str, Any]) -> None:
    """Three steps: recomputation leaves the stream where it found it, or the steps after the first would differ."""
    model, batch = MODELS[name]()
    program = template(model, batch, **choices)
    assert "dropout" in program.source and re.search(r"rt.(recomputed|remade)\(", program.source)
    results = pool(program.plan.mesh.num_devices).run(exact_steps, program.source, state_of(model), batch, 7)
    losses, gradients = eager_steps(model, batch, 7, program.plan.microbatches)
    for found, found_gradients in results:
        assert found == pytest.approx(losses, rel=1e-5)
        for key, expected in gradients.items():
            error = (found_gradients[key] - expected).norm() / expected.norm().clamp(min=1e-4)
            assert error <= 1e-4, f"gradient of {key}: relative difference {error:.2e}"


SCHEDULES = [("gpipe", 1, 2), ("1f1b", 2, 4)]


@pytest.mark.sampled
@pytest.mark.parametrize(("schedule", "dp", "world"), SCHEDULES)
@pytest.mark.parametrize("model_name", ["gpt", "llama"])
def test_stages_compute_operators_again(model_name: str, schedule: str, dp: int, world: int) -> None:
    """Of some layers alone; the others keep everything."""
    model, batch = zoo.build(model_name)
    choices = {"pp": 2, "dp": dp, "zero": 3 if dp > 1 else 0, "microbatches": 2, "schedule": schedule}
    plan = planned.template(model_name, **choices, recompute="selective")
    program = planned.program(model_name, replace(plan, recompute=plan.recompute[1:]))
    assert "rt.remade(" in program.source
    results = pool(world).run(run_rank, program.source, state_of(model), batch, ("sgd",))
    found = differences(single(model_name), results[0])
    assert not found, "\n".join(found)


def relative_error(found: Any, expected: Any) -> float:
    """The largest, over all gradients."""
    errors = [(found[name] - tensor).norm() / tensor.norm().clamp(min=1e-4) for name, tensor in expected.items()]
    return float(max(errors))


def test_recomputation_draws_the_masks_of_the_first_run() -> None:
    """As a program that keeps everything does; and a runtime that forgets to go back is found out."""
    model, batch = dropped_gpt()
    choices = {"dp": 2, "zero": 3, "microbatches": 2}
    kept = template(model, batch, **choices)
    again = template(model, batch, **choices, recompute="full")
    (expected, gradients), (found, own), (_, wrong) = (
        pool(2).run(drawn_steps, program.source, state_of(model), batch, forgets)[0]
        for program, forgets in ((kept, False), (again, False), (again, True))
    )
    assert found == pytest.approx(expected, rel=1e-6)
    assert relative_error(own, gradients) < 1e-5
    assert relative_error(wrong, gradients) > 1e-2


# Operators by themselves ----------------------------------------


class Chained(nn.Module):
    """Operators that run again and read others that do, views of these, noise, and a kept one in between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = torch.nn.functional.dropout(self.up(y).tanh() * torch.cat([y, y], 1).sin(), 0.5, self.training)
        w = z.view(-1, 4, 4).transpose(1, 2).softmax(-1)
        return x + self.down(w.reshape(-1, 16).exp() * z)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Chained() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


@pytest.mark.sampled(only=("dp-0", "dp-3", "zero3-1", "zero3-7", "tp-2"))
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("choices", [{"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}], ids=["dp", "zero3", "tp"])
def test_any_operators_run_again(choices: dict[str, Any], seed: int) -> None:
    """Whichever they are: gradients, and what is sent, are those that were asked for and predicted."""
    model, batch = Chain(), {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(1))}
    mesh, graph = autopar.Mesh("cpu", devices_per_node=2), trace(model, batch)
    blocks, rng = block_paths(graph), random.Random(seed)
    able = [operator_call(node) for node in graph.nodes if refusal_again(graph, node, blocks) is None]
    recompute = tuple(name for name in able if rng.random() < 0.6)
    plan = replace(template_of_graph(graph, mesh, **choices), recompute=recompute)
    program = autopar.parallelize(model, mesh, batch, plan=plan)
    assert len(able) > 20 and "rt.remade(" in program.source
    (loss, gradients, _, sent), _ = pool(2).run(counted_step, program.source, state_of(model), batch)
    torch.manual_seed(7)
    expected = model(**batch)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert relative_error(gradients, {n: p.grad for n, p in model.named_parameters()}) < 1e-4
    assert sent == traffic(graph, plan)


# What a block may be ----------------------------------------


class Interrupted(nn.Module):
    """Its inner module runs twice a step, its norm changes buffers, its noise is drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shared(self.norm(x))
        return x + self.shared(x.tanh()) * torch.rand_like(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Interrupted() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("recompute", "num_calls"),
    [
        (("layers.0", "layers.1"), 2),
        (("layers.0.shared", "layers.1.shared"), 4),
        (("layers.1.norm", "layers.0.shared.0"), 3),
    ],
    ids=["around it", "in pieces", "single modules"],
)
@pytest.mark.parametrize("choices", [{"dp": 2}, {"dp": 2, "zero": 3}], ids=["dp", "zero3"])
def test_blocks_in_pieces_with_buffers_and_noise(
    choices: dict[str, Any], recompute: tuple[str, ...], num_calls: int
) -> None:
    model, batch = Net(), {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(1))}
    mesh, graph = autopar.Mesh("cpu", devices_per_node=2), trace(model, batch)
    plan = replace(template_of_graph(graph, mesh, **choices), recompute=recompute)
    program = autopar.parallelize(model, mesh, batch, plan=plan)
    assert program.source.count("rt.recomputed(") == num_calls
    state = state_of(model)
    (loss, gradients, buffers, sent), _ = pool(2).run(counted_step, program.source, state, batch)
    torch.manual_seed(7)
    expected = model(**batch)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert relative_error(gradients, {n: p.grad for n, p in model.named_parameters()}) < 1e-4
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, msg=name)  # updated once
    assert sent == traffic(graph, plan)
