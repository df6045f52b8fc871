"""One plan runs inputs of several shapes, each as one device does, or says before anything runs that it does not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import runtime as rt
from autopar.errors import PlanError
from autopar.program import load_source
from tests.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2}, "zero3": {"dp": 2, "zero": 3}, "tp_sequence": {"tp": 2, "sequence_parallel": True},
    "stages": {"pp": 2, "microbatches": 2}, "contexts": {"cp": 2}, "ring": {"cp": 2, "context": "ring"},
}  # fmt: skip


class Block(nn.Module):
    """Causal attention, whose heads and positions are views of the lengths at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, 2))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Causal(nn.Module):
    """Positions by number, blocks, a loss over the tokens that labels keep."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(37, 8), nn.Embedding(16, 8)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 37)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.size(1)))
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def causal() -> nn.Module:
    torch.manual_seed(1)
    return Causal()


class Pooled(nn.Module):
    """What goes wrong first: statistics of the batch, and means over tokens that a mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(37, 8), nn.BatchNorm1d(8), nn.Linear(8, 37)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2)
        kept = (labels != -100).unsqueeze(2)
        mean = (hidden * kept).sum(1) / kept.sum(1).clamp(min=1)
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return loss + self.head(mean).square().mean()


def pooled() -> nn.Module:
    torch.manual_seed(2)
    return Pooled()


def text(rows: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    labels = torch.randint(37, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.3] = -100
    return {"input_ids": torch.randint(37, (rows, length), generator=generator), "labels": labels}


def sizes(rows: int, length: int) -> dict[str, tuple[int, int]]:
    return {"input_ids": (rows, length), "labels": (rows, length)}


def steps(
    number: int, world: int, source: str, start: dict[str, Tensor], shapes: list[tuple[int, int]]
) -> list[tuple[float, dict[str, Tensor], dict[str, Tensor]]]:
    """Loss, gradients and buffers of a step of each shape, one after the other on the same parameters."""
    rank = rt.build(load_source(source).Program)
    rank.init_from(start, broadcast=False)
    found = []
    for shape in shapes:
        rank.zero_grad()
        loss = rank.train_step(**text(*shape))
        state = {name: x for name, x in rank.full_state_dict().items() if name.startswith("norm.running")}
        found.append((loss.item(), rank.full_gradients(), state))
    with pytest.raises(rt.ProgramError, match=r"expected inputs of input_ids \(4, 8\).* found .*\(4, 29\).*shapes=\["):
        rank.train_step(**text(4, 29))
    return found


def one_device(model: nn.Module, shapes: list[tuple[int, int]]) -> list[tuple[float, dict[str, Tensor]]]:
    found = []
    for shape in shapes:
        model.zero_grad()
        out = model(**text(*shape))
        loss = out if isinstance(out, Tensor) else out.loss
        loss.backward()
        found.append((loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    return found


def allowed(model: nn.Module, plan: autopar.Plan, shapes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The shapes that the plan holds for; the others are refused with their lengths."""
    found = []
    for shape in shapes:
        try:
            autopar.parallelize(model, plan.mesh, text(4, 8), plan=plan, shapes=[sizes(*shape)], check=False)
            found.append(shape)
        except PlanError as error:
            assert str(shape) in str(error)
    return found


def check(pool: RankPool, make: Callable[[], nn.Module], plan_name: str, count: int, seed: int) -> tuple[int, int]:
    """How many shapes are equal to one device, and how many are refused."""
    model, choices = make(), PLANS[plan_name]
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    plan = autopar.template_plan(model, mesh, text(4, 8), **choices)
    draw = random.Random(seed)
    drawn = [(draw.randint(1, 8), draw.randint(2, 14)) for _ in range(count)]
    held = [(4, 8), *dict.fromkeys(allowed(model, plan, drawn))]
    program = autopar.parallelize(model, mesh, text(4, 8), plan=plan, shapes=[sizes(*shape) for shape in held])
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    order = [*held, *held[::-1]]
    expected = one_device(model, order)
    for found in pool.run(steps, program.source, start, order):
        for shape, (loss, gradients, _), (own_loss, own) in zip(order, found, expected, strict=True):
            assert loss == pytest.approx(own_loss, rel=1e-5), shape
            for name, gradient in own.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=f"{shape} {name}")
        for name, tensor in found[-1][2].items():
            torch.testing.assert_close(tensor, model.state_dict()[name])
    return len(held) - 1, count - len([shape for shape in drawn if shape in held])


@pytest.mark.sampled(only=("causal-stages", "pooled-zero3"))
@pytest.mark.parametrize(("make", "plan"), [(causal, "tp_sequence"), (causal, "stages"), (pooled, "zero3")])
def test_shapes_under_one_plan(rank_pool: Callable[[int], RankPool], make: Callable[[], nn.Module], plan: str) -> None:
    equal, refused = check(rank_pool(2), make, plan, 2, seed=len(plan))
    assert equal >= 1 and equal + refused == 2


def test_a_shape_that_the_plan_does_not_hold_for_is_refused_when_it_is_planned() -> None:
    mesh = autopar.Mesh("cpu", devices_per_node=1)
    plan = autopar.template_plan(causal(), mesh, text(4, 8), microbatches=2, check=False)
    with pytest.raises(PlanError, match=r"hold for inputs of input_ids \(3, 8\), labels \(3, 8\) as well.*Leave the"):
        autopar.parallelize(causal(), mesh, text(4, 8), plan=plan, check=False, shapes=[sizes(3, 8)])
    with pytest.raises(PlanError, match="expected 2 lengths"):
        autopar.parallelize(causal(), mesh, text(4, 8), plan=plan, check=False, shapes=[{"labels": (3,)}])
