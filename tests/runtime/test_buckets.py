"""Gradients that share a bucket's buffer, and sums that nobody waits for in the midst of a step."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar import runtime as rt
from autopar.runtime import comm, redistribute
from tests.rank_pool import RankPool


class Selective(rt.Program):
    """A mean loss of two microbatches: `early` is used in the first alone, `idle` in none, `weight` in both."""

    AXES = {"dp": 2}  # noqa: RUF012
    MICROBATCHES = 2
    INPUTS = (
        rt.Input("x", (8, 3), torch.float32, "S(0)", microbatch_dim=0),
        rt.Input("target", (8,), torch.int64, "S(0)", microbatch_dim=0),
    )

    def __init__(self, mesh: rt.RankMesh) -> None:
        super().__init__(mesh)
        self.weight = rt.Parameter((5, 3), stored="I", uses=("R",))
        self.idle = rt.Parameter((7,), stored="I", uses=("R",))
        self.early = rt.Parameter((5,), stored="I", uses=("R",))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        dp = self.mesh["dp"]
        count = rt.start_valid_count(target, (dp,), ignore_index=-100)
        logits = F.linear(x, self.weight, self.early if self.microbatch == 0 else None)
        loss = rt.cross_entropy(logits, target, reduction_axes=(dp,), num_classes=5, count=count)
        return redistribute(loss, dp, "P -> I", wait=False)


def selective(rank: int, world: int) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(8, 3), torch.tensor([0, 1, -100, 3, 4, -100, -100, 2])
    weight, early = torch.randn(5, 3, requires_grad=True), torch.randn(5, requires_grad=True)
    losses = [F.cross_entropy(F.linear(x[:4], weight, early), target[:4])]
    losses.append(F.cross_entropy(F.linear(x[4:], weight), target[4:]))
    sum(losses).backward()
    part = rt.build(Selective)
    part.load_full_state_dict({"weight": weight, "early": early, "idle": torch.zeros(7)})
    torch.testing.assert_close(part(x, target), sum(losses).detach())
    kept = []
    for scale in (1, 2):  # gradients add up over two steps
        torch.testing.assert_close(part.train_step(x, target), sum(losses).detach())
        assert set(part.full_gradients()) == {"weight", "early"}
        torch.testing.assert_close(part.full_gradients(), {"weight": weight.grad * scale, "early": early.grad * scale})
        kept.append(part.weight.grad)
    part.zero_grad()
    with rt.count_bytes() as counted:
        part.train_step(-x, target)
    assert counted["all_reduce", "dp"] == (5 * 3 + 5) * 4 + 2 * (4 + 4)  # gradients; a count and a loss a microbatch
    torch.testing.assert_close(kept[1].to_local(), weight.grad * 2)  # a gradient that is kept is not overwritten


def test_parameters_without_a_gradient_leave_their_bucket(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(selective)


class Decomposed(rt.Program):
    """What is stored whole is cut and put together again on its way to its use, and so is its gradient on its way home:
    what a plan takes where a sum of all ranks costs more than its two halves. Of seven elements two ranks have unlike
    parts; of a matrix, columns."""

    AXES = {"dp": 2}  # noqa: RUF012
    MICROBATCHES = 1
    INPUTS = (rt.Input("x", (8, 6), torch.float32, "S(0)"),)

    def __init__(self, mesh: rt.RankMesh) -> None:
        super().__init__(mesh)
        self.matrix = rt.Parameter((7, 6), stored="I", uses=("S(1) -> R",))
        self.biases = rt.Parameters(
            **{f"bias_{n}": rt.Parameter((7,), stored="I", uses=("S(0) -> R",)) for n in range(4)}
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.matrix)
        for n in range(4):
            y = torch.tanh(y + getattr(self.biases, f"bias_{n}"))
        return redistribute(y.square().sum(), self.mesh["dp"], "P -> I")


def decomposed(rank: int, world: int) -> int:
    torch.manual_seed(0)
    x, matrix = torch.randn(8, 6), torch.randn(7, 6, requires_grad=True)
    biases = [torch.randn(7, requires_grad=True) for _ in range(4)]
    y = F.linear(x, matrix)
    for bias in biases:
        y = torch.tanh(y + bias)
    y.square().sum().backward()
    part = rt.build(Decomposed)
    names = {f"biases.bias_{n}": bias for n, bias in enumerate(biases)}
    part.load_full_state_dict({"matrix": matrix, **names})
    started = []
    plain = comm.start_all_gather
    with mock.patch.object(comm, "start_all_gather", lambda *of: started.append(of) or plain(*of)):
        part.train_step(x)
    found = part.full_gradients()
    for name, whole in {"matrix": matrix, **names}.items():
        torch.testing.assert_close(found[name], whole.grad)
    return len(started)


def test_gradients_of_what_is_cut_and_gathered_go_home_together(rank_pool: Callable[[int], RankPool]) -> None:
    """Of each of two ways one gather when the step begins and one on the way home: the biases not one each."""
    assert rank_pool(2).run(decomposed) == [4, 4]
