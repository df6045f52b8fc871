"""Tensors that forward makes of plain values are in no state dict: the emitted program holds them itself.

Once they were declared but never filled. A decoder whose start token is not zero (Whisper) then trained on another
input than its model.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import TraceError
from autopar.program import load_source
from tests.equivalence.on_threads import planned, program_differences

SPECIAL = [1.0, -0.1, math.inf, -math.inf, math.nan, 1e-40]


class Constants(nn.Module):
    """Shifts its input as decoders do, and scales it by a list of figures."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x.new_zeros(x.shape)
        shifted[:, 1:] = x[:, :-1]
        shifted[:, 0] = 3.0
        scales = torch.tensor([0.1, 2.0, -3.0, 0.5, 7.0, 1.0 / 3.0], device=x.device)
        kept = torch.tensor([True, False, True, True, False, True], device=x.device)
        return (self.linear(shifted * scales).square() * kept).mean()


class Holds(nn.Module):
    """A parameter times a constant tensor made in forward."""

    def __init__(self, values: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.values, self.dtype = values, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        constant = torch.tensor(self.values, dtype=self.dtype, device=x.device)
        return (torch.view_as_real(constant) if constant.is_complex() else constant).sum() * x.sum() * self.weight


def emitted(model: nn.Module, *inputs: torch.Tensor) -> autopar.PlannedProgram:
    return autopar.parallelize(model, autopar.Mesh("h100", devices_per_node=1), inputs)


def test_program_with_constants_equals_the_model() -> None:
    torch.manual_seed(0)
    model, x = Constants(), torch.randn(4, 6)
    rank = emitted(model, x).build()
    loss = rank.train_step(x)
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(rank.full_gradients()["linear.weight"], model.linear.weight.grad)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (SPECIAL, torch.float32),
        (SPECIAL, torch.float64),
        ([1.0, 3.1415], torch.bfloat16),
        ([[-(2**63), 2**63 - 1]], torch.int64),
        ([True, False], torch.bool),
        ([complex(1.5, -math.inf), 2j], torch.complex64),
        ([], torch.float32),
        (7, torch.int64),
    ],
)
def test_constants_are_written_exactly(values: Any, dtype: torch.dtype) -> None:
    program = emitted(Holds(values, dtype), torch.ones(2))
    from autopar import runtime

    held = [buffer for name, buffer in runtime.build(load_source(program.source).Program).named_buffers()]
    expected = torch.tensor(values, dtype=dtype)
    assert any(
        value.dtype == dtype and torch.equal(_bits(value.reshape(expected.shape)), _bits(expected)) for value in held
    )


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8) if value.dim() and value.numel() else value


def test_constant_that_is_too_large_is_refused_with_its_line() -> None:
    model = Holds(torch.arange(5000.0).tolist())
    with pytest.raises(TraceError, match=r"at most 4,096 elements, found \[5000\] that pipeline/test_con.*py:\d+"):
        emitted(model, torch.ones(2))


def test_constant_that_a_meta_model_lost_is_refused_with_its_line() -> None:
    with torch.device("meta"):
        model, x = Holds([1.0, 2.0]), torch.ones(2)
    with pytest.raises(TraceError, match=r"constant tensor \[2\] that pipeline/test_con.*py:\d+ reads, found none"):
        emitted(model, x)


class Layer(nn.Module):
    """Adds what it makes of positions, times a number of its own, to what a linear layer makes."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(6, 6), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(6, device=x.device).float()
        cosines, sines = positions.cos(), positions.sin() * self.factor
        return self.linear(x) + torch.cat([cosines[:3], cosines[:3]]) + torch.cat([cosines[3:], sines[:3]])


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(0.5), Layer(0.5), Layer(2.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("how", ["dp=2", "tp=2"])
def test_constants_that_layers_have_in_common_are_made_once(how: str) -> None:
    torch.manual_seed(0)
    model, batch = Layers(), {"x": torch.randn(4, 6)}
    program = planned(model, batch, how)
    source = program.source
    assert [source.count(f"aten.{name}.") for name in ("arange", "cos", "sin", "cat")] == [1, 1, 1, 3]
    assert not program_differences(model, batch, program)
