"""A gradient that autograd hands out may share memory with one that is still to be read: nothing is added to it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autopar import runtime as rt
from autopar.runtime import redistribute
from tests.rank_pool import RankPool


class Residual(rt.Program):
    """A parameter that is used as summands of one axis, and of another: both gradients are home as they are made, and
    the first is the gradient of what is added up, too."""

    AXES = {"a": 2, "b": 2}  # noqa: RUF012
    INPUTS = (rt.Input("x", (6,), torch.float32, "I I"),)

    def __init__(self, mesh: rt.RankMesh) -> None:
        super().__init__(mesh)
        self.scale = rt.Parameter((6,), stored="I I", uses=("I I",))
        self.offset = rt.Parameter((2, 3), stored="I I", uses=("I P", "P I"))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.mesh["a"], self.mesh["b"]
        early = redistribute(x * self.scale, b, "I -> P")
        middle = redistribute(early + x.tanh() * self.offset.view(6), b, "P -> I")
        late = redistribute(redistribute(middle, a, "I -> P") + self.offset_1.view(6), a, "P -> I")
        return (late * late).sum()


def residual(rank: int, world: int) -> None:
    x, scale = torch.arange(6.0), torch.linspace(1, 2, 6).requires_grad_()
    offset = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
    late = x * scale + x.tanh() * offset.view(6) + offset.view(6)
    loss = (late * late).sum()
    loss.backward()
    part = rt.build(Residual)
    part.load_full_state_dict({"scale": scale, "offset": offset})
    torch.testing.assert_close(part.train_step(x), loss.detach())
    torch.testing.assert_close(part.full_gradients(), {"scale": scale.grad, "offset": offset.grad})


def test_a_gradient_that_another_reads_is_not_changed(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(4).run(residual)
