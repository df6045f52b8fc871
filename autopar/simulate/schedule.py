"""Plays a step: each submesh makes its passes in the schedule's order, tensors travel between stages.

A pass (`player`) begins when the submesh has made the one before and what it reads has arrived. What a rank sends to
another stage leaves at the end of the pass and queues on its stream to the level of link that joins the two; it does
not disturb collectives. It travels once the receiver has taken memory for it, one pass ahead of the one that reads it
(`runtime.arrivals`); a gradient keeps its memory on the sender until then. Who asks for what was sent before is held
up by that (`Runtime.late_ns`): so passes are played in the order in which they begin.
Gradients of tied parameters are summed over their stages once all of them are home. Then the optimizer runs.
Where ranks share cores, those that are busy have the cores of those that wait (`cores`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from autopar.clock import worked
from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.plan import Breakdown, Plan
from autopar.ir.schedule import BACKWARD, DIRECTIONS, FORWARD, Turn, turns
from autopar.runtime.arrivals import may_come_early
from autopar.simulate.cores import Beside, clock_of, in_time, sharing_of
from autopar.simulate.engine import NOTHING_SENT, Carried, Change, Flight, Moment, Sent
from autopar.simulate.parted import PartedStage
from autopar.simulate.passes import LEAVE_GRADIENTS, Bound, Pass, PassKind, Played, Standing
from autopar.simulate.timeline import BETWEEN, Lane, Timeline, TimelinePiece
from autopar.simulate.transfers import Tie, Transfer, find_ties, find_transfers, way_of
from autopar.tunables import TURN_S

WORK = DIRECTIONS
TIED = "gradient all_reduce"
ON_ITS_WAY = "between stages"


def play_stages(
    graph: Graph, plan: Plan, players: Sequence[PartedStage], profiles: Sequence[Profile], until_ns: float = math.inf
) -> PlayedStep:
    """One step of a plan whose stages are lowered: a player for each of them, which may have played before. Raises
    Beyond as soon as it must take longer than `until_ns`."""
    step = PlayedStep(graph, plan, players, profiles, until_ns)
    step.run()
    return step


def profiles_of_stages(plan: Plan, profile: Profile | Mapping[str, Profile]) -> list[Profile]:
    """The profile of each stage's devices, slowed down where those of a node share its cores."""
    groups = [plan.mesh.group_of(stage.ranks) for stage in plan.stages]
    known = {group.profile: profile if isinstance(profile, Profile) else profile[group.profile] for group in groups}
    return [known[group.profile].shared_by(group.devices_per_node) for group in groups]


@lru_cache(maxsize=1 << 10)
def _change(num_bytes: int) -> list[Change]:
    """One list for equal changes, which the timeline reads once."""
    return [(0, num_bytes, ON_ITS_WAY, Moment.START)]


@lru_cache(maxsize=1 << 10)
def _held(num_bytes: int, under_way_ns: int) -> list[Change]:
    """One list for what is held equally long."""
    return [*_change(num_bytes), (under_way_ns, -num_bytes, ON_ITS_WAY, Moment.END)]


class _Arrival(NamedTuple):
    """What travels: when it left and is there, if it is received from the begin; and from where."""

    transfer: Transfer
    sender: Submesh
    left_ns: int
    time_ns: int

    def received(self, asked_ns: int) -> _Arrival:
        """When it is there if it is received from then on."""
        there_ns = asked_ns + self.transfer.duration_ns
        return self if there_ns <= self.time_ns else self._replace(time_ns=there_ns)

    def hold(self, begin_ns: int) -> None:
        """The sender keeps what has not left; between stages of one submesh, nothing does before the pass begins that
        reads it."""
        until_ns = self.time_ns if self.transfer.link else begin_ns
        size, under_way = self.transfer.held_bytes, until_ns - self.left_ns
        if size and under_way:
            self.sender.pieces.append(TimelinePiece(self.left_ns, "", [], _held(size, under_way)))


@dataclass(eq=False)
class Submesh:
    """A rank's streams in absolute time: when each is free, what is in flight, what was played, what waited for."""

    ranks: range
    stages: list[int]
    turns: list[Turn] = field(default_factory=list)
    free_ns: int = 0
    last_ns: int = 0
    unmet_ns: int = 0
    links: dict[str, int] = field(default_factory=dict)
    sends: dict[str, int] = field(default_factory=dict)
    in_flight: list[Flight] = field(default_factory=list)
    pieces: list[TimelinePiece] = field(default_factory=list)
    waited: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    sent: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    between: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    between_along: dict[str, Sent] = field(default_factory=dict)  # by kind
    played: Counter[Played] = field(default_factory=Counter)
    departed: Counter[tuple[int, ...]] = field(default_factory=Counter)  # transfers, by what each rank sends
    around: list[tuple[int, int]] = field(default_factory=list)  # passes: calling them, handing over messages
    carrying_ns: int = 0  # of the network's threads, for what a rank sends
    bubble_ns: int = 0
    num_made: int = 0  # turns
    left_ns: int = 0  # what must be computed yet
    begin_ns: int | None = None  # of the next turn, once what it reads is sent
    asked_ns: int = 0  # from when on what the next turn reads is received
    asked_early: bool = False  # before the turn
    expected: int = 0  # bytes that are taken for that

    def carried(self, now: int) -> Carried:
        links = tuple(sorted((link, end - now) for link, end in self.links.items() if end > now))
        in_flight = tuple(
            (begin - now, end - now, slow, link) for begin, end, slow, link in self.in_flight if end > now
        )
        return Carried(links, in_flight, self.last_ns, self.unmet_ns)

    def take(self, done: Pass, begin: int, label: str) -> None:
        """Adds a pass that began then."""
        self.free_ns = begin + done.length_ns
        self.last_ns = done.last_ns
        self.unmet_ns = done.unmet_after(self.unmet_ns)
        self.links.update((link, begin + end) for link, end in done.links.items())
        self.in_flight = [
            (begin + a, begin + b, slow, link) for a, b, slow, link in done.in_flight if b > done.length_ns
        ]
        for at, played, rename in done.pieces:
            self.pieces.append(TimelinePiece(begin + at, label, played.tasks, played.allocations, rename))
            self.played[played] += 1
        if done.changes:
            self.pieces.append(TimelinePiece(begin, "", [], done.changes))

    def note(self, kind: str, sent: Sent) -> None:
        """Counts what is sent to other submeshes."""
        self.between_along[kind] = self.between_along.get(kind, NOTHING_SENT).plus(sent)

    def in_all(self, what: Callable[[Played], Mapping[str, int]], more: Mapping[str, int]) -> dict[str, int]:
        """Something of all that was played, by kind, and more."""
        found = defaultdict(int, more)
        for played, count in self.played.items():
            for kind, amount in what(played).items():
                found[kind] += amount * count
        return dict(found)

    @property
    def along(self) -> dict[tuple[int, str], Sent]:
        """What was sent, by axis (or `BETWEEN` submeshes) and kind."""
        found = {(BETWEEN, kind): sent for kind, sent in self.between_along.items()}
        for done, count in self.played.items():
            for way, sent in done.along.items():
                found[way] = found.get(way, NOTHING_SENT).plus(sent.repeated(count))
        if (BETWEEN, "send") in found:
            found[BETWEEN, "send"] = found[BETWEEN, "send"]._replace(num_bytes=self.sends_bytes)
        return found

    def keep(self, now: int, num_bytes: int) -> None:
        """Takes memory for what is to come, or gives it back."""
        if num_bytes:
            self.pieces.append(TimelinePiece(now, "", [], _change(num_bytes)))

    def hand(self, collective: str, num_bytes: int) -> None:
        """Counts what is for other submeshes, but for sends, which `departed` has."""
        self.sent[collective] += num_bytes
        self.between[collective] += num_bytes

    @property
    def sends_bytes(self) -> int:
        """What its busiest rank sends to others in the step."""
        by_rank = zip(*([size * times for size in sizes] for sizes, times in self.departed.items()), strict=True)
        return max(map(sum, by_rank), default=0)

    @property
    def next_turn(self) -> Turn | None:
        return self.turns[self.num_made] if self.num_made < len(self.turns) else None

    def stand(self, duration_ns: int) -> None:
        """Compute stands still for what is sent."""
        self.waited["send"] += duration_ns
        self.free_ns += duration_ns

    @property
    def end_ns(self) -> int:
        """When all of its streams are free."""
        return max([self.free_ns, *self.links.values(), *self.sends.values()])


@dataclass(eq=False)
class StageProgress:
    """How far a stage is: what it has under way, in how many passes it has made gradients."""

    player: PartedStage
    standing: Standing = field(default_factory=Standing)
    since_ns: int = 0  # when it was so
    num_made: int = 0

    def at(self, now: int) -> Standing:
        """What is under way then."""
        return self.standing.after(now - self.since_ns)

    def take(self, done: Pass, begin: int) -> None:
        """Goes on from a pass that began then."""
        new = done.standing
        if done.kind.name in LEAVE_GRADIENTS:
            new = new.with_gradients(self.at(begin))
        self.standing, self.since_ns = new, begin


def pass_kind(turn: Turn, stage: StageProgress, microbatches: int) -> PassKind:
    """What pass a turn is, which counts those that make gradients."""
    if turn.direction in LEAVE_GRADIENTS:
        return PassKind(turn.direction)
    stage.num_made += 1
    return PassKind(turn.direction, stage.num_made == 1, stage.num_made == microbatches)


class PlayedStep:
    """One step, pass by pass on all submeshes."""

    def __init__(
        self, graph: Graph, plan: Plan, players: Sequence[PartedStage], profiles: Sequence[Profile], until_ns: float
    ) -> None:
        self.plan, self.sharing = plan, sharing_of(profiles) if len(plan.stages) > 1 else None
        self.until_ns = math.inf if self.sharing else until_ns  # else time passes faster where ranks wait
        self.trains = plan.mode == "train" and graph.loss is not None
        self.stages = [StageProgress(player) for player in players]
        self.submeshes = _submeshes(plan)
        self.transfers = find_transfers(graph, plan, players, profiles)
        self.ties = find_ties(graph, plan, profiles) if self.trains and len(plan.stages) > 1 else []
        self.home_of = {stage: submesh for submesh in self.submeshes for stage in submesh.stages}
        self.arrived: dict[tuple[int, str, int], list[_Arrival]] = defaultdict(list)  # stage, direction, microbatch
        orders = turns(plan.schedule, [s.stages for s in self.submeshes], plan.microbatches, self.trains)
        for submesh, order in zip(self.submeshes, orders, strict=True):
            submesh.turns = order
            submesh.left_ns = sum([self.stages[turn.stage].player.work_ns(turn.direction) for turn in order])
            submesh.left_ns += sum([self.stages[stage].player.work_ns("optimizer") for stage in submesh.stages])

    def run(self) -> None:
        """The whole step."""
        for submesh in self.submeshes:
            for stage in submesh.stages:
                self._play(submesh, stage, PassKind("begin"), 0, "")
        self._make_turns()
        if self.trains:
            self._end_step()

    def _make_turns(self) -> None:
        """Those that begin earlier first: what is sent before a turn begins is known then."""
        coming: list[tuple[int, int, Submesh]] = []
        may_go_on = self.submeshes
        while True:
            for submesh in may_go_on:
                turn = submesh.next_turn
                if submesh.begin_ns is None and turn is not None and self._is_possible(turn):
                    submesh.begin_ns = self._receive(submesh, turn)
                    heapq.heappush(coming, (submesh.begin_ns, submesh.ranks.start, submesh))
            if not coming:
                break
            _, _, submesh = heapq.heappop(coming)
            may_go_on = [submesh, *self._make_turn(submesh)]
        stuck = [submesh.next_turn for submesh in self.submeshes if submesh.next_turn]
        assert not stuck, f"the schedule {self.plan.schedule!r} waits for itself at {stuck}"

    def _is_possible(self, turn: Turn) -> bool:
        """Whether all that a turn reads is sent."""
        return len(self._sent_for(turn)) == self.transfers.num_awaited(turn)

    def _sent_for(self, turn: Turn) -> list[_Arrival]:
        """What a turn reads, as far as it is sent."""
        return self.arrived.get((*way_of(turn), turn.microbatch), [])

    def _receive(self, submesh: Submesh, turn: Turn) -> int:
        """When the submesh's next turn begins, for which all is sent."""
        if not submesh.asked_early:
            submesh.asked_ns = self._ask(submesh, turn, submesh.asked_ns)
        return self._wait(submesh, [arrival.received(submesh.asked_ns) for arrival in self._sent_for(turn)])

    def _ask(self, submesh: Submesh, turn: Turn, now: int) -> int:
        """Asks for what a turn reads; when that is done. Compute stands still for what was sent before."""
        runtime = self.transfers.runtimes[turn.stage]
        if runtime is None or not runtime.late_ns:
            return now
        late = sum(len(one.transfer.names) for one in self._sent_for(turn) if one.transfer.link and one.left_ns <= now)
        submesh.stand(late * runtime.late_ns)
        return now + late * runtime.late_ns

    def _make_turn(self, submesh: Submesh) -> list[Submesh]:
        """A forward or backward pass, and the sending of what it makes for others, which are returned."""
        turn, begin = submesh.next_turn, submesh.begin_ns
        assert turn is not None and begin is not None
        submesh.num_made, submesh.begin_ns = submesh.num_made + 1, None
        self.arrived.pop((*way_of(turn), turn.microbatch), None)
        following = submesh.next_turn
        early = following if following is not None and may_come_early(turn, following) else None
        self._expect(submesh, begin, early)
        if early is not None:
            begin = submesh.asked_ns = self._ask(submesh, early, begin)
        label = f" #{turn.microbatch}" if self.plan.microbatches > 1 else ""
        kind = pass_kind(turn, self.stages[turn.stage], self.plan.microbatches)
        self._play(submesh, turn.stage, kind, begin, label)
        submesh.asked_early = early is not None
        if early is None:
            submesh.asked_ns = submesh.free_ns
        sent = self.transfers.of(turn)
        for transfer in sent:
            self._send(submesh, transfer, submesh.free_ns, turn.microbatch, label)
        around_ns = self.transfers.around_ns(turn)
        submesh.around.append((submesh.free_ns, submesh.free_ns + around_ns))
        submesh.stand(around_ns)
        submesh.carrying_ns += self.transfers.carrying_ns(turn)
        return [self.home_of[transfer.target] for transfer in sent]

    def _expect(self, submesh: Submesh, begin: int, following: Turn | None) -> None:
        """Memory for what a turn reads is its own from its begin on; that for the following one's is taken."""
        submesh.keep(begin, -submesh.expected)
        submesh.expected = self.transfers.expected_bytes(following) if following is not None else 0
        submesh.keep(begin, submesh.expected)

    def _wait(self, submesh: Submesh, arrivals: Sequence[_Arrival]) -> int:
        """When the pass begins; what it waits for is travelling time as far as that goes, else bubble."""
        latest = max(arrivals, key=lambda arrival: arrival.time_ns, default=None)
        idle = max(0, latest.time_ns - submesh.free_ns) if latest else 0
        travelling = min(idle, latest.time_ns - latest.left_ns) if latest else 0
        if travelling:
            submesh.waited["send"] += travelling
        submesh.bubble_ns += idle - travelling
        begin = submesh.free_ns + idle
        for arrival in arrivals:
            arrival.hold(begin)
        return begin

    def _play(self, submesh: Submesh, stage: int, kind: PassKind, begin: int, label: str) -> Pass:
        worked(TURN_S)
        progress = self.stages[stage]
        submesh.left_ns -= progress.player.work_ns(kind.name)
        bound = Bound(self.until_ns, begin + submesh.left_ns)
        done = progress.player.play(kind, submesh.carried(begin), progress.at(begin), bound)
        submesh.take(done, begin, label)
        progress.take(done, begin)
        return done

    def _send(self, submesh: Submesh, transfer: Transfer, ready: int, microbatch: int, label: str) -> None:
        end = ready
        if transfer.link:
            start = max(ready, submesh.sends.get(transfer.link, 0))
            end = submesh.sends[transfer.link] = start + transfer.duration_ns
            task = (transfer.link, ", ".join(transfer.names), 0, transfer.duration_ns, "send")
            submesh.pieces.append(TimelinePiece(start, label, [task], []))
            submesh.departed[transfer.sent_bytes] += 1
            submesh.note("send", Sent(1, 0, transfer.duration_ns))  # bytes: `departed`
        self.arrived[transfer.target, transfer.direction, microbatch].append(_Arrival(transfer, submesh, ready, end))

    # The end of a step ----------------------------------------

    def _end_step(self) -> None:
        for tie in self.ties:
            self._sum_tied(tie)
        for submesh in self.submeshes:
            for stage in submesh.stages:
                self._play(submesh, stage, PassKind("optimizer"), submesh.free_ns, "")

    def _sum_tied(self, tie: Tie) -> None:
        """What the stages that keep a tensor send each other, once the last gradient is home on all of them."""
        members = {self.home_of[stage].ranks.start: self.home_of[stage] for stage in tie.stages}.values()
        for stage, sent in tie.inside.items():
            for collective, size in sent.items():
                self.home_of[stage].hand(collective, size)
                self.home_of[stage].note(f"gradient {collective}", Sent(1, size, 0))  # in the tie's duration
        for submesh in members:
            self._wait_for_home(submesh)
        start = max(submesh.free_ns for submesh in members)
        for submesh in members:
            submesh.bubble_ns += start - submesh.free_ns
            submesh.waited[TIED] += tie.duration_ns
            submesh.free_ns = submesh.links[tie.link] = start + tie.duration_ns
            task = (tie.link, f"gradient of {tie.tensor}", 0, tie.duration_ns, TIED)
            submesh.pieces.append(TimelinePiece(start, "", [task], []))
            submesh.hand("all_reduce", tie.num_bytes)
            submesh.note(TIED, Sent(1, tie.num_bytes, tie.duration_ns))

    def _wait_for_home(self, submesh: Submesh) -> None:
        """Compute stands still until the submesh's gradients are home."""
        for stage in submesh.stages:
            progress = self.stages[stage]
            for after_ns, kind in progress.standing.home:
                end = progress.since_ns + after_ns
                submesh.waited[kind] += max(0, end - submesh.free_ns)
                submesh.free_ns = max(end, submesh.free_ns)

    # Result ----------------------------------------

    @property
    def _makespan(self) -> int:
        """When all streams are free, while ranks that wait leave their cores to nobody."""
        return max([submesh.end_ns for submesh in self.submeshes])

    @property
    def step_time_ns(self) -> int:
        """How long the step takes."""
        return self._makespan if self.sharing is None else self.timeline.step_time_ns

    @cached_property
    def timeline(self) -> Timeline:
        """Everything that was played."""
        makespan = self._makespan
        lanes = tuple(lane_of(submesh, makespan, self._residents(submesh)) for submesh in self.submeshes)
        if self.sharing is not None:
            beside = [Beside(submesh.around, submesh.carrying_ns) for submesh in self.submeshes]
            clock = clock_of(lanes, beside, self.sharing, self.plan.mesh.devices_per_node)
            makespan = clock.at(makespan)
            lanes = tuple(in_time(lane, clock, makespan) for lane in lanes)
        last = lanes[max(range(len(lanes)), key=lambda n: self.submeshes[n].end_ns)]
        most = max(lanes, key=lambda lane: sum(lane.comm_bytes.values()))
        host = max([self._host_bytes(submesh) for submesh in self.submeshes])
        return Timeline(lanes, makespan, last.breakdown, last.exposed, most.comm_bytes, host)

    def _host_bytes(self, submesh: Submesh) -> int:
        """What a rank has on its host at most: what is kept there, and of each stage what waits there of microbatches
        that are between their passes."""
        each = {stage: self.stages[stage].player.waiting_bytes for stage in submesh.stages}
        now, most = dict.fromkeys(each, 0), dict.fromkeys(each, 0)
        for turn in submesh.turns if any(each.values()) else ():
            now[turn.stage] += {FORWARD: 1, BACKWARD: -1}.get(turn.direction, 0)
            most[turn.stage] = max(most[turn.stage], now[turn.stage])
        return sum(self.stages[stage].player.host_bytes + most[stage] * size for stage, size in each.items())

    def _residents(self, submesh: Submesh) -> list[tuple[int, str]]:
        return [held for stage in submesh.stages for held in self.stages[stage].player.residents]


def _submeshes(plan: Plan) -> list[Submesh]:
    """In the order of their first stages."""
    found: dict[int, Submesh] = {}
    for number, stage in enumerate(plan.stages):
        found.setdefault(stage.first_rank, Submesh(stage.ranks, [])).stages.append(number)
    return list(found.values())


def lane_of(submesh: Submesh, makespan: int, residents: Sequence[tuple[int, str]]) -> Lane:
    """What it did, and where its time went: the parts of the breakdown add up to the whole step's."""
    waited = submesh.in_all(lambda played: played.waited, submesh.waited)
    tail = submesh.end_ns - submesh.free_ns
    if tail:
        kind = _last_kind(submesh.pieces)
        waited[kind] = waited.get(kind, 0) + tail
    exposed = {kind: spent for kind, spent in sorted(waited.items()) if spent}
    spent, sent = (
        submesh.in_all(lambda played: played.spent, {}),
        submesh.in_all(lambda played: played.sent, submesh.sent),
    )
    held: list[Change] = [(0, size, kind, Moment.START) for size, kind in residents if size]
    sends = {"send": submesh.sends_bytes} if submesh.departed else {}
    breakdown = Breakdown(
        compute_ns=sum(spent.get(kind, 0) for kind in WORK),
        recompute_ns=spent.get("recompute", 0),
        exposed_communication_ns=sum(exposed.values()),
        bubble_ns=submesh.bubble_ns + makespan - submesh.end_ns,
        optimizer_ns=spent.get("optimizer", 0),
    )
    return Lane(
        submesh.ranks,
        (TimelinePiece(0, "", [], held), *submesh.pieces),
        breakdown,
        exposed,
        dict(sorted((sent | sends).items())),
        submesh.between | sends,
        submesh.along,
    )


def _last_kind(pieces: Sequence[TimelinePiece]) -> str:
    """The kind of the task that ends last."""
    ends = ((piece.begin_ns + task[3], -number, task[4]) for number, piece in enumerate(pieces) for task in piece.tasks)
    return max(ends)[2]
