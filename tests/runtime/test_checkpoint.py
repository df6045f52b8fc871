"""Checkpoints: every kind of shard is read under another layout, and an interrupted write leaves the one before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar import runtime as rt
from autopar.runtime import redistribute
from tests.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SHAPES = {"both": (29, 6), "crossed": (7, 10), "few": (5,), "columns": (3, 11), "whole": (4, 4), "scalar": ()}
FOUR = {"both": "S(0) S(0)", "crossed": "S(1) S(0)", "few": "S(0) S(0)", "columns": "I S(1)", "whole": "I I"}
TWO = {"both": "S(1)", "crossed": "S(0)", "few": "S(0)", "columns": "S(0)", "whole": "S(1)"}


def program(axes: dict[str, int], stored: dict[str, str]) -> type[rt.Program]:
    """A weighted sum of squares, whatever the layout, with parameters, buffers and a tied name."""
    none = " ".join("I" for _ in axes)

    def placed(name: str) -> str:
        return stored.get(name, none)

    class Layout(rt.Program):
        AXES = axes
        INPUTS = (rt.Input("x", (), torch.float32, " ".join("R" for _ in axes)),)
        TIED = {"again.both": "inner.both"}  # noqa: RUF012

        def __init__(self, mesh: rt.RankMesh) -> None:
            super().__init__(mesh)
            kept = {
                name: rt.Parameter(shape, stored=placed(name), uses=(none,), regather="S" in placed(name))
                for name, shape in SHAPES.items()
            }
            frozen = rt.Parameter((6,), stored=placed("few"), uses=(none,), requires_grad=False)
            idle = rt.Parameter((6,), stored=placed("few"), uses=(none,))
            self.inner = rt.Parameters(**kept, frozen=frozen, idle=idle)
            self.calls = rt.Buffer((), torch.int64, none.replace("I", "R"))
            self.table = rt.Buffer((5,), torch.float32, placed("few"))

        @rt.computed_once
        def constants(self) -> tuple[Tensor]:
            table = self.table
            for axis, kind in reversed([*zip(self.axes, placed("few").split(), strict=True)]):
                outer = [a for a in self.axes if a.name < axis.name]
                size = rt.local_size(5, *outer)
                table = redistribute(table, axis, f"{kind} -> I", size) if kind != "I" else table
            return (table.sum(),)

        def forward(self, x: Tensor) -> Tensor:
            (table,) = self.constants()
            self.update(calls=self.calls + 1)
            terms = [(getattr(self.inner, name) * (i + 1)).square().sum() for i, name in enumerate(SHAPES)]
            return (torch.stack(terms).sum() + self.inner.frozen.sum()) * table * x

    return Layout


LAYOUTS: dict[int, type[rt.Program]] = {
    4: program({"a": 2, "b": 2}, FOUR),
    2: program({"a": 2}, TWO),
    1: program({}, {}),
}


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {f"inner.{name}": torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    state |= {"inner.frozen": torch.arange(6.0), "inner.idle": torch.ones(6)}
    return state | {"calls": torch.tensor(3), "table": torch.arange(5.0) / 16}


def optimizer_of(rank: rt.Rank, lr: float) -> torch.optim.Optimizer:
    trained = [(name, p) for name, p in rank.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trained if p.dim() > 1], "lr": lr, "weight_decay": 0.1},
        {"params": [p for name, p in trained if p.dim() <= 1], "lr": lr / 2, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups)


def steps(rank: rt.Rank, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        losses.append(rank.train_step(torch.tensor(0.5)).item())
        optimizer.step()
    return losses


def save(rank: int, world: int, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps, a checkpoint, and what comes after it; another learning rate by then, as a schedule would."""
    part = rt.build(LAYOUTS[world])
    part.load_full_state_dict(start())
    optimizer = optimizer_of(part, 0.01)
    steps(part, optimizer, 3)
    for group in optimizer.param_groups:
        group["lr"] *= 3
    rt.seed_dropout(11)
    rt.save_checkpoint(folder, part, optimizer, step=3)
    return steps(part, optimizer, 3), part.full_state_dict()


def resume(rank: int, world: int, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    part = rt.build(LAYOUTS[world])
    part.load_full_state_dict({name: torch.zeros_like(tensor) for name, tensor in start().items()})
    optimizer = optimizer_of(part, 0.5)
    steps(part, optimizer, 1)  # whatever it holds is replaced, constants made of buffers too
    assert rt.load_checkpoint(folder, part, optimizer) == 3
    return steps(part, optimizer, 3), part.full_state_dict()


@pytest.mark.parametrize(("saved", "loaded"), [(4, 2), (2, 4), (4, 1), (1, 4)])
def test_training_goes_on_under_another_layout(
    saved: int, loaded: int, rank_pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    expected, tensors = rank_pool(saved).run(save, str(tmp_path))[0]
    for losses, found in rank_pool(loaded).run(resume, str(tmp_path)):
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(found, tensors, rtol=1e-6, atol=1e-7)
    assert tensors["calls"] == 9


def one() -> tuple[rt.Rank, torch.optim.Optimizer]:
    part = rt.build(LAYOUTS[1])
    part.load_full_state_dict(start())
    return part, optimizer_of(part, 0.01)


def test_no_checkpoint_is_step_zero(tmp_path: Path) -> None:
    part, optimizer = one()
    assert rt.load_checkpoint(tmp_path / "none", part, optimizer) == 0
    assert rt.last_checkpoint(tmp_path / "none") is None


def test_the_last_ones_are_kept_and_a_step_may_be_saved_again(tmp_path: Path) -> None:
    part, optimizer = one()
    for step in (0, 1, 2, 2):
        rt.save_checkpoint(tmp_path, part, optimizer, step=step)
        steps(part, optimizer, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]
    other, its_optimizer = one()
    assert rt.load_checkpoint(tmp_path, other, its_optimizer) == 2
    assert other.full_state_dict()["calls"] == 6


def test_saving_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    """torch makes an optimizer's state by a step without gradients; that step must not be counted."""
    (part, optimizer), (other, its_optimizer) = one(), one()
    rt.save_checkpoint(tmp_path, part, optimizer, step=0)
    assert not optimizer.state
    assert rt.load_checkpoint(tmp_path, other, its_optimizer) == 0
    reference = one()
    expected = steps(*reference, 3)
    assert steps(part, optimizer, 3) == expected
    assert steps(other, its_optimizer, 3) == expected
    torch.testing.assert_close(part.full_state_dict(), reference[0].full_state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(other.full_state_dict(), reference[0].full_state_dict(), rtol=0, atol=0)


def test_a_write_that_ends_midway_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, optimizer = one()
    rt.save_checkpoint(tmp_path, part, optimizer, step=1)
    expected = steps(part, optimizer, 2)

    renames = Path.rename

    def dies(path: Path, target: Any) -> Path:
        if path.suffix == ".part":
            raise KeyboardInterrupt
        return renames(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", dies)  # everything is written, nothing is published
        rt.save_checkpoint(tmp_path, part, optimizer, step=3)
    other, its_optimizer = one()
    assert rt.load_checkpoint(tmp_path, other, its_optimizer) == 1
    assert steps(other, its_optimizer, 2) == expected
    rt.save_checkpoint(tmp_path, part, optimizer, step=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]


def test_extra_objects_travel(tmp_path: Path) -> None:
    part, optimizer = one()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        steps(part, optimizer, 1)
        schedule.step()
    rt.save_checkpoint(tmp_path, part, optimizer, step=3, extra={"schedule": schedule})
    other, its_optimizer = one()
    its_schedule = torch.optim.lr_scheduler.StepLR(its_optimizer, 2)
    rt.load_checkpoint(tmp_path, other, its_optimizer, extra={"schedule": its_schedule})
    assert its_schedule.state_dict() == schedule.state_dict()
    assert [g["lr"] for g in its_optimizer.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    part, optimizer = one()
    rt.save_checkpoint(tmp_path, part, step=1)
    with pytest.raises(rt.ProgramError, match="expected a checkpoint with an optimizer's state, found none"):
        rt.load_checkpoint(tmp_path, part, optimizer)

    class Other(rt.Program):
        AXES = {}  # noqa: RUF012

        def __init__(self, mesh: rt.RankMesh) -> None:
            super().__init__(mesh)
            self.inner = rt.Parameters(both=rt.Parameter((28, 6)), new=rt.Parameter((2,)))

    with pytest.raises(rt.ProgramError, match=r"lacks: inner.new; .*inner.both: expected \(28, 6\), found \(29, 6\)"):
        rt.load_checkpoint(tmp_path, rt.build(Other))


def test_the_stream_of_dropout_masks_goes_on(tmp_path: Path) -> None:
    part, optimizer = one()
    rt.seed_dropout(7)
    steps(part, optimizer, 2)
    rt.save_checkpoint(tmp_path, part, optimizer, step=2)
    steps(part, optimizer, 1)
    expected = rt.dropout(torch.ones(64), 0.5)
    rt.seed_dropout(8)
    rt.load_checkpoint(tmp_path, part, optimizer)
    steps(part, optimizer, 1)
    torch.testing.assert_close(rt.dropout(torch.ones(64), 0.5), expected, rtol=0, atol=0)
    rt.seed_dropout(0)


def test_constants_follow_buffers_that_are_read_in_place() -> None:
    """As torch.distributed.checkpoint.load reads into a rank's state_dict."""
    part, _ = one()
    loss = part.train_step(torch.tensor(0.5))
    part.state_dict()["table"].mul_(2)
    torch.testing.assert_close(part.train_step(torch.tensor(0.5)), 2 * loss)


def test_constants_are_kept_while_forward_sets_other_buffers() -> None:
    """Here `calls`. A cache of keys has another version at each step, and no constant is made of it."""
    part, _ = one()
    program: Any = part._locals[0].program
    for _ in range(2):  # the first shows what is set
        part.train_step(torch.tensor(0.5))
    kept, calls = program.constants(), int(program.calls)
    part.train_step(torch.tensor(0.5))
    assert program.constants() is kept and int(program.calls) == calls + 1
    part.state_dict()["table"].mul_(2)
    assert program.constants() is not kept
