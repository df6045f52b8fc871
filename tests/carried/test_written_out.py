"""What torch computes with a look at values is written out: batch norms that count batches, bincount, covariances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError, TraceError
from autopar.trace import written_out
from tests.carried.compared import differences, planned

BATCH = 8


class Normed(nn.Module):
    """A batch norm that is called twice, also under a second name."""

    def __init__(self, momentum: float | None, names: tuple[str, ...] = ("norm",)) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 4, bias=False), nn.Linear(4, 1)
        norm = nn.BatchNorm1d(4, momentum=momentum)
        for name in names:
            self.add_module(name, norm)
        self.used = names[0], names[-1]

    def forward(self, x: Tensor) -> Tensor:
        h = self.get_submodule(self.used[0])(self.enter(x))
        return self.leave(self.get_submodule(self.used[1])(h.tanh())).square().mean()


class Instances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(6, 4), nn.InstanceNorm1d(3, track_running_stats=True)
        self.same = self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.same(self.norm(self.enter(x).unflatten(1, (1, 4)).expand(-1, 3, 4))).tanh().square().mean()


NORMS: dict[str, Callable[[], nn.Module]] = {
    "counting": lambda: Normed(None), "two names": lambda: Normed(0.1, ("norm", "same")),
    "one of two names": lambda: Normed(0.1, ("norm", "unused", "norm")), "instances": Instances,
    "counting, two names": lambda: Normed(None, ("norm", "same")),
}  # fmt: skip


@pytest.mark.sampled(always=("counting-how0",))
@pytest.mark.parametrize("how", [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}])
@pytest.mark.parametrize("name", NORMS)
def test_norms_that_count_or_have_two_names(name: str, how: dict[str, Any]) -> None:
    """The running statistics of two steps are held against the model's while tracing (`checked against eager`)."""
    torch.manual_seed(1)
    model, inputs = NORMS[name]().double(), (torch.randn(BATCH, 6).double(),)
    program = planned(model, inputs, **how)
    assert "checked against eager: yes" in str(program.plan)
    assert differences(model, inputs, **how) == []


def test_a_norm_that_counts_is_searched_and_refused_in_microbatches_with_its_line() -> None:
    torch.manual_seed(1)
    model, inputs = Normed(None).double(), (torch.randn(BATCH, 6).double(),)
    assert differences(model, inputs, devices=2) == []
    with pytest.raises(PlanError, match=r"test_written_out\.py:\d+"):
        planned(model, inputs, dp=1, microbatches=2)


class Counted(nn.Module):
    """A loss weighted by how often there is each class."""

    def __init__(self, count: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.count = nn.Linear(6, 4), count

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.head(x)
        return F.cross_entropy(z, y, weight=1 / (1 + self.count(x, y, z)))


COUNTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "classes": lambda x, y, z: torch.bincount(y, minlength=4).float(),
    "weighted": lambda x, y, z: y.bincount(weights=x[:, 0].abs(), minlength=4),
    "chosen": lambda x, y, z: torch.bincount(z.argmax(-1), minlength=4).float(),
}  # fmt: skip


def counted(count: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return Counted(count), (torch.randn(BATCH, 6), torch.randint(4, (BATCH,)))


@pytest.mark.sampled
@pytest.mark.parametrize("how", [{"dp": 2}, {"tp": 2}, {"dp": 2, "microbatches": 2}])
@pytest.mark.parametrize("name", ["classes", "weighted"])
def test_counts_of_classes(name: str, how: dict[str, Any]) -> None:
    assert differences(*counted(COUNTS[name]), **how) == []


def test_counts_of_what_is_computed_go_without_microbatches() -> None:
    model, inputs = counted(COUNTS["chosen"])
    assert differences(model, inputs, dp=2) == []
    with pytest.raises(PlanError, match=r"test_written_out\.py:\d+"):
        planned(model, inputs, dp=1, microbatches=2)


def test_counts_without_a_length_are_refused_with_their_line() -> None:
    with pytest.raises(TraceError, match=r"bincount.*\n.*test_written_out\.py:\d+.*\nGive it minlength="):
        planned(*counted(lambda x, y, z: torch.bincount(y)[:1].float()), dp=2)


class Spread(nn.Module):
    def __init__(self, spread: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.spread = nn.Linear(6, 4), spread

    def forward(self, x: Tensor) -> Tensor:
        found = self.spread(self.enter(x))
        return (found - torch.eye(len(found))).square().sum()


@pytest.mark.sampled
@pytest.mark.parametrize("how", [{"dp": 2}, {"tp": 2}])
@pytest.mark.parametrize("spread", [lambda z: torch.cov(z.t()), lambda z: z.corrcoef()], ids=["columns", "samples"])
def test_covariances(spread: Callable[[Tensor], Tensor], how: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model, inputs = Spread(spread).double(), (torch.randn(BATCH, 6).double(),)
    model.spread = lambda z: spread(z).float()  # type: ignore[assignment]
    assert differences(model, inputs, **how) == []


FREQUENCIES, WEIGHTS = torch.tensor([1, 2, 1, 3, 1]), torch.tensor([0.2, 1.0, 0.5, 0.3, 0.7])


@pytest.mark.parametrize("shape", [(3, 5), (5,)])
@pytest.mark.parametrize(
    "how",
    [{}, {"correction": 0}, {"fweights": FREQUENCIES}, {"aweights": WEIGHTS}, {"aweights": WEIGHTS, "correction": 0},
     {"fweights": FREQUENCIES, "aweights": WEIGHTS}],
    ids=["plain", "biased", "frequencies", "weights", "biased weights", "both"],
)  # fmt: skip
def test_covariances_are_torchs(shape: tuple[int, ...], how: dict[str, Any]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(written_out._cov(x, **how), torch.cov(x, **how))
    torch.testing.assert_close(written_out._corrcoef(x), torch.corrcoef(x))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.run = nn.LSTM(6, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.run(packed)[0])[0].square().mean()


def test_packed_sequences_are_refused_with_their_line() -> None:
    mesh = autopar.Mesh("h100", devices_per_node=2)
    with pytest.raises(TraceError, match=r"packed ones.*\n.*test_written_out\.py:\d+.*\nRun the recurrent module"):
        autopar.template_plan(Packed(), mesh, (torch.randn(2, 3, 6), torch.tensor([3, 2])), dp=2)
