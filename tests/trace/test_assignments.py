"""Buffers that forward puts another tensor in the place of, in modules of any depth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace import trace
from tests.equivalence.on_threads import differences, kept
from tests.trace.test_writes import assert_traced

Assign = Callable[["Layer", Tensor], None]


def _mean(layer: Layer, h: Tensor) -> None:
    layer.state = h.detach().mean(0)


def _twice(layer: Layer, h: Tensor) -> None:
    layer.state = layer.state + 1
    layer.state = layer.state * 0.5
    with torch.no_grad():
        layer.state.add_(h.mean(0))


def _swapped(layer: Layer, h: Tensor) -> None:
    layer.state, layer.other = layer.other, layer.state


def _other_parameter(layer: Layer, h: Tensor) -> None:
    """The state becomes what the parameter is then, which is written to as well."""
    layer.linear.bias.data.mul_(0.5)
    layer.state = layer.linear.bias.detach().clone()


def _registered(layer: Layer, h: Tensor) -> None:
    layer.register_buffer("state", h.detach().amax(0))


def _past_attributes(layer: Layer, h: Tensor) -> None:
    layer._buffers["state"] = layer._buffers["state"] * 0.5 + h.detach().mean(0)


class Layer(nn.Module):
    def __init__(self, assign: Assign) -> None:
        super().__init__()
        self.linear, self.assign = nn.Linear(4, 4), assign
        self.register_buffer("nothing", None)
        self.register_buffer("state", torch.zeros(4))
        self.register_buffer("other", torch.ones(4))

    state: Tensor
    other: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) + self.state
        self.assign(self, h)
        return h - self.other


class Model(nn.Module):
    """Layers that are alike, one of which may stand for all; a buffer of its own that is registered first."""

    def __init__(self, assign: Assign, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("nothing", None)
        self.register_buffer("last", torch.zeros(4))
        self.layers = nn.ModuleList(Layer(assign) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.last = x.detach().mean(0)
        return x.square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(1))}


ASSIGNED = [_mean, _twice, _swapped, _other_parameter, _registered, _past_attributes]


@pytest.mark.sampled
@pytest.mark.parametrize("depth", [2, 6])
@pytest.mark.parametrize("assign", ASSIGNED, ids=lambda f: f.__name__.strip("_"))
def test_what_is_assigned_is_what_the_buffer_becomes(assign: Assign, depth: int) -> None:
    assert_traced(Model(assign, depth), batch())


def test_without_values_too_where_no_comparison_with_the_model_would_see_it() -> None:
    graph = trace(Model(_mean, 2).to("meta"), {"x": torch.randn(4, 4, device="meta")})
    assert graph.mutations.keys() == {"last", "layers.0.state", "layers.1.state"}


def _moved(layer: Layer, h: Tensor) -> None:
    layer.state = layer.state.to(h.device, h.dtype)


def test_a_buffer_that_becomes_itself_is_not_updated_and_any_stage_may_read_it() -> None:
    model = Model(_moved, 2)
    assert trace(model, batch()).mutations.keys() == {"last"}
    assert differences(model, batch(), "pp=2") == []


@pytest.mark.sampled
@pytest.mark.sweep
@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero=3", "recompute", "pp=2"])
@pytest.mark.parametrize("assign", ASSIGNED, ids=lambda f: f.__name__.strip("_"))
def test_programs_equal_the_model(assign: Assign, plan: str) -> None:
    wrong = differences(*kept(Model, batch, assign, 2), plan)
    assert wrong == [] or (wrong is None and (assign, plan) == (_swapped, "pp=2")), wrong  # what no node makes


def _another_shape(layer: Layer, h: Tensor) -> None:
    layer.state = h.detach()


def _another_dtype(layer: Layer, h: Tensor) -> None:
    layer.state = h.detach().mean(0).double()


def _none(layer: Layer, h: Tensor) -> None:
    layer.state = None  # type: ignore[assignment]


def _registered_anew(layer: Layer, h: Tensor) -> None:
    layer.register_buffer("state", torch.ones(3))


def _put_back(layer: Layer, h: Tensor) -> None:
    kept = layer.state
    layer.state = h.detach()
    layer.state = kept + layer.state.mean(0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("assign", [_another_shape, _another_dtype, _none, _registered_anew])
def test_what_is_no_tensor_like_the_buffer_is_refused_with_its_line(assign: Assign, device: str) -> None:
    with torch.device(device):
        model, inputs = Model(assign, 2), {"x": torch.empty(4, 4)}
    with pytest.raises(TraceError, match=r"'layers\.\d\.state' to stay float32\[4\].*\n.*test_assignments\.py:\d+"):
        trace(model, inputs)


def test_what_is_put_back_in_the_same_step_may_look_otherwise() -> None:
    assert_traced(Model(_put_back, 2), batch())
