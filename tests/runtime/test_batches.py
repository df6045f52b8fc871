"""Batches of a loader: by name, on the ranks that read any, and after a checkpoint the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from autopar import runtime as rt
from autopar.runtime.batches import Batches
from tests.rank_pool import RankPool


class Program(rt.Program):
    """The sum of a vector times what is read."""

    INPUTS = (rt.Input("x", (4, 2), torch.float32, ""),)

    def __init__(self, mesh: rt.RankMesh) -> None:
        super().__init__(mesh)
        self.inner = rt.Parameters(w=rt.Parameter((2,)))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.inner.w).sum()


class Short(Program):
    """The same for three rows."""

    INPUTS = (rt.Input("x", (3, 2), torch.float32, ""),)


class Both(Program):
    """Four rows or three."""

    OTHERS = (Short,)


class Rows(Dataset[Tensor]):
    """Rows that are not the same when they are read twice: a part of each is drawn."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


class Stateful:
    """A loader with a state of its own, as torchdata's."""

    def __init__(self, count: int) -> None:
        self.count, self.next, self.begin = count, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.begin = self.begin, 0
        for number in range(begin, self.count):
            self.next = number + 1
            yield torch.full((4, 2), float(number))

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["next"]


def built(program: type[rt.Program] = Program) -> rt.Rank:
    rank = rt.build(program)
    rank.load_full_state_dict({"inner.w": torch.ones(2)})
    return rank


def shuffled(count: int) -> DataLoader[Tensor]:
    return DataLoader(Rows(count), batch_size=4, shuffle=True, drop_last=True)


@pytest.mark.parametrize("at", [1, 3, 4, 7])
def test_after_a_checkpoint_comes_the_next_batch(tmp_path: Path, at: int) -> None:
    torch.manual_seed(3)
    rank = built()
    batches, seen = rank.batches(shuffled(17), epochs=3), []
    for batch in batches:
        seen.append(batch["x"])
        rank.train_step(**batch)
        if len(seen) == at:
            rt.save_checkpoint(tmp_path, rank, step=at, extra={"data": batches})
    assert len(seen) == 12
    torch.manual_seed(99)
    again = built()
    rest = again.batches(shuffled(17), epochs=3)
    assert rt.load_checkpoint(tmp_path, again, extra={"data": rest}) == at
    found = [batch["x"] for batch in rest]
    assert torch.equal(torch.stack(found), torch.stack(seen[at:]))


def test_a_loader_with_a_state_of_its_own_is_not_skipped_through() -> None:
    rank = built()
    batches = rank.batches(Stateful(5), epochs=2)
    items = iter(batches)
    seen = [next(items)["x"][0, 0].item() for _ in range(3)]
    rest = rank.batches(loader := Stateful(5), epochs=2)
    rest.load_state_dict(batches.state_dict())
    own = iter(rest)
    seen.append(next(own)["x"][0, 0].item())
    assert loader.next == 4 and seen == [0, 1, 2, 3]
    assert [batch["x"][0, 0].item() for batch in own] == [4, 0, 1, 2, 3, 4]


def test_a_short_last_batch_runs_where_it_was_planned_and_is_refused_before_anything_where_not() -> None:
    loader = DataLoader([torch.full((2,), float(n)) for n in range(7)], batch_size=4)
    rank = built()
    with pytest.raises(rt.ProgramError, match=r"4 rows, found that the last of the loader has 3; plan with shapes"):
        next(iter(rank.batches(loader)))
    assert [len(batch["x"]) for batch in rank.batches(loader, short="drop")] == [4]
    rank = built(Both)
    losses = [rank.train_step(**batch).item() for batch in rank.batches(loader)]
    assert losses == [12.0, 30.0]
    assert rank.full_gradients()["inner.w"].tolist() == [21.0, 21.0]
    with pytest.raises(rt.ProgramError, match=r"expected inputs of x \(4, 2\) or x \(3, 2\), .* found x \(2, 2\)"):
        rank.train_step(torch.ones(2, 2))


def test_batches_are_named_and_epochs_told_to_samplers() -> None:
    rank = built()
    told: list[int] = []
    loader = DataLoader([torch.ones(2)] * 4, batch_size=4)
    loader.sampler.set_epoch = told.append  # type: ignore[attr-defined]
    assert [list(batch) for batch in rank.batches(loader, epochs=2)] == [["x"], ["x"]]
    assert told == [0, 1]
    assert list(next(iter(rank.batches([(torch.ones(4, 2),)])))) == ["x"]
    with pytest.raises(rt.ProgramError, match="expected batches of the inputs x, found one of 2 values"):
        next(iter(rank.batches([(torch.ones(4, 2), 3)])))


def numbers(found: Batches) -> list[float]:
    return [batch["x"][0, 0].item() for batch in found]


def rows(*counts: int) -> list[Tensor]:
    return [torch.full((count, 2), float(number)) for number, count in enumerate(counts)]


def test_a_pass_is_as_many_epochs_again_and_one_that_was_left_begins_its_epoch_anew() -> None:
    """As loaders do. Once, the second pass had nothing and said nothing, and a pass that was left counted on."""
    batches = built().batches(rows(4, 4, 4))
    assert [numbers(batches) for _ in range(2)] == [[0, 1, 2]] * 2 and batches.epoch == 2
    assert [batch["x"][0, 0].item() for _, batch in zip(range(2), batches, strict=False)] == [0, 1]
    assert (batches.epoch, batches.batch) == (2, 2)
    assert numbers(batches) == [0, 1, 2] and (batches.epoch, batches.batch) == (3, 0)


@pytest.mark.parametrize("at", range(1, 7))
def test_a_pass_that_is_resumed_ends_where_it_would_have(at: int) -> None:
    rank, seen, left = built(), [], list[float]()
    batches = rank.batches(rows(4, 4, 4))
    state = dict[str, Any]()
    for _ in range(2):
        for batch in batches:
            seen.append(batch["x"][0, 0].item())
            state = batches.state_dict() if len(seen) == at else state
    rest = rank.batches(rows(4, 4, 4))
    rest.load_state_dict(state)
    left = numbers(rest)
    assert left == seen[at : 3 * (-(-at // 3))]
    assert numbers(rest) == [0, 1, 2]


@pytest.mark.parametrize("epochs", [1, 3, None])
@pytest.mark.parametrize("short", ["refuse", "drop"])
def test_an_epoch_without_batches_is_said(epochs: int | None, short: str) -> None:
    """A generator is read once: further epochs would be none, and a run without end would never take a step."""
    rank = built()
    with pytest.raises(rt.ProgramError, match="expected batches in epoch 0 of the loader, found none"):
        list(rank.batches(DataLoader(Rows(3), batch_size=4, drop_last=True), epochs=epochs, short=short))
    if epochs != 1:
        with pytest.raises(rt.ProgramError, match=r"epoch 1 of the loader, found none.*generator is read once"):
            list(rank.batches((x for x in rows(4, 4)), epochs=epochs, short=short))
    else:
        assert numbers(rank.batches((x for x in rows(4, 4)), short=short)) == [0, 1]


def test_what_is_left_out_is_short_and_last() -> None:
    """Once, any batch that was not planned ended the epoch, and what came behind it was not seen."""
    rank = built()
    assert numbers(rank.batches(rows(4, 4, 2), short="drop", epochs=2)) == [0, 1, 0, 1]
    assert numbers(built(Both).batches(rows(4, 3, 2), short="drop")) == [0, 1]
    with pytest.raises(rt.ProgramError, match="a short batch at the end of the loader alone, found others behind one"):
        list(rank.batches(rows(4, 2, 4), short="drop"))
    longer = [torch.ones(4, 2), torch.ones(4, 3), torch.ones(4, 2)]
    found = list(rank.batches(longer, short="drop"))
    assert len(found) == 3
    with pytest.raises(rt.ProgramError, match=r"found \(4, 3\)"):
        rank.train_step(**found[1])


class Ended(rt.Program):
    """On two ranks that have loaders of their own."""

    AXES = {"dp": 2}  # noqa: RUF012
    INPUTS = (rt.Input("x", (4, 2), torch.float32, "S(0)"),)

    def __init__(self, mesh: rt.RankMesh) -> None:
        super().__init__(mesh)
        self.inner = rt.Parameters(w=rt.Parameter((2,), stored="I", uses=("R",)))

    def forward(self, x: Tensor) -> Tensor:
        return rt.redistribute((x * self.inner.w).sum(), self.axes[0], "P -> I")


def own_loaders(number: int, world: int) -> list[float]:
    rank = rt.build(Ended)
    rank.load_full_state_dict({"inner.w": torch.ones(2)})
    items = (torch.full((2, 2), float(number + count)) for count in range(3 + number))
    batches = rank.batches(items, local=True)
    assert isinstance(batches, Batches)
    return [rank.train_step(**batch, local=True).item() for batch in batches]


def test_loaders_of_each_rank_end_together(rank_pool: Callable[[int], RankPool]) -> None:
    first, second = rank_pool(2).run(own_loaders)
    assert first == second == [4.0, 12.0, 20.0]
