"""Learning rates for batches of another size: the rules as their papers state them, and which optimizer takes which."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autopar import runtime as rt
from autopar.runtime.batch_rules import suggested_rate


def test_goyals_rate_and_warm_up() -> None:
    """ResNet-50: 0.1 for 256 images, 3.2 for 8,192, from 0.1 on over the first steps."""
    found = suggested_rate(0.1, 256, 8192, torch.optim.SGD)
    assert float(found) == pytest.approx(3.2) and found.rule == "linear"
    rates = [found.at(step, 5) for step in range(7)]
    assert rates[4:] == pytest.approx([3.2] * 3) and rates[0] == pytest.approx(0.1 + 3.1 / 5)
    assert rates == sorted(rates) and found.at(0, 0) == pytest.approx(3.2)
    assert str(found) == "learning rate 3.2 = 0.1 · (8192 / 256), by the linear rule"


def test_adams_rate_grows_with_the_root() -> None:
    for optimizer in (torch.optim.AdamW, "adam", torch.optim.Adafactor([nn.Parameter(torch.ones(2, 2))])):
        found = suggested_rate(3e-4, 32, 128, optimizer)
        assert found.rate == pytest.approx(6e-4) and found.rule == "square root"
    assert suggested_rate(3e-4, 128, 32).rate == pytest.approx(1.5e-4)  # of fewer samples it falls
    assert suggested_rate(3e-4, 32, 128, rule="linear").rate == pytest.approx(1.2e-3)
    assert str(suggested_rate(0.1, 2, 8)) == "learning rate 0.2 = 0.1 · √(8 / 2), by the square root rule"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"optimizer": torch.optim.LBFGS}, "found lbfgs; say rule='linear'"),
        ({"rule": "cubic"}, "found 'cubic'"),
        ({"base": math.nan}, "expected base as a positive number"),
        ({"base_batch": 0}, "expected base_batch as a positive number of samples, found 0"),
        ({"batch": 2.5}, "expected batch as a positive number of samples, found 2.5"),
    ],
)
def test_what_has_no_rule_is_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(rt.ProgramError, match=told):
        suggested_rate(**{"base": 0.1, "base_batch": 2, "batch": 8, **given})  # type: ignore[arg-type]


class OfEight(rt.Program):
    """Steps of eight samples."""

    AXES = {"dp": 1}  # noqa: RUF012
    MICROBATCHES = 1
    INPUTS = (rt.Input("scale", (), torch.float32), rt.Input("x", (8, 3), torch.float32, "S(0)"))

    def __init__(self, mesh: rt.RankMesh) -> None:
        super().__init__(mesh)
        self.weight = rt.Parameter((3,), stored="I", uses=("R",))

    def forward(self, scale: Tensor, x: Tensor) -> Tensor:
        return (x * self.weight * scale).sum()


def test_a_rank_knows_its_batch() -> None:
    rank = rt.build(OfEight)
    assert float(rank.suggested_learning_rate(0.1, 2)) == pytest.approx(0.2)
    assert float(rank.suggested_learning_rate(0.1, 2, optimizer=torch.optim.SGD(rank.parameters()))) == pytest.approx(
        0.4
    )
    assert float(rank.suggested_learning_rate(0.1, 2, optimizer="sgd", batch=32)) == pytest.approx(1.6)
