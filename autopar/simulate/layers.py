"""What each stage or repeated block of a plan costs by itself, for a search that puts layers together.

Stages are played alone. Of a stage of several layers, times and bytes are about the sums of these; gradient sums of a
layer run beside the backward passes of those before it, so what could hide them is told apart. Stages of unequal
devices are sized by how long blocks take on a kind of device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, SCHEDULES, Turn
from autopar.simulate.engine import COMPUTE, Change, Moment
from autopar.simulate.player import Pass, PassKind, Player
from autopar.simulate.program import Item, LocalProgram, lower_stages
from autopar.simulate.schedule import StageProgress, Submesh
from autopar.simulate.transfers import Transfers, find_transfers

_IN_TWO = next(row.name for row in SCHEDULES.values() if row.splits_backward)
CONSTANTS = "constants"  # of memory, the kind: a mask, say, that all layers read


class LayerCost(NamedTuple):
    """Times in ns, memory in bytes a device.

    forward_ns, backward_ns: of a microbatch, where none is the first or the last. receive_ns: of a microbatch, to fetch
    what crosses the border before the layer, and to send its gradient back. reduce_ns: a step, gathering parameters and
    summing gradients over ranks, which up to `hide_ns` of passes can run beside. optimizer_ns: a step.
    resident_bytes: parameters, gradients and optimizer state. activation_bytes: of each microbatch in flight.
    workspace_bytes: what a pass takes beside both. Of backward passes in two parts, if these were played (else 0):
    waiting_bytes: of each microbatch between them. second_bytes: what the second takes beside what is there before it,
    in a stage of several layers for all of them at once. split_ns: what they take longer, but for kernels that run in
    both.
    """

    forward_ns: int
    backward_ns: int
    receive_ns: int
    reduce_ns: int
    hide_ns: int
    optimizer_ns: int
    resident_bytes: int
    activation_bytes: int
    workspace_bytes: int
    waiting_bytes: int
    second_bytes: int
    split_ns: int


def layer_costs(
    graph: Graph, plan: Plan, profile: Profile, splits: bool = False, constants_once: bool = False
) -> list[LayerCost]:  # fmt: skip
    """The cost of each stage of a plan for one microbatch, whose stages are layers in order. See `LayerCost`.

    splits: whether backward passes are played in two parts, too. constants_once: what is computed once is no part of
    what stays, of which a stage has the sum over its layers, but of the workspace, of which it has the largest.
    """
    shared = profile.shared_by(plan.mesh.devices_per_node)
    profiles = [shared] * len(plan.stages)
    trains = plan.mode == "train" and graph.loss is not None
    players = [Player(program, shared, trains) for program in lower_stages(graph, plan, profiles)]
    transfers = find_transfers(graph, plan, players, profiles)
    costs = [
        _cost(player, plan.microbatches, _crossing_ns(transfers, number), constants_once)
        for number, player in enumerate(players)
    ]
    if not (splits and trains and len(plan.stages) > 1):
        return costs
    in_two = lower_stages(graph, replace(plan, schedule=_IN_TWO), profiles)
    return [_with_two_parts(cost, program, shared) for cost, program in zip(costs, in_two, strict=True)]


def _crossing_ns(transfers: Transfers, border: int) -> int:
    """What is sent over the border before a stage, each tensor once a direction, and what that takes of its ranks."""
    found: dict[tuple[str, ...], int] = {}
    for (source, direction), sent in transfers.sent.items():
        for transfer in sent:
            first, last = sorted((source, transfer.target))
            if first < border <= last:
                found[(direction, *transfer.names)] = transfer.duration_ns
    around = [transfers.around_ns(Turn(border, name, 0)) for name in (FORWARD, BACKWARD) if border]
    return sum(found.values()) + sum(around)


def _cost(player: Player, microbatches: int, receive_ns: int, constants_once: bool) -> LayerCost:
    """Plays a step of at most three microbatches: the first, one of those between, and the last."""
    alone = _Alone(player)
    count = min(microbatches, 3)
    begin = alone.play(PassKind("begin"))
    forward = [alone.play(PassKind("forward")) for _ in range(count)]
    kinds = [PassKind("backward", number == 0, number == count - 1) for number in range(count)]
    backward = [alone.play(kind) for kind in kinds] if player.trains else []
    end = [alone.play(PassKind("optimizer"))] if player.trains else []
    one, back = forward[-1], backward[count // 2 : count // 2 + 1]
    passes = _held([begin, *forward, *backward, *end], count)
    end_of_step = sum(_net(done.allocations) for done, _ in passes)
    first = _net(begin.allocations) + _net(one.allocations)
    kept = _net(one.allocations) if count > 1 else max(0, first - end_of_step)
    resident = _between(passes, kept, CONSTANTS if constants_once else None)
    length, busy = sum(done.length_ns for done in (one, *back)), _link_ns([one, *back])
    return LayerCost(
        forward_ns=one.length_ns,
        backward_ns=max(length, busy) - one.length_ns,
        receive_ns=receive_ns,
        reduce_ns=_link_ns([begin]) + _link_ns(backward[-1:]) - _link_ns(back),
        hide_ns=max(0, length - busy),
        optimizer_ns=player.program.optimizer_ns,
        resident_bytes=resident,
        activation_bytes=kept,
        workspace_bytes=_workspace(passes, resident, kept),
        waiting_bytes=0,
        second_bytes=0,
        split_ns=0,
    )


def _with_two_parts(cost: LayerCost, program: LocalProgram, profile: Profile) -> LayerCost:
    """Plays two microbatches, of which the second holds what every other does."""
    alone = _Alone(Player(program, profile, trains=True))
    kinds = [PassKind(name) for name in ("begin", FORWARD, FORWARD, BACKWARD_INPUT, BACKWARD_INPUT)]
    _, _, forward, _, first = [alone.play(kind) for kind in kinds]
    _, second = [alone.play(PassKind(BACKWARD_WEIGHT, is_first, not is_first)) for is_first in (True, False)]
    branch_ns = sum(profile.runtime.branch_ns) if profile.runtime else 0
    return cost._replace(
        waiting_bytes=_net(forward.allocations) + _net(first.allocations),
        second_bytes=_peak(second.allocations),
        split_ns=branch_ns * _num_branches(program),
    )


def _num_branches(program: LocalProgram) -> int:
    """The items that gradients go through to what was received, and to other tensors, too."""
    way, found = set(program.receives.values()), 0
    for item in program.items:
        wanted = [value in way for value in item.inputs if program.values[value].wants_gradient]
        if any(wanted):
            way.update(item.outputs)
        found += item.runs_backward and any(wanted) and not all(wanted)
    return found


class _Alone:
    """A stage that waits for no other."""

    def __init__(self, player: Player) -> None:
        self.submesh, self.progress = Submesh(range(1), [0]), StageProgress(player)

    def play(self, kind: PassKind) -> Pass:
        begin = self.submesh.free_ns
        done = self.progress.player.play(kind, self.submesh.carried(begin), self.progress.at(begin))
        if kind.name == "begin":
            held = [(0, size, what, Moment.START) for size, what in self.progress.player.residents if size]
            done = replace(done, changes=held)
        self.submesh.take(done, begin, "")
        self.progress.take(done, begin)
        return done


def _net(changes: Iterable[Change]) -> int:
    return sum(size for _, size, _, _ in changes)


def _peak(changes: list[Change]) -> int:
    """The most bytes above those at the begin of the pass."""
    if not changes:
        return 0
    rows = np.array([(time, moment, size) for time, size, _, moment in changes], dtype=np.int64)
    order = np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))
    return max(0, int(np.cumsum(rows[order, 2]).max()))


Held = list[tuple[Pass, int]]
"""Passes in order, with the number of microbatches that hold activations while each runs."""


def _held(passes: list[Pass], count: int) -> Held:
    flying = [0, *range(1, count + 1), *range(count, -1, -1)]
    return list(zip(passes, flying, strict=False))


def _between(passes: Held, kept: int, but: str | None) -> int:
    """The most that is there between passes beside the activations of microbatches in flight, and but one kind."""
    level = most = 0
    for done, held in passes:
        level += _net(change for change in done.allocations if change[2] != but)
        left = held - (done.kind.name == "backward")
        most = max(most, level - left * kept)
    return most


def _workspace(passes: Held, resident: int, kept: int) -> int:
    """How far a pass goes above what stays and what the microbatches in flight hold, itself included."""
    level = most = 0
    for done, held in passes:
        most = max(most, level + _peak(done.allocations) - resident - held * kept)
        level += _net(done.allocations)
    return most


def _link_ns(passes: list[Pass]) -> int:
    """How long the busiest communication stream works in passes."""
    busy: dict[str, int] = {}
    for done in passes:
        for stream, _, start, stop, _ in done.tasks:
            if stream != COMPUTE:
                busy[stream] = busy.get(stream, 0) + stop - start
    return max(busy.values(), default=0)


# Blocks ----------------------------------------


def block_times_ns(graph: Graph, plan: Plan, profile: Profile, block_paths: Sequence[str]) -> list[int]:
    """Nanoseconds of a microbatch in each block, forward and backward, with the collectives inside.

    graph, plan: of one microbatch and one stage, on devices of the profile, slowed down where they share cores.
    block_paths: module paths of the blocks, in any order; the result has the order in which they run. What runs before
    the first block counts to that, anything else outside of blocks to the one before.
    """
    (program,) = lower_stages(graph, plan, [profile])
    trains = plan.mode == "train" and graph.loss is not None
    times: dict[str, int] = {}
    before, current = 0, ""
    for item in program.items:
        current = _block(program.units[item.unit], block_paths) or current
        spent = _spent_ns(item, trains)
        if current:
            times[current] = times.get(current, 0) + spent
        else:
            before += spent
    found = [*times.values()]
    return [found[0] + before, *found[1:]] if found else []


def _block(unit: str, block_paths: Sequence[str]) -> str:
    return next((path for path in block_paths if f"{unit}.".startswith(f"{path}.")), "")


def _spent_ns(item: Item, trains: bool) -> int:
    """Forward, once more where it is recomputed, and backward."""
    forward = item.forward_ns + sum(sent.duration_ns for sent in (*item.forward, *item.inner))
    if not trains:
        return forward
    again = forward if item.region >= 0 else 0
    backward = item.backward_ns + sum(sent.duration_ns for sent in (*item.backward, *item.inner_backward))
    return forward + again + (backward if item.runs_backward else 0)
