"""soap: a plan, the simulator → a plan that is no slower, and how it was found (FlexFlow's MCMC over SOAP dims).

    from each start a chain (`annealing`)  →  the best plan of all  →  taken back, what hardly gains  →  report

A start that does not fit is let find its way to memory that does. Nothing slower than the first start that fits is ever
returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import NamedTuple

from autopar.clock import Clock
from autopar.ir.labels import bracketed, storage_text, strategy_text
from autopar.ir.plan import Move, NodePlan, Plan, Refinement, Storage
from autopar.soap.annealing import Chain, Jump, Scored, Watch, World, anneal, joined_trace, scored
from autopar.soap.proposals import INPUT, RECOMPUTE, STORAGE, Option
from autopar.soap.space import Change, Draft, Space, option_of

RESOLUTION = 0.001
"""Of a step: what no profile tells apart is not worth a decision that differs."""


@dataclass(frozen=True)
class Budget:
    """Proposals over all chains, seconds for these as a safeguard (results depend on the machine where these end a
    chain), and the seed of all chance."""

    proposals: int
    seconds: float
    seed: int = 0


@dataclass(frozen=True)
class Start:
    """Where a chain begins."""

    name: str
    world: World
    plan: Plan


class RefinedPlan(NamedTuple):
    """The best plan, and the world that it is of."""

    world: World
    plan: Plan


def refine(
    starts: Sequence[Start], budget: Budget, jumps: Mapping[str, Jump] | None = None,
    watch: Watch | None = None,
) -> tuple[RefinedPlan, Refinement]:  # fmt: skip
    """The best plan that chains from the starts find, and how; the first start's plan, where none is faster.

    The budget is shared equally. What the best differs in from the first start is in the report. jumps: further
    proposals, by kind; they may lead to other worlds.
    """
    clock, random = Clock.of(budget.seconds), Random(budget.seed)
    chains: list[Chain] = []
    for start in starts:
        own = clock.part((len(chains) + 1) / len(starts))
        count = max(1, budget.proposals // len(starts))
        chains.append(anneal(start.world, start.plan, count, own, Random(random.random()), jumps, watch))
        if chains[-1].stop_reason == "interrupted":
            break
    ends = [chains[0].first, *(chain.best for chain in chains)]
    number = min(range(len(ends)), key=lambda n: (not ends[n].fits, ends[n].cost_ns, n))
    simplest = _DecisionDifferences(ends[0], ends[number])
    plan, moves = simplest.taken_back()
    report = _report(starts, chains, max(0, number - 1), simplest.best, moves, budget, clock.passed_s)
    return RefinedPlan(simplest.best.world, plan), report


def refined_elsewhere(start: Start, other: Start, report: Refinement) -> tuple[RefinedPlan, Refinement]:
    """As `refine`, where the chains ran on a model with fewer equal blocks and found what, done in all, is the other.

    report: of that search. Its steps are told in proportion to the whole model's; what each decision gains is simulated
    there.
    """
    clock = Clock.of(0.0)
    first, second = _scored_at(start), _scored_at(other)
    simplest = _DecisionDifferences(first, min((first, second), key=lambda one: (not one.fits, one.cost_ns)))
    plan, moves = simplest.taken_back()
    whole = first.cost_ns / report.before_ns
    report = replace(
        report, before_ns=first.cost_ns, after_ns=simplest.best.cost_ns, moves=tuple(moves),
        seconds=round(report.seconds + clock.passed_s, 3),
        starts={start.name: (first.cost_ns, simplest.best.cost_ns)},
        trace=tuple((count, round(now * whole), round(best_ns * whole)) for count, now, best_ns in report.trace),
    )  # fmt: skip
    return RefinedPlan(simplest.best.world, plan), report


def _scored_at(start: Start) -> Scored:
    world, plan = start.world, start.plan
    return scored(world, world.space.draft(plan), world.score.step_time_ns(plan), plan.memory_limit)


def _report(
    starts: Sequence[Start], chains: Sequence[Chain], number: int, best: Scored, moves: Sequence[Move], budget: Budget,
    seconds: float,
) -> Refinement:  # fmt: skip
    made, accepted = Counter[str](), Counter[str]()
    for chain in chains:
        made.update(chain.tally.made)
        accepted.update(chain.tally.accepted)
    return Refinement(
        start=starts[number].name,
        before_ns=chains[0].first.cost_ns,
        after_ns=best.cost_ns,
        proposals=made.total(),
        simulated=sum(chain.tally.simulated for chain in chains),
        seconds=round(seconds, 3),
        seed=budget.seed,
        stop_reason="; ".join(dict.fromkeys(chain.stop_reason for chain in chains)),
        rates={kind: (count, accepted[kind]) for kind, count in sorted(made.items())},
        starts={s.name: (c.first.cost_ns, c.best.cost_ns) for s, c in zip(starts, chains, strict=False)},
        trace=joined_trace(chains),
        moves=tuple(moves),
    )


@dataclass
class _DecisionDifferences:
    """Decisions in which the best plan differs from the first: each is taken back where that loses next to nothing."""

    first: Scored
    best: Scored

    @property
    def space(self) -> Space:
        """Of the best."""
        return self.best.world.space

    def _is_as_good(self) -> bool:
        """Whether the first plan fits as well, and no profile tells the two apart."""
        gained = self.first.cost_ns - self.best.cost_ns
        return self.first.fits >= self.best.fits and gained <= RESOLUTION * self.first.cost_ns

    @cached_property
    def _good_enough_ns(self) -> int:
        """What a plan may cost that differs from the first in less."""
        gained = self.first.cost_ns - self.best.cost_ns
        return self.best.cost_ns + min(round(RESOLUTION * self.best.cost_ns), gained // 2)

    def taken_back(self) -> tuple[Plan, list[Move]]:
        """The best plan without decisions that gain nothing, and what each of the others gains."""
        if self._is_as_good() or self.best.draft.plan is self.first.draft.plan:
            self.best = self.first
            return self.first.draft.plan, []
        if not self._is_comparable():
            gain = self.first.cost_ns - self.best.cost_ns
            return self.space.in_order(self.best.draft), [Move("plan", "jump", 1, *self._outlines(), gain)]
        kept: list[tuple[Change, int]] = []
        for change in self._changes():
            draft = self.space.changed(self.best.draft, change)
            without_ns = self.best.cost_ns if draft is None else self.best.world.score.step_time_ns(draft.plan)
            without = self._scored(draft, without_ns) if draft and without_ns <= self._good_enough_ns else None
            if without is not None and without.fits >= self.best.fits:
                self.best = without
            else:
                kept.append((change, without_ns - self.best.cost_ns))
        moves = [self._move(change, gain) for change, gain in kept]
        return self.space.in_order(self.best.draft), sorted(moves, key=lambda move: -move.gain_ns)

    def _scored(self, draft: Draft, step_ns: int) -> Scored:
        world, limit = self.best.world, draft.plan.memory_limit
        return Scored(world, draft, step_ns, not limit or not world.score.excess_bytes(draft.plan, limit))

    def _is_comparable(self) -> bool:
        """Whether both are plans of one world with the same branches: decisions can be taken back one by one."""
        same = self.first.world is self.best.world
        return same and self.first.draft.plan.stage.forks == self.best.draft.plan.stage.forks

    def _outlines(self) -> tuple[str, str]:
        return _outline(self.first), _outline(self.best)

    def _changes(self) -> list[Change]:
        """Back to the first plan, decision by decision: what stands in the same place of equal blocks is one."""
        before, after = self.first.draft.plan.stage, self.best.draft.plan.stage
        groups: dict[tuple[str, Option, Option], list[str]] = {}
        pairs: list[tuple[Mapping[str, Option], Mapping[str, Option]]]
        pairs = [(before.nodes, after.nodes), (before.storage, after.storage), (before.inputs, after.inputs)]
        for old, new in pairs:
            for name, option in new.items():
                if old[name] != option:
                    key = name if name in after.inputs else self.space.representative(name)
                    groups.setdefault((key, old[name], option), []).append(name)
        found = [_back(names, option) for (_, option, _), names in groups.items()]
        again = self.first.draft.plan.recompute
        if again != self.best.draft.plan.recompute:
            found.append(Change(RECOMPUTE, "recompute", recompute=again))
        return found

    def _move(self, change: Change, gain_ns: int) -> Move:
        before, after = self.first.draft.plan, self.best.draft.plan
        if change.recompute is not None:
            old, new = (", ".join(plan.recompute) or "none" for plan in (before, after))
            return Move(change.name, change.kind, 1, old, new, gain_ns)
        names = [*change.options]
        old, new = (option_text(option_of(plan, names[0])) for plan in (before, after))
        return Move(names[0], change.kind, len(names), old, new, gain_ns)


def _outline(scored: Scored) -> str:
    forks = len(scored.draft.plan.stage.forks)
    return scored.world.outline + (f", {forks} forks" if forks else "")


def _back(names: Sequence[str], option: Option) -> Change:
    kind = "operator" if isinstance(option, NodePlan) else STORAGE if isinstance(option, Storage) else INPUT
    return Change(kind, names[0], dict.fromkeys(names, option))


def option_text(option: Option) -> str:
    """ "[S(0) R], [R R] -> [S(0) R]": an option as `plan.explain` writes it."""
    if isinstance(option, NodePlan):
        return strategy_text(option)
    return f"stored {storage_text(option)}" if isinstance(option, Storage) else bracketed((option,))
