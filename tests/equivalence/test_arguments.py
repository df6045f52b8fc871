"""Inputs and outputs of any form, and losses that store something: as on one device."""

from __future__ import annotations

import functools
from collections import UserDict, namedtuple
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import runtime as rt
from autopar.errors import TraceError
from autopar.program import load_source, model_state
from autopar.runtime import ProgramError
from autopar.trace import trace
from tests.equivalence.alike import assert_alike, both, planned
from tests.random_programs.world import thread_world


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X, Y = torch.randn(8, 16, generator=generator()), torch.randint(10, (8,), generator=generator(1))


@dataclass
class Batch:
    image: Tensor
    label: Tensor
    scale: float = 1.0
    extra: dict[str, Any] | None = None


Pair = namedtuple("Pair", "first second")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(16, 10)


class Nested(Base):
    """Dicts in dicts, lists, a named tuple, a dataclass, constants of each kind."""

    def forward(self, batch: Batch, more: dict[str, Any], *, kind: str, pair: Pair, flag: bool = False) -> Tensor:
        x = batch.image * batch.scale + more["deep"]["shift"][0] - pair.second
        assert batch.extra is not None and more["none"] is None and kind == "mean"
        logits = self.a(x) / (batch.extra["temperature"] if flag else 1.0)
        return F.cross_entropy(logits, batch.label) * pair.first


def nested() -> dict[str, Any]:
    shift = torch.randn(8, 16, generator=generator(2))
    return {
        "batch": Batch(X, Y, 0.5, {"temperature": torch.tensor(2.0)}),
        "more": {"deep": {"shift": [shift, 3]}, "none": None},
        "kind": "mean",
        "pair": Pair(2, X * 0.1),
        "flag": True,
    }


@both("dp", "tp", "zero3", "microbatches", "stages")
def test_nested_inputs(how: str) -> None:
    assert_alike(Nested(), nested(), how)


class Plain(Base):
    """Positions, defaults, any number of tensors."""

    def forward(self, x: Tensor, y: Tensor, k: int = 2, *rest: Tensor) -> Tensor:
        for other in rest:
            x = x + other
        return F.cross_entropy(self.a(x) * k, y)


@pytest.mark.sampled
@pytest.mark.parametrize("inputs", [(X, Y), (X, Y, 3), (X, Y, 3, X * 2, X * 3)], ids=("default", "number", "rest"))
@both("dp", "searched")
def test_arguments_by_position(inputs: Any, how: str) -> None:
    assert_alike(Plain(), inputs, how)


class Keywords(Base):
    def forward(self, **batch: Any) -> Tensor:
        return F.cross_entropy(self.a(batch["x"]) * batch["k"], batch["y"])


@both("dp")
def test_arguments_by_any_name(how: str) -> None:
    assert_alike(Keywords(), {"x": X, "y": Y, "k": 2.5}, how)


def _refused_step(rank: int, source: str, state: Any, args: Any, kwargs: Any) -> str:
    built = rt.build(load_source(source).Program, device=torch.device("cpu"))
    built.init_from(state, broadcast=False)
    try:
        built.train_step(*args, **kwargs)
    except ProgramError as error:
        return str(error)
    return ""


def refused(program: Any, model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """What a step says of arguments."""
    found = thread_world(2).run(_refused_step, program.source, model_state(model), args, kwargs)
    return str(found[0])


def test_other_constants_and_forms_are_refused() -> None:
    model = Nested()
    program, given = planned(model, nested(), "dp"), nested()
    assert refused(program, model, **given) == ""
    flat = {"batch_image": X, "batch_label": Y, "batch_extra_temperature": torch.tensor(2.0), "pair_second": X * 0.1}
    assert refused(program, model, **flat, more_deep_shift_0=nested()["more"]["deep"]["shift"][0]) == ""
    assert "expected 'mean', for which" in refused(program, model, **{**given, "kind": "sum"})
    assert "input flag: expected True" in refused(program, model, **{**given, "flag": 1})
    assert "input pair.0: expected 2" in refused(program, model, **{**given, "pair": Pair(X, X)})
    assert "input more: expected a dict of deep, none" in refused(program, model, **{**given, "more": {"none": None}})
    assert "input batch.extra: expected a dict" in refused(program, model, **{**given, "batch": Batch(X, Y, 0.5, None)})
    del given["flag"]
    assert "expected the inputs batch, more, kind, pair, flag" in refused(program, model, **given)


def test_inputs_that_are_neither_are_refused() -> None:
    with pytest.raises(TraceError, match="found object as k"):
        trace(Plain(), (X, Y, object()))


class Flag(IntEnum):
    ON = 1


@pytest.mark.parametrize("value", [Flag.ON, {Flag.ON: X}, torch.float32])
def test_constants_that_source_cannot_state_are_refused(value: Any) -> None:
    with pytest.raises(TraceError, match=r"found \w+ as k"):
        trace(Plain(), (X, Y, value))


def test_any_mapping_is_inputs_by_name() -> None:
    graph = trace(Plain(), UserDict({"y": Y, "x": X, "k": 3}))
    assert graph.inputs == ("y", "x") and dict(graph.arguments)["k"] == 3


def test_gradients_of_inputs_are_refused() -> None:
    with pytest.raises(TraceError, match="requires_grad=True for 'x'"):
        trace(Plain(), (X.clone().requires_grad_(), Y))
    model = Plain()
    said = refused(planned(model, (X, Y), "tp"), model, X.clone().requires_grad_(), Y)
    assert "input x: expected a tensor that needs no gradient" in said


class Temperature(Base):
    def forward(self, x: Tensor, y: Tensor, t: Tensor, edges: Tensor) -> Tensor:
        return F.cross_entropy(self.a(x) / t, y) + 0 * edges.sum()


def test_inputs_without_a_batch_are_the_same_on_all_ranks() -> None:
    inputs = X, Y, torch.tensor(2.0), torch.arange(8.0).view(2, 4)
    plan = autopar.template_plan(Temperature(), autopar.Mesh("cpu", devices_per_node=4), inputs, dp=4)
    kinds = {name: placement[0].kind for name, placement in plan.stage.inputs.items()}
    assert kinds["x"] == kinds["y"] == "S" and "S" not in (kinds["t"], kinds["edges"])
    assert_alike(Temperature(), inputs, "dp")


# Outputs


@dataclass
class Output:
    aux: Tensor
    loss: Tensor | None
    parts: dict[str, Any]


class Returns(Base):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = self.a(x)
        loss, aux = F.cross_entropy(z, y), z.pow(2).mean()
        return {
            "dict": {"aux": aux, "loss": loss},
            "dataclass": Output(aux, loss, {"z": z}),
            "named tuple": namedtuple("Both", "aux loss")(aux, loss),
            "nested": {"aux": aux, "losses": {"loss": loss, "n": 3}},
            "detached": (aux.detach(), z, loss),
            "two": (loss, aux),
            "none": {"z": z, "aux": aux.detach()},
        }[self.how]


@pytest.mark.parametrize("how", ["dict", "dataclass", "named tuple", "nested", "detached"])
def test_the_loss_among_outputs(how: str) -> None:
    model = Returns(how)
    assert_alike(model, (X, Y), "dp", eager=lambda: F.cross_entropy(model.a(X), Y))


def test_which_output_is_the_loss_is_not_guessed() -> None:
    with pytest.raises(TraceError, match=r"found 2 scalars .*output 0, output 1; return their sum"):
        trace(Returns("two"), (X, Y))
    with pytest.raises(TraceError, match=r"scalar loss .*, found z\[8, 10\] at .*:\d+, aux\[\] at .*:\d+; return one"):
        trace(Returns("none"), (X, Y))


def test_outputs_of_inference_are_flat_and_in_order() -> None:
    graph = trace(Returns("dataclass"), (X, Y), mode="inference")
    assert [graph.tensors[name].shape for name in graph.outputs] == [(), (), (8, 10)]


# Losses that store something


class Forward(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Learned(nn.Module):
    """Parameters, a buffer, and a method that is the loss as well."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(10, 10, generator=generator(5)))
        self.register_buffer("prior", torch.rand(10, generator=generator(6)))

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(z @ self.w + self.prior, t)

    def scaled(self, z: Tensor, t: Tensor, factor: float = 1.0) -> Tensor:
        return self(z, t) * factor


def _closure(learned: Learned, constant: Tensor) -> Any:
    return lambda z, t: learned(z + constant, t)


LOSSES = {
    "module": Learned,
    "method": lambda: Learned().scaled,
    "partial": lambda: functools.partial(Learned().scaled, factor=0.5),
    "closure": lambda: _closure(Learned(), torch.linspace(0, 1, 10)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("loss", LOSSES)
@both("dp", "tp", "zero3", "microbatches", "stages")
def test_losses_with_parameters_and_buffers(loss: str, how: str) -> None:
    program = assert_alike(Forward(), (X, Y), how, LOSSES[loss]())
    assert "loss_fn" in program.source


def test_losses_start_from_their_values_where_a_state_has_none() -> None:
    def start(rank: int, source: str, state: Any) -> Any:
        built = rt.build(load_source(source).Program, device=torch.device("cpu"))
        built.init_from(state, broadcast=False)
        return built.full_state_dict()

    model, loss = Forward(), Learned()
    program = planned(model, (X, Y), "tp", loss)
    for state in thread_world(2).run(start, program.source, model_state(model)):
        assert torch.equal(state["loss_fn.w"], loss.w) and torch.equal(state["loss_fn.prior"], loss.prior)
        assert torch.equal(state["a.weight"], model.a.weight)


class WithLossInside(Forward):
    """Whose own module has the name."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss_fn(self.a(x))


def test_a_model_that_has_a_module_of_that_name() -> None:
    program = assert_alike(WithLossInside(), (X, Y), "dp", Learned())
    assert "loss_fn_" in program.source


def test_a_loss_of_the_model_itself() -> None:
    model = Forward()
    assert_alike(model, (X, Y), "dp", lambda z, y: F.cross_entropy(z, y) + 0.1 * model.a.weight.pow(2).sum())


def test_parameters_in_no_module_are_refused() -> None:
    scale = nn.Parameter(torch.ones(()))
    with pytest.raises(TraceError, match=r"parameters of the loss function in a module, found 'scale'"):
        trace(Forward(), (X, Y), loss_fn=lambda z, y: F.cross_entropy(z * scale, y))


class Two(Base):
    def forward(self, x: Tensor, scale: float = 2.0) -> tuple[Tensor, Tensor]:
        z = self.a(x)
        return z, z.mean(0) * scale


@both("dp")
def test_several_outputs_go_to_the_loss_as_they_are(how: str) -> None:
    def loss(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], y) + outputs[1].pow(2).sum()

    assert_alike(Two(), (X, Y), how, loss)
