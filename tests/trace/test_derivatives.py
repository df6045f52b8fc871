"""Derivatives that forward takes are refused before torch begins them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from autopar.errors import TraceError
from autopar.trace import trace

Of = Callable[[Tensor], Tensor]


def _dual(f: Of, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x))).tangent


WAYS: dict[str, Callable[[Of, Tensor], Tensor]] = {
    "grad": lambda f, x: grad(lambda y: f(y).sum())(x),
    "grad of each": lambda f, x: vmap(grad(lambda y: f(y).sum()))(x),
    "vjp": lambda f, x: vjp(f, x)[1](x)[0],
    "jvp": lambda f, x: jvp(f, (x,), (x,))[1],
    "jacobians of each": lambda f, x: vmap(jacrev(f))(x),
    "jacobians of each, forward": lambda f, x: vmap(jacfwd(f))(x),
    "hessians of each": lambda f, x: vmap(hessian(lambda y: f(y).sum()))(x),
    "dual numbers": _dual,
}


class Slopes(nn.Module):
    def __init__(self, way: Callable[[Of, Tensor], Tensor]) -> None:
        super().__init__()
        self.way, self.factor = way, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(lambda y: torch.tanh(y * self.factor), x).square().mean()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at its first derivative forward
@pytest.mark.parametrize("way", WAYS)
def test_derivatives_are_refused_and_torch_is_left_able_to_take_them(way: str) -> None:
    """An export that ended inside of one left torch in it: "Nested forward mode AD is not supported" from then on."""
    model, x = Slopes(WAYS[way]), torch.randn(3, 4)
    expected = model(x)
    with pytest.raises(TraceError, match=r"computes no gradients.*\n.*test_derivatives\.py:\d+"):
        trace(model, (x,))
    assert all(torch.isfinite(Slopes(other)(x)) for other in WAYS.values())
    torch.testing.assert_close(model(x), expected)
