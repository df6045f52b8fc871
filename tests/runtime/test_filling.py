"""Short batches filled up with rows that count for nothing: equal to one device on the short batch, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import runtime as rt
from autopar.errors import PlanError
from autopar.program import load_source
from tests.rank_pool import RankPool
from tests.runtime.test_shapes import Pooled, causal, one_device, text

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

PAD = {"labels": -100}
SHORT = [(3, 8), (1, 8), (4, 8)]


def steps(
    number: int, world: int, source: str, start: dict[str, Tensor]
) -> list[tuple[float, dict[str, Tensor], float]]:
    rank = rt.build(load_source(source).Program)
    rank.init_from(start, broadcast=False)
    found = []
    for shape in SHORT:
        rank.zero_grad()
        loss = rank.train_step(**text(*shape))
        found.append((loss.item(), rank.full_gradients(), rank(**text(*shape)).item()))
    with pytest.raises(rt.ProgramError, match="expected the global batch"):
        rank.train_step(**text(3, 7))
    return found


@pytest.mark.parametrize("choices", [{"dp": 2}, {"pp": 2, "microbatches": 2}], ids=str)
def test_short_batches_are_those_of_one_device(rank_pool: Callable[[int], RankPool], choices: dict[str, int]) -> None:
    """Three rows, which two ranks or microbatches cannot share, and one, of which one rank has none."""
    model, mesh = causal(), autopar.Mesh("cpu", devices_per_node=2)
    plan = autopar.template_plan(model, mesh, text(4, 8), **choices)
    program = autopar.parallelize(model, mesh, text(4, 8), plan=plan, pad=PAD, check=False)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = one_device(model, SHORT)
    for found in rank_pool(2).run(steps, program.source, start):
        for (loss, gradients, again), (own_loss, own) in zip(found, expected, strict=True):
            assert loss == pytest.approx(own_loss, rel=1e-5) and again == pytest.approx(own_loss, rel=1e-5)
            for name, gradient in own.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


class Squared(nn.Module):
    """A mean over samples, whose divisor is the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return (self.inner(input_ids.float()) - labels).square().mean()


@pytest.mark.parametrize(
    ("model", "pad", "why"),
    [
        (Squared(), PAD, "of labels=-100 filled in, found a loss of .* instead of"),
        (causal(), {"labels": 3}, "of labels=3 filled in, found a loss of"),
        (Pooled(), PAD, "a loss that is a sum over samples"),
        (causal(), {"targets": -100}, "inputs that have rows .*, found targets"),
    ],
    ids=["mean over samples", "a value that counts", "batch statistics", "no such input"],
)
def test_rows_that_would_count_are_refused(model: nn.Module, pad: dict[str, float], why: str) -> None:
    mesh = autopar.Mesh("cpu", devices_per_node=1)
    plan = autopar.template_plan(model, mesh, text(4, 8), check=False)
    with pytest.raises(PlanError, match=why):
        autopar.parallelize(model, mesh, text(4, 8), plan=plan, pad=pad, check=False)
