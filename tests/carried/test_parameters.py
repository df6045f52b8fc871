"""Parameters that forward changes, in plans of every kind: each shard is what one device has, step after step."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cost.files import profiles_folder
from autopar.errors import PlanError, TraceError
from autopar.pipeline import template_of_graph
from autopar.program import PlannedProgram
from autopar.trace import trace
from tests.equivalence.on_threads import PLANS, differences, kept, program_differences
from tests.random_programs.world import thread_world
from tests.trace.test_writes import assert_traced

WIDTH = 8
Write = Callable[["Block", Tensor, Tensor], None]


def _clamped(block: Block, h: Tensor, ids: Tensor) -> None:
    block.first.weight.data.clamp_(-0.2, 0.2)


def _masked(block: Block, h: Tensor, ids: Tensor) -> None:
    with torch.no_grad():
        block.first.weight.mul_(block.mask)


def _normalised(block: Block, h: Tensor, ids: Tensor) -> None:
    with torch.no_grad():
        block.first.weight.div_(block.first.weight.norm(dim=0, keepdim=True))


def _assigned(block: Block, h: Tensor, ids: Tensor) -> None:
    block.first.weight.data = F.normalize(block.first.weight.data, dim=1)


def _row(block: Block, h: Tensor, ids: Tensor) -> None:
    with torch.no_grad():
        block.first.weight[0].zero_()


def _decayed_and_bounded(block: Block, h: Tensor, ids: Tensor) -> None:
    with torch.no_grad():
        block.first.weight.mul_(0.9)
        block.first.bias.add_(0.125)
        block.first.weight[:, 2:5].clamp_(max=0.1)


def _pulled(block: Block, h: Tensor, ids: Tensor) -> None:
    with torch.no_grad():
        block.first.weight.lerp_(block.second.weight, 0.25)


def _following(block: Block, h: Tensor, ids: Tensor) -> None:
    with torch.no_grad():
        for own, other in zip(block.teacher.parameters(), block.first.parameters(), strict=True):
            own.mul_(0.75).add_(other, alpha=0.25)


def _copied(block: Block, h: Tensor, ids: Tensor) -> None:
    block.teacher.weight.data.copy_(block.first.weight.data)


def _turned(block: Block, h: Tensor, ids: Tensor) -> None:
    block.teacher.weight.data.copy_(block.first.weight.data.t())


def _exchanged(block: Block, h: Tensor, ids: Tensor) -> None:
    with torch.no_grad():
        held = block.first.weight.clone()
        block.first.weight.copy_(block.second.weight)
        block.second.weight.copy_(held)


def _filled(block: Block, h: Tensor, ids: Tensor) -> None:
    with torch.no_grad():
        block.first.bias.copy_(block.second.bias.mean())
        block.first.weight.copy_(block.second.weight[0])
        block.second.bias.zero_()


def _drifting(block: Block, h: Tensor, ids: Tensor) -> None:
    with torch.no_grad():
        block.first.bias.add_(h.mean(0), alpha=0.1)


def _bounded(block: Block, h: Tensor, ids: Tensor) -> None:
    F.embedding(ids, block.first.weight, max_norm=0.5)


def _remembered(block: Block, h: Tensor, ids: Tensor) -> None:
    """A buffer becomes a parameter: memory that is used, and given back under ZeRO-3."""
    block.mask.copy_(block.second.weight.detach())


OF_THE_STATE: tuple[Write, ...] = (
    _clamped, _masked, _normalised, _assigned, _row, _decayed_and_bounded, _pulled, _following, _copied, _turned,
    _exchanged, _filled, _remembered,
)  # fmt: skip
OF_THE_BATCH: tuple[Write, ...] = (_drifting, _bounded)


class Block(nn.Module):
    """Writes before it reads, and after."""

    def __init__(self, write: Write, late: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("mask", (torch.rand(WIDTH, WIDTH) > 0.5).float())
        self.write, self.late = write, late

    mask: Tensor

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        if not self.late:
            self.write(self, h, ids)
        made = torch.tanh(self.first(h)) + self.second(h) - self.teacher(h) + h @ self.mask
        if self.late:
            bias = self.first.bias  # its value is not read by the backward pass, as autograd asks for
            with torch.no_grad():
                bias.mul_(0.9)
        return made


class Model(nn.Module):
    def __init__(self, write: Write, *, late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(write, late) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, ids)
        return F.cross_entropy(self.head(x), y)


def _changing_late() -> nn.Module:
    return Model(lambda *_: None, late=True)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, y = (torch.randint(high, (8,), generator=generator) for high in (WIDTH, 3))
    return {"x": torch.randn(8, WIDTH, generator=generator), "ids": ids, "y": y}


def _named(write: Write) -> str:
    return write.__name__.strip("_")


@pytest.mark.parametrize("write", [*OF_THE_STATE, *OF_THE_BATCH], ids=_named)
def test_the_graph_has_the_new_values(write: Write) -> None:
    assert_traced(Model(write), batch())


@pytest.mark.sampled
@pytest.mark.parametrize("plan", ["tp=2", "zero=3"])
@pytest.mark.parametrize("write", [_normalised, _row, _copied, _drifting], ids=_named)
def test_shards_are_what_one_device_has(write: Write, plan: str) -> None:
    assert differences(*kept(Model, batch, write), plan) == []


@pytest.mark.sampled
@pytest.mark.sweep
@pytest.mark.parametrize("plan", sorted(PLANS))
@pytest.mark.parametrize("write", OF_THE_STATE, ids=_named)
def test_updates_made_of_what_is_stored_run_in_every_plan(write: Write, plan: str) -> None:
    assert differences(*kept(Model, batch, write), plan) == []


@pytest.mark.sampled
@pytest.mark.sweep
@pytest.mark.parametrize("plan", sorted(PLANS))
@pytest.mark.parametrize("write", OF_THE_BATCH, ids=_named)
def test_updates_made_of_the_batch_run_without_microbatches(write: Write, plan: str) -> None:
    wrong = differences(*kept(Model, batch, write), plan)
    assert wrong == [] or (wrong is None and "microbatches" in plan), wrong


@pytest.mark.sampled(only=("dp=2 tp=2", "zero=3", "microbatches", "pp=2", "recompute", "searched"))
@pytest.mark.sweep
@pytest.mark.parametrize("plan", sorted(PLANS))
def test_a_parameter_that_is_changed_after_its_use(plan: str) -> None:
    assert differences(*kept(_changing_late, batch), plan) == []


@pytest.mark.parametrize("write", [_row, _exchanged, _drifting], ids=_named)
def test_ranks_with_unequal_shares_of_the_batch(write: Write, tmp_path: Path) -> None:
    """Axes with shares cut what is stored evenly, and what is computed as the batch is."""
    kinds = []
    for name, slower in (("fast", 1e4), ("slow", 3e4)):
        data = json.loads((profiles_folder() / "cpu.json").read_text())
        rates = data["facts"]["peak_flops"]
        data["facts"] |= {"peak_flops": {dtype: max(1e6, rate / slower) for dtype, rate in rates.items()}}
        data["facts"]["memory_bandwidth"] /= slower
        kinds.append(str(tmp_path / f"{name}.json"))
        Path(kinds[-1]).write_text(json.dumps(data))
    model, mesh = Model(write), autopar.Mesh([(kind, 1, 1) for kind in kinds])
    graph = trace(model, batch())
    plan = template_of_graph(graph, mesh, split="speed", dp=2, zero=3)
    assert any(axis.shares for axis in plan.stage.axes)
    assert program_differences(model, batch(), autopar.parallelize(model, mesh, batch(), plan=plan)) == []


def test_an_update_made_of_the_batch_is_refused_in_microbatches_with_its_line() -> None:
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    with pytest.raises(PlanError, match=r"test_parameters.py:\d+.*microbatches=1"):
        autopar.template_plan(Model(_drifting), mesh, batch(), dp=2, microbatches=2)


@pytest.mark.sampled
@pytest.mark.parametrize("use", [nn.Linear.forward, lambda layer, h: h @ layer.weight.t()], ids=["whole", "view"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_write_to_what_the_backward_pass_reads_is_refused_with_both_lines(device: str, use: Any) -> None:
    """Which finds the new value there. Without values, too, where no comparison with the model would see it."""
    model = Model(lambda *_: None).to(device)
    layer = model.layers[1]  # whose input has a gradient, which is made of the weight
    layer.forward = lambda h, ids: (use(layer.first, h).sin(), layer.first.weight.data.mul_(0.5))[0]
    inputs = {name: x.to(device) for name, x in batch().items()}
    told = r"(?s)'layers.1.first.weight'.*aten.\w+.default at .*:\d+ does.*\n.*test_parameters.py:\d+.*Write before"
    with pytest.raises(TraceError, match=told):
        trace(model, inputs)


class Teacher(nn.Module):
    """A frozen copy that follows the student, read beside it; a centre that follows the copy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(4))
        self.student = nn.Sequential(*blocks)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("centre", torch.zeros(WIDTH))

    centre: Tensor

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.lerp_(other, 0.1)
            wanted = self.teacher(x)
        made = self.student(x)
        loss = (made - (wanted - self.centre)).square().mean() + F.cross_entropy(self.head(made), y)
        with torch.no_grad():
            self.centre.lerp_(wanted.mean(0), 0.1)
        return loss


@pytest.mark.sampled(only=("dp=2 tp=2", "zero=3", "pp=2", "recompute", "searched"))
@pytest.mark.sweep
@pytest.mark.parametrize("plan", sorted(PLANS))
def test_a_teacher_that_follows_its_student(plan: str) -> None:
    wrong = differences(*kept(Teacher, batch), plan)
    assert wrong == [] or (wrong is None and "microbatches" in plan), wrong


class Shared(nn.Module):
    """A parameter that the first block and the last one read, and one of them changes."""

    def __init__(self, writer: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.writer = writer

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == self.writer:
                layer.weight.data.clamp_(-0.2, 0.2)
            x = torch.tanh(layer(x))
        return F.cross_entropy(x, y)


@pytest.mark.parametrize("plan", ["pp=2", "zero=3", "searched"])
def test_a_parameter_that_several_stages_read_after_the_first_has_changed_it(plan: str) -> None:
    assert differences(*kept(Shared, batch, 0), plan) == []


def test_a_parameter_that_several_stages_store_is_refused_with_its_line() -> None:
    model, mesh = Shared(3), autopar.Mesh("cpu", devices_per_node=2)
    with pytest.raises(PlanError, match=r"layers.0.weight.*test_parameters.py:\d+.*take one stage"):
        autopar.template_plan(model, mesh, batch(), pp=2)
    assert differences(model, batch(), "zero=3") == []


def _planned(model: nn.Module, precision: str | None, mode: str = "train") -> PlannedProgram:
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    plan = autopar.template_plan(model, mesh, batch(), dp=2, zero=3, precision=precision, mode=mode)
    return autopar.parallelize(model, mesh, batch(), plan=plan)


@pytest.mark.sampled(only=("row", "drifting"))
@pytest.mark.parametrize("write", [_clamped, _row, _drifting, _decayed_and_bounded], ids=_named)
def test_master_weights_are_updated_and_keep_their_bits(write: Write) -> None:
    """Made in bfloat16, each step would round them: what an optimizer adds would be lost."""
    model = Model(write)
    for layer in model.layers:
        layer.first.bias.data.fill_(1.001)  # in bfloat16, 1.0
    program = _planned(model, "bf16")
    graph = program._graph
    assert {graph.tensors[name].dtype for name in graph.mutations.values()} == {"float32"}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = thread_world(2).run(_step, program.source, copy.deepcopy(state), batch())
    expected = copy.deepcopy(model)
    expected(**batch())
    for name, value in expected.named_parameters():
        close = 1e-6 if write is not _drifting else 1e-3
        torch.testing.assert_close(found[0][name], value.detach(), rtol=close, atol=close)


def _step(rank: int, source: str, state: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    from autopar import runtime as rt
    from tests.random_programs.programs import load

    built = rt.build(load(source, "program").Program, device="cpu")
    built.init_from(state, broadcast=False)
    built.train_step(**inputs)
    return {name: tensor.clone() for name, tensor in built.full_state_dict().items()}


def test_it_goes_with_what_is_kept_of_parameters_in_inference() -> None:
    """What is made of parameters once is not made of one that forward changes."""
    model = Model(_clamped).eval()
    program = _planned(model, None, "inference")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: tensor.detach() * 3 for name, tensor in state.items()}
    found = thread_world(2).run(_calls, program.source, copy.deepcopy(state), batch())
    expected = Model(_clamped).eval()
    expected.load_state_dict(state)
    for number in range(2):
        with torch.no_grad():
            torch.testing.assert_close(found[0][f"output {number}"], expected(**batch()))
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[0][name], value.detach())


def _calls(rank: int, source: str, state: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    from autopar import runtime as rt
    from tests.random_programs.programs import load

    built = rt.build(load(source, "program").Program, device="cpu")
    built.init_from(state, broadcast=False)
    outputs = {f"output {number}": built(**inputs) for number in range(2)}
    return outputs | {name: tensor.clone() for name, tensor in built.full_state_dict().items()}


class Loss(nn.Module):
    """A loss that clamps its own scale, counts its calls, and keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.25, 2.0, 3))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    calls: Tensor
    mean: Tensor

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(0.5, 1.5)
            self.calls.add_(1)
            self.mean.lerp_(z.mean(0), 0.1)
        return F.cross_entropy(z * self.scale - self.mean, y) / self.calls


@pytest.mark.parametrize("choices", [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}], ids=str)
def test_losses_that_change_what_they_store(choices: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    loss, inputs = Loss(), {"input": batch()["x"], "y": batch()["y"]}
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    plan = autopar.template_plan(model, mesh, inputs, loss_fn=loss, **choices)
    program = autopar.parallelize(model, mesh, inputs, loss_fn=loss, plan=plan)
    state = model.state_dict() | {f"loss_fn.{name}": value.clone() for name, value in loss.state_dict().items()}
    found = thread_world(2).run(_step, program.source, copy.deepcopy(state), inputs)
    loss(model(inputs["input"]), inputs["y"])
    for name, value in loss.state_dict().items():
        torch.testing.assert_close(found[0][f"loss_fn.{name}"], value)
        assert not torch.equal(value, state[f"loss_fn.{name}"])


def test_a_difference_would_be_seen() -> None:
    """The comparison above has power: a program for other values differs."""
    program = _planned(Model(_clamped), None)
    source = program.source.replace("-0.2, 0.2", "-0.2, 0.25")
    assert source != program.source
    assert program_differences(Model(_clamped), batch(), PlannedProgram(program._graph, program.plan, source))
