"""Backward passes in forward and operators that call functions are refused with their line; transforms are carried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from tests.carried.compared import differences, planned
from tests.carried.models import Net, batch


def _grad(net: Net, h: Tensor) -> Tensor:
    return torch.autograd.grad(net.gate(h).sum(), h, create_graph=True)[0]


def _backward(net: Net, h: Tensor) -> Tensor:
    net.gate(h).sum().backward(retain_graph=True)
    return h


def _cond(net: Net, h: Tensor) -> Tensor:
    chosen: Any = torch.cond(h.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (h,))
    return chosen


def _while(net: Net, h: Tensor) -> Tensor:
    from torch._higher_order_ops import while_loop

    with torch.no_grad():
        (looped,) = while_loop(lambda x: x.sum() < 9, lambda x: (x + 1,), (h.detach(),))
    return h + looped


def _map(net: Net, h: Tensor) -> Tensor:
    from torch._higher_order_ops import map as each

    mapped: Any = each(lambda x: x.sin(), h)
    return mapped


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (_grad, r"found torch\.autograd\.grad at\n.*test_transforms\.py:\d+: return torch\.autograd\.grad"),
        (_backward, r"found torch\.autograd\.backward at\n.*test_transforms\.py:\d+"),
        (_cond, r"found cond, .*\n.*models\.py:\d+: return"),
        (_while, r"found while_loop, .*\n.*models\.py:\d+: return"),
        (_map, r"found map_impl, .*\n.*models\.py:\d+: return"),
    ],
)
def test_what_calls_functions_is_refused_with_its_line(part: Callable[[Net, Tensor], Tensor], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        planned(Net(part), batch(), dp=2)


def _vmap(net: Net, h: Tensor) -> Tensor:
    mapped: Any = torch.vmap(lambda x: x.sin() * x.sum())(h)
    return mapped


def test_vmap_is_written_out() -> None:
    assert differences(Net(_vmap), batch(), dp=2) == []


class Rows(nn.Module):
    """A product for each row with what the module stores."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(6, 6)
        self.register_buffer("kept", torch.randn(6, 6))

    def forward(self, h: Tensor) -> Tensor:
        mapped: Tensor = torch.vmap(lambda row: torch.tanh(self.own.weight @ row) + self.kept @ row)(h)
        return mapped


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Rows() for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


@pytest.mark.parametrize("how", [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "microbatches": 2}])
def test_vmap_over_products_in_blocks(how: dict[str, int]) -> None:
    """Torch leaves the product's tensors behind in the graph as constants that nothing reads."""
    torch.manual_seed(0)
    assert differences(Blocks(2), (torch.randn(8, 6),), **how) == []


def test_tracing_that_ends_within_vmap_leaves_torch_as_it_was() -> None:
    class Ended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            mapped: Tensor = torch.vmap(lambda row: self.own(row) * row.sum().item())(x)
            return mapped.sum()

    with pytest.raises(TraceError):
        planned(Ended(), (torch.randn(8, 6),), dp=2)
    torch.randn(2)
