"""Brings gradients home: from the leaves, back through the transposed conversions, to the stored shards.

Gradients travel in buckets, started from autograd's hooks as soon as a bucket is complete, while the backward
pass goes on. A parameter's gradient is sent once a step, in the last microbatch's backward pass, or after
every microbatch where it is declared so.

A bucket that is summed as it is has one buffer. Each gradient is copied there as it comes, while it is still in
the cache, and its own memory serves the next one; the sums stay where they are, so nothing is copied back. Several
microbatches add up there, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from autopar.runtime import coalesce, comm
from autopar.runtime.coalesce import CutTensor
from autopar.runtime.mesh import Axis, RankMesh
from autopar.runtime.packing import MAX_IN_FLIGHT, pack_gradients
from autopar.runtime.ranges import gradient
from autopar.runtime.redistributing import backward_step
from autopar.runtime.stored import ParameterUse, SizedStep


class GradientBucket:
    """Slots whose gradients take the same way home, and the gradients that have come so far."""

    def __init__(self, slots: Sequence[ParameterUse]) -> None:
        self.slots = list(slots)
        self.missing = len(self.slots)
        declared = slots[0].parameter.declared
        self.each_microbatch = declared.regather or declared.reduce_each_microbatch
        self.dtype, self.is_cast = declared.dtype, slots[0].is_cast
        self.has_buffer = is_summed_first(slots[0])
        self.levels, self.is_served = slots[0].levels, slots[0].is_served
        self._parts = math.prod(axis.size for axis in self.levels[:-1])
        self._offsets = dict(zip(slots, accumulate(map(self._room, slots), initial=0), strict=False))
        self._gradients: dict[ParameterUse, Tensor] = {}
        self._buffer: Tensor | None = None

    @torch.no_grad()
    def collect(self, slot: ParameterUse) -> None:
        """Takes the leaf's gradient: into the bucket's buffer, if it has one; added to what it has of the leaf."""
        gradient = _take_gradient(slot)
        if slot in self._gradients:
            self._gradients[slot].add_(gradient)
        elif self.has_buffer:
            start, length = self._offsets[slot], gradient.numel()
            self._gradients[slot] = self._make_buffer(gradient)[start : start + length].view(slot.shape)
            self._gradients[slot].copy_(gradient)
        else:
            self._gradients[slot] = gradient.to(self.dtype)

    def hand_over(self) -> tuple[list[ParameterUse], list[Tensor], Tensor | None]:
        """Hands out the slots that have a gradient, the gradients, and the buffer that these fill."""
        found = [slot for slot in self.slots if slot in self._gradients]
        tensors, buffer = [self._gradients[slot] for slot in found], self._buffer
        self._gradients, self._buffer = {}, None
        if buffer is not None and len(found) < len(self.slots):  # a parameter had no part in the loss
            buffer, tensors = coalesce.pack(tensors, self._parts)
        return found, tensors, buffer

    @property
    def has_gradients(self) -> bool:
        return bool(self._gradients)

    def _make_buffer(self, like: Tensor) -> Tensor:
        if self._buffer is None:
            self._buffer = like.new_empty(sum(map(self._room, self.slots)), dtype=self.dtype)
        return self._buffer

    def _room(self, slot: ParameterUse) -> int:
        """Elements that a gradient takes of the buffer, which levels cut in equal parts."""
        return -(-slot.leaf.numel() // self._parts) * self._parts


class GradientReduction:
    """A bucket's gradients on their way home: transposed steps, each started, then awaited."""

    def __init__(self, bucket: GradientBucket, mesh: RankMesh) -> None:
        self.slots, self.tensors, self.buffer = bucket.hand_over()
        self.mesh, self.is_served = mesh, bucket.is_served
        self.owned = False  # whether the tensors are ours to overwrite
        # where autograd's gradients lie: a step that the rank stops for may hand on what it was given
        self._made = {tensor.untyped_storage().data_ptr() for tensor in self.tensors}
        self.on_host = bucket.slots[0].parameter.is_on_host
        steps = [sized.step for sized in bucket.slots[0].steps]
        # what arrives is memory of its own, beside whole gradients or packed shards: few of these are under way
        self.is_resized = self.on_host or any(step.source.is_shard or step.target.is_shard for step in steps)
        # the last step is the copy to the host; those of a sum by levels are phases of their own
        self._steps_left = len(bucket.slots[0].steps) - len(bucket.levels) + self.on_host
        self._phases = [] if self.buffer is None else coalesce.sum_by_levels(self.buffer, bucket.levels)
        self._wait: Callable[[], list[Tensor]] | None = None
        self.advance()

    @property
    def is_to_go_on(self) -> bool:
        """Whether a step of the journey is still to be started."""
        return bool(self._steps_left or self._phases)

    @property
    def has_levels_left(self) -> bool:
        return bool(self._phases)

    @torch.no_grad()
    def advance(self) -> None:
        """Waits for the step under way, then goes on until the next step is under way or none is left."""
        if self._wait is not None:
            self.tensors, self._wait, self.owned = self._wait(), None, True
        while self.is_to_go_on and self._wait is None:
            if self._phases:
                self._wait = self._start_level(self._phases.pop(0))
                continue
            self._steps_left -= 1
            place = self._steps_left - self.on_host
            self._wait = self._start_down() if place < 0 else self._start([slot.steps[place] for slot in self.slots])
        if self._wait is None:
            self._deliver()

    def finish(self) -> None:
        while self.slots:
            self.advance()

    def wrap_ahead(self) -> None:
        """While the last sum is under way, which leaves the gradients where they are."""
        if self.buffer is not None and not self.is_to_go_on:
            for slot, tensor in zip(self.slots, self.tensors, strict=True):
                slot.parameter.wrap_ahead(tensor)

    def _start_down(self) -> Callable[[], list[Tensor]]:
        """To the host, where gradients are added up."""
        landed = [slot.parameter.landing() for slot in self.slots]
        copy = self.mesh.host_link.down(list(zip(landed, self.tensors, strict=True)))
        self.buffer = None

        def results() -> list[Tensor]:
            copy.wait()
            return landed

        return results

    def _start(self, steps: list[SizedStep]) -> Callable[[], list[Tensor]] | None:
        step = steps[0].step
        axis = self.mesh.axes[step.axis]
        kinds = (step.source.kind, step.target.kind)
        if kinds == ("I", "R"):
            return self._start_sum(axis)
        self.buffer = None
        if kinds == ("S", "R"):
            return coalesce.reduce_scatter(self.tensors, [s.step.source.dim for s in steps], axis)
        if kinds == ("I", "S"):
            return self._start_gather(steps, axis)
        self.tensors = [
            _without_rest(backward_step(tensor, axis, s.step.source, s.step.target, s.sizes))
            for tensor, s in zip(self.tensors, steps, strict=True)
        ]
        return None

    def _start_level(self, start: Callable[[], comm.Wait]) -> Callable[[], list[Tensor]]:
        wait, tensors = start(), self.tensors

        def results() -> list[Tensor]:
            wait()
            return tensors

        return results

    def _start_sum(self, axis: Axis) -> Callable[[], list[Tensor]]:
        if self.buffer is None:
            return coalesce.all_reduce(self.tensors, axis, owned=self.owned)
        servers = self.mesh.servers[axis.name] if self.is_served else None
        start = comm.start_all_reduce if servers is None else partial(comm.start_sum_over_servers, group=servers)
        wait, tensors = start(self.buffer, axis), self.tensors

        def results() -> list[Tensor]:
            wait()
            return tensors

        return results

    def _start_gather(self, steps: list[SizedStep], axis: Axis) -> Callable[[], list[Tensor]]:
        """Of gradients of what was cut where it is used, packed as parameters are."""
        cut = []
        for tensor, sized in zip(self.tensors, steps, strict=True):
            assert sized.sizes[1] is not None, "a cut ends at a sharded dim"
            cut.append(CutTensor(tensor, sized.step.target.dim, sized.sizes[1]))
        wholes = [piece.tensor.new_empty(piece.whole_shape) for piece in cut]
        return coalesce.all_gather(cut, wholes, axis)

    def _deliver(self) -> None:
        for slot, tensor in zip(self.slots, self.tensors, strict=True):
            slot.parameter.add_gradient(
                tensor, owned=self.owned or tensor.untyped_storage().data_ptr() not in self._made
            )
        self.slots, self.tensors, self.buffer = [], [], None


class Reducer:
    """Watches the leaves' gradients and sends complete buckets home."""

    def __init__(
        self, slots: Iterable[ParameterUse], mesh: RankMesh, unit_of: Callable[[ParameterUse], object]
    ) -> None:
        self.mesh = mesh
        self.is_last_microbatch = True
        self._converted = [s for s in slots if s.leaf.requires_grad and s.leaf is not s.parameter.tensor]
        self._local = [slot for slot in self._converted if not (slot.steps or slot.parameter.is_on_host)]
        self.buckets = make_buckets([slot for slot in self._converted if slot not in self._local], unit_of)
        self._in_flight: list[GradientReduction] = []
        for bucket in self.buckets:
            for slot in bucket.slots:
                on_gradient(slot.leaf, partial(self._gradient_done, bucket, slot))
        sent_too = {id(slot.parameter) for slot in self._converted if slot not in self._local}
        for slot in self._local:
            if slot.is_cast or id(slot.parameter) in sent_too:
                on_gradient(slot.leaf, partial(self._keep, slot))

    def begin_microbatch(self, is_last: bool) -> None:
        self.is_last_microbatch = is_last
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)

    def end_microbatch(self) -> None:
        """Sends the buckets that stayed incomplete because a parameter had no part in the loss."""
        for bucket in self.buckets:
            if bucket.missing and self._is_due(bucket):
                for slot in bucket.slots:
                    if slot.leaf.grad is not None:
                        bucket.collect(slot)
                self._send(bucket)
        for slot in self._converted:
            slot.parameter.own_gradient()

    def begin_step(self) -> None:
        """Forgets what a step that failed midway may have left."""
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.hand_over()
        for slot in self._converted:
            slot.leaf.grad = slot.parameter.gradient = None

    def end_step(self) -> None:
        """Waits until every gradient is home."""
        for journey in self._in_flight:
            journey.wrap_ahead()
        while going := [journey for journey in self._in_flight if journey.has_levels_left]:
            for journey in going:  # side by side, so that no axis rests
                journey.advance()
        for journey in self._in_flight:
            journey.finish()
        self._in_flight.clear()
        for slot in self._local:
            if slot.leaf.grad is not None:
                _keep_gradient(slot)

    def _gradient_done(self, bucket: GradientBucket, slot: ParameterUse) -> None:
        bucket.missing -= 1
        if self._is_due(bucket):
            with gradient(slot.gradient_bytes):
                bucket.collect(slot)
                if bucket.missing == 0:
                    self._send(bucket)
        # Microbatches add up where the sum is sent from, so that it is held once, and in the dtype that is stored.
        elif bucket.has_buffer or bucket.is_cast:
            bucket.collect(slot)

    def _keep(self, slot: ParameterUse) -> None:
        """Of a leaf that is what is stored: added to what other uses of the parameter have sent home before."""
        for journey in [*self._in_flight]:
            if any(other.parameter is slot.parameter for other in journey.slots):
                journey.finish()
                self._in_flight.remove(journey)
        _keep_gradient(slot)

    def _is_due(self, bucket: GradientBucket) -> bool:
        return self.is_last_microbatch or bucket.each_microbatch

    def _send(self, bucket: GradientBucket) -> None:
        if not bucket.has_gradients:
            return
        for journey in self._in_flight:
            if journey.is_to_go_on:
                journey.advance()
        resized = [journey for journey in self._in_flight if journey.is_resized]
        for journey in resized[: max(0, len(resized) - MAX_IN_FLIGHT + 1)]:
            journey.finish()
            self._in_flight.remove(journey)
        journey = GradientReduction(bucket, self.mesh)
        if journey.slots:  # it is not home yet
            self._in_flight.append(journey)


def make_buckets(slots: Sequence[ParameterUse], unit_of: Callable[[ParameterUse], object]) -> list[GradientBucket]:
    """Groups slots by their way home, in reverse order of declaration: about the order of their gradients."""
    groups = pack_gradients(
        reversed(slots), lambda slot: _way_home(slot, unit_of), lambda slot: slot.gradient_bytes, is_summed_first
    )
    return [GradientBucket(group) for group in groups]


def _way_home(slot: ParameterUse, unit_of: Callable[[ParameterUse], object]) -> Hashable:
    declared = slot.parameter.declared
    steps = tuple((s.step.axis, str(s.step.source), str(s.step.target)) for s in slot.steps)
    unit = id(unit_of(slot)) if declared.regather else None
    return (
        steps,
        declared.on_host,
        slot.dtype,
        declared.dtype,
        declared.regather or declared.reduce_each_microbatch,
        unit,
        bool(slot.levels),
        slot.is_served,
    )


def is_summed_first(slot: ParameterUse) -> bool:
    """Whether the gradient's first step home is a sum over an axis that leaves its shape."""
    if not slot.steps:
        return False
    step = slot.steps[-1].step
    return (step.source.kind, step.target.kind) == ("I", "R")


def on_gradient(leaf: Tensor, function: Callable[[], None]) -> None:
    """Calls the function whenever the leaf's gradient has been accumulated."""
    leaf.register_post_accumulate_grad_hook(lambda leaf: function())  # type: ignore[no-untyped-call] # torch's


def _without_rest(part: Tensor) -> Tensor:
    """The tensor in memory of its own, so that a slice does not keep the whole gradient for the rest of the step."""
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part


def _keep_gradient(slot: ParameterUse) -> None:
    """Of a leaf that is what is stored, but for its dtype: its gradient is at home."""
    dtype = slot.parameter.declared.dtype
    slot.parameter.add_gradient(_take_gradient(slot).to(dtype), owned=slot.dtype != dtype)


def _take_gradient(slot: ParameterUse) -> Tensor:
    gradient, slot.leaf.grad = slot.leaf.grad, None
    assert gradient is not None, f"{slot.parameter.name} has no gradient to send"
    return gradient
