"""Processes that end, disks that fill and power that goes, at any instant of saving a checkpoint; and damaged files."""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from autopar import runtime as rt

CALLS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")


class Dead(BaseException):
    """The process ends here, whatever it would still do."""


class Disk:
    """Files as they are changed, until the call number `at`, at which `how` comes to pass before it is done.

    killed: the process ends. power: also, files that were not brought to disk are cut short. names: also, renames whose
    folder was not brought to disk are undone (what was removed is gone all the same). full: this call and all that
    write after it fail, yet files can be removed.
    """

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how, self.calls, self.has_ended = at, how, 0, False
        self._written: set[Path] = set()
        self._renamed: list[tuple[Path, Path]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Watches what is done inside."""
        with ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(mock.patch.object(os, name, self._watched(name, getattr(os, name))))
            opened = self._watched("open", io.open)
            stack.enter_context(mock.patch.object(io, "open", opened))
            stack.enter_context(mock.patch.object(builtins, "open", opened))
            yield
        if self.has_ended and self.how in ("power", "names"):
            self._lose()

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not set("wax") & set(str(args[1] if len(args) > 1 else kwargs.get("mode", "r"))):
                return call(*args, **kwargs)
            self.calls += 1
            self.has_ended |= self.calls == self.at
            if self.has_ended and self.how != "full":
                raise Dead
            if self.has_ended and name not in ("unlink", "rmdir"):
                raise OSError(errno.ENOSPC, "No space left on device")
            result = call(*args, **kwargs)
            self._note(name, args)
            return result

        return watched

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "open":
            self._written.add(Path(args[0]))
        elif name == "fsync":
            path = Path(os.readlink(f"/proc/self/fd/{args[0] if isinstance(args[0], int) else args[0].fileno()}"))
            self._written.discard(path)
            self._renamed = [(old, new) for old, new in self._renamed if new.parent != path]
        elif name in ("rename", "replace"):
            old, new = Path(args[0]), Path(args[1])
            self._renamed.append((old, new))
            self._written = {
                new / path.relative_to(old) if path.is_relative_to(old) else path for path in self._written
            }

    def _lose(self) -> None:
        for path in self._written:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        for old, new in reversed(self._renamed if self.how == "names" else []):
            if new.exists() and not old.exists():
                new.rename(old)


class Model(rt.Program):
    """A few numbers."""

    AXES = {}  # noqa: RUF012
    INPUTS = (rt.Input("x", (), torch.float32),)

    def __init__(self, mesh: rt.RankMesh) -> None:
        super().__init__(mesh)
        self.inner = rt.Parameters(weight=rt.Parameter((8, 8)), bias=rt.Parameter((8,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its loss."""
        return (self.inner.weight.square().sum() + self.inner.bias.sum()) * x


class Run:
    """A run whose numbers all tell which save they are of."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, rt.build(Model)
        self.set(0)
        self.optimizer = torch.optim.SGD(self.rank.parameters(), lr=0.0, momentum=0.9)

    def set(self, value: int) -> None:
        """Makes all numbers alike."""
        with torch.no_grad():
            for parameter in self.rank.parameters():
                parameter.fill_(value)

    def save(self, step: int, value: int, keep: int = 2) -> None:
        """Saves numbers of their own at a step."""
        self.set(value)
        for parameter in self.rank.parameters():
            parameter.grad = torch.full_like(parameter, value)
            self.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
        rt.save_checkpoint(self.folder, self.rank, self.optimizer, step=step, keep=keep)

    def load(self) -> tuple[int, int]:
        """The step and the value of what is found; asserts that all of it is of one save."""
        step = rt.load_checkpoint(self.folder, self.rank, self.optimizer)
        held = [*self.rank.parameters(), *(s["momentum_buffer"] for s in self.optimizer.state.values() if s)]
        values = {value for tensor in held for value in tensor.detach().flatten().tolist()}
        assert len(values) == 1, values
        return step, int(values.pop())


# Killed by the system ----------------------------------------


def killed(folder: Path, seed: int) -> tuple[list[int], int]:
    """Lets a child save one checkpoint after the other until it is killed at a random instant, some time after its
    first. Returns the values that it had saved, in order, and the one that is found then."""
    draw = random.Random(seed)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            _save_for_ever(folder, writer, draw.choice([1, 2, 3]))
        os._exit(1)
    os.close(writer)
    first = os.read(reader, 4)
    assert first, "the child could not save"
    time.sleep(draw.random() * 0.15)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    rest = b""
    while found := os.read(reader, 1 << 16):
        rest += found
    os.close(reader)
    saved = [value for (value,) in struct.iter_unpack("i", first + rest)]
    step, value = Run(folder).load()
    assert step == value % 1000
    return saved, value


def _save_for_ever(folder: Path, writer: int, repeats: int) -> None:
    """Each step is saved `repeats` times; steps fall back to 1 now and then."""
    run = Run(folder)
    _, value = run.load() if folder.exists() else (0, 0)
    while True:
        value += 1 if value % repeats else 1000  # the step is what is left over by 1000
        run.save(value % 1000, value)
        os.write(writer, struct.pack("i", value))


# Damage ----------------------------------------


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def _fill(path: Path, draw: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "a bit flipped": _flip,
    "cut short": _cut,
    "all zeros": _fill,
    "removed": lambda path, draw: path.unlink(),
}


def damaged(folder: Path, name: str, damage: str, seed: int) -> tuple[int, list[str]]:
    """Damages a file of the last checkpoint. Returns the step that is loaded then, and the warnings."""
    last = rt.last_checkpoint(folder)
    assert last is not None
    DAMAGES[damage](last / name, random.Random(seed))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step, value = Run(folder).load()
    assert step == value
    return step, [str(item.message) for item in told]
