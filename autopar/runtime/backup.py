"""Synchronous steps without their last ranks: the gradients of the first n - b ranks that are there make the update.

Ranks take a number when their passes of a step have ended. The first n - b send their gradients to the first of all,
which adds them in the order of ranks, and sends their mean to every other rank. One that comes later drops its own
gradient and takes the mean; one that begins a step that is decided makes no passes, and catches up so. All update by
the same bits. A rank may be `BEHIND` steps late; before it would be more, the others wait for it, and a rank that is
lost is so missed within the time that collectives wait.

    step t   number(t) = 1, 2, …    first(t): its rank, who sums    all(t): every rank has taken the mean

Of a mean over counted samples, ranks send the sum over theirs, and the count: what is left is the mean over the samples
of those that took part. Of other sums and means, it is n / (n - b) times their summands.

Source: Chen et al. 2016 (arXiv:1604.00981), section 3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch lists no exports

from autopar.runtime import comm
from autopar.runtime.errors import WorldError
from autopar.runtime.mesh import TIMEOUT_S, Axis, own_group
from autopar.runtime.packing import BACKUP_NUMBERS, BEHIND
from autopar.runtime.stored import StoredParameter

_LOSS, _DIVISOR, _WISHES = 0, 1, 2
_GRADIENTS, _MEAN = 0, 1
_WHAT = ("gradients", "the mean of gradients")
_TAGS = 1 << 20  # of messages, used in turn


class FirstArrivals:
    """Where ranks along an axis meet in each step, but for the last ones.

    late: whose gradients a step goes without. items: the trained parameters, in an order that all ranks have.
    """

    def __init__(self, axis: Axis, late: int, items: Sequence[StoredParameter]) -> None:
        assert axis.group is not None, "there are at least two copies"
        self._ranks = dist.get_process_group_ranks(axis.group)
        if self._ranks != list(range(dist.get_world_size())):
            raise WorldError(
                f"expected all {dist.get_world_size()} ranks to run a program under backup, in their order, found "
                f"ranks {self._ranks[:8]}; give no device mesh, or one over all"
            )
        self._axis, self._first, self._items = axis, axis.size - late, list(items)
        self._timeout_s = axis.timeout_s or TIMEOUT_S
        self._group = own_group((tuple(self._ranks),), self._timeout_s, "backup", "gloo")
        self._step = 0  # that is under way, counted from 1
        with self._told("opening a store on the host of rank 0 (MASTER_ADDR)"):
            self._store = self._joined(axis.group)
        self._sent: list[tuple[int, comm.Sending, Tensor]] = []  # with its step, and memory that must stay
        self._wishes, self._granted = [False, False], [0, 0]

    def _joined(self, group: dist.ProcessGroup) -> TCPStore:
        """A store of this program's own, which the first rank keeps."""
        host, limit = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=self._timeout_s)
        made = TCPStore(host, 0, None, True, limit, wait_for_workers=False) if not self._axis.index else None
        port = comm.gather_objects(made.port if made is not None else 0, group)[0]
        return made or TCPStore(host, port, None, False, limit, wait_for_workers=False)

    def step(self, passes: Callable[[], Tensor]) -> Tensor:
        """Makes a step's passes, where it is not decided yet. Parameters have the gradients of those that took part
        then; returns their loss. passes: returns that of this rank's samples, and leaves their gradients."""
        self._step += 1
        with self._told("asking whether the step is decided"):
            is_decided = self._store.check([self._key("rank", self._first)])
        own, is_counted = None, False
        if not is_decided:
            assert self._axis.group is not None, "there are at least two copies"
            with comm.alone(self._axis.group) as alone:
                loss = passes()
            is_counted = bool(alone.counts)
            if self._arrived() <= self._first:
                own = self._packed(loss, alone.counts[0] if is_counted else None)
        with torch.no_grad():
            return self._met(own, is_counted)

    def _met(self, own: Tensor | None, is_counted: bool) -> Tensor:
        """What all take of a step. own: what this rank sends, if it takes part."""
        leader = self._rank_of(1)
        if own is not None and leader == self._axis.index:
            mean = self._mean(own, is_counted)
            self._await_all(self._step - BEHIND)
            others = (rank for rank in range(self._axis.size) if rank != leader)
            self._sent += [(self._step, self._sending(mean, rank, _MEAN), mean) for rank in others]
        else:
            sending = self._sending(own, leader, _GRADIENTS) if own is not None else None
            mean = self._received(leader, _MEAN)
            if sending is not None:
                sending.wait()
        self._taken()
        return self._unpack(mean)

    def drain(self) -> None:
        """Waits until all other ranks have taken what this one sums for them. All call this after the same step."""
        for _, sending, _ in self._sent:
            sending.wait()
        self._sent = []

    def agreed(self, wishes: Sequence[bool]) -> list[bool]:
        """Which of two wishes some rank had before the step that has just ended was decided, equal on all ranks; one
        that is granted begins anew. Those of a rank are told to the others in steps to come."""
        with self._told("telling a wish"):
            for number, wanted in enumerate(wishes):
                if wanted:
                    self._store.add(f"wish/{number}/{self._granted[number]}", 1)
        found = self._wishes
        self._granted = [count + is_granted for count, is_granted in zip(self._granted, found, strict=True)]
        return found

    def _key(self, what: str, number: int, step: int | None = None) -> str:
        return f"{step or self._step}/{what}/{number}"

    def _arrived(self) -> int:
        """This rank's number in the step, from 1 on."""
        with self._told("taking a number"):
            number = int(self._store.add(self._key("number", 0), 1))
            if number <= self._first:
                self._store.set(self._key("rank", number), str(self._axis.index))
        return number

    def _rank_of(self, number: int) -> int:
        """Who has a number in the step; waits until somebody has."""
        with self._told(f"waiting for the rank that is there as number {number}"):
            return int(self._store.get(self._key("rank", number)))

    def _mean(self, own: Tensor, is_counted: bool) -> Tensor:
        """Of all that take part: the sum in the order of ranks, divided; of which the loss is the first number."""
        ranks = sorted(self._rank_of(number) for number in range(1, self._first + 1))
        total: Tensor | None = None
        for rank in ranks:
            other = own if rank == self._axis.index else self._received(rank, _GRADIENTS)
            if total is None:
                total = other
                continue
            for both, part in zip(self._parts(total), self._parts(other), strict=True):
                both.add_(part)
        assert total is not None, "some rank takes part: this one"
        numbers, *gradients = self._parts(total)
        factor = 1 / numbers[_DIVISOR].item() if is_counted else self._axis.size / self._first
        numbers[_LOSS] *= factor
        with self._told("reading wishes"):
            for number, epoch in enumerate(self._granted):
                numbers[_WISHES + number] = int(self._store.add(f"wish/{number}/{epoch}", 0)) > 0
        for part in gradients:
            part.mul_(factor)
        return total

    def _await_all(self, step: int) -> None:
        """Until every rank has taken the mean of a step: no rank is further behind."""
        if step < 1:
            return
        with self._told(f"waiting for ranks that are {BEHIND} steps behind"):
            self._store.wait([self._key("all", 0, step)], timedelta(seconds=self._timeout_s))
            if step > BEHIND:
                self._store.delete_key(self._key("all", 0, step - BEHIND))
        left = [one for one in self._sent if one[0] > step]
        for when, sending, _ in self._sent:
            if when <= step:
                sending.wait()
        self._sent = left

    def _taken(self) -> None:
        """Tells that this rank is through with the step; the last one forgets what was kept of it."""
        with self._told("ending the step"):
            if self._store.add(self._key("taken", 0), 1) < self._axis.size:
                return
            self._store.set(self._key("all", 0), "")
            for what, number in [("number", 0), ("taken", 0), *(("rank", one + 1) for one in range(self._first))]:
                self._store.delete_key(self._key(what, number))

    def _sending(self, message: Tensor, rank: int, kind: int) -> comm.Sending:
        assert self._group is not None, "all ranks are in it"
        tag, name = (2 * self._step + kind) % _TAGS, self._axis.name
        return comm.start_send(message, self._ranks[rank], self._group, tag, _WHAT[kind], self._timeout_s, name)

    def _received(self, rank: int, kind: int) -> Tensor:
        assert self._group is not None, "all ranks are in it"
        message, tag = self._empty(), (2 * self._step + kind) % _TAGS
        comm.start_receive(message, self._ranks[rank], self._group, tag, _WHAT[kind], self._timeout_s).wait()
        return message

    def _empty(self) -> Tensor:
        return torch.empty(8 * self._num_numbers + sum(item.local.nbytes for item in self._items), dtype=torch.uint8)

    @property
    def _num_numbers(self) -> int:
        return BACKUP_NUMBERS + len(self._items)

    def _parts(self, message: Tensor) -> list[Tensor]:
        """A message's numbers, and a gradient of each parameter, where they lie: wide elements before narrow ones."""
        at = 8 * self._num_numbers
        found: dict[int, Tensor] = {}
        for index, item in sorted(enumerate(self._items), key=lambda pair: -pair[1].local.element_size()):
            found[index] = message[at : at + item.local.nbytes].view(item.local.dtype).view(item.local.shape)
            at += item.local.nbytes
        return [message[: 8 * self._num_numbers].view(torch.float64), *(found[index] for index in sorted(found))]

    @torch.no_grad()
    def _packed(self, loss: Tensor, count: Tensor | None) -> Tensor:
        """What this rank sends of its passes."""
        message = self._empty()
        numbers, *gradients = self._parts(message)
        numbers.zero_()
        numbers[_LOSS] = loss.double().cpu()
        numbers[_DIVISOR] = 1.0 if count is None else count.double().cpu()
        for number, (item, part) in enumerate(zip(self._items, gradients, strict=True)):
            numbers[BACKUP_NUMBERS + number] = item.gradient is not None
            part.copy_(item.gradient) if item.gradient is not None else part.zero_()
        return message

    def _unpack(self, mean: Tensor) -> Tensor:
        """Takes what was decided. Returns the loss."""
        numbers, *gradients = self._parts(mean)
        for number, (item, part) in enumerate(zip(self._items, gradients, strict=True)):
            if not numbers[BACKUP_NUMBERS + number]:
                item.gradient = None
            elif item.gradient is not None:
                item.gradient.copy_(part)
            else:
                item.add_gradient(part.to(item.local.device, copy=True), owned=True)
        self._wishes = [bool(numbers[_WISHES + number]) for number in range(2)]
        like = self._items[0].local
        return numbers[_LOSS].to(like.device, like.dtype)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Raises CollectiveError in place of the store's error."""
        assert self._group is not None, "all ranks are in it"
        with comm.explained_group(f"{what} in step {self._step:,} under backup", self._group):
            yield
