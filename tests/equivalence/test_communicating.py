"""Operators that communicate inside, in whole models: planned so that they must, and equal to one device."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.trace import trace
from models import unet, wide_resnet
from tests.equivalence import communicating
from tests.equivalence.following import follow
from tests.equivalence.harness import Tensors, differences, run_rank, run_single
from tests.rank_pool import pool
from tests.routed_bytes import bytes_of


def check_equal(
    model: nn.Module,
    batch: Tensors,
    sizes: tuple[int, ...],
    inputs: dict[str, str],
    stored: dict[str, str] | None = None,
    reference: nn.Module | None = None,
) -> autopar.Program:
    """Runs the plan that follows its inputs: loss, gradients, weights and bytes are as they should be.

    `reference`: a model of the same weights and results that runs on one device, if it is another one.
    """
    world = int(torch.tensor(sizes).prod())
    state = {name: value.clone() for name, value in {**model.state_dict(), **dict(model.named_buffers())}.items()}
    plan = follow(trace(model, batch), sizes, inputs, stored or {})
    program = autopar.parallelize(model, plan.mesh, batch, plan=plan)
    results = pool(world).run(run_rank, program.source, state, batch, ("sgd",))
    found = differences(run_single(reference or model, batch, ("sgd",)), results[0])
    assert not found, "\n".join(found)
    check_buffers(reference or model, batch, results[0][3]["sgd"])
    assert results[0][4] == bytes_of(program._graph, plan, model, batch)
    return program


def check_buffers(model: nn.Module, batch: Tensors, found: Tensors) -> None:
    """Running statistics after three steps of the harness's optimizer."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3 if dict(model.named_buffers()) else 0):
        optimizer.zero_grad()
        output = model(**batch)
        (output if isinstance(output, Tensor) else output["loss"]).backward()
        optimizer.step()
    for name in model.state_dict().keys() - dict(model.named_parameters()).keys():
        torch.testing.assert_close(found[name], model.state_dict()[name])


@pytest.mark.sampled(only=("sizes2-14-S(2) S(3)", "sizes3-18-S(0) S(2)"))
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sizes", "size", "placement"),
    [((2,), 16, "S(2)"), ((4,), 14, "S(3)"), ((2, 2), 14, "S(2) S(3)"), ((2, 2), 18, "S(0) S(2)")],
)
def test_images_split_by_rows(sizes: tuple[int, ...], size: int, placement: str) -> None:
    model, batch = communicating.images(size)
    program = check_equal(model, batch, sizes, {"images": placement})
    for call in ("convolution", "batch_norm", "group_norm", "max_pool", "avg_pool", "mean"):
        assert f"rt.{call}(" in program.source
    assert re.search(r"rt.max_pool\(.*; \w+ [\d,]+ B; backward \w+ [\d,]+ B", program.source)


@pytest.mark.sampled(only=("resnet",))
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("module", "sizes", "placement"), [(wide_resnet, (2, 2), "S(0) S(2)"), (unet, (2,), "S(2)")], ids=["resnet", "unet"]
)
def test_example_models_split_by_rows(module: Any, sizes: tuple[int, ...], placement: str) -> None:
    model, batch = communicating.image_model(module)
    images = [name for name, value in batch.items() if value.dim() == 4]
    program = check_equal(model, batch, sizes, dict.fromkeys(images, placement))
    assert "rt.convolution(" in program.source


EXPERTS = [f"model.layers.{layer}.mlp.experts.{name}" for layer in range(2) for name in ("gate_up_proj", "down_proj")]


@pytest.mark.sampled(only=("tokens_and_experts", "experts"))
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sizes", "tokens", "experts", "call"),
    [
        ((2,), "S(0)", "I", "True, 5, ())"),
        ((2,), "R", "S(0)", "True, 5, (d0,)"),
        ((2, 2), "S(0) R", "I S(0)", "True, 5, (d1,)"),
        ((4,), "S(0)", "S(1)", "True, 5, ())"),
    ],
    ids=["tokens", "experts", "tokens_and_experts", "stored_by_columns"],
)
def test_mixtral_routes_alike(sizes: tuple[int, ...], tokens: str, experts: str, call: str) -> None:
    model, batch = communicating.mixtral()
    reference, _ = communicating.mixtral("eager")  # a loop over experts
    inputs = {"input_ids": tokens, "labels": tokens}
    program = check_equal(model, batch, sizes, inputs, dict.fromkeys(EXPERTS, experts), reference)
    assert program.source.count(call) >= 1 and "aten.sort" not in program.source
    assert not [op for op, rules in program.plan.coverage.items() if rules.startswith("replicated")]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sizes", "inputs", "tables", "call"),
    [
        ((2,), "S(0)", "I", "matrix"),
        ((4,), "R", "S(0)", "rt.embedding_bag("),
        ((2, 2), "S(0) R", "I S(0)", "rt.embedding_bag("),
        ((2,), "R", "S(1)", "_embedding_bag.default("),
    ],
    ids=["bags", "rows", "bags_and_rows", "columns"],
)
def test_embedding_bags(sizes: tuple[int, ...], inputs: str, tables: str, call: str) -> None:
    model, batch = communicating.bags()
    split = {"matrix": inputs, "labels": inputs}
    program = check_equal(model, batch, sizes, split, {"equal.weight": tables, "ragged.weight": tables})
    assert call in program.source


@pytest.mark.sampled(only=("sizes1",))
@pytest.mark.ranks
@pytest.mark.parametrize("sizes", [(2,), (4,)])
def test_recurrent_layers_and_cells_split_by_samples(sizes: tuple[int, ...]) -> None:
    model, batch = communicating.recurrent()
    program = check_equal(model, batch, sizes, dict.fromkeys(batch, "S(0)"))
    assert "aten.lstm.input(x," in program.source
