"""What a rank of a pipeline does beside training steps from the global batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.emit import emit
from autopar.errors import PlanError
from autopar.pipeline import template_of_graph
from autopar.profiler import profiles_of
from autopar.program import load_source
from autopar.staging import cut
from autopar.trace import trace
from models import gpt
from tests.rank_pool import pool

MESH = autopar.Mesh("cpu", devices_per_node=2)


def build(**changes: Any) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = replace(gpt.Config(num_layers=2, batch_size=4, tie_head=True), **changes)
    return gpt.build(config), gpt.example_inputs(config)


def inference_job(rank: int, world: int, source: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    return built(**batch)


@pytest.mark.ranks
def test_inference_returns_what_the_model_returns_on_every_rank() -> None:
    model, batch = build()
    model.eval()
    plan = autopar.template_plan(model, MESH, batch, pp=2, microbatches=1, mode="inference")
    program = autopar.parallelize(model, MESH, batch, plan=plan)
    with torch.no_grad():
        expected = model(**batch)
    for found in pool(2).run(inference_job, program.source, dict(model.state_dict()), batch):
        torch.testing.assert_close(found, expected)


def training_job(rank: int, world: int, source: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    losses = [built.train_step(**batch).item()]
    own = {name: value if rank == (name == "labels") else None for name, value in batch.items()}
    losses.append(built.train_step(**own, local=True).item())
    gradients = built.full_gradients()
    rt.set_exact_dropout(True)
    try:
        with pytest.raises(rt.ProgramError, match="one of 2, whose stages draw at the same time"):
            built.train_step(**batch)
    finally:
        rt.set_exact_dropout(False)
    for parameter in built.parameters():
        torch.nn.init.constant_(parameter, rank + 1.0)
    built.unite_tied()
    united = built.full_state_dict()
    return losses, gradients, united, [name for name, _ in built.named_parameters()]


@pytest.mark.ranks
def test_shards_gradients_and_tied_parameters() -> None:
    model, batch = build()
    plan = autopar.template_plan(model, MESH, batch, pp=2, microbatches=2)
    program = autopar.parallelize(model, MESH, batch, plan=plan)
    assert program.input_layout == {"tokens": "stage 0: S(0)", "labels": "stage 1: S(0)"}
    loss = model(**batch)
    loss.backward()
    first, second = pool(2).run(training_job, program.source, dict(model.state_dict()), batch)
    for losses, gradients, united, names in (first, second):
        assert losses == first[0] and losses[0] == pytest.approx(loss.item(), rel=1e-5) == losses[1]
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], 2 * parameter.grad, rtol=1e-4, atol=1e-6)
        assert "embedding.token.weight" in names  # on both ranks
        assert united["head.weight"].eq(1).all() and united["final_norm.weight"].eq(2).all()


def wrong_stage_job(rank: int, world: int, source: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
    from autopar import runtime as rt

    found = []
    for change in ("unfrozen", "replaced", "unset"):
        built = rt.build(load_source(source).Program)
        if change != "unset":
            built.init_from(state, broadcast=False)
        if change == "unfrozen":
            for parameter in built.parameters():
                parameter.requires_grad_(True)
        elif change == "replaced" and "final_norm" in dict(built.named_children()):
            built.final_norm = torch.nn.LayerNorm(4)
        with pytest.raises(rt.ProgramError) as refusal:
            built.train_step(**batch)
        found.append(str(refusal.value))
    return found


@pytest.mark.ranks
def test_what_one_stage_alone_refuses_ends_the_first_step_of_all() -> None:
    model, batch = build()
    model.final_norm.requires_grad_(False)
    model.final_norm.register_buffer("scale", torch.ones(4))
    model.final_norm.register_forward_hook(lambda module, args, output: output * module.scale[0])
    plan = autopar.template_plan(model, MESH, batch, pp=2, microbatches=2)
    program = autopar.parallelize(model, MESH, batch, plan=plan)
    first, second = pool(2).run(wrong_stage_job, program.source, dict(model.state_dict()), batch)
    assert first == [f"rank 1 refused: {text}" for text in second]
    assert "expected final_norm.weight to need no gradient" in second[0]
    assert "found others in the places of final_norm" in second[1]
    assert "expected values of the buffers final_norm.scale" in second[2]


def wrong_inputs_job(rank: int, world: int, source: str, batch: dict[str, Tensor]) -> Any:
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    tokens, labels = batch["tokens"], batch["labels"]
    wrong: dict[str, Any] = {
        "dtype": {**batch, "labels": labels.int()},
        "shape": {**batch, "tokens": tokens[:2]},
        "no tensor": {**batch, "labels": labels.tolist()},
        "gradient": {**batch, "labels": labels.float().requires_grad_()},
        "part": {"tokens": tokens if rank == 0 else None, "labels": labels[:2] if rank == 1 else None, "local": True},
    }
    found = {}
    for name in ("part", "dtype", "shape", "no tensor", "gradient"):  # the part in one of the steps that are compared
        with pytest.raises(rt.ProgramError) as refusal:
            built.train_step(**wrong[name])
        found[name] = str(refusal.value)
    with pytest.raises(rt.ProgramError) as refusal:
        built(**wrong["shape"])
    built.train_step(tokens=tokens if rank == 0 else None, labels=labels if rank == 1 else None)
    return found


@pytest.mark.ranks
def test_inputs_that_one_stage_reads_are_refused_on_all_ranks() -> None:
    """The ranks of the other stage waited, for as long as the groups' timeout, for one that had refused its input."""
    model, batch = build()
    plan = autopar.template_plan(model, MESH, batch, pp=2, microbatches=2)
    program = autopar.parallelize(model, MESH, batch, plan=plan)
    first, second = pool(2).run(wrong_inputs_job, program.source, batch)
    names = {"part": "labels", "dtype": "labels", "shape": "tokens", "no tensor": "labels", "gradient": "labels"}
    for name, refused in names.items():
        assert f"input {refused}: expected " in first[name] and f"input {refused}: expected " in second[name]
    assert first["part"] == f"rank 1 refused: {second['part']}"
    assert "goes with local=True" in first["shape"] and "goes with local=True" not in second["shape"]


def test_zero_bubble_with_recomputation_is_refused() -> None:
    model, batch = build()
    with pytest.raises(PlanError, match=r'expected no recomputation with schedule "zero_bubble"'):
        autopar.template_plan(model, MESH, batch, pp=2, microbatches=2, schedule="zero_bubble", recompute="full")


class Factored(torch.nn.Module):
    """A block whose factor, made of its parameter alone, only what comes behind it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor([0.5, 2.0]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), self.factor.exp()


class Behind(torch.nn.Module):
    """Factor and product are made on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Factored()

    def forward(self, x: Tensor) -> Tensor:
        x, factor = self.block(x)
        return x * factor


@pytest.mark.ranks
def test_what_is_computed_once_in_inference_is_sent_to_later_stages() -> None:
    model, batch = Behind().eval(), {"x": torch.rand(4, 2)}
    graph = trace(model, batch, mode="inference")
    alone = template_of_graph(graph, autopar.Mesh("cpu", devices_per_node=1), mode="inference")
    members = {node.name: (int("mul" in node.op),) for node in graph.nodes}
    plan = cut(graph, alone, members, [0, 1], "gpipe", MESH, profiles_of(MESH))
    source = emit(graph, plan)
    for found in pool(2).run(inference_job, source, dict(model.state_dict()), batch):
        torch.testing.assert_close(found, model(**batch))
