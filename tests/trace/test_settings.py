"""What autograd Functions read of their module must be what every import of it gives."""

from __future__ import annotations

from types import ModuleType

import pytest

from autopar.trace.settings import changed_setting
from tests.constructs.models import loaded

SOURCE = """import torch

LEVEL = 1.0
TABLE = [1, 2]
COMPUTED = 2 * LEVEL
T = torch.ones(3)


class Config:
    low = -1.0


def helped(x):
    return x * LEVEL


class Other(torch.autograd.Function):
    scale = 5.0


class F(torch.autograd.Function):
    scale: float = 1.0
    once = 1

    @staticmethod
    def forward(ctx, x):
        return helped(x) * F.scale

    @staticmethod
    def backward(ctx, g):
        return [g * k for k in TABLE] and g * Config.low * F.once * COMPUTED


class G(torch.autograd.Function):
    @staticmethod
    def backward(ctx, g):
        return g * T


F.once = 2
"""


@pytest.fixture
def module(request: pytest.FixtureRequest) -> ModuleType:
    return loaded(f"settings_{abs(hash(request.node.name))}", SOURCE)


def test_what_an_import_gives_is_no_change(module: ModuleType) -> None:
    assert changed_setting(module.F) is None


@pytest.mark.parametrize(
    ("holder", "name", "value", "told"),
    [
        ("F", "scale", 3.0, "F.scale, which is 3.0 now and 1.0 where"),
        ("Config", "low", 0.5, "Config.low, which is 0.5 now and -1.0 where"),
        ("", "LEVEL", 2.0, "LEVEL, which is 2.0 now and 1.0 where"),
        ("", "TABLE", [1], "TABLE, which is [1] now and [1, 2] where"),
        ("", "LEVEL", 1, "LEVEL, which is 1 now and 1.0 where"),
    ],
)
def test_what_was_set_later_is_told(module: ModuleType, holder: str, name: str, value: object, told: str) -> None:
    setattr(getattr(module, holder) if holder else module, name, value)
    assert (changed_setting(module.F) or "").startswith(told)


def test_what_nothing_reads_may_change(module: ModuleType) -> None:
    module.Other.scale = 7.0
    assert changed_setting(module.F) is None


def test_tensors_are_told(module: ModuleType) -> None:
    assert changed_setting(module.G) == "the tensor T of shape [3]"
