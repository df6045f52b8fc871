"""Checkpoints that any plan of the same model reads, on any number of ranks, and that are written whole or not at all.

A checkpoint is a folder of `torch.distributed.checkpoint` under `folder`: each rank writes its shards under the
single-device names, so what reads them need neither be cut alike nor pack its parameters alike. How it gets its name
only when it is whole, and which are kept, is in `folder`; what is read of pickles in `unpickling`.

    model.*  parameters and persistent buffers · optimizer.*  as torch.distributed.checkpoint.state_dict names it
    progress  steps done, and where the stream of dropout masks stands · extra.*  whatever else has a state_dict
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader

from autopar.runtime import comm, randomness
from autopar.runtime.errors import ProgramError
from autopar.runtime.folder import FoundCheckpoint, Manifest, Writing, checkpoints, damage, digest, newest_manifest
from autopar.runtime.saved import SavedState
from autopar.runtime.slices import Sliced, SlicesReader, SlicesWriter
from autopar.runtime.unpickling import SafeReader

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from autopar.runtime.rank import Rank

Result = TypeVar("Result")

#: by rank and folder: the last manifest there that this run has written, or seen when it loaded
_seen: WeakKeyDictionary[Rank, dict[Path, Manifest | None]] = WeakKeyDictionary()


def save_checkpoint(
    folder: str | Path, rank: Rank, optimizer: Optimizer | None = None, *, step: int,
    extra: Mapping[str, Any] | None = None, keep: int = 2,
) -> Path:  # fmt: skip
    """Writes the state after `step` steps to `folder`, which all ranks share, and drops all but the last `keep` saved.

    extra: further objects with `state_dict` and `load_state_dict`, such as a learning-rate scheduler, by name; they
    must be equal on all ranks. Called on every rank; returns the checkpoint's folder, which is whole then. Raises
    ProgramError when it could not be written, and where the folder has checkpoints of another run: one goes on with
    them by `load_checkpoint`, or takes a folder of its own.
    """
    folder = Path(folder)
    state, slices = whole_state(rank, optimizer, step, extra)
    known, part = _seen.setdefault(rank, {}), folder / f"step_{step:08d}.part"
    writing: list[Writing] = []  # on the first rank
    is_written = False
    try:
        _on_first(rank, lambda: writing.append(Writing.begin(folder, step, known.get(folder.resolve()))))
        _run(rank, f"saving {part}", lambda: save(
            state, checkpoint_id=part, planner=SlicesWriter(slices), no_dist=not _is_distributed(rank)
        ))  # fmt: skip
        hashed = _on_each(rank, lambda: _digests(part, _number(rank)))
        files = {name: found for part_of_rank in hashed for name, found in part_of_rank.items()}
        path, known[folder.resolve()] = _on_first(rank, lambda: writing[0].publish(files, keep))
        is_written = True
    finally:
        for item in writing:
            item.end(failed=not is_written)
    return path


def whole_state(
    rank: Rank, optimizer: Optimizer | None, step: int, extra: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Mapping[tuple[str, ...], Sliced]]:
    """What a checkpoint after `step` steps holds of this rank, and beside it its slices of packed parameters."""
    rank.unite_copies(optimizer)
    saved = SavedState(rank.stored_parameters, rank.state_dict())
    state: dict[str, Any] = {"model": saved.plain, "progress": _progress(step), **_extra(extra)}
    if optimizer is not None:
        state["optimizer"] = saved.add_optimizer(_optimizer_state(rank, optimizer))
    return state, saved.slices


def load_checkpoint(
    folder: str | Path, rank: Rank, optimizer: Optimizer | None = None, *, extra: Mapping[str, Any] | None = None
) -> int:
    """Loads the last whole checkpoint of `folder` on every rank and returns its number of steps; 0 when there is none.

    Files are held against what was written; damage is warned of, and the checkpoint before is loaded. Raises
    ProgramError that names what of the program the checkpoint lacks or has in another shape, and when none is whole.
    """
    folder = Path(folder)
    problems: dict[tuple[str, str], str] = {}
    while True:
        listed, newest = _on_first(rank, lambda: (checkpoints(folder), newest_manifest(folder)))
        for found in listed:
            if newest is not None and found.manifest is None:  # else of an earlier version: nothing to hold it against
                problems[_key(found)] = "no manifest that can be read"
        left = [found for found in listed if _key(found) not in problems]
        since = left[-1].step if left else -1  # of those without a manifest, later ones alone are lost
        lost = [found for found in listed if _key(found) in problems and (found.manifest or found.step > since)]
        told = "; ".join(f"{found.path.name}: {problems[_key(found)]}" for found in reversed(lost))
        if not left and told:
            raise ProgramError(f"expected a whole checkpoint in {folder}, found none. {told}")
        if not left:
            return 0
        try:
            _check_data(rank, left[-1])
            step = load_state(SafeReader(left[-1].path), left[-1].path, rank, optimizer, extra)
        except _Unreadable as error:  # or removed by now, where a run writes here; then another stands
            problems[_key(left[-1])] = str(error)
            continue
        _seen.setdefault(rank, {})[folder.resolve()] = newest
        if told:
            _warn(f"{folder}: loaded {left[-1].path.name}, the last whole checkpoint. {told}")
        return step


def _warn(text: str) -> None:
    """Steps are lost: where warnings are ignored, as many scripts have it, a line says so all the same."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn(text, stacklevel=3)
    if shown:
        warnings.warn(text, stacklevel=3)
    else:
        print(text, file=sys.stderr, flush=True)


def _key(found: FoundCheckpoint) -> tuple[str, str]:
    return found.path.name, found.manifest.save if found.manifest is not None else ""


def load_state(
    reader: StorageReader, path: Path, rank: Rank, optimizer: Optimizer | None, extra: Mapping[str, Any] | None
) -> int:
    """Loads what a reader reads on every rank, and returns its number of steps. path: where that is, for errors."""
    read: list[Metadata] = []
    _on_each(rank, lambda: read.append(reader.read_metadata()))
    found = read[0].state_dict_metadata
    own, progress = SavedState(rank.stored_parameters, rank.state_dict()), _progress(0)
    _check(path, own.shapes, found)
    _check_extra(path, _extra(extra), found)
    state: dict[str, Any] = {"model": own.plain, "progress": progress, **_extra(extra)}
    held: dict[str, Any] = {}
    if optimizer is not None:
        _check_optimizer(path, found)
        optimizer.zero_grad()  # torch makes the state that is to be loaded by a step without gradients
        _complete_state(optimizer, own.shapes, found)
        held = _torch_state(rank, optimizer)
        state["optimizer"] = own.only_saved(own.add_optimizer(held), found)
    planner = SlicesReader(own.slices)
    _run(rank, f"loading {path}", lambda: load(
        state, storage_reader=reader, planner=planner, no_dist=not _is_distributed(rank)
    ))  # fmt: skip
    if optimizer is not None:
        loaded = own.as_stored(held, state["optimizer"])
        groups = _own_groups(held["param_groups"], loaded["param_groups"], path)
        with _named_alone(rank, optimizer):
            loaded["param_groups"] = groups
            set_optimizer_state_dict(rank, optimizer, loaded, options=StateDictOptions(strict=False))
        for group, saved in zip(optimizer.param_groups, groups, strict=True):  # torch leaves out those without names
            group.update({key: value for key, value in saved.items() if key != "params"})
    step, seed, dropout_step = (int(value) for value in progress)
    randomness.restore_stream(seed, dropout_step)
    rank.forget_constants()
    return step


def note_seen(folder: str | Path, rank: Rank) -> None:
    """The run goes on from another place than this folder, whose checkpoints are its own: it may save there."""
    path = Path(folder)
    _seen.setdefault(rank, {})[path.resolve()] = _on_first(rank, lambda: newest_manifest(path))


def last_checkpoint(folder: str | Path) -> Path | None:
    """The folder of the last checkpoint saved of which all files are there, if there is one."""
    found = [item.path for item in checkpoints(Path(folder)) if item.stands]
    return found[-1] if found else None


# Whether data is as it was written ----------------------------------------


def _digests(part: Path, number: int) -> dict[str, tuple[int, str]]:
    """Of the files that a rank has written; the first rank's are the metadata too."""
    names = [*part.glob(f"__{number}_*"), *([part / ".metadata"] if number == 0 else [])]
    return {path.name: digest(path) for path in names}


def _check_data(rank: Rank, found: FoundCheckpoint) -> None:
    """Raises _Unreadable, on all ranks, for a checkpoint that is damaged; each rank reads a part of the files."""
    files = sorted(found.manifest.files) if found.manifest is not None else []
    every = _on_each(rank, lambda: damage(found, files[_number(rank) :: rank.num_ranks]))
    problems = [problem for problems in every for problem in problems]
    if problems:
        raise _Unreadable("; ".join(problems))


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


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "asked for where ranks run together"
    return dist.group.WORLD


def _number(rank: Rank) -> int:
    return dist.get_rank() if _is_distributed(rank) else 0


class _Unreadable(ProgramError):
    """Files that are damaged, or that the system does not read or write."""


def _run(rank: Rank, what: str, act: Callable[[], object]) -> None:
    """What torch does on all ranks together. Raises our errors in place of torch's, which is no Exception."""
    explained = comm.explained_group(what, _world()) if _is_distributed(rank) else nullcontext()
    try:
        with _quiet(), explained:
            act()
    except CheckpointException as error:
        failures = {number: failure for number, (failure, _) in error.failures.items()}
        for failure in failures.values():
            if isinstance(failure, ProgramError | KeyboardInterrupt):
                raise failure from None
        is_system = all(isinstance(failure, OSError) for failure in failures.values())
        told = "; ".join(f"rank {number}: {failure!r}" for number, failure in failures.items())
        raise (_Unreadable if is_system else ProgramError)(f"{what} failed: {told}") from None


def _on_each(rank: Rank, act: Callable[[], Result]) -> list[Result]:
    """What each rank gets by acting, on all of them. Raises on all where it fails on one."""
    try:
        own: tuple[Any, str, bool] = act(), "", False
    except (OSError, ProgramError) as error:
        own = None, str(error), isinstance(error, OSError | _Unreadable)
    every = comm.gather_objects(own, _world()) if _is_distributed(rank) else [own]
    failed = {number: text for number, (_, text, _) in enumerate(every) if text}
    if failed:
        told = "; ".join(f"rank {k}: {text}" if len(every) > 1 else text for k, text in failed.items())
        raise (_Unreadable if all(every[k][2] for k in failed) else ProgramError)(told)
    return [found for found, _, _ in every]


def _on_first(rank: Rank, act: Callable[[], Result]) -> Result:
    """What the first rank gets by acting, on all of them."""
    return _on_each(rank, lambda: act() if _number(rank) == 0 else None)[0]  # type: ignore[return-value] # the first's


# What an optimizer holds ----------------------------------------


def _optimizer_state(rank: Rank, optimizer: Optimizer) -> dict[str, Any]:
    """By single-device names. An optimizer that has not stepped yet has no state, and must not be given one."""
    has_stepped = bool(optimizer.state)
    held = [parameter.grad for parameter in rank.parameters()]
    state = _torch_state(rank, optimizer)
    if not has_stepped:
        optimizer.state.clear()
        state["state"] = {}
        for parameter, gradient in zip(rank.parameters(), held, strict=True):
            parameter.grad = gradient
    return state


def _torch_state(rank: Rank, optimizer: Optimizer) -> dict[str, Any]:
    with _named_alone(rank, optimizer):
        return get_optimizer_state_dict(rank, optimizer)


def _complete_state(optimizer: Optimizer, names: Container[str], saved: Mapping[str, Any]) -> None:
    """Makes what is to be loaded by a step without gradients, of an optimizer that has some state from the start, such
    as a mark of what is a matrix: torch does so only where there is none."""
    held = {key for item in optimizer.state.values() if isinstance(item, dict) for key in item}
    keys = {_key_of(path, names) for path in saved if path.startswith(_STATE)} - {""}
    if not optimizer.state or keys <= set(map(str, held)):
        return
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    for group, rate in rates:
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    optimizer.step()
    for group, rate in rates:
        group["lr"] = rate
    optimizer.zero_grad()


_STATE = "optimizer.state."


def _key_of(path: str, names: Container[str]) -> str:
    """The key of a parameter's state that a path in a checkpoint leads to; empty where it is of no parameter here."""
    parts = path.removeprefix(_STATE).split(".")
    return next((parts[k] for k in range(len(parts) - 1, 0, -1) if ".".join(parts[:k]) in names), "")


@contextmanager
def _named_alone(rank: Rank, optimizer: Optimizer) -> Iterator[None]:
    """The optimizer without the empty tensor that it has where no parameter is trained, which has no name."""
    named = {id(parameter) for _, parameter in rank.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in named]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters


def _own_groups(own: list[dict[str, Any]], saved: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The saved options of an optimizer's groups: by the names in them, or by their number, as names are those of one
    rank, which may have had other stages. Raises ProgramError where neither tells."""
    by_name = {name: group for group in saved for name in group["params"]}
    found = []
    for number, group in enumerate(own):
        known = next((by_name[name] for name in group["params"] if name in by_name), None)
        if known is None and len(saved) != len(own):
            raise ProgramError(f"expected {len(own)} groups of parameters in {path}, found {len(saved)}; make as many")
        found.append({**(known or saved[number]), "params": group["params"]})
    return found


def _check_optimizer(path: Path, saved: Mapping[str, Any]) -> None:
    if not any(key.startswith("optimizer.") for key in saved):
        raise ProgramError(f"expected a checkpoint with an optimizer's state, found none in {path}: load without")


def _check_extra(path: Path, extra: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing = [
        name for name, item in extra.items() if item.state_dict() and not any(key.startswith(name) for key in saved)
    ]
    if missing:
        raise ProgramError(f"expected {', '.join(missing)} in {path}, found none: load without, or save it too")


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
