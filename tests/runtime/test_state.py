"""Weights in and out: round trips, checkpoints across world sizes, accumulation, clear errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar import runtime as rt
from autopar.runtime import redistribute
from tests.rank_pool import RankPool
from tests.runtime.programs import Model, Plan, Sizes, batch, emitted

UNEVEN = Sizes(vocab=29, hidden=13)


def weights(sizes: Sizes) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return Model(sizes).state_dict()


def built(sizes: Sizes, plan: Plan) -> rt.Rank:
    return rt.build(emitted(sizes, plan))


def round_trip(rank: int, world: int, plan: Plan) -> None:
    expected = weights(UNEVEN)
    part = built(UNEVEN, plan)
    part.load_full_state_dict(expected)
    torch.testing.assert_close(part.full_state_dict(cpu_offload=True), expected, rtol=0, atol=0)
    torch.manual_seed(rank)  # the first rank's model is what counts
    part.init_from(Model(UNEVEN))
    torch.testing.assert_close(part.full_state_dict(), expected, rtol=0, atol=0)
    assert set(part.state_dict()) == set(expected) - {"head.weight"}
    assert all(isinstance(tensor, DTensor) for tensor in part.state_dict().values())


@pytest.mark.parametrize(
    "plan",
    [Plan({"dp": 4}, zero=1), Plan({"dp": 2, "tp": 2}, zero=3), Plan({"a": 2, "dp": 2}, zero=3)],
    ids=str,
)
def test_full_state_round_trip(rank_pool: Callable[[int], RankPool], plan: Plan) -> None:
    rank_pool(4).run(round_trip, plan)


def save(rank: int, world: int, folder: str) -> None:
    part = built(UNEVEN, Plan({"dp": 2, "tp": 2}, zero=3))
    part.load_full_state_dict(weights(UNEVEN))
    dcp.save(part.state_dict(), checkpoint_id=folder)


def load(rank: int, world: int, folder: str, plan: Plan) -> None:
    part = built(UNEVEN, plan)
    state = part.state_dict()
    dcp.load(state, checkpoint_id=folder)
    torch.testing.assert_close(part.full_state_dict(), weights(UNEVEN), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_checkpoint_of_four_ranks_loads_on_two(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    rank_pool(4).run(save, str(tmp_path))
    rank_pool(2).run(load, str(tmp_path), Plan({"dp": 2}, zero=1))
    rank_pool(2).run(load, str(tmp_path), Plan({"tp": 2}))


def accumulate(rank: int, world: int) -> None:
    """Two steps without clearing gradients give the sum; a local shard gives what the global batch gives."""
    sizes, plan = Sizes(), Plan({"dp": 2}, zero=3)
    part = built(sizes, plan)
    part.load_full_state_dict(weights(sizes))
    part.train_step(**batch(sizes, 0))
    once = part.full_gradients()
    shard = {name: tensor.chunk(2)[rank] for name, tensor in batch(sizes, 0).items()}
    part.train_step(local=True, **shard)
    torch.testing.assert_close(part.full_gradients(), {name: 2 * grad for name, grad in once.items()})


def test_gradients_accumulate_and_shards_are_taken(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(accumulate)


def norms(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = Model(UNEVEN).double()
    part = rt.build(emitted(UNEVEN, Plan({"dp": 2, "tp": 2}, zero=3), torch.float64))
    part.init_from(model)
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        model.zero_grad()
        part.zero_grad()
        model(**batch(UNEVEN, 0)).backward()
        part.train_step(**batch(UNEVEN, 0))
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        torch.testing.assert_close(part.clip_grad_norm_(0.1, norm_type), expected, check_dtype=False)
        found = part.full_gradients()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, check_dtype=False, rtol=1e-6, atol=1e-12)


def test_clipped_norms_of_any_order(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(4).run(norms)


class Counting(rt.Program):
    """Counts its calls in a buffer, scales by a constant, and has a parameter that nothing uses."""

    AXES = {"dp": 2}  # noqa: RUF012
    INPUTS = (rt.Input("x", (4, 3), torch.float32, "S(0)"),)

    def __init__(self, mesh: rt.RankMesh) -> None:
        super().__init__(mesh)
        self.calls = rt.Buffer((), torch.int64, "R")
        self.table = rt.Buffer((4,), torch.float32, "S(0)")
        self.constant = rt.Buffer((), torch.float32, "R", persistent=False)
        self.linear = rt.Parameters(
            weight=rt.Parameter((5, 3), stored="S(0)", uses=("R", "S(0)")),
            frozen=rt.Parameter((5,), stored="R", uses=("R",), requires_grad=False),
            idle=rt.Parameter((2,), stored="I", uses=("R",)),
        )

    def forward(self, x: Tensor) -> Tensor:
        dp = self.mesh["dp"]
        y = (x @ self.linear.weight.t() + self.linear.frozen).square().sum() * self.constant
        rows = redistribute(self.linear.weight_1, dp, "S(0) -> I", 5)
        self.update(calls=self.calls + 1)
        return redistribute(y, dp, "P -> I") + rows.sum() + 0 * redistribute(self.table, dp, "S(0) -> I").sum()


class Reference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("constant", torch.tensor(0.5), persistent=False)
        self.linear = nn.Linear(3, 5, bias=False)
        self.linear.register_parameter("frozen", nn.Parameter(torch.ones(5), requires_grad=False))
        self.linear.register_parameter("idle", nn.Parameter(torch.ones(2)))


def odd_program(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model, x = Reference(), torch.arange(12.0).view(4, 3) / 8
    part = rt.build(Counting)
    part.init_from(model)
    w = model.linear.weight
    expected = (x @ w.t() + 1).square().sum() * 0.5 + w.sum()
    expected.backward()
    for calls in (1, 2):
        part.zero_grad()
        torch.testing.assert_close(part.train_step(x), expected.detach())
        assert set(part.full_gradients()) == {"linear.weight"}
        torch.testing.assert_close(part.full_gradients()["linear.weight"], w.grad)
        assert part.full_state_dict()["calls"] == calls
    torch.testing.assert_close(part(x), expected.detach())
    assert set(part.full_state_dict()) == set(model.state_dict())
    torch.testing.assert_close(part.full_state_dict()["table"], torch.arange(4.0))


def test_buffers_second_uses_frozen_and_idle_parameters(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(odd_program)


def test_errors_name_what_was_expected() -> None:
    part = built(Sizes(), Plan())
    state = weights(Sizes())
    state["norm.weight"] = torch.ones(3)
    state["extra"] = state.pop("norm.bias")
    with pytest.raises(rt.ProgramError, match=r"missing: norm.bias; unexpected: extra; .*norm.weight: expected \(8,\)"):
        part.load_full_state_dict(state)
    with pytest.raises(rt.ProgramError, match="expected the inputs tokens, labels; found 1 by position"):
        part.train_step(torch.ones(8, 6))
    with pytest.raises(rt.ProgramError, match=r"input tokens: expected the global batch, \(8, 6\) torch.int64"):
        part.train_step(torch.ones(4, 6), torch.ones(4, 6))
    assert part.train_step(**batch(Sizes(), 0)).isnan(), "weights that were never loaded must show"


def wrong_world(rank: int, world: int) -> str:
    with pytest.raises(rt.WorldError) as raised:
        built(Sizes(), Plan({"dp": 2, "tp": 2}))
    return str(raised.value)


def test_world_unlike_the_mesh(rank_pool: Callable[[int], RankPool]) -> None:
    message = rank_pool(2).run(wrong_world)[0]
    assert "needs 4 ranks (mesh dp=2 × tp=2), found 2 running" in message
    assert "torchrun --nproc-per-node 4" in message
