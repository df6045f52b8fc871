"""Routers that forward converts to the dtype in which they compute, as those of Switch Transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace import trace
from tests.trace.test_writes import assert_traced

Convert = Callable[[nn.Module, Tensor], nn.Module]


class Router(nn.Module):
    def __init__(self, convert: Convert) -> None:
        super().__init__()
        self.classifier, self.convert = nn.Linear(4, 3), convert

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.convert(self.classifier, x)
        return self.classifier(x)


class Model(nn.Module):
    def __init__(self, convert: Convert) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.router = nn.Linear(4, 4), Router(convert)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.router(self.linear(x))).mean()


def _batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize(
    "convert",
    [lambda m, x: m.to(x.dtype), lambda m, x: m.to(x), lambda m, x: m.to(x.device), lambda m, x: m.float()],
    ids=["dtype", "tensor", "device", "float"],
)
def test_what_changes_nothing_is_traced(convert: Convert) -> None:
    assert_traced(Model(convert), _batch())


def test_another_dtype_is_refused_with_its_line() -> None:
    said = (
        r"'weight' of a Linear in torch.float32 on cpu, found it converted to torch.bfloat16.*\n.*conversions\.py:\d+"
    )
    with pytest.raises(TraceError, match=said):
        trace(Model(lambda module, x: module.to(torch.bfloat16)), _batch())
