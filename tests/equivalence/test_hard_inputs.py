"""What goes in and what comes out: integers and masks, several outputs, ignored targets, evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Constraint
from tests.equivalence.hard import assert_equal, operands_of, pin, planned, state_of, template
from tests.equivalence.hard_jobs import evaluated
from tests.rank_pool import pool

pytestmark = pytest.mark.ranks
IGNORED = -100


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Masked(nn.Module):
    """Takes numbers of every kind: tokens of 64 and 32 bits, a boolean mask, bytes, and a float weight a sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.kinds = nn.Embedding(30, 16), nn.Embedding(4, 16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 30)

    def forward(self, tokens: Tensor, kinds: Tensor, mask: Tensor, levels: Tensor, weight: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.kinds(kinds) * (levels > 100)[:, None, None]
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None]).transpose(1, 2).flatten(2)
        x = torch.where(mask[..., None], x, 0.0)
        losses = F.cross_entropy(self.head(x).transpose(1, 2), tokens.long(), reduction="none")
        kept = losses.masked_fill(~mask, 0.0).sum(1) / mask.sum(1)
        return (kept * weight).sum() / weight.sum()


def masked_batch(count: int = 8) -> dict[str, Tensor]:
    lengths = torch.arange(count) % 5 + 1
    return {
        "tokens": torch.randint(0, 30, (count, 6), generator=generator(1)),
        "kinds": torch.randint(0, 4, (count, 6), generator=generator(2), dtype=torch.int32),
        "mask": torch.arange(6)[None] < lengths[:, None],
        "levels": torch.randint(0, 256, (count,), generator=generator(3), dtype=torch.uint8),
        "weight": torch.rand(count, generator=generator(4)),
    }


@pytest.mark.sampled(only=("7-{'dp': 4}", "8-{'dp': 2, 'tp': 2}"))
@pytest.mark.parametrize(("count", "choices"), [(8, {"dp": 4}), (7, {"dp": 4}), (8, {"dp": 2, "tp": 2})], ids=str)
def test_integer_and_boolean_inputs(count: int, choices: dict[str, int]) -> None:
    model, batch = Masked(), masked_batch(count)
    program = template(model, batch, **choices)
    assert all(layout.startswith("S(0)") for layout in program.input_layout.values())
    assert_equal(model, batch, program)


def test_integer_and_boolean_inputs_change_their_placement() -> None:
    """Inputs that arrive split by position are gathered and exchanged: bytes and booleans too."""
    model, batch = Masked(), masked_batch()
    rules = [Constraint(name, ("S(1)",), what="input") for name in ("tokens", "kinds", "mask")]
    program = planned(model, batch, {"x": 2}, *rules, Constraint("levels", ("S(0)",), what="input"))
    assert program.input_layout["mask"] == "S(1)" and program.input_layout["levels"] == "S(0)"
    assert_equal(model, batch, program)


class Tagger(nn.Module):
    """A head over classes, with a loss that leaves targets out."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 10)
        self.register_buffer("weight", torch.linspace(0.5, 2, 10))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.body(x)))
        if self.loss == "nll":
            return F.nll_loss(F.log_softmax(logits, -1), target, ignore_index=IGNORED)
        weight = self.weight if self.loss == "weighted" else None
        smoothing = 0.1 if self.loss == "smoothed" else 0.0
        return F.cross_entropy(logits, target, weight, ignore_index=IGNORED, label_smoothing=smoothing)


def tagged(count: int) -> dict[str, Tensor]:
    """The first rank's targets are all ignored, the second holds one, the others hold most of theirs."""
    target = torch.randint(0, 10, (count,), generator=generator(5))
    target[:3] = IGNORED
    target[-1] = IGNORED
    return {"x": torch.randn(count, 8, generator=generator(6)), "target": target}


@pytest.mark.sampled
@pytest.mark.parametrize("loss", ["plain", "nll", "weighted", "smoothed"])
@pytest.mark.parametrize(("count", "choices"), [(8, {"dp": 4}), (10, {"dp": 4}), (8, {"tp": 4})], ids=str)
def test_ignored_targets_where_ranks_hold_unequal_counts(loss: str, count: int, choices: dict[str, int]) -> None:
    """The mean is over the targets that count, of all ranks: 0, 1, 2 and 1 of 2 each."""
    model, batch = Tagger(loss), tagged(count)
    program = template(model, batch, **choices)
    if "dp" in choices:
        assert program.input_layout == {"x": "S(0)", "target": "S(0)"}
    assert_equal(model, batch, program)


@pytest.mark.parametrize("loss", ["plain", "smoothed"])
def test_ignored_targets_over_split_samples_and_microbatches(loss: str) -> None:
    model, batch = Tagger(loss), tagged(8)
    rule = Constraint("*", ("S(0)",), what="input")
    only = {"aten.cross_entropy_loss.default": ("S(0)", "S(0)")}
    program = planned(model, batch, {"dp": 2}, rule, microbatches=2, only=only)
    assert operands_of(program, "aten.cross_entropy_loss.default") == [["S(0)", "S(0)"]]
    assert_equal(model, batch, program)


def test_ignored_targets_over_split_classes() -> None:
    model, batch = Tagger("plain"), tagged(8)
    program = planned(
        model, batch, {"tp": 4}, *pin("head.*", "S(0)"), only={"aten.cross_entropy_loss.default": ("S(1)", "R")}
    )
    assert operands_of(program, "aten.cross_entropy_loss.default") == [["S(1)", "R"]]
    assert_equal(model, batch, program)


class Several(nn.Module):
    """Batch norm and dropout below two heads; returns a mapping with a nested pair, and what was counted."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.drop = nn.Linear(8, 10), nn.BatchNorm1d(10), nn.Dropout(0.5)
        self.first, self.second = nn.Linear(10, 6), nn.Linear(10, 3)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        hidden = self.drop(self.norm(torch.relu(self.body(x)))) * mask[:, None]
        first, second = self.first(hidden), self.second(hidden)
        return {
            "logits": (first, second),
            "best": first.argmax(-1),
            "count": mask.sum(),
            "energy": hidden.square().mean(),
        }


def evaluation() -> tuple[nn.Module, dict[str, Tensor]]:
    model = Several()
    for _ in range(3):
        model(torch.randn(16, 8, generator=generator(1)), torch.ones(16, dtype=torch.bool))
    return model.eval(), {"x": torch.randn(8, 8, generator=generator(7)), "mask": torch.arange(8) % 3 > 0}


def flat(outputs: dict[str, Any]) -> list[Tensor]:
    return [*outputs["logits"], outputs["best"], outputs["count"], outputs["energy"]]


INFERENCE = {
    "dp": ({"dp": 4}, [Constraint("*", ("S(0)",), what="input")]),
    "tp": ({"tp": 4}, [Constraint("*", ("R",), what="input"), *pin("body.*", "S(0)"), *pin("first.weight", "S(1)")]),
    "dp_tp": (
        {"dp": 2, "tp": 2},
        [Constraint("*", ("S(0)",), what="input", axis="dp"), *pin("*.weight", "S(0)", "tp")],
    ),
}


@pytest.mark.parametrize("name", INFERENCE)
def test_evaluation_plan_returns_all_outputs(name: str) -> None:
    """Running statistics are used and kept, nothing is dropped, and every output is whole on every rank."""
    axes, rules = INFERENCE[name]
    model, batch = evaluation()
    program = planned(model, batch, axes, *rules, mode="inference")
    assert program.plan.mode == "inference" and "dropout" not in program.source and "TRAINING = False" in program.source
    expected = flat(model(**batch))
    for first, second, training, said in pool(4).run(evaluated, program.source, state_of(model), batch):
        assert not training and "expected to stay in evaluation mode" in said
        for outputs in (first, second):
            assert len(outputs) == len(expected)
            for found, wanted in zip(outputs, expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_inference_plan_holds_no_optimizer_state_nor_gradients() -> None:
    """The defaults of `parallelize` do for inference, and a plan made so says what it is for."""
    model, batch = evaluation()
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    plan = autopar.parallelize(model, mesh, batch, mode="inference").plan
    kinds = {kind for kind, size in plan.predicted.memory.items() if size}
    assert "parameters" in kinds and not kinds & {"optimizer", "gradients", "activation gradients"}
    assert autopar.parallelize(model, mesh, batch, plan=plan).plan.mode == "inference"


def test_a_training_program_refuses_to_evaluate() -> None:
    """Its dropout and batch norm are those of training, so eval() must not seem to work."""
    model = Tagger("plain")
    program = template(model, tagged(8), dp=2)
    for _, _, training, said in pool(2).run(evaluated, program.source, state_of(model), tagged(8)):
        assert training and "expected to stay in training mode" in said and "model.eval()" in said
