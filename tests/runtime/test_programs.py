"""Hand-written programs against one device: loss, each gradient, clipped norm, weights after steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar import runtime as rt
from tests.rank_pool import RankPool
from tests.runtime.programs import Model, Plan, Sizes, batch, emitted

UNEVEN = Sizes(vocab=29, width=8, hidden=13)
NUM_STEPS = 3

PLANS = {
    "dp2": Plan({"dp": 2}),
    "zero1": Plan({"dp": 2}, zero=1),
    "zero2": Plan({"dp": 2}, zero=2, microbatches=2),
    "zero3": Plan({"dp": 2}, zero=3),
    "zero3, 2 microbatches": Plan({"dp": 2}, zero=3, microbatches=2),
    "zero3 along dim 1": Plan({"dp": 4}, zero=3, zero_dim=1),
    "dp4, 2 microbatches": Plan({"dp": 4}, microbatches=2),
    "zero1 on 4": Plan({"dp": 4}, zero=1),
    "tp2": Plan({"tp": 2}),
    "tp4": Plan({"tp": 4}),
    "dp2 tp2": Plan({"dp": 2, "tp": 2}),
    "tp2 dp2": Plan({"tp": 2, "dp": 2}, zero=1, zero_dim=1),
    "zero3 dp2 tp2": Plan({"dp": 2, "tp": 2}, zero=3),
    "two axes of shards": Plan({"node": 2, "dp": 2}, zero=3, batch_axes=("node", "dp")),
    "two axes of shards, kept": Plan({"node": 2, "dp": 2}, zero=1, batch_axes=("node", "dp"), microbatches=2),
}


def reference(sizes: Sizes) -> tuple[dict[str, Tensor], list[dict[str, object]]]:
    """The single-device run in float64: initial weights, then the record of each step."""
    torch.manual_seed(0)
    model = Model(sizes).double()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    records = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(**batch(sizes, step))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        records.append({"loss": loss.item(), "gradients": gradients, "norm": norm.item(), "weights": weights})
    return start, records


def train(
    rank: int,
    world: int,
    sizes: Sizes,
    plan: Plan,
    start: dict[str, Tensor],
    expected: list[dict[str, object]],
) -> None:
    """Runs the emitted program on a rank and compares everything with the single-device run."""
    part = rt.build(emitted(sizes, plan, torch.float64))
    part.load_full_state_dict(start)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2, eps=1e-6)
    for step, record in enumerate(expected):
        optimizer.zero_grad()
        loss = part.train_step(**batch(sizes, step))
        torch.testing.assert_close(loss.item(), record["loss"], rtol=1e-8, atol=1e-10)
        gradients = part.full_gradients()
        del gradients["head.weight"]
        torch.testing.assert_close(gradients, record["gradients"], rtol=1e-6, atol=1e-9)
        norm = part.clip_grad_norm_(0.5)
        torch.testing.assert_close(norm.item(), record["norm"], rtol=1e-6, atol=0)
        optimizer.step()
        torch.testing.assert_close(part.full_state_dict(), record["weights"], rtol=1e-6, atol=1e-9)


CASES = [(name, UNEVEN) for name in PLANS] + [(name, Sizes()) for name in ("zero3", "zero1 on 4", "dp2 tp2")]


@pytest.mark.sampled(
    only=(
        "dp2-29",
        "zero1-29",
        "zero2-29",
        "zero3, 2 microbatches-29",
        "zero3 along dim 1-29",
        "dp4, 2 microbatches-29",
        "tp4-29",
        "two axes of shards-29",
        "zero3-30",
        "zero1 on 4-30",
        "dp2 tp2-30",
    )
)
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=lambda value: getattr(value, "vocab", value))
def test_program_equals_one_device(rank_pool: Callable[[int], RankPool], name: str, sizes: Sizes) -> None:
    plan = PLANS[name]
    world = torch.tensor(list(plan.axes.values())).prod().item()
    start, expected = reference(sizes)
    rank_pool(int(world)).run(train, sizes, plan, start, expected)


def test_one_rank_needs_no_process_group() -> None:
    start, expected = reference(Sizes())
    train(0, 1, Sizes(), Plan(), start, expected)
