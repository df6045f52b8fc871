"""Tensors on their way between stages: activations forward, their gradients backward.

Tensors travel over several groups (`group_name`): on NCCL, what a rank sends and receives over one is done in the order
in which it was started (see `arrivals`). Sends go on while the rank computes; what is under way is kept until it has
left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.crossing import Crossing, PeerMove, Side, crossing
from autopar.runtime.declare import Received, Stage
from autopar.runtime.mesh import Axis
from autopar.runtime.placement import local_shape


@dataclass(frozen=True, eq=False)
class Channel:
    """A received tensor of a stage: how it comes from its source, and how its gradient goes back.

    number: tells channels apart, on all ranks alike.
    """

    number: int
    received: Received
    target: int
    there: Side
    here: Side

    def route(self, is_forward: bool) -> Crossing:
        """Who sends what to whom."""
        sides = (self.there, self.here) if is_forward else (self.here, self.there)
        return crossing(self.received.shape, *sides)


def find_channels(stages: Sequence[type[Stage]]) -> list[Channel]:
    """Everything that stages receive, in their order."""
    found: list[Channel] = []
    for target, stage in enumerate(stages):
        for received in stage.RECEIVED:
            there = _side(stages[received.source], received.left)
            found.append(Channel(len(found), received, target, there, _side(stage, received.placement)))
    return found


def group_name(channel: Channel, is_forward: bool) -> str:
    """The group that carries a tensor, or its gradient: those between stages equally far apart, and only up or only
    down the ranks, share one."""
    rises = (channel.there.ranks < channel.here.ranks) == is_forward
    distance = channel.target - channel.received.source
    return f"{'forward' if is_forward else 'backward'} {distance} {'up' if rises else 'down'}"


def group_names(channels: Sequence[Channel]) -> list[str]:
    """All groups that the channels need, on all ranks in the same order."""
    travelling = [channel for channel in channels if channel.there.ranks != channel.here.ranks]
    return sorted({group_name(channel, is_forward) for channel in travelling for is_forward in (True, False)})


def _side(stage: type[Stage], placement: str) -> Side:
    return Side.of(stage.FIRST_RANK, tuple(stage.AXES.values()), placement)


class Outbox:
    """Tensors that are leaving. A thread waits for each in turn and lets go of it: gloo tells nobody else that it has
    left, and until then its memory is taken."""

    def __init__(self) -> None:
        self._leaving: SimpleQueue[tuple[comm.Sending, Tensor]] = SimpleQueue()
        self._left: SimpleQueue[Exception | None] = SimpleQueue()
        self._count = 0
        self._thread: Thread | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether `finish` has not seen all of them leave."""
        return self._count > 0

    def add(self, sending: comm.Sending, tensor: Tensor) -> None:
        """Takes a tensor until it has left."""
        if self._thread is None:
            self._thread = Thread(target=_watch, args=(self._leaving, self._left), daemon=True)
            self._thread.start()
        self._count += 1
        self._leaving.put((sending, tensor))

    def finish(self) -> None:
        """Waits until all have left. Raises CollectiveError when one could not."""
        while self._count:
            error = self._left.get()
            self._count -= 1
            if error is not None:
                raise error


def _watch(leaving: SimpleQueue[tuple[comm.Sending, Tensor]], left: SimpleQueue[Exception | None]) -> None:
    while True:
        left.put(_see_off(*leaving.get()))


def _see_off(sending: comm.Sending, tensor: Tensor) -> Exception | None:
    """Waits with a tensor that is leaving; what went wrong, if anything did."""
    try:
        sending.wait()
    except Exception as error:  # raised again by `finish`
        return error
    return None


class Transport:
    """This rank's sends and receives. Raises CollectiveError for a rank that does not answer."""

    def __init__(
        self, groups: Mapping[str, dist.ProcessGroup], microbatches: int, device: torch.device, timeout_s: float
    ) -> None:
        self._groups = groups
        self._microbatches, self._device, self._timeout_s = microbatches, device, timeout_s
        self._rank = dist.get_rank()
        self._outbox = Outbox()
        self._kept: dict[tuple[int, bool, int], tuple[PeerMove, Tensor]] = {}  # from one stage of this rank to another

    def send(self, channel: Channel, tensor: Tensor, microbatch: int, is_forward: bool) -> None:
        """Starts to send this rank's part of a tensor."""
        for move in channel.route(is_forward).sends(self._rank):
            if move.peer == self._rank:
                self._kept[channel.number, is_forward, microbatch] = move, tensor
                continue
            part = tensor[move.slices].contiguous()
            tag = self._tag(channel, microbatch)
            what, group = _what(channel, is_forward), self._groups[group_name(channel, is_forward)]
            self._outbox.add(comm.start_send(part, move.peer, group, tag, what, self._timeout_s), part)

    def start_receive(self, channel: Channel, microbatch: int, is_forward: bool) -> Callable[[], Tensor]:
        """Starts to receive this rank's part of a tensor, which the returned function waits for."""
        side = channel.here if is_forward else channel.there
        shape = local_part_shape(channel.received.shape, side, self._rank)
        whole = torch.empty(shape, dtype=channel.received.dtype, device=self._device)
        parts: list[tuple[comm.Sending, Tensor, PeerMove]] = []
        kept: list[PeerMove] = []
        for move in channel.route(is_forward).receives(self._rank):
            if move.peer == self._rank:
                kept.append(move)
                continue
            part = whole if move.num_elements == whole.numel() else whole.new_empty(whole[move.slices].shape)
            tag = self._tag(channel, microbatch)
            what, group = _what(channel, is_forward), self._groups[group_name(channel, is_forward)]
            receiving = comm.start_receive(part, move.peer, group, tag, what, self._timeout_s)
            parts.append((receiving, part, move))

        def finish() -> Tensor:
            for receiving, part, move in parts:
                receiving.wait()
                if part is not whole:
                    whole[move.slices].copy_(part)
            for move in kept:
                source, tensor = self._kept.pop((channel.number, is_forward, microbatch))
                whole[move.slices].copy_(tensor[source.slices])
            return whole

        return finish

    def finish(self) -> None:
        """Waits until everything has left."""
        self._outbox.finish()

    def forget(self) -> None:
        """Leaves what a step that failed midway has under way."""
        self._outbox = Outbox() if self._outbox.is_waiting else self._outbox
        self._kept.clear()

    def _tag(self, channel: Channel, microbatch: int) -> int:
        return channel.number * self._microbatches + microbatch


def _what(channel: Channel, is_forward: bool) -> str:
    name = channel.received.name if is_forward else f"the gradient of {channel.received.name}"
    return f"{name} between stages {channel.received.source} and {channel.target}"


def local_part_shape(shape: Sequence[int], side: Side, rank: int) -> tuple[int, ...]:
    """Shape of what a rank of the side holds."""
    rest, axes = side.ranks.index(rank), list[Axis]()
    for size in reversed(side.sizes):
        rest, index = divmod(rest, size)
        axes.insert(0, Axis("", size, index, None))
    return local_shape(shape, side.types, axes)


def num_ranks(stage: type[Stage]) -> int:
    """Ranks of a stage's submesh."""
    return math.prod(stage.AXES.values())
