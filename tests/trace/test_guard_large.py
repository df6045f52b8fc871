"""The comparison with models that are too dear for it as they are: cut batches, sums of gradients, parts.

Faults are planted in tracing: what would be lost without the pass that keeps it has to be refused here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.trace import export, guard, held_against_eager, trace, writes
from autopar.trace.eager import summary
from autopar.trace.originals import Originals
from autopar.trace.smaller import cut, retraced, sizes_to_cut

pytestmark = pytest.mark.sweep

WIDTH = 320
"""Its square is more than the comparison keeps as it is, of values and of gradients."""
SEEN: list[float] = []


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Model(nn.Module):
    """Tokens, a large layer, something of a user's, an output."""

    def __init__(self, act: Callable[[Model, Tensor], Tensor] = lambda model, h: h.relu()) -> None:
        super().__init__()
        self.token, self.first = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("table", torch.ones(WIDTH, WIDTH))
        self.act = act

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.norm(self.act(self, self.first(self.token(tokens))))
        return F.cross_entropy(self.second(h).flatten(0, 1), labels.flatten())


def batch(samples: int = 16, length: int = 48) -> dict[str, Tensor]:
    tokens = torch.randint(50, (samples, length), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "labels": tokens}


def compared(model: nn.Module, inputs: Any = None, **options: Any) -> str:
    inputs = batch() if inputs is None else inputs
    return held_against_eager(model, trace(model, inputs), inputs, **options)


@pytest.fixture
def _dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model is too dear to be compared as it is."""
    monkeypatch.setattr(guard, "_WHOLE_S", 0.0)


CUT = "with sizes of inputs cut from 16 to 2, 48 to 8"


@pytest.mark.usefixtures("_dear")
def test_a_large_batch_is_cut_and_the_plan_says_so() -> None:
    assert compared(Model()) == f"yes, {CUT}"
    plan = autopar.template_plan(Model(), autopar.Mesh("h100", devices_per_node=2), batch(), dp=2)
    assert f"  checked against eager: yes, {CUT}\n" in str(plan)
    assert autopar.Plan.from_json(plan.to_json()).checked_against_eager == f"yes, {CUT}"


# What tracing keeps, lost ----------------------------------------


def _hooked(model: Model, h: Tensor) -> Tensor:
    h = h * 1.0
    h.register_hook(lambda gradient: gradient * 2)
    return h


def _clamped(model: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        h.clamp_(min=0.0)
    return h


def _assigned(model: Model, h: Tensor) -> Tensor:
    h = h * 1.0
    h.data = h.data.relu()
    return h


FAULTS: dict[str, tuple[str, Callable[[Model, Tensor], Tensor], str]] = {
    "backward of a Function": ("functions_kept", lambda m, h: Reversed.apply(h) * 1.0, "gradient of"),
    "hook on an activation": ("hooks_kept", _hooked, "gradient of"),
    "write under no_grad": ("writes_kept", _clamped, "another (loss|gradient)"),
}


@pytest.mark.usefixtures("_dear")
@pytest.mark.parametrize("part", ["all", "small gradients"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_tracing_loses_is_refused_with_its_line(fault: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_by, act, what = FAULTS[fault]
    if part != "all":
        monkeypatch.setattr(guard, "_SCOPES", guard._SCOPES[1:])
    assert compared(Model(act)).endswith(CUT)
    monkeypatch.setattr(export, kept_by, lambda *_, **__: nullcontext(writes.Aside()))
    with pytest.raises(TraceError, match=rf"(?s){what}.*test_guard_large.py:\d+"):
        compared(Model(act))


@pytest.mark.usefixtures("_dear")
def test_a_parameter_that_the_graph_does_not_train_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.first.requires_grad_(False)
    graph = trace(model, batch())
    model.first.requires_grad_(True)
    monkeypatch.setattr(guard, "retraced", lambda *_: None)
    with pytest.raises(TraceError, match="gradient of 'first"):
        held_against_eager(model, graph, batch())


@pytest.mark.usefixtures("_dear")
def test_a_lost_update_of_a_large_buffer_is_missed() -> None:
    model = Model(_updating)
    graph = trace(model, batch())
    assert held_against_eager(model, graph, batch()) == f"yes, {CUT}"
    with pytest.raises(TraceError, match="new value of 'table'"):
        held_against_eager(model, replace(graph, mutations={"seen": graph.mutations["seen"]}), batch())


def test_sums_of_gradients_differ_where_one_element_does() -> None:
    torch.manual_seed(0)
    for like in (torch.randn(300, 400), torch.randn(64, 32, 8, 8, dtype=torch.float64), torch.randn(400, 300) * 1j):
        other = like.clone()
        other[7, 3] += like.abs().max() * 0.05
        assert summary(like).numel() < like.numel() / 10
        assert guard.distance(summary(like), summary(like.clone())) == 0.0
        assert guard.distance(summary(like), summary(other)) > 1e-4
        assert guard.distance(summary(like), summary(like * (1 + 1e-7))) < 1e-5
        assert guard.distance(summary(like), summary(-like)) > 0.1


def test_what_takes_longer_is_compared_in_part_and_said() -> None:
    model = Model()
    graph = trace(model, batch())
    whole = guard._estimate_s(graph, {16: 2, 48: 8})
    said = {
        share: held_against_eager(Model(), graph, batch(), seconds=whole * share) for share in (1.01, 0.51, 0.26, 0.1)
    }
    assert said[1.01] == f"yes, {CUT}"
    assert said[0.51].startswith("in part, one step, with gradients of parameters of at most 65,536 elements: all")
    assert said[0.26].startswith("in part, outputs and buffers of one step: all would take about 0 s, with sizes of")
    assert said[0.1].startswith("no, it would take about")


# Cutting ----------------------------------------


class OfSize(Model):
    """Does something else with a batch that is longer in one dim."""

    dim = 0

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(tokens, labels)
        return loss * 2 if tokens.shape[self.dim] > 12 else loss.abs()


class Heads(nn.Module):
    """As many heads as samples, features as steps; masks and positions of so many steps."""

    def __init__(self, length: int = 48) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(50, 48), nn.Embedding(length, 48)
        self.norm, self.mixed = nn.LayerNorm(48), nn.Linear(48, 144)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        samples, length = tokens.shape
        h = self.norm(self.token(tokens) + self.place(torch.arange(length)))
        q, k, v = self.mixed(h).view(samples, length, 16, 9).transpose(1, 2).chunk(3, -1)
        mask = torch.full((length, length), -1e9).triu(1).expand(samples, 16, length, length)
        h = (torch.softmax(q @ k.mT + mask, -1) @ v).transpose(1, 2).reshape(samples, length, 48)
        return F.cross_entropy(h.view(-1, 48)[: samples * length], labels.flatten() % 48)


@pytest.mark.usefixtures("_dear")
def test_sizes_in_the_graph_follow_those_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Any] = []
    monkeypatch.setattr(guard, "retraced", lambda *args: again.append(args))
    assert compared(Heads()) == f"yes, {CUT}"
    assert not again, "expected no other trace"
    flat = {**batch(), "labels": batch()["labels"].flatten()}
    assert compared(Model(), flat) == f"yes, {CUT}, 768 to 16"
    images = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1))
    graph = trace(images, (torch.zeros(8, 3, 224, 224),), mode="inference")
    said = held_against_eager(images, graph, (torch.randn(8, 3, 224, 224),))
    assert said == "yes, with sizes of inputs cut from 8 to 2, 224 to 64"
    assert not again


@pytest.mark.usefixtures("_dear")
def test_a_model_that_does_something_else_with_a_cut_batch_is_compared_with_the_whole() -> None:
    in_samples, in_length = OfSize(), OfSize()
    in_length.dim = 1
    assert compared(in_length) == "yes, with sizes of inputs cut from 16 to 2", "long sequences take a branch"
    assert compared(in_samples) == "yes"
    fixed = Model(lambda m, h: h + torch.arange(48.0)[:, None])
    assert compared(fixed) == "yes, with sizes of inputs cut from 16 to 2"
    graph = trace(in_samples, batch())
    for sizes in sizes_to_cut(batch()):
        assert retraced(graph, cut(batch(), sizes), lambda inputs: trace(in_samples, inputs)) is None


@pytest.mark.usefixtures("_dear")
def test_inputs_on_the_meta_device_are_made_up() -> None:
    meta = {name: x.to("meta") for name, x in batch().items()}
    assert compared(Model(), meta) == f"yes, {CUT}"
    assert compared(Model().to("meta"), meta) == "no, the model is on the meta device"


# What it leaves behind ----------------------------------------


def _noisy(model: Model, h: Tensor) -> Tensor:
    return F.dropout(h, 0.5) * torch.rand_like(h)


def _updating(model: Model, h: Tensor) -> Tensor:
    model.seen.mul_(0.9).add_(h.detach().mean((0, 1)))
    model.table.add_(1.0)
    return h * model.seen + h @ model.table * 0.01


def _logging(model: Model, h: Tensor) -> Tensor:
    SEEN.append(1.0)
    model.last = h.detach()
    return h.relu()


def _moving(model: Model, h: Tensor) -> Tensor:
    model.seen.data = model.seen.data + 1
    model.table.data = model.table.data * 2
    return h @ model.table


KINDS = {
    "plain": lambda m, h: h.relu(), "random": _noisy, "buffers": _updating, "Python": _logging, "moved": _moving,
    "hook": _hooked, "function": FAULTS["backward of a Function"][1], "in place": _clamped, "data": _assigned,
}  # fmt: skip


def _left(model: Model) -> Any:
    """All of a model that a comparison could change, by name."""
    stored = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    hooks = {name: len(getattr(x, "_post_accumulate_grad_hooks", None) or ()) for name, x in stored.items()}
    modules = [(name, module.training, sorted(vars(module))) for name, module in model.named_modules()]
    places = {name: (x.data_ptr(), x.requires_grad, id(x.grad)) for name, x in stored.items()}
    drawn = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    return hooks, modules, places, drawn, len(SEEN), {name: x.tolist() for name, x in model.state_dict().items()}


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["whole", "cut", "in part", "fails"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_comparison_leaves_no_trace(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_WHOLE_S", 1e9 if way == "whole" else 0.0)
    if way == "in part":
        monkeypatch.setattr(guard, "_SCOPES", guard._SCOPES[1:])
    model = Model(KINDS[kind])
    model.second.bias.requires_grad_(False)
    model.second.bias.grad = None
    model.first.weight.grad = torch.full((WIDTH, WIDTH), 3.0)
    model.norm.train(False)
    graph = trace(model, batch())
    if way == "fails":
        model.second.register_forward_pre_hook(lambda *_: 1 / 0)
    before = _left(model)
    said = held_against_eager(model, graph, batch())
    assert said.startswith({"whole": "yes", "cut": "yes", "in part": "in part", "fails": "no, the model does not"}[way])
    assert _left(model) == before
    assert bool((model.first.weight.grad == 3.0).all())


def test_weights_are_copied_when_they_are_written_alone() -> None:
    model = Model()
    large = {id(model.first.weight), id(model.table)}
    with Originals([*model.parameters(), *model.buffers()]) as originals:
        model(**batch()).backward()
        assert large.isdisjoint(originals.copies)
        weight, table = model.first.weight.detach().clone(), model.table.data_ptr()
        with torch.no_grad():
            model.first.weight.view(-1)[3:9].zero_()
        model.table.data = torch.zeros(WIDTH, WIDTH)
        assert originals.changed(model.first.weight) and originals.changed(model.table)
        assert not originals.changed(model.token.weight)
    originals.restore()
    assert torch.equal(model.first.weight, weight)
    assert bool((model.table == 1).all()) and model.table.data_ptr() == table


def test_weights_too_small_to_be_halved_exactly_are_what_they_were() -> None:
    """In the second step they are half as large: the last bit of a subnormal number is lost on the way."""
    model = Model()
    with torch.no_grad():
        model.first.weight[:3] = 3 * 2.0**-149
    weight = model.first.weight.detach().clone()
    assert held_against_eager(model, trace(model, batch()), batch()).startswith("yes")
    assert torch.equal(model.first.weight, weight) and bool((weight[:3] * 0.5 * 2 != weight[:3]).any())
