"""Proposals of the SOAP search: a decision is drawn, another option for it, and what goes along.

    Sample       another cut of a batch (dim 0)         ┐
    Attribute    another cut of another dim             ├ of one operator, or of all that stand in its place in
    Parameter    another cut of what the operator reads ┘ equal blocks
    storage      another ZeRO stage or dim of a stored tensor, or of all in its place
    input        another slice of the batch for each rank
    recompute    modules of one block, or of all, are computed again in the backward pass, or no more
    axes         two axes of the mesh, equally long, change places in all decisions (on the way down only)
    jumps        what the caller knows how to do: operators placed on a part of the devices, microbatches, stages

The change goes on to a neighbour with a probability that is drawn for each proposal: the neighbour takes an option that
agrees with what it meets, so that no redistribution is needed there. FlexFlow (MLSys'19), section 6.2; the propagation
is that of its later releases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from random import Random

from autopar.ir.graph import is_inside
from autopar.ir.placement import Placement, Type
from autopar.ir.plan import NodePlan, Plan, Storage
from autopar.soap.space import Change, DecisionLink, Draft, LinkEnd, Modules, Option, Space, option_of

SAMPLE, ATTRIBUTE, PARAMETER = "sample", "attribute", "parameter"
STORAGE, INPUT, RECOMPUTE, AXES = "storage", "input", "recompute", "axes"

_WEIGHTS = {"operator": 64, STORAGE: 12, INPUT: 3, RECOMPUTE: 1}
_ALONE = 0.2  # of proposals to operators and storage that change one block's alone
_REACHES = (0.0, 0.5, 0.8, 0.95)  # probabilities with which a change goes on to a neighbour
_LOOKED_AT = 12  # agreeing options of a neighbour that are compared


class Proposals:
    """Draws changes of a draft."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._matching: dict[tuple[str, LinkEnd, Placement], tuple[Option, ...]] = {}
        self._same: dict[str, dict[Option, Option]] = {}
        self._others: dict[tuple[str, int], tuple[Option, list[Option]]] = {}  # by name and identity of what is kept

    @cached_property
    def _kinds(self) -> tuple[list[str], list[int]]:
        """What there is to change, with its weight."""
        space = self.space
        there = {"operator": space.operators, STORAGE: space.stored, INPUT: space.fed, RECOMPUTE: space.recomputable}
        kinds = [kind for kind, decisions in there.items() if decisions]
        return kinds, [_WEIGHTS[kind] for kind in kinds]

    def is_empty(self) -> bool:
        """Whether there is nothing to change."""
        return not self._kinds[0]

    def draw(self, draft: Draft, random: Random) -> Change:
        """A change of the draft; it may be one that no typed plan has, or none."""
        kinds, weights = self._kinds
        kind = random.choices(kinds, weights)[0]
        if kind == RECOMPUTE:
            return self._recomputing(draft.plan, random)
        space, held = self.space, self.space.held(draft.plan)
        names = {"operator": space.operators, STORAGE: space.stored, INPUT: space.fed}[kind]
        name = random.choice(names)
        equals = space.equals.get(name, (name,))
        together = len(equals) == 1 or random.random() >= _ALONE
        first = name if together else random.choice(equals)
        if not held.isdisjoint(equals):
            return Change(kind, first)
        now = option_of(draft.plan, first)
        option = random.choice(self._other_options(first, now))
        found = self._spread({first: option}, draft.plan, together, random.choice(_REACHES), random)
        return Change(self._kind_of(draft.plan, first, option), first, found, together)

    def spread(self, change: Change, draft: Draft, random: Random) -> Change:
        """The change with every operator beside it that has an option which agrees with it, theirs with theirs, and so
        on. What is fed and stored stays: that has reasons of its own."""
        found = self._spread(dict(change.options), draft.plan, change.together, 1.0, random, self._kept)
        return replace(change, options=found)

    @cached_property
    def _kept(self) -> frozenset[str]:
        """What is fed, and stored."""
        return frozenset((*self.space.inputs, *self.space.storages))

    def all_changes(self, draft: Draft) -> list[Change]:
        """Every option of every decision, for all that it stands for; and equal axes of the mesh exchanged."""
        space, plan, held = self.space, draft.plan, self.space.held(draft.plan)
        single = [
            Change(self._kind_of(plan, name, option), name, {name: option}, together=True)
            for name in (*space.operators, *space.stored, *space.fed)
            if held.isdisjoint(space.equals.get(name, (name,)))
            for option in self._options(name)
        ]
        axes = plan.stage.axes
        equal = [pair for pair in combinations(range(len(axes)), 2) if len({axes[n].size for n in pair}) == 1]
        return [*single, *(Change(AXES, " and ".join(map(str, pair))) for pair in equal if not plan.stage.forks)]

    def exchanged(self, plan: Plan, change: Change) -> Change | None:
        """What an exchange of axes sets, if each decision has the option; any other change as it is."""
        if change.kind != AXES:
            return change
        first, second = map(int, change.name.split(" and "))
        order = [*range(len(plan.stage.axes))]
        order[first], order[second] = second, first
        found = dict[str, Option]()
        for held in (plan.stage.nodes, plan.stage.storage, plan.stage.inputs):
            for name, option in held.items():
                other = self._same_options(name).get(_permuted(option, order))
                if other is None:
                    return None
                found[name] = other
        return replace(change, options=found)

    def _same_options(self, name: str) -> Mapping[Option, Option]:
        key = name if name in self.space.inputs else self.space.representative(name)
        if key not in self._same:
            self._same[key] = {option: option for option in self._options(key)}
        return self._same[key]

    # Options ----------------------------------------

    def _options(self, name: str) -> Sequence[Option]:
        space = self.space
        if name in space.inputs:
            return space.inputs[name]
        key = space.representative(name)
        return space.strategies[key] if key in space.strategies else space.storages.get(key, ())

    def _other_options(self, name: str, now: Option) -> list[Option]:
        known = self._others.get((name, id(now)))
        if known is None:
            known = self._others[name, id(now)] = now, [option for option in self._options(name) if option != now]
        return known[1]

    def _agreeing(self, name: str, end: LinkEnd, placement: Placement) -> tuple[Option, ...]:
        """The options of a neighbour that meet a placement without a redistribution."""
        key = (name if end.kind == "input" else self.space.representative(name)), end, placement
        if key not in self._matching:
            options = self._options(name)
            self._matching[key] = tuple(option for option in options if _fits(option, end, placement))
        return self._matching[key]

    # Propagation ----------------------------------------

    def _spread(
        self, changed: dict[str, Option], plan: Plan, together: bool, reach: float, random: Random,
        closed: frozenset[str] = frozenset(),
    ) -> dict[str, Option]:  # fmt: skip
        """What else is changed. together: names are representatives, and what is decided is for all that they stand
        for. reach: the probability with which it goes on to a neighbour; closed: it never goes on to these."""
        held = self.space.held(plan)
        held = held | closed if closed else held
        waiting = [*changed]
        while waiting and reach:
            name = waiting.pop(random.randrange(len(waiting)))
            for link in self._links(name, together):
                if link.other in changed or not self._may_follow(link, held) or random.random() > reach:
                    continue
                meets = placement_at(changed[name], link.own)
                if placement_at(option_of(plan, link.other), link.end) == meets:
                    continue
                options = self._agreeing(link.other, link.end, meets)
                if options:
                    changed[link.other] = self._most_agreeing(link.other, options, changed, plan, together, random)
                    waiting.append(link.other)
        return changed

    def _may_follow(self, link: DecisionLink, held: frozenset[str]) -> bool:
        key = link.other if link.end.kind == "input" else self.space.representative(link.other)
        return key in self._open and (not held or held.isdisjoint(self.space.equals.get(key, (key,))))

    @cached_property
    def _open(self) -> frozenset[str]:
        return frozenset((*self.space.operators, *self.space.stored, *self.space.fed))

    def _most_agreeing(
        self, name: str, options: Sequence[Option], changed: Mapping[str, Option], plan: Plan, together: bool,
        random: Random,
    ) -> Option:  # fmt: skip
        """Of some of these options, one with the fewest redistributions around it."""
        if len(options) == 1:
            return options[0]
        looked_at = options if len(options) <= _LOOKED_AT else random.sample(options, _LOOKED_AT)
        links = self._links(name, together)
        around = [
            (link.own, placement_at(changed.get(link.other) or option_of(plan, link.other), link.end)) for link in links
        ]
        agreeing = [sum(placement_at(option, own) == met for own, met in around) for option in looked_at]
        most = max(agreeing)
        return random.choice([option for option, count in zip(looked_at, agreeing, strict=True) if count == most])

    def _links(self, name: str, together: bool) -> Sequence[DecisionLink]:
        return self._shared_links(name) if together else self.space.links(name)

    def _shared_links(self, name: str) -> Sequence[DecisionLink]:
        """What all that a representative stands for meet, by representatives."""
        if name not in self._shared:
            found: dict[DecisionLink, None] = {}
            for equal in self.space.equals.get(name, (name,)):
                for link in self.space.links(equal):
                    other = link.other if link.end.kind == "input" else self.space.representative(link.other)
                    if other != name:
                        found[link._replace(other=other)] = None
            self._shared[name] = tuple(found)
        return self._shared[name]

    @cached_property
    def _shared(self) -> dict[str, Sequence[DecisionLink]]:
        return {}

    # Changes ----------------------------------------

    def _kind_of(self, plan: Plan, name: str, option: Option) -> str:
        if isinstance(option, Storage):
            return STORAGE
        if not isinstance(option, NodePlan):
            return INPUT
        before, operands = plan.stage.nodes[name], self.space.graph.node_by_name[name].operands
        read = zip(operands, before.operands, option.operands, strict=True)
        if any(old != new and tensor in plan.stage.storage for tensor, old, new in read):
            return PARAMETER
        pairs = zip((*before.operands, *before.results), (*option.operands, *option.results), strict=True)
        return SAMPLE if any(_cuts_samples(old) != _cuts_samples(new) for old, new in pairs) else ATTRIBUTE

    def _recomputing(self, plan: Plan, random: Random) -> Change:
        """Blocks' modules of one kind, all of them or one's, are added or taken away."""
        blocks = random.choice(self.space.recomputable)
        chosen = blocks if random.random() >= _ALONE else (random.choice(blocks),)
        modules = [module for group in chosen for module in group]
        again = set(plan.recompute)
        if again.issuperset(modules):
            kept = tuple(module for module in plan.recompute if module not in modules)
        else:
            kept = (*(m for m in plan.recompute if not is_inside(m, modules)), *(m for m in modules if m not in again))
            kept = tuple(m for m in kept if not is_inside(m, [other for other in kept if other != m]))
        return Change(RECOMPUTE, modules[0], recompute=kept)


def placement_at(option: Option, end: LinkEnd) -> Placement:
    """What an option leaves, reads, stores or feeds there."""
    if isinstance(option, NodePlan):
        return (option.results if end.kind == "result" else option.operands)[end.position]
    return option.placement if isinstance(option, Storage) else option


def _permuted(option: Option, order: Sequence[int]) -> Option:
    """With the mesh's axes in another order."""

    def along(placement: Placement) -> Placement:
        return tuple([placement[axis] for axis in order])

    if isinstance(option, NodePlan):
        operands, results = tuple(map(along, option.operands)), tuple(map(along, option.results))
        return replace(option, operands=operands, results=results)
    return replace(option, placement=along(option.placement)) if isinstance(option, Storage) else along(option)


def _fits(option: Option, end: LinkEnd, placement: Placement) -> bool:
    """Whether it meets a placement: what is stored whole is read as I or R alike."""
    own = placement_at(option, end)
    return own == placement or (end.kind == "stored" and all(map(_is_whole_alike, own, placement)))


def _is_whole_alike(stored: Type, used: Type) -> bool:
    return stored == used or (stored.kind in "IR" and used.kind in "IR")


def _cuts_samples(placement: Placement) -> tuple[bool, ...]:
    return tuple(type_.kind == "S" and type_.dim == 0 for type_ in placement)


__all__ = ["Modules", "Option", "Proposals"]
