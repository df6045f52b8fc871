"""What export cannot see is refused, with its module and line; what it can see is never refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, InternalError, TraceError
from autopar.trace import export, guard, held_against_eager, trace
from autopar.trace.eager import run_model

Act = Callable[["Model", Tensor], Tensor]
CALLS = 0


class Model(nn.Module):
    """Two layers with something of a user's between them."""

    def __init__(self, act: Act, **attributes: Any) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(8, 8), Between(act), nn.Linear(8, 4)
        self.register_buffer("state", torch.ones(8))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.act(self, self.first(x))), y)


class Between(nn.Module):
    def __init__(self, function: Act) -> None:
        super().__init__()
        self.function = function

    def forward(self, model: Model, h: Tensor) -> Tensor:
        return self.function(model, h)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)


def checked(model: nn.Module, inputs: Any = None, **options: Any) -> str:
    inputs = batch() if inputs is None else inputs
    return held_against_eager(model, trace(model, inputs, **options), inputs, options.get("loss_fn"))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def _hooked(model: Model, h: Tensor) -> Tensor:
    h = h * 1.0
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 2)
    return h


def _clamped(model: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        h.clamp_(min=0.0)
    return h


def _counted(model: Model, h: Tensor) -> Tensor:
    model.calls += 1
    return h * model.calls


def _grown(model: Model, h: Tensor) -> Tensor:
    model.seen.append(1.0)
    return h * sum(model.seen)


def _alternating(model: Model, h: Tensor) -> Tensor:
    model.flag = not model.flag
    return h.relu() if model.flag else h.tanh()


def _in_holder(model: Model, h: Tensor) -> Tensor:
    model.holder["rate"] = model.holder["rate"] * 0.5
    return h * model.holder["rate"]


def _global(model: Model, h: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return h * CALLS


def _random(model: Model, h: Tensor) -> Tensor:
    return h * random.random()


def _numpy(model: Model, h: Tensor) -> Tensor:
    return h * float(np.random.rand())


SEEN: dict[str, tuple[Act, dict[str, Any], str]] = {
    "counter": (_counted, {"calls": 0}, "loss"),
    "list": (_grown, {"seen": []}, "loss"),
    "flag": (_alternating, {"flag": False}, "loss"),
    "dict": (_in_holder, {"holder": {"rate": 2.0}}, "loss"),
    "global variable": (_global, {}, "loss"),
    "random": (_random, {}, "loss"),
    "numpy": (_numpy, {}, "loss"),
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """In which output or gradient values first part depends on the weights, and on what is drawn."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def _python_state_unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused while a model is traced gets as far as the comparison."""
    monkeypatch.setattr(export, "same_each_time", lambda *_, **__: nullcontext())


@pytest.mark.usefixtures("_python_state_unwatched")
@pytest.mark.parametrize("name", SEEN)
def test_what_export_cannot_see_is_refused_where_values_first_part(name: str) -> None:
    act, attributes, what = SEEN[name]
    model = Model(act, **attributes)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    graph = trace(model, batch())
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    with pytest.raises(TraceError, match=f"(?s)another {what}.*test_guard.py:.*check=False"):
        held_against_eager(model, graph, batch())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert states[:2] == (random.getstate(), str(np.random.get_state()))
    assert torch.equal(states[2], torch.get_rng_state())


def test_what_is_the_models_own_in_the_backward_pass_runs_as_in_the_model() -> None:
    assert checked(Model(lambda m, h: _Reversed.apply(h) * 1.0)) == "yes"
    assert checked(Model(_hooked)) == "yes"
    assert checked(Model(_clamped)) == "yes"


@pytest.mark.usefixtures("_python_state_unwatched")
def test_the_error_names_module_line_and_the_state_that_changed() -> None:
    model = Model(_counted, calls=0)
    with pytest.raises(TraceError, match=r"(?s)step 2.*changed calls.*module 'act' \(Between\).*h \* model.calls"):
        checked(model)
    assert model.calls == 0


def test_a_hook_that_the_graph_lacks_is_missed() -> None:
    model = Model(lambda m, h: h.relu())
    graph = trace(model, batch())
    assert held_against_eager(model, graph, batch()) == "yes"
    model.first.weight.register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(TraceError, match=r"gradient of 'first.weight'"):
        held_against_eager(model, graph, batch())


def _cached(model: Model, h: Tensor) -> Tensor:
    model.length = max(model.length, h.shape[0])
    if model.table is None:
        model.table = torch.arange(8.0)
    return h + model.table


def _dropped(model: Model, h: Tensor) -> Tensor:
    return F.dropout(h, 0.5, model.training) + torch.rand_like(h)


def _unread_draw(model: Model, h: Tensor) -> Tensor:
    torch.rand(3)
    return F.dropout(h, 0.5, model.training)


def _updated(model: Model, h: Tensor) -> Tensor:
    model.state.mul_(0.9).add_(h.detach().mean(0))
    return h * model.state


def _not_finite(model: Model, h: Tensor) -> Tensor:
    return torch.where(h > 0, h, h.detach().log())


RIGHT: dict[str, tuple[Act, dict[str, Any]]] = {
    "cache": (_cached, {"length": 0, "table": None}),
    "dropout": (_dropped, {}),
    "buffer": (_updated, {}),
    "normalised": (lambda m, h: F.batch_norm(h, None, None, training=True), {}),
    "not finite": (_not_finite, {}),
    "counter that is not read": (lambda m, h: (m.log.append(1), h.relu())[1], {"log": []}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_export_sees_is_not_refused(name: str) -> None:
    act, attributes = RIGHT[name]
    assert checked(Model(act, **attributes)) == "yes"


def test_an_order_of_draws_that_the_graph_lacks_is_said_and_not_refused() -> None:
    assert checked(Model(_unread_draw)) == "no, the model draws its random numbers in another order"


def _of_file(file: Path) -> Act:
    """Multiplies by how often it was called, which it keeps in a file."""

    def act(model: Model, h: Tensor) -> Tensor:
        with file.open("a") as calls:
            calls.write(".")
        return h * file.stat().st_size

    return act


def test_what_cannot_be_compared_is_said_and_not_refused(tmp_path: Path) -> None:
    sized = Model(lambda m, h: h.relu())
    graph = trace(sized, batch())
    assert held_against_eager(sized, graph, batch(), seconds=0.0).startswith("no, it would take about")
    fails = Model(lambda m, h: h.relu())
    fails.second.register_forward_pre_hook(lambda module, args: None if args[0].is_meta else 1 / 0)
    assert held_against_eager(fails, graph, batch()).startswith("no, the model does not run on cpu here: ZeroDivision")
    unlike = Model(_of_file(tmp_path / "calls"))
    with pytest.raises(TraceError, match=r"(?s)compute the same whenever it begins with the same.*draw with\storch's"):
        held_against_eager(unlike, trace(unlike, batch()), batch())


def test_plans_say_what_came_of_it() -> None:
    mesh, model = autopar.Mesh("h100", devices_per_node=2), Model(lambda m, h: h.relu())
    plan = autopar.template_plan(model, mesh, batch(), dp=2)
    assert "  checked against eager: yes\n" in str(plan)
    assert autopar.Plan.from_json(plan.to_json()).checked_against_eager == "yes"
    unchecked = autopar.template_plan(model, mesh, batch(), dp=2, check=False)
    assert "  checked against eager: no, check=False was asked for\n" in str(unchecked)
    meta = autopar.template_plan(Model(lambda m, h: h.relu()).to("meta"), mesh, batch(), dp=2)
    assert meta.checked_against_eager == "no, the model is on the meta device"
    with pytest.raises(TraceError, match="the same each time"):
        autopar.parallelize(Model(_counted, calls=0), mesh, batch(), search="fast")


def test_a_model_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, model, ran = autopar.Mesh("h100", devices_per_node=2), Model(lambda m, h: h.relu()), list[int]()
    monkeypatch.setattr(guard, "run_model", lambda *args, **options: ran.append(1) or run_model(*args, **options))
    plan = autopar.template_plan(model, mesh, batch(), dp=2)
    assert autopar.parallelize(model, mesh, batch(), plan=plan).plan.checked_against_eager == "yes"
    assert ran == [1]
    model.first.weight.register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(AutoparError):  # the plan is for a graph without the hook
        autopar.parallelize(model, mesh, batch(), plan=plan)


class _Centred(nn.Module):
    """The bias before a mean is taken off has a gradient of zero, of which rounding is left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)))
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return (h - h.mean(0)).pow(2).mean() + (h * self.mean).sum() * 0


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_zero_and_buffers_that_forward_replaces_are_no_difference(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = _Centred(), torch.randn(8, 8)
    assert held_against_eager(model, trace(model, (x,)), (x,)) == "yes"


def test_a_gradient_that_plans_would_lose_is_seen() -> None:
    model, x = _Centred(), torch.randn(8, 8)
    graph = trace(model, (x,))
    name = next(node.results[0] for node in graph.nodes if "tanh" in node.op)
    tensors = dict(graph.tensors) | {name: replace(graph.tensors[name], differentiable=False)}
    with pytest.raises(InternalError, match=r"no gradient through tanh.*test_guard.py:\d+, found that one flows"):
        held_against_eager(model, replace(graph, tensors=tensors), (x,))


def test_a_parameter_that_forward_replaces_is_refused_with_its_line() -> None:
    class Replacing(_Centred):
        def forward(self, x: Tensor) -> Tensor:
            self.first.weight = nn.Parameter(self.first.weight.detach().clamp(-0.1, 0.1))
            return super().forward(x)

    with pytest.raises(TraceError, match=r"(?s)found 'weight' of a Linear set anew at\n.*test_guard.py:\d+"):
        trace(Replacing(), (torch.randn(8, 8),))


@pytest.mark.parametrize("how", ["replaced", "first call", "in a dict", "inside of another"])
def test_a_module_with_parameters_that_forward_makes_is_refused_with_its_line(how: str) -> None:
    class Making(_Centred):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.heads = None, nn.ModuleDict()

        def forward(self, x: Tensor) -> Tensor:
            if how == "replaced":
                self.first = nn.Linear(8, 16)
            if how == "first call" and self.head is None:
                self.head = nn.Linear(8, 8)
            if how == "in a dict" and "a" not in self.heads:
                self.heads["a"] = nn.Linear(8, 8)
            if how == "inside of another":
                self.heads["a"] = nn.Sequential(nn.ReLU(), nn.Linear(8, 8))
            return super().forward(x)

    with pytest.raises(TraceError, match=r"found a new \w+ as '\w+' of a \w+ at\n.*test_guard.py:\d+.*\nAn optimizer"):
        trace(Making(), (torch.randn(8, 8),))


def test_a_module_without_parameters_may_be_made_in_forward() -> None:
    class Making(_Centred):
        def forward(self, x: Tensor) -> Tensor:
            self.act = nn.ReLU()
            return super().forward(self.act(x))

    model, x = Making(), torch.randn(8, 8)
    assert held_against_eager(model, trace(model, (x,)), (x,)) == "yes"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda h: h.mean()[None], r"unsqueeze\[1\] at .*test_guard.py:\d+; make the loss one that has no dims"),
        (lambda h: h.mean().detach(), r"detach\w*\[\] at .*test_guard.py:\d+; return one that follows from"),
        (lambda h: h.square(), r"square\[8, 16\] at .*test_guard.py:\d+; pass loss_fn="),
    ],
    ids=["one element", "detached", "no loss"],
)
def test_what_is_no_loss_is_refused_with_its_line(make: Callable[[Tensor], Tensor], message: str) -> None:
    class Making(_Centred):
        def forward(self, x: Tensor) -> Tensor:
            return make(self.first(x))

    with pytest.raises(TraceError, match=message):
        trace(Making(), (torch.randn(8, 8),))


def test_a_number_out_of_a_tensor_is_refused_with_its_line() -> None:
    class Scaling(_Centred):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x / x.abs().max().item())

    with pytest.raises(TraceError, match=r"(?s)a number that is taken out of a tensor.*test_guard.py:\d+"):
        trace(Scaling(), (torch.randn(8, 8),))
