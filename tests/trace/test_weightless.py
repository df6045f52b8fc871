"""Models that are built without weights keep what they compute of numbers alone, and train from there."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import runtime as rt
from autopar.program import load_source
from autopar.trace.weightless import built_on_meta


class Rotary(nn.Module):
    """Frequencies and a table of angles, as most people write them; nothing of it is in the state_dict."""

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        inv = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
        angles = torch.outer(torch.arange(length).float(), inv)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin


class Sinusoid(nn.Module):
    """Positions written into slices of zeros."""

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        table = torch.zeros(length, dim)
        place = torch.arange(length).unsqueeze(1)
        step = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        table[:, 0::2], table[:, 1::2] = torch.sin(place * step), torch.cos(place * step)
        self.register_buffer("table", table.unsqueeze(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Masked(nn.Module):
    """A causal mask and slopes in the state_dict, normalisation by running statistics, tied weights, drop rates."""

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).bool())
        self.register_buffer("slopes", torch.tensor([2.0**-n for n in range(1, 3)]))
        self.norm = nn.BatchNorm1d(dim)
        self.up, self.down = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.down.weight = self.up.weight
        self.rates = torch.linspace(0, 0.1, 3).tolist()
        nn.init.normal_(self.up.weight, std=self.rates[1])

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ x.mT * self.slopes.sum()).masked_fill(~self.mask, -1e9).softmax(-1)
        return self.down(self.norm(self.up(scores @ x).mT).mT)


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module], vocab: int = 32, dim: int = 8, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), kind(dim, length)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.positions(self.tokens(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


KINDS = [Rotary, Sinusoid, Masked]


def batch() -> dict[str, Tensor]:
    ids = torch.arange(64).reshape(4, 16) % 32
    return {"ids": ids, "labels": ids.flip(1).contiguous()}


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_on_meta_and_buffers_have_their_values(kind: type[nn.Module]) -> None:
    real, made = Net(kind), built_on_meta(lambda: Net(kind))
    assert all(parameter.is_meta for parameter in made.parameters())
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    for name, buffer in real.named_buffers():
        assert torch.equal(made.get_buffer(name), buffer), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_planned_without_weights_starts_and_trains(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    real, made = Net(kind), built_on_meta(lambda: Net(kind))
    program = autopar.parallelize(made, autopar.Mesh("h100"), batch(), search="fast")
    rank = rt.build(load_source(program.source).Program, device="cpu")
    with torch.no_grad():
        state = dict(real.named_parameters())
        for name, parameter in rank.named_parameters():
            parameter.copy_(state[name])
    loss, expected = rank.train_step(**batch()), copy.deepcopy(real)(**batch())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_large_tensors_take_no_memory() -> None:
    def build() -> nn.Module:
        big: Any = nn.Linear(1 << 20, 1 << 20)  # four terabytes
        big.register_buffer("mask", torch.tril(torch.ones(1 << 18, 1 << 18)))
        big.register_parameter("scale", nn.Parameter(torch.ones(1 << 20)))
        return big  # type: ignore[no-any-return]

    made = built_on_meta(build)
    assert all(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))


def test_code_that_mixes_what_is_on_meta_is_built_on_meta() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(128, 128) * torch.arange(128))
            self.register_buffer("table", torch.arange(4), persistent=False)

    assert built_on_meta(Mixing).weight.is_meta and built_on_meta(Mixing).table.is_meta
    with pytest.raises(RuntimeError, match="mine"):
        built_on_meta(lambda: (_ for _ in ()).throw(RuntimeError("mine")))


class Offset(nn.Module):
    """A buffer in the state_dict."""

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(length, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def test_buffers_without_a_value_are_named_before_a_step() -> None:
    with torch.device("meta"):
        made, masked = Net(Sinusoid), Net(Offset)
    for model, name in ((made, "positions.table"), (masked, "positions.mask")):
        program = autopar.parallelize(model, autopar.Mesh("h100"), batch(), search="fast")
        rank = rt.build(load_source(program.source).Program, device="cpu")
        with pytest.raises(rt.ProgramError, match=name):
            rank.train_step(**batch())


def test_what_a_state_dict_lacks_is_still_missing() -> None:
    program = autopar.parallelize(built_on_meta(lambda: Net(Offset)), autopar.Mesh("h100"), batch(), search="fast")
    rank = rt.build(load_source(program.source).Program, device="cpu")
    state = {name: value for name, value in Net(Offset).state_dict().items() if name != "positions.mask"}
    for load in (rank.load_full_state_dict, rank.init_from):
        with pytest.raises(rt.ProgramError, match=r"positions\.mask"):
            load(state)
