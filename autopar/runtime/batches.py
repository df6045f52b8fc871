"""The batches of a loader, as a rank takes them: on the ranks that read any, one ahead, and resumable.

    for batch in rank.batches(loader):
        loss = rank.train_step(**batch)

A state says after which batch of which epoch it was taken. A loader that has a state of its own (torchdata's
StatefulDataLoader) goes on from that; any other begins its epoch anew, from the random numbers with which it began, and
leaves out what was seen.
"""

from __future__ import annotations

import base64
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.runtime import agreement
from autopar.runtime.declare import Pipeline, Program
from autopar.runtime.errors import ProgramError

Batch = dict[str, Any]


class RankOfBatches(Protocol):
    """What batches must know of a rank."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def programs(self) -> Sequence[type[Program] | type[Pipeline]]: ...
    @property
    def reads_inputs(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def number(self) -> int: ...


class Batches:
    """An iterable of batches by the inputs' names; None for each on a rank whose stages read none.

    One pass over it is `epochs` of the loader, or without end if that is None; the next pass is as many again, and one
    that was left begins its epoch anew. `epoch` and `batch` count what was given out. Passed to `save_checkpoint` and
    `load_checkpoint` as `extra={"data": batches}`, a run goes on with the next.
    """

    def __init__(
        self, rank: RankOfBatches, loader: Iterable[Any], *, local: bool, epochs: int | None, short: str
    ) -> None:
        if short not in ("refuse", "drop"):
            raise ProgramError(f'expected short="refuse" or "drop", found {short!r}')
        self._rank, self._loader, self._local, self._epochs, self._short = rank, loader, local, epochs, short
        self.epoch = self.batch = 0
        self._first = 0  # epoch of this pass
        self._start: dict[str, Any] = {}  # random numbers at the begin of this epoch
        self._after: Any = None  # the loader's own state, after the batch that was given out last
        self._resumed: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Batch]:
        self._check_loader()
        if self._resumed is None and self._is_done:
            self._first = self.epoch
        while not self._is_done:
            yield from self._one_epoch()
            self._check_some()
            self.epoch, self.batch, self._after = self.epoch + 1, 0, None
        self._resumed = None

    @property
    def _is_done(self) -> bool:
        return self._epochs is not None and self.epoch >= self._first + self._epochs

    def _check_some(self) -> None:
        """Raises ProgramError, on all ranks alike, behind an epoch without batches: the next ones would have none."""
        if not self.batch:
            left_out = ", or none but the short one that is left out" if self._short == "drop" else ""
            raise ProgramError(
                f"expected batches in epoch {self.epoch} of the loader, found none{left_out}: a generator is read once "
                "(give a list, or an object whose iter() begins anew), and drop_last=True leaves nothing of fewer "
                "samples than a batch"
            )

    def _one_epoch(self) -> Iterator[Batch]:
        ahead: deque[tuple[Batch, Any]] = deque()
        if self._resumed is None:
            self.batch = 0
        items = self._items()
        while True:
            while len(ahead) < self._depth and (found := self._next(items)) is not None:
                ahead.append(found)
            if not ahead:
                return
            batch, self._after = ahead.popleft()
            self.batch += 1
            yield batch

    @property
    def _depth(self) -> int:
        """One is read ahead of a loader with workers. Without, reading draws random numbers in this process, and what
        is drawn before a step must not be drawn before the one before."""
        return 2 if getattr(self._loader, "num_workers", 0) else 1

    def _items(self) -> Iterator[Any]:
        """The loader's items from the next on; nothing is read where no stage of this rank needs it."""
        resumed, self._resumed = self._resumed, None
        if not self._rank.reads_inputs:
            return itertools.repeat(None)
        set_epoch = getattr(getattr(self._loader, "sampler", None), "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)
        if resumed is None:
            self._start = self._random()
            return iter(self._loader)
        if resumed.get("loader") is not None and hasattr(self._loader, "load_state_dict"):
            self._loader.load_state_dict(resumed["loader"])
            self._start = resumed["start"] or self._random()
            return iter(self._loader)
        self._start = resumed["start"] or self._random()
        now = self._random()
        self._set_random(self._start)
        items = iter(self._loader)
        skipped = sum(1 for _ in itertools.islice(items, self.batch))
        if skipped < self.batch:
            raise ProgramError(
                f"expected {self.batch} batches that were seen before the checkpoint, found that the "
                f"loader has {skipped}; give the loader that the run began with"
            )
        self._set_random(resumed["now"] or now)
        return items

    def _next(self, items: Iterator[Any]) -> tuple[Batch, Any] | None:
        """The next batch with the loader's state after it; None at the end, on all ranks at once."""
        item = next(items, _END)
        batch = None if item is _END else self._named(item)
        is_short = batch is not None and self._is_short(batch)
        is_followed = is_short and next(items, _END) is not _END
        ends = [(batch is None or is_short, is_followed)]
        if self._rank.num_stages > 1 or self._local:
            ends = agreement.gathered(ends[0], self._rank.num_ranks) or ends
        if any(followed for _, followed in ends):
            raise ProgramError(
                f"expected a short batch at the end of the loader alone, found others behind one in epoch {self.epoch};"
                " plan with shapes=[…] of so many rows as well, or leave it out of the loader"
            )
        if batch is None or any(end for end, _ in ends):
            return None
        has_state = self._rank.reads_inputs and hasattr(self._loader, "state_dict")
        after = self._loader.state_dict() if has_state else None  # type: ignore[attr-defined] # seen to have one
        return {name: self._moved(value) for name, value in batch.items()}, after

    def _named(self, item: Any) -> Batch:
        program = self._rank.programs[0]
        names = list(program.ARGUMENTS or [spec.name for spec in program.INPUTS])
        if item is None:
            return dict.fromkeys(names)
        if isinstance(item, Mapping):
            return {str(name): value for name, value in item.items()}
        values = list(item) if isinstance(item, (tuple, list)) else [item]
        if len(values) != len(names):
            raise ProgramError(
                f"expected batches of the inputs {', '.join(names)}, found one of {len(values)} values; give "
                "dicts by name"
            )
        return dict(zip(names, values, strict=True))

    def _is_short(self, batch: Batch) -> bool:
        """Whether a batch of fewer rows than any that was planned is left out. Others are refused by the step."""
        if self._short == "refuse" or self._local:
            return False
        programs = self._rank.programs
        return not any(_fits(one, batch) for one in programs) and any(_fits(one, batch, fewer=True) for one in programs)

    def _moved(self, value: Any) -> Any:
        is_far = isinstance(value, Tensor) and self._rank.device.type != "cpu" and not self._local
        return value.to(self._rank.device, non_blocking=True) if is_far else value

    # Before anything runs ----------------------------------------

    def _check_loader(self) -> None:
        """Raises ProgramError, on all ranks, for loaders of unequal length, and for a short last batch of rows that
        were not planned."""
        rank = self._rank
        count = _length(self._loader) if rank.reads_inputs else None
        own = {} if count is None else {"number of batches": str(count)}
        agreement.check_equal("the data", own, rank.num_ranks, "Give each rank a loader of as many batches")
        agreement.together(self._check_last, rank.num_ranks)

    def _check_last(self) -> None:
        rows, size = _last_rows(self._loader)
        if not self._rank.reads_inputs or self._local or self._short == "drop" or rows == 0:
            return
        known = {spec.shape[0] for program in self._rank.programs for spec in program.INPUTS if spec.shape}
        if self._rank.programs[0].FILLING and rows < max(known):
            return
        if size in known and rows not in known:
            raise ProgramError(
                f"expected batches of {' or '.join(map(str, sorted(known)))} rows, found that the last of the "
                f"loader has {rows}; plan with shapes=[…] of so many rows as well, with pad={{…}}, or leave it out: "
                'drop_last=True of the loader, or short="drop"'
            )

    # State ----------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the batches stand: plain data and tensors, equal on all ranks, which call this together."""
        own = {"loader": self._after, "start": self._start or None, "now": self._random(), "first": self._first}
        every = agreement.gathered(own, self._rank.num_ranks) or [own]
        return {"epoch": self.epoch, "batch": self.batch, "ranks": _as_text(every)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after the batch that was given out last; the pass that this was in ends where it would have, the next
        is a whole one. On another number of ranks, a loader for all of them begins
        where the first rank's was."""
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        every = _of_text(state["ranks"])
        self._first = int(every[0].get("first", 0))
        same = len(every) == self._rank.num_ranks
        if self._local and not same and self.batch:
            raise ProgramError(
                f"expected as many ranks as loaders of their own were saved for, {len(every)}, found "
                f"{self._rank.num_ranks}; give a loader of global batches to go on under another plan"
            )
        readers = [one for one in every if one["start"] is not None] or every
        own = every[self._rank.number] if same else readers[0]
        self._resumed = own if own["start"] is not None else readers[0]

    def _random(self) -> dict[str, Any]:
        """Where torch's random numbers stand, and those of the loader's own generator."""
        generator = getattr(self._loader, "generator", None)
        own = generator.get_state() if isinstance(generator, torch.Generator) else None
        return {"torch": torch.get_rng_state(), "loader": own}

    def _set_random(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        generator = getattr(self._loader, "generator", None)
        if isinstance(generator, torch.Generator) and state["loader"] is not None:
            generator.set_state(state["loader"])


def _as_text(states: list[dict[str, Any]]) -> str:
    """One value of whatever form loaders' states have: a checkpoint is read by keys that are known before."""
    written = BytesIO()
    torch.save(states, written)
    return base64.b64encode(written.getvalue()).decode()


def _of_text(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = torch.load(BytesIO(base64.b64decode(text)), weights_only=True)
    return found


_END: Any = object()


def _fits(program: type[Program] | type[Pipeline], batch: Batch, fewer: bool = False) -> bool:
    """Whether a batch is one of the program's; or, but for having fewer rows."""
    taken = {spec.name: tuple(spec.shape) for spec in program.INPUTS}
    pairs = [(tuple(x.shape), taken[name]) for name, x in batch.items() if isinstance(x, Tensor) and name in taken]
    if not fewer:
        return all(own == planned for own, planned in pairs)
    return all(len(own) == len(planned) and own[1:] == planned[1:] and own[:1] <= planned[:1] for own, planned in pairs)


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type] # where it has none, see below
    except (TypeError, NotImplementedError):
        return None


def _last_rows(loader: Iterable[Any]) -> tuple[int, int]:
    """The rows of a DataLoader's last batch, and of the others; zeros where they are not known, or there is no such."""
    size: int | None = getattr(loader, "batch_size", None)
    sampler: Callable[[], int] | None = getattr(getattr(loader, "sampler", None), "__len__", None)
    if size is None or getattr(loader, "drop_last", True) or sampler is None:
        return 0, 0
    try:
        return sampler() % size, size
    except (TypeError, NotImplementedError):
        return 0, 0
