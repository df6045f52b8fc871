"""One Markov chain over plans: Metropolis acceptance against the current plan, at a temperature that falls.

    accept with probability min(1, exp(−(new − current) / T))      ⇔   new ≤ current − T·ln u,  u uniform in (0, 1]

The uniform number is drawn first. So what a proposal may cost at most is known before it is simulated, and one whose
lower bound is above that is refused without: the chain is the same, only faster. Costs are simulated step times in ns.
Where a plan does not fit its memory, its cost grows by as large a part as it is over, ten times; a plan that fits is
never left for one that does not. Metropolis et al. (1953); FlexFlow (MLSys'19), section 6.2.

T is a part of the best cost and falls from `HOT` to `COLD` over a round; each round begins again at the best plan. What
is left of the proposals goes down from there: one change after another, each of them tried, as long as one gains; then
each with all operators around it that agree with it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol

from autopar.clock import Clock, is_interrupted, worked
from autopar.ir.plan import Plan
from autopar.soap.ledger import Ledger
from autopar.soap.proposals import AXES, Proposals
from autopar.soap.space import Change, Draft, Space
from autopar.tunables import PROPOSAL_NODE_S, PROPOSAL_S

HOT, COLD = 0.005, 0.0001  # temperature, as parts of the best cost
ROUNDS = 4
DESCENT = 0.25  # of proposals, those that are kept for the way down
JUMPS = 0.015  # of proposals, where there are any
_TRACED = 200  # points of a trace at most
_OVER = 10  # how much dearer a plan is by each part of its limit that it is over


class Score(Protocol):
    """The simulator, as far as the search asks it. Plans are of one stage and one microbatch's graph. A step that takes
    longer than `until_ns` need not be played to its end: anything between may be said of it."""

    def step_time_ns(self, plan: Plan, until_ns: float = math.inf) -> int: ...
    def excess_bytes(self, plan: Plan, limit_bytes: int) -> int: ...


class World(NamedTuple):
    """Plans of one graph on one logical mesh, and what they cost; in words, what they have in common; what bounds their
    cost before they are made."""

    space: Space
    score: Score
    outline: str = ""
    ledger: Ledger | None = None

    def least_ns(self, plan: Plan, change: Change | None = None) -> int:
        """At most the step time of a plan with a change. Branches are run by a part of the devices: 0 is known of
        those."""
        return 0 if self.ledger is None or plan.stage.forks else self.ledger.least_ns(plan, change)


Jump = Callable[[World, Plan, Random], "tuple[World, Plan] | None"]
"""A proposal that is more than another option of a decision: the plan after it, where there is one."""


class Scored(NamedTuple):
    """A draft, where it is from, what it costs (ns, and more where it does not fit), and whether it fits."""

    world: World
    draft: Draft
    cost_ns: int
    fits: bool


@dataclass
class Tally:
    """What a chain did: proposals made and accepted by kind, how many were simulated, (number, current, best) in ns."""

    made: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    simulated: int = 0
    trace: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def proposals(self) -> int:
        """All that were made."""
        return self.made.total()


@dataclass(frozen=True)
class Chain:
    """A chain that has ended: where it began, its best, and why it stopped."""

    first: Scored
    best: Scored
    tally: Tally
    stop_reason: str


Watch = Callable[[int, int], None]
"""Told the number of proposals and the best cost in ns, once in a while."""


def anneal(
    world: World, plan: Plan, proposals: int, clock: Clock, random: Random, jumps: Mapping[str, Jump] | None = None,
    watch: Watch | None = None,
) -> Chain:  # fmt: skip
    """Runs a chain from a plan. proposals: how many at most; it stops when half of them brought no gain, or its
    time is over. jumps: by kind of proposal. An interrupt ends it with what it has."""
    return _Annealing(world, plan, proposals, clock, random, jumps or {}, watch).run()


def scored(world: World, draft: Draft, step_ns: int, memory_limit: int) -> Scored:
    """A draft whose step takes so long, with what it costs where it does not fit. memory_limit: bytes, 0 for none."""
    over = world.score.excess_bytes(draft.plan, memory_limit) / memory_limit if memory_limit else 0.0
    return Scored(world, draft, round(step_ns * (1.0 + _OVER * over)), over == 0.0)


def threshold_ns(current_ns: int, temperature_ns: float, uniform: float) -> float:
    """What a proposal may cost at most to be accepted. uniform: of [0, 1)."""
    return current_ns - temperature_ns * math.log(1.0 - uniform)


class _Annealing:
    def __init__(
        self, world: World, plan: Plan, proposals: int, clock: Clock, random: Random, jumps: Mapping[str, Jump],
        watch: Watch | None,
    ) -> None:  # fmt: skip
        self.random, self.jumps, self.watch = random, jumps, watch
        self.limit, self.clock, self.memory_limit = proposals, clock, plan.memory_limit
        self.chain_limit = proposals - int(DESCENT * proposals)
        self.proposals: dict[Space, Proposals] = {}
        self.known: dict[Hashable, int] = {}  # at most the step times of what was simulated
        self.key: Hashable = None  # of the plan that is looked at
        self.tally = Tally()
        step_ns = world.score.step_time_ns(plan)
        self.first = self.best = self.current = scored(world, world.space.draft(plan), step_ns, self.memory_limit)
        self.improved_at = 0

    def run(self) -> Chain:
        empty = self._proposals(self.first.world.space).is_empty() and not self.jumps
        reason = "nothing to change" if empty else ""
        while not reason and self.tally.proposals < self.chain_limit:
            self._propose()
            reason = self._reason_to_stop()
        if not reason or reason == self._without_gain:
            reason = self._descend() or reason or f"no change gains after {self.tally.proposals:,} proposals"
        self._note(always=True)
        return Chain(self.first, self.best, self.tally, reason)

    def _reason_to_stop(self) -> str:
        count = self.tally.proposals
        if is_interrupted():
            return "interrupted"
        if count >= self.limit:
            return f"all {count:,} proposals made"
        if self.clock.is_over:
            return f"{self.clock.stop_reason} after {count:,} proposals"
        return self._without_gain if count - self.improved_at >= max(1, self.limit // 2) else ""

    @property
    def _without_gain(self) -> str:
        return f"half of {self.limit:,} proposals without gain"

    # The way down ----------------------------------------

    def _descend(self) -> str:
        """Takes every change that gains, by itself first, then with the operators that agree with it, until none does;
        says why it stopped before."""
        self.current, proposals = self.best, self._proposals(self.best.world.space)
        changes = deque(proposals.all_changes(self.best.draft))
        self.random.shuffle(changes)
        refused = 0
        while refused < 2 * len(changes):
            reason = self._reason_to_stop()
            if reason and reason != self._without_gain:
                return reason
            changes.rotate(-1)
            refused = 0 if self._gains(changes[-1], spreads=refused >= len(changes)) else refused + 1
        return ""

    def _gains(self, change: Change, spreads: bool) -> bool:
        """Whether the best plan is better with a change, which it then has. spreads: with what agrees with it."""
        world, draft, threshold = self.best.world, self.best.draft, self.best.cost_ns - 1
        proposals = self._proposals(world.space)
        real = proposals.exchanged(draft.plan, change)
        if real is not None and spreads and change.kind != AXES:
            real = proposals.spread(real, draft, self.random)
        found = None if real is None else self._changed(world, draft, real, threshold)
        after = None if found is None else self._within(*found, threshold)
        self._count(change.kind, after)
        return after is not None and after is self.best

    # A step of the chain ----------------------------------------

    def _propose(self) -> None:
        number, length = self.tally.proposals, max(1, self.chain_limit // ROUNDS)
        if number % length == 0:
            self.current = self.best
        temperature = self.best.cost_ns * HOT * (COLD / HOT) ** (number % length / length)
        threshold = threshold_ns(self.current.cost_ns, temperature, self.random.random())
        kind, found = self._drawn(threshold)
        self._count(kind, None if found is None else self._within(*found, threshold))

    def _count(self, kind: str, after: Scored | None) -> None:
        """Notes a proposal, and goes where it leads if it is accepted."""
        worked(PROPOSAL_S + PROPOSAL_NODE_S * len(self.first.draft.plan.stage.nodes))
        self.tally.made[kind] += 1
        if after is not None:
            self.tally.accepted[kind] += 1
            self.current = after
            if (after.fits, -after.cost_ns) > (self.best.fits, -self.best.cost_ns):
                self.best, self.improved_at = after, self.tally.proposals
        self._note()

    def _drawn(self, threshold: float) -> tuple[str, tuple[World, Draft] | None]:
        """The kind of a proposal, and the draft after it, if there is one that may cost as little."""
        world, draft, random, self.key = self.current.world, self.current.draft, self.random, None
        proposals = self._proposals(world.space)
        kind = self._jump(proposals.is_empty())
        if kind:
            found = self.jumps[kind](world, draft.plan, random)
            if found is None or found[0].least_ns(found[1]) > threshold:
                return kind, None
            return kind, (found[0], found[0].space.draft(found[1]))
        if proposals.is_empty():
            return "nothing", None
        change = proposals.draw(draft, random)
        return change.kind, self._changed(world, draft, change, threshold)

    def _changed(self, world: World, draft: Draft, change: Change, threshold: float) -> tuple[World, Draft] | None:
        """The draft with a change, if there is one that may cost as little."""
        if world.least_ns(draft.plan, change) > threshold or self._is_known_above(world, draft.plan, change, threshold):
            return None
        after = world.space.changed(draft, change)
        return None if after is None or after is draft else (world, after)

    def _jump(self, always: bool) -> str:
        """The kind of a jump, if this is one."""
        random, kinds = self.random, [*self.jumps]
        return random.choice(kinds) if kinds and (always or random.random() < JUMPS) else ""

    def _is_known_above(self, world: World, plan: Plan, change: Change, threshold: float) -> bool:
        """Whether the plan with a change was simulated before, and costs more; if not, its cost will be noted."""
        self.key = None
        if world.ledger is None or plan.stage.forks:
            return False
        again = plan.recompute if change.recompute is None else change.recompute
        self.key = id(world), again, world.ledger.key(plan, change)
        return self.known.get(self.key, 0) > threshold

    def _proposals(self, space: Space) -> Proposals:
        if space not in self.proposals:
            self.proposals[space] = Proposals(space)
        return self.proposals[space]

    def _within(self, world: World, draft: Draft, threshold: float) -> Scored | None:
        """A draft, where it costs no more than so much."""
        self.tally.simulated += 1
        step_ns = world.score.step_time_ns(draft.plan, threshold)
        if self.key is not None:
            self.known[self.key] = step_ns
        if step_ns > threshold:
            return None
        found = scored(world, draft, step_ns, self.memory_limit)
        return found if found.cost_ns <= threshold and found.fits >= self.current.fits else None

    def _note(self, always: bool = False) -> None:
        count = self.tally.proposals
        if always or count % max(1, self.limit // _TRACED) == 0:
            self.tally.trace.append((count, self.current.cost_ns, self.best.cost_ns))
            if self.watch is not None:
                self.watch(count, self.best.cost_ns)


def joined_trace(chains: Sequence[Chain]) -> tuple[tuple[int, int, int], ...]:
    """The traces one after another, with the best of all so far, thinned alike."""
    found, before, best = list[tuple[int, int, int]](), 0, 0
    for chain in chains:
        for number, current, own in chain.tally.trace:
            best = min(best, own) if best else own
            found.append((before + number, current, best))
        before += chain.tally.proposals
    thin = max(1, len(found) // _TRACED)
    return tuple(found[::thin])
