"""One stage as the schedules of `torch.distributed.pipelining` call it, and the schedules by name.

A schedule decides when a stage runs forward or backward. What is received may come from any earlier stage, in several
pieces and placements; so the stage receives by itself when its passes begin (`arrivals`), sends by itself when they
have ended, and hands the schedule no operations to run. Of a forward and a backward pass that torch has as one action,
the first sends before the second begins: torch would send for both at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import (
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B

from autopar.runtime.arrivals import BACKWARD, BACKWARD_WEIGHT, FORWARD, Arrivals, Turn, Wait, reach_when_bound
from autopar.runtime.errors import ProgramError
from autopar.runtime.local import Local
from autopar.runtime.ranges import RECEIVE, part
from autopar.runtime.splitting import BackwardOutline, Root, SplitBackward
from autopar.runtime.stashing import WeightStash
from autopar.runtime.transport import Channel, Transport


class ScheduledStage:
    """A stage's passes over the microbatches of one step.

    index, count: of the stage; place, num_places: of its submesh. `receives`: its channels; `sends`: those that what it
    makes for later stages leaves by; both by number. loss_position: among what it makes of the model's outputs.
    `arrivals`: set before each step, by `foresee`.
    """

    arrivals: Arrivals

    def __init__(
        self, local: Local, index: int, count: int, place: int, num_places: int, transport: Transport,
        receives: Sequence[Channel], sends: Sequence[Channel], loss_position: int | None,
    ) -> None:  # fmt: skip
        self.local, self._transport = local, transport
        self._receives, self._sends = receives, sends
        self._loss_position = loss_position
        # What torch's schedules read and set.
        self.submod, self.device = local.program, local.mesh.device
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, count, place, num_places
        self.is_first, self.is_last = index == 0, index == count - 1
        self.has_backward = True
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.args_recv_info: dict[int, tuple[()]] = {0: ()}
        self.act_send_info: dict[int, list[int]] = {}
        self.stash: WeightStash | None = None  # under PipeDream
        self._outlines: list[BackwardOutline] = []
        self.clear_runtime_states()

    def begin_step(self, inputs: Sequence[tuple[Tensor, ...]]) -> None:
        """The local inputs of every microbatch of the step."""
        self._inputs = inputs
        if self.stash is not None:
            self.stash.begin_step()
        self.losses: list[Tensor] = []

    def clear_runtime_states(self) -> None:
        """Before a step: forgets what one that failed midway has left."""
        self.output_chunks: list[Tensor] = []  # merged by the schedule, for nobody
        self._between: dict[int, tuple[list[Tensor], list[Tensor], list[GradientEdge | None]]] = {}
        self._second: dict[int, Callable[[], None]] = {}

    # Forward ----------------------------------------

    def get_fwd_recv_ops(self, index: int) -> list[Any]:
        """Nothing: the pass itself asks for what it reads."""
        return []

    def get_fwd_send_ops(self, index: int) -> list[Any]:
        """Nothing: the pass itself has sent what it makes."""
        return []

    def start_receive(self, direction: str, index: int) -> dict[int, Wait]:
        """Starts to receive what a pass of a microbatch reads: tensors of earlier stages, or gradients of later ones.

        Returns what waits for each, by the number of the channel.
        """
        if direction == BACKWARD_WEIGHT:
            return {}
        is_forward = direction == FORWARD
        channels = self._receives if is_forward else [channel for channel in self._sends if _goes_back(channel)]
        return {c.number: self._transport.start_receive(c, index, is_forward) for c in channels}

    def forward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> Tensor:
        """The forward pass of a microbatch. Returns its loss, or nothing of use where the stage makes none."""
        output, sent = self._forward_to_train(index)
        self.send_forward(index, sent)
        return output

    def _forward_to_train(self, index: int) -> tuple[Tensor, list[Tensor]]:
        """The pass, with what its backward pass begins and ends at kept. Returns its loss, and what is to be sent."""
        with self.stash.forward(index) if self.stash is not None else nullcontext():
            results, sent, received = self.run_forward(index)
        losses = [] if self._loss_position is None else [results[self._loss_position]]
        if any(loss.dim() != 0 for loss in losses):
            raise ProgramError(f"expected a scalar loss, found shape {tuple(losses[0].shape)}")
        returning = [tensor for tensor, c in zip(received, self._receives, strict=True) if _goes_back(c)]
        ends = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in sent]
        self._between[index] = returning, losses, ends
        self.losses += [loss.detach() for loss in losses]
        output = self.losses[-1].view(1) if losses else torch.empty(0)
        self.output_chunks.append(output)
        return output, [tensor.detach() for tensor in sent]

    def run_forward(self, index: int) -> tuple[tuple[Any, ...], tuple[Tensor, ...], list[Tensor]]:
        """What the stage makes of the model's outputs, what it leaves for later stages, and what it has received."""
        arriving = self._begin(FORWARD, index).values()
        with part(RECEIVE):
            received = [wait() for wait in arriving]
        if torch.is_grad_enabled():
            for tensor, channel in zip(received, self._receives, strict=True):
                tensor.requires_grad_(channel.received.has_gradient)
        try:
            results, sent = self.local.forward(index, (*self._inputs[index], *received))
        finally:
            self.local.end_pass()
        return results, sent, received

    def send_forward(self, index: int, sent: Sequence[Tensor]) -> None:
        """Starts to send what the forward pass has made for later stages, detached."""
        for channel in self._sends:
            self._transport.send(channel, sent[channel.received.position], index, True)

    # Backward ----------------------------------------

    def get_bwd_recv_ops(self, index: int) -> list[Any]:
        """Nothing: the pass itself asks for what it reads."""
        return []

    def get_bwd_send_ops(self, index: int) -> list[Any]:
        """Nothing: the pass itself has sent what it makes."""
        return []

    def backward_one_chunk(
        self, index: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of a microbatch, from its loss and the gradients that have come.

        full_backward: False makes the gradients of what was received alone; `backward_weight_one_chunk` makes the rest.
        """
        with self.stash.backward(index) if self.stash is not None else nullcontext():
            gradients = self._make_gradients(index, full_backward)
        self._send_backward(index, gradients)
        if self.stash is not None:
            self.stash.update(index)

    def _make_gradients(self, index: int, full_backward: bool) -> list[Tensor]:
        """Returns the gradients of what was received; those that came are given back."""
        arriving = self._begin(BACKWARD, index)
        received, losses, ends = self._between.pop(index)
        roots = [(get_gradient_edge(loss), torch.ones_like(loss)) for loss in losses if loss.requires_grad]
        roots += self._returned(arriving, ends)
        trained = [tensor for tensor in received if tensor.requires_grad]
        if full_backward or not trained:
            whole = partial(self.local.backward, index, partial(_run_backward, roots))
            if not roots:
                whole = partial(self.local.backward_of_nothing, index)
            if full_backward:
                self._pass(whole)
            else:
                self._second[index] = whole
        else:
            split = SplitBackward(roots, trained, self.local.leaves, self._outlines)
            self._pass(partial(self.local.backward_of_inputs, index, split.first))
            self._second[index] = partial(self.local.backward_of_leaves, index, split.second)
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in received]
        for tensor in received:
            tensor.grad = None  # the second part keeps the tensor, and has no use for what is sent
        return gradients

    def backward_weight_one_chunk(self, index: int, last_backward: bool = False) -> None:
        """The second part of a backward pass: the gradients of parameters."""
        self._begin(BACKWARD_WEIGHT, index)
        self._pass(self._second.pop(index))

    def _begin(self, direction: str, index: int) -> dict[int, Wait]:
        return self.arrivals.begin(Turn(self.stage_index, direction, index))

    def _returned(self, arriving: dict[int, Wait], ends: Sequence[GradientEdge | None]) -> list[Root]:
        """The gradients that have come of what the stage has sent, those of one tensor summed."""
        parts: dict[int, list[Tensor]] = {}
        for channel in self._sends:
            if channel.number in arriving:
                wait = arriving.pop(channel.number)
                with part(RECEIVE):
                    parts.setdefault(channel.received.position, []).append(wait())
        return [(end, _sum(parts[place])) for place, end in enumerate(ends) if end is not None and place in parts]

    def _pass(self, run: Callable[[], None]) -> None:
        try:
            run()
        finally:
            self.local.end_pass()

    def _send_backward(self, index: int, gradients: Sequence[Tensor]) -> None:
        """Starts to send the gradients of what the stage has received."""
        channels = [channel for channel in self._receives if _goes_back(channel)]
        for gradient, channel in zip(gradients, channels, strict=True):
            self._transport.send(channel, gradient, index, False)

    # A stage beside the one before it on the same rank.

    def set_local_fwd_input(self, output: Any, index: int) -> None:
        """Nothing: the stage before has sent it."""

    def get_local_bwd_output(self, index: int) -> tuple[()]:
        """Nothing: the pass itself has sent it."""
        return ()

    def set_local_bwd_input(self, gradients: tuple[()], index: int) -> None:
        """Nothing: the pass itself asks for what it reads."""

    # What there is nothing to do for: placements, shapes and gradients are the program's own affair.

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Losses of microbatches add up to that of the batch: nothing is left to scale."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Gradients go home from the hooks of the last backward pass."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> tuple[()]:
        return ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        return None


def _goes_back(channel: Channel) -> bool:
    return channel.received.has_gradient


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for other in parts[1:]:
        total = total + other
    return total


def _run_backward(roots: Sequence[Root]) -> None:
    torch.autograd.backward([end for end, _ in roots], [gradient for _, gradient in roots])


class _Schedule1F1B(Schedule1F1B):
    """1F1B with any number of microbatches; torch's refuses fewer than stages, which its order allows."""

    def __init__(self, stage: Any, n_microbatches: int, loss_fn: Callable[..., Any], scale_grads: bool) -> None:
        PipelineScheduleSingle.__init__(self, stage, n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)


_SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": _Schedule1F1B}
_LOOPED: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zero_bubble_v": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


_IN_TWO_PARTS = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV)


def check_reach(name: str, has_chunks: bool, channels: Sequence[Channel]) -> None:
    """Raises ProgramError where ranks of a schedule would wait for ever, bound to their devices (`arrivals`)."""
    reach = reach_when_bound(has_chunks, _LOOPED.get(name) in _IN_TWO_PARTS) if is_bound() else math.inf
    moving = [channel for channel in channels if channel.there.ranks != channel.here.ranks]
    farthest = max((channel.target - channel.received.source for channel in moving), default=0)
    if farthest > reach:
        raise ProgramError(
            f"expected chunks of schedule {name!r} to send at most {reach:g} stages on where the process group is bound"
            f" to its device, found a tensor that is sent {farthest} stages on; call init_process_group without "
            "device_id, or plan another schedule"
        )


def is_bound() -> bool:
    """Whether the process group is bound to its device."""
    return dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None


_DIRECTIONS = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": BACKWARD,
    "BACKWARD_WEIGHT": BACKWARD_WEIGHT,
}


def make_schedule(name: str, stages: Sequence[ScheduledStage], microbatches: int) -> Callable[[], None]:
    """A step of the schedule over this rank's stages. Raises ProgramError for a name that is unknown."""
    schedule = _torch_schedule(name, stages, microbatches)
    targets = {"target": torch.empty(microbatches, 0)} if any(stage.is_last for stage in stages) else {}
    order = order_of(schedule, stages, microbatches)

    def step() -> None:
        foresee(stages, order)
        schedule.step(**targets)

    return step


def _torch_schedule(name: str, stages: Sequence[ScheduledStage], microbatches: int) -> Any:
    options: dict[str, Any] = {"loss_fn": lambda output, target: output, "scale_grads": False}
    if name in _LOOPED:
        return _LOOPED[name](list(stages), microbatches, **options)
    if name in _SINGLE and len(stages) == 1:
        return _SINGLE[name](stages[0], microbatches, **options)
    raise ProgramError(f"expected a schedule for {len(stages)} stages on a rank, found {name!r}")


def foresee(stages: Sequence[ScheduledStage], order: Sequence[Turn]) -> None:
    """Tells the stages of a rank in which order they are about to make their passes."""
    by_number = {stage.stage_index: stage for stage in stages}
    arrivals = Arrivals(order, lambda turn: by_number[turn.stage].start_receive(turn.direction, turn.microbatch))
    for stage in stages:
        stage.arrivals = arrivals


def order_of(schedule: Any, stages: Sequence[ScheduledStage], microbatches: int) -> list[Turn]:
    """The passes of this rank in the order of one of torch's schedules."""
    if not isinstance(schedule, PipelineScheduleSingle):
        listed = [action for action in schedule.pipeline_order[stages[0].group_rank] if action is not None]
        actions = [action for one in listed for action in one.sub_actions or (one,)]
        return [Turn(a.stage_index, _DIRECTIONS[a.computation_type.name], a.microbatch_index) for a in actions]
    (stage,) = stages
    forward, backward = (
        [Turn(stage.stage_index, way, index) for index in range(microbatches)] for way in (FORWARD, BACKWARD)
    )
    is_gpipe = isinstance(schedule, ScheduleGPipe)
    ahead = microbatches if is_gpipe else min(microbatches, stage.num_stages - stage.stage_index)
    steady = [turn for pair in zip(backward, forward[ahead:], strict=False) for turn in pair]
    return [*forward[:ahead], *steady, *backward[microbatches - ahead :]]
