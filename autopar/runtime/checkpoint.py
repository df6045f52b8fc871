"""Checkpoints that any plan of the same model reads, on any number of ranks, and that are written whole or not at all.

A checkpoint is a folder of `torch.distributed.checkpoint` under `folder`: each rank writes its shards under the
single-device names, so what reads them need neither be cut alike nor pack its parameters alike. It is written as
`step_00000012.part` and renamed once every rank is done; a run that dies meanwhile leaves the one before as the last.

    model.*  parameters and persistent buffers · optimizer.*  as torch.distributed.checkpoint.state_dict names it
    progress  steps done, and where the stream of dropout masks stands · extra.*  whatever else has a state_dict
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autopar.runtime import comm, randomness
from autopar.runtime.errors import ProgramError
from autopar.runtime.saved import SavedState
from autopar.runtime.slices import SlicesReader, SlicesWriter

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from autopar.runtime.rank import Rank

_NAME = re.compile(r"step_(\d+)")


def save_checkpoint(
    folder: str | Path, rank: Rank, optimizer: Optimizer | None = None, *, step: int,
    extra: Mapping[str, Any] | None = None, keep: int = 2,
) -> Path:  # fmt: skip
    """Writes the state after `step` steps to `folder`, which all ranks share, and drops all but the last `keep`.

    extra: further objects with `state_dict` and `load_state_dict`, such as a learning-rate scheduler, by name; they
    must be equal on all ranks. Called on every rank; returns the checkpoint's folder, which is whole then.
    """
    folder = Path(folder)
    path, part = folder / f"step_{step:08d}", folder / f"step_{step:08d}.part"
    saved = SavedState(rank.stored_parameters, rank.state_dict())
    state: dict[str, Any] = {"model": saved.plain, "progress": _progress(step), **_extra(extra)}
    if optimizer is not None:
        state["optimizer"] = saved.add_optimizer(_optimizer_state(rank, optimizer))
    _on_first(rank, lambda: _prepare(part))
    with _quiet():
        save(state, checkpoint_id=part, planner=SlicesWriter(saved.slices), no_dist=not _is_distributed(rank))
    _on_first(rank, lambda: _publish(part, path, keep))
    return path


def load_checkpoint(
    folder: str | Path, rank: Rank, optimizer: Optimizer | None = None, *, extra: Mapping[str, Any] | None = None
) -> int:
    """Loads the last whole checkpoint of `folder` on every rank and returns its number of steps; 0 when there is none.

    Raises ProgramError that names what of the program the checkpoint lacks or has in another shape.
    """
    path = last_checkpoint(folder)
    if path is None:
        return 0
    found = FileSystemReader(path).read_metadata().state_dict_metadata
    own, progress = SavedState(rank.stored_parameters, rank.state_dict()), _progress(0)
    _check(path, own.shapes, found)
    state: dict[str, Any] = {"model": own.plain, "progress": progress, **_extra(extra)}
    held: dict[str, Any] = {}
    if optimizer is not None:
        _check_optimizer(path, found)
        optimizer.zero_grad()  # torch makes the state that is to be loaded by a step without gradients
        held = get_optimizer_state_dict(rank, optimizer)
        state["optimizer"] = own.only_saved(own.add_optimizer(held), found)
    with _quiet():
        load(state, checkpoint_id=path, planner=SlicesReader(own.slices), no_dist=not _is_distributed(rank))
    if optimizer is not None:
        loaded = own.as_stored(held, state["optimizer"])
        set_optimizer_state_dict(rank, optimizer, loaded, options=StateDictOptions(strict=False))
    step, seed, dropout_step = (int(value) for value in progress)
    randomness.restore_stream(seed, dropout_step)
    rank.forget_constants()
    return step


def last_checkpoint(folder: str | Path) -> Path | None:
    """The folder of the last whole checkpoint, if there is one."""
    found = _whole(Path(folder))
    return found[-1] if found else None


def _whole(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first; what is under way has another name."""
    paths = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step_")))


def _extra(objects: Mapping[str, Any] | None) -> dict[str, Any]:
    """At the top level, where torch calls `state_dict` and `load_state_dict` itself."""
    return {f"extra.{name}": item for name, item in (objects or {}).items()}


def _progress(step: int) -> torch.Tensor:
    return torch.tensor([step, *randomness.stream_position()], dtype=torch.int64)


def _is_distributed(rank: Rank) -> bool:
    """Whether ranks write together. Raises ProgramError when other processes run besides the program's."""
    if rank.num_ranks > 1 and rank.num_ranks != dist.get_world_size():
        raise ProgramError(
            f"expected a program on all {dist.get_world_size()} ranks that run, found one on {rank.num_ranks}; "
            "save its `full_state_dict()` instead"
        )
    return rank.num_ranks > 1


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns of a single process also when it is asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _on_first(rank: Rank, act: Callable[[], object]) -> None:
    """Acts on the first rank while the others wait for it."""
    if not _is_distributed(rank):
        act()
        return
    if dist.get_rank() == 0:
        act()
    comm.barrier(rank.timeout_s)


def _prepare(part: Path) -> None:
    """Makes way for a checkpoint; an interrupted one may have left something."""
    part.parent.mkdir(parents=True, exist_ok=True)
    _remove(part)


def _publish(part: Path, path: Path, keep: int) -> None:
    """Gives the checkpoint its name; a former one of the same step makes way. Then drops the oldest."""
    old = path.with_name(path.name + ".old")
    _remove(old)
    if path.exists():
        path.rename(old)
    part.rename(path)
    _remove(old)
    for extra in _whole(path.parent)[: -max(keep, 1)]:
        _remove(extra)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


# What an optimizer holds ----------------------------------------


def _optimizer_state(rank: Rank, optimizer: Optimizer) -> dict[str, Any]:
    """By single-device names. An optimizer that has not stepped yet has no state, and must not be given one."""
    has_stepped = bool(optimizer.state)
    held = [parameter.grad for parameter in rank.parameters()]
    state = get_optimizer_state_dict(rank, optimizer)
    if not has_stepped:
        optimizer.state.clear()
        state["state"] = {}
        for parameter, gradient in zip(rank.parameters(), held, strict=True):
            parameter.grad = gradient
    return state


def _check_optimizer(path: Path, saved: Mapping[str, Any]) -> None:
    if not any(key.startswith("optimizer.") for key in saved):
        raise ProgramError(f"expected a checkpoint with an optimizer's state, found none in {path}: load without")


def _check(path: Path, shapes: Mapping[str, tuple[int, ...]], saved: Mapping[str, Any]) -> None:
    missing = [name for name in shapes if f"model.{name}" not in saved]
    others = [
        f"{name}: expected {shape}, found {tuple(saved[f'model.{name}'].size)}"
        for name, shape in shapes.items()
        if name not in missing and shape != tuple(saved[f"model.{name}"].size)
    ]
    if missing or others:
        raise ProgramError(
            f"the checkpoint {path} is of another model; it lacks: {', '.join(missing) or 'nothing'}; other shape: "
            f"{'; '.join(others) or 'none'}. Give this program a folder of its own"
        )
