"""Random numbers: exact mode draws what one device draws, bit for bit; otherwise shards differ and replicas agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from autopar import Constraint
from autopar.program import PlannedProgram
from tests.equivalence.hard import operands_of, planned, state_of
from tests.equivalence.hard_jobs import STEPS, exact_steps, outputs
from tests.equivalence.harness import Tensors
from tests.rank_pool import pool

pytestmark = pytest.mark.ranks


class Dropped(nn.Module):
    """Every kind of dropout that models use: its masks alone are what leaves it in `masks`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = 4
        self.embedding = nn.Linear(16, 16)
        self.module = nn.Dropout(0.1)
        self.channels = nn.Dropout2d(0.3)
        self.in_place = nn.Dropout(0.2, inplace=True)
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.25, batch_first=True)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = F.dropout(self.module(self.embedding(x)).transpose(0, 1), 0.15).transpose(0, 1)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3).transpose(1, 2).flatten(2)
        x = self.in_place(self.channels(x.transpose(1, 2)[..., None])[..., 0].transpose(1, 2) * 2)
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(x.shape[1:])
        return F.cross_entropy(self.head(F.gumbel_softmax(x, dim=-1)).flatten(0, 1), target.flatten())


def batch_of(count: int = 4) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 6, 16, generator=generator)
    return {"x": x, "target": torch.randint(0, 10, (count, 6), generator=generator)}


def eager_steps(model: nn.Module, batch: Tensors, seed: int, microbatches: int = 1) -> Any:
    """The same on one device: the model itself, after torch.manual_seed."""
    torch.manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        total = 0.0
        for part in range(microbatches):
            loss = model(**{name: value.chunk(microbatches)[part] for name, value in batch.items()}) / microbatches
            loss.backward()
            total += loss.item()
        losses.append(total)
    return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_draws(model: nn.Module, batch: Tensors, program: PlannedProgram) -> None:
    """A mask that differs in one element moves the loss and gradients far more than the order of sums does."""
    results = pool(program.plan.mesh.num_devices).run(exact_steps, program.source, state_of(model), batch, 7)
    losses, gradients = eager_steps(model, batch, 7, program.plan.microbatches)
    for found, found_gradients in results:
        assert found == pytest.approx(losses, rel=1e-5)
        for name, expected in gradients.items():
            error = (found_gradients[name] - expected).norm() / expected.norm().clamp(min=1e-4)
            assert error <= 1e-4, f"gradient of {name}: relative difference {error:.2e}"


@pytest.mark.sampled(only=("dp_tp",))
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=["dp", "dp_tp"])
def test_exact_mode_draws_what_one_device_draws(axes: dict[str, int]) -> None:
    """nn.Dropout, F.dropout of a transposed view, Dropout2d, in place, attention's twice, noise and Gumbel noise."""
    model, batch = Dropped(), batch_of()
    rules = [Constraint("*", ("S(0)",), what="input", axis="dp"), Constraint("*", ("R",), what="input", axis="tp")]
    rules += [Constraint("*dropout*", ("S",), what="output", axis=axis) for axis in axes]
    program = planned(model, batch, axes, *rules)
    dropouts = operands_of(program, "aten.native_dropout.default")
    assert len(dropouts) == 5 and all(placements[0].count("S") == len(axes) for placements in dropouts)
    assert_same_draws(model, batch, program)


class PlainDropout(nn.Module):
    """Its outputs are its masks, scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * self.weight
        return F.dropout(x, 0.1), F.dropout(x, 0.7).transpose(0, 1) * 3


def mask_program(axes: dict[str, int], x: Tensor, *types: tuple[str, str]) -> PlannedProgram:
    rules = [Constraint("*", (type_,), what="input", axis=axis) for axis, type_ in types]
    only = {"aten.native_dropout.default": [" ".join(type_ for _, type_ in types)]}
    return planned(PlainDropout(), {"x": x}, axes, *rules, mode="inference", only=only)


@pytest.mark.parametrize("length", [8, 7], ids=["even", "uneven"])
def test_exact_masks_are_those_of_one_device_bit_for_bit(length: int) -> None:
    x = torch.ones(length, 5)
    program = mask_program({"a": 2, "b": 2}, x, ("a", "S(0)"), ("b", "S(1)"))
    assert operands_of(program, "aten.native_dropout.default") == [["S(0) S(1)"]] * 2
    results = pool(4).run(outputs, program.source, state_of(PlainDropout()), {"x": x}, 11, True)
    torch.manual_seed(11)
    expected = [PlainDropout()(x) for _ in range(2)]
    for found in results:
        for step, made in zip(expected, found, strict=True):
            assert all(torch.equal(left, right) for left, right in zip(step, made, strict=True))


def test_default_masks_differ_between_shards_and_agree_on_replicas() -> None:
    """Axis a splits, axis b does not: four ranks hold two different halves, and another step has other masks."""
    x = torch.ones(8, 400)
    program = mask_program({"a": 2, "b": 2}, x, ("a", "S(0)"), ("b", "R"))
    assert operands_of(program, "aten.native_dropout.default") == [["S(0) R"]] * 2
    first, *others = pool(4).run(outputs, program.source, state_of(PlainDropout()), {"x": x}, 11, False)
    for other in others:
        assert all(torch.equal(a, b) for s, t in zip(first, other, strict=True) for a, b in zip(s, t, strict=True))
    mask = first[0][0] != 0
    upper, lower = mask[:4], mask[4:]
    assert not torch.equal(upper, lower)
    agreement = (upper == lower).double().mean()  # of independent masks: 0.9² + 0.1² = 0.82, deviation 0.01
    assert 0.77 < agreement < 0.87
    assert not torch.equal(mask, first[1][0] != 0)
    assert abs(mask.double().mean() - 0.9) < 0.03


class OnlyDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.relu(self.first(x)), 0.5)).square().mean()


def test_exact_mode_in_microbatches_draws_as_one_device_that_takes_them_in_turn() -> None:
    model, batch = OnlyDropout(), {"x": torch.randn(8, 6)}
    program = planned(model, batch, {"dp": 2}, Constraint("*", ("S(0)",), what="input"), microbatches=2)
    assert program.plan.microbatches == 2
    assert_same_draws(model, batch, program)


class TwoNoises(nn.Module):
    """Two equal calls that draw: they must not become one, nor be computed once for all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        one, other = torch.empty_like(x).exponential_(), torch.empty_like(x).exponential_()
        return ((x + one - other) * self.weight + torch.normal(0.0, 1.0, (5,))).square().mean()


def test_equal_draws_stay_apart_and_are_new_at_every_step() -> None:
    model, batch = TwoNoises(), {"x": torch.randn(4, 5)}
    program = planned(model, batch, {"dp": 2}, Constraint("*", ("S(0)",), what="input"))
    assert_same_draws(model, batch, program)
    losses, _ = eager_steps(model, batch, 7)
    assert len(set(losses)) == STEPS


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, n_positions=32, vocab_size=96, bos_token_id=1, eos_token_id=1, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config).train()


class LossOnly(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.inner(input_ids=input_ids, labels=labels).loss


def test_exact_mode_on_gpt2_with_its_own_dropout() -> None:
    """Embeddings, attention weights and residuals drop with probability 0.1, over samples and on the second axis."""
    ids = torch.randint(0, 96, (4, 12), generator=torch.Generator().manual_seed(1))
    model, batch = LossOnly(gpt2()), {"input_ids": ids, "labels": ids}
    rules = [Constraint("*", ("S(0)",), what="input", axis="dp"), Constraint("*", ("R",), what="input", axis="tp")]
    rules += [Constraint("*dropout*", ("S(0)",), axis="dp"), Constraint("*dropout*", ("S",), axis="tp", soft=True)]
    program = planned(model, batch, {"dp": 2, "tp": 2}, *rules)
    dropouts = [placements[0] for placements in operands_of(program, "aten.native_dropout.default")]
    assert len(dropouts) == 7 and all(placement.startswith("S(0)") for placement in dropouts)
    assert any(placement.count("S") == 2 for placement in dropouts), dropouts
    assert_same_draws(model, batch, program)
