"""A lower bound of what a change costs, found before there is a plan with it: from the prices of what it touches.

least = max over stages of   microbatches · (forward + backward) + optimizer + what runs before and after on others
                             link work, of each level

Operators and tensors that stand in the same place of equal blocks, and are placed alike, are priced once
(`_EqualWorth`), so what a change of all of them takes does not grow with the number of blocks. What crosses a border
between stages is left out. Of what is computed again, operators count that save something for their own backward pass:
they surely are.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from autopar.ir.graph import Node
from autopar.ir.placement import Placement
from autopar.ir.plan import NodePlan, Plan, Storage
from autopar.ir.redistribution import Step
from autopar.soap.space import Change, Option, Space, option_of

NEVER = 1 << 62
"""What has no plan costs more than anything."""

KEPT_WORKS = 1 << 12  # of a group: more are forgotten all at once


class Spent(Protocol):
    """Nanoseconds of a microbatch on the compute stream, forward and backward, and of a step on links inside nodes and
    between them; and, of an operator, what it takes where it is computed again."""

    @property
    def forward_ns(self) -> int: ...
    @property
    def backward_ns(self) -> int: ...
    @property
    def inside_ns(self) -> int: ...
    @property
    def across_ns(self) -> int: ...
    @property
    def again_ns(self) -> int: ...


Reshard = tuple[Placement, tuple[Step, ...], bool]
"""How a tensor is brought to a placement; whether a gradient comes back from there."""


class LedgerPrices(Protocol):
    """What operators and tensors take by themselves, on the plans' axes and with their microbatches."""

    @property
    def kinds(self) -> Mapping[str, int]: ...
    def goes_back(self, tensor: str, reader: str) -> bool: ...
    def node(self, node: Node, placed: NodePlan) -> Spent: ...
    def activation(
        self, name: str, base: Placement, reshards: Sequence[Reshard], placed: Mapping[str, NodePlan]
    ) -> Spent: ...
    def stored(
        self, name: str, storage: Storage, reshards: Sequence[Reshard], placed: Mapping[str, NodePlan]
    ) -> Spent: ...
    def moved_bytes(self, name: str, storage: Storage) -> int: ...
    def optimizer_ns(self, moved_bytes: int, tensors: int) -> int: ...
    def computed_again(self, recompute: Sequence[str]) -> Iterable[str]: ...


class Stages(NamedTuple):
    """Which stages each node runs in; whether a microbatch's passes follow each other through them one by one, forward
    and backward."""

    members: Mapping[str, tuple[int, ...]]
    is_row: tuple[bool, bool]
    submesh_of: tuple[int, ...]


class Worth(NamedTuple):
    """Of one tensor, operator or group: as `Spent`, and the bytes that the optimizer moves."""

    forward_ns: int
    backward_ns: int
    inside_ns: int
    across_ns: int
    moved_bytes: int
    again_ns: int


NODE = ("node",)
_NOTHING = Worth(0, 0, 0, 0, 0, 0)
_COLUMNS = range(len(_NOTHING))
_AGAIN = len(_NOTHING) - 1

Codes = tuple[int, ...]


class _Alike(NamedTuple):
    """Members of a group with equal decisions: the place of one, how many, and how many of them run again."""

    codes: Codes
    place: int
    num_members: int
    num_again: int


class _EqualWorth:
    """Tensors, or operators, that are worth the same wherever decisions of the same names are.

    decisions: by member, what its worth depends on: who makes it, then who reads it; shared: these by representative.
    again: the members, by place, that are computed again; ways: how they are decided now.
    """

    def __init__(self, stage: int, shared: tuple[str, ...], is_node: bool) -> None:
        self.stage, self.shared, self.is_node = stage, shared, is_node
        self.members: list[str] = []
        self.decisions: list[tuple[str, ...]] = []
        self.known: dict[Codes, Worth | None] = {}
        self.again: set[int] = set()
        self.ways: list[_Alike] = []


class Ledger:
    """What a draft comes to, and what it would with a change. stages: where the plans are cut into such."""

    def __init__(self, space: Space, prices: LedgerPrices, microbatches: int, stages: Stages | None = None) -> None:
        self.space, self.prices, self.microbatches, self.stages = space, prices, microbatches, stages
        graph = space.graph
        self.num_stages = len(stages.submesh_of) if stages else 1
        self._codes: dict[int, int] = {}  # by identity of an option, which holds as long as `_options` keeps it
        self._numbers: dict[Option, int] = {}
        self._options: list[Option] = []
        self._kept: list[Option] = []
        groups: dict[Hashable, _EqualWorth] = {}
        for node in graph.nodes:
            self._join(groups, node.name, NODE, self._stage_of(node.name), (node.name,))
        for name in graph.tensors:
            self._join(groups, name, ("tensor", prices.kinds[name]), self._stage_of_tensor(name), self._around(name))
        self._groups = list(groups.values())
        self._of_decision: dict[str, list[int]] = defaultdict(list)  # groups, by representative
        self._uses: dict[str, list[tuple[int, int]]] = defaultdict(list)  # group and place of member, by name
        for number, group in enumerate(self._groups):
            for shared in dict.fromkeys(group.shared):
                self._of_decision[shared].append(number)
            for place, names in enumerate(group.decisions):
                for name in dict.fromkeys(names):
                    self._uses[name].append((number, place))
        self._counts = self._trained()
        self._names = tuple(node.name for node in graph.nodes), tuple(item.tensor for item in graph.stored)
        self._digests: dict[tuple[str, int], int] = {}
        self._held: list[Option] = []
        self._plan: Plan | None = None

    # Groups ----------------------------------------

    def _join(
        self, groups: dict[Hashable, _EqualWorth], name: str, kind: Hashable, stage: int, decisions: tuple[str, ...]
    ) -> None:  # fmt: skip
        """Adds a member to its group; what is in no one stage is left out."""
        if stage < 0:
            return
        shared = tuple([self._representative(one) for one in decisions])
        key = kind, stage, shared, self._places(name, kind)
        group = groups.setdefault(key, _EqualWorth(stage, shared, kind == NODE))
        group.members.append(name)
        group.decisions.append(decisions)

    def _representative(self, name: str) -> str:
        return name if name in self.space.graph.inputs else self.space.representative(name)

    def _places(self, name: str, kind: Hashable) -> Hashable:
        """At which result a tensor is made, and at which operands it is read."""
        graph = self.space.graph
        if kind == NODE:
            return None
        maker = graph.producers.get(name)
        return None if maker is None else maker.results.index(name), tuple([at for _, at in self._readers(name)])

    def _readers(self, name: str) -> list[tuple[Node, int]]:
        """Those in the tensor's stage."""
        stage, stages = self._stage_of_tensor(name), self.stages
        found = self.space.graph.consumers[name]
        return [pair for pair in found if stages is None or stages.members[pair[0].name] == (stage,)]

    def _around(self, name: str) -> tuple[str, ...]:
        maker = self.space.graph.producers.get(name)
        return (name if maker is None else maker.name, *[node.name for node, _ in self._readers(name)])

    def _stage_of(self, node: str) -> int:
        """The only stage of a node; of one that runs in several, the first."""
        return self.stages.members[node][0] if self.stages else 0

    def _stage_of_tensor(self, name: str) -> int:
        """Where a tensor is made, or stored; −1 where that is in several stages."""
        if self.stages is None:
            return 0
        maker = self.space.graph.producers.get(name)
        nodes = [node for node, _ in self.space.graph.consumers[name]] if maker is None else [maker]
        found = {stage for node in nodes for stage in self.stages.members[node.name]}
        return found.pop() if len(found) == 1 else -1

    def _trained(self) -> list[int]:
        """How many tensors each stage's optimizer updates."""
        counts = [0] * self.num_stages
        for item in self.space.graph.stored:
            stage = self._stage_of_tensor(item.tensor)
            counts[stage] += item.requires_grad and stage >= 0
        return counts

    # Options ----------------------------------------

    def _code(self, option: Option) -> int:
        """One number for equal options; the same object is looked at once."""
        known = self._codes.get(id(option))
        if known is None:
            known = self._numbers.setdefault(option, len(self._options))
            if known == len(self._options):
                self._options.append(option)
            self._codes[id(option)] = known
            self._kept.append(option)
        return known

    # Worth ----------------------------------------

    def _worth(self, group: _EqualWorth, place: int, codes: Codes) -> Worth | None:
        """Of a member whose decisions have these options; None where it cannot be brought to where it is read."""
        known = group.known.get(codes, _NOTHING)
        if known is not _NOTHING:
            return known
        name, options = group.members[place], [self._options[code] for code in codes]
        if len(group.known) >= KEPT_WORKS:
            group.known.clear()
        if group.is_node:
            found = self._of_node(name, options)
        else:
            found = self._of_tensor(name, group.decisions[place], options)
        group.known[codes] = found
        return found

    def _of_node(self, name: str, options: Sequence[Option]) -> Worth | None:
        (option,) = options
        assert isinstance(option, NodePlan)
        return _row(self.prices.node(self.space.graph.node_by_name[name], option))

    def _of_tensor(self, name: str, decisions: Sequence[str], options: Sequence[Option]) -> Worth | None:
        graph, own = self.space.graph, options[0]
        placed = dict(zip(decisions[1:], options[1:], strict=True))
        if isinstance(own, NodePlan):
            source = own.results[graph.producers[name].results.index(name)]
        else:
            source = own.placement if isinstance(own, Storage) else own
        wanted: dict[Placement, bool] = {}
        for node, at in self._readers(name):
            option = placed[node.name]
            assert isinstance(option, NodePlan)
            if option.operands[at] != source:
                back = self.prices.goes_back(name, node.name)
                wanted[option.operands[at]] = wanted.get(option.operands[at], False) or back
        reshards = list[Reshard]()
        for target, back in wanted.items():
            conversion = self.space.conversion(name, source, target)
            if conversion is None:
                return None
            reshards.append((target, conversion.steps, back))
        if isinstance(own, Storage):
            spent = self.prices.stored(name, own, reshards, placed)  # type: ignore[arg-type]
            return _row(spent, self.prices.moved_bytes(name, own))
        return _row(self.prices.activation(name, source, reshards, placed))  # type: ignore[arg-type]

    # A draft ----------------------------------------

    def _follow(self, plan: Plan) -> None:
        """Adds up what a plan comes to, where it is not the one of before."""
        if plan is self._plan:
            return
        options = self._options_of(plan)
        if self._plan is None:
            self._begin(plan, options)
        else:
            same = [*map(operator.is_, options, self._held)]
            if not all(same):
                self._exchange([name for name, is_same in zip(self._now, same, strict=True) if not is_same], plan)
            if plan.recompute != self._plan.recompute:
                self._mark_again(plan.recompute)
        self._plan, self._held = plan, options

    def _options_of(self, plan: Plan) -> list[Option]:
        nodes, stored = self._names
        inputs = map(plan.stage.inputs.__getitem__, self.space.graph.inputs)
        return [*map(plan.stage.nodes.__getitem__, nodes), *map(plan.stage.storage.__getitem__, stored), *inputs]

    def _begin(self, plan: Plan, options: Sequence[Option]) -> None:
        """Adds everything."""
        names = (*self._names[0], *self._names[1], *self.space.graph.inputs)
        self._now = dict(zip(names, map(self._code, options), strict=True))
        self._alike = {name: self._now[name] for name in self.space.graph.inputs}
        self._alike |= {name: self._common(name) for name in self.space.equals}
        self._digest = 0
        for name, code in self._now.items():
            self._digest ^= self._digest_of(name, code)
        self._rows: list[Sequence[int]] = [_NOTHING] * len(self._groups)
        self._totals = [[*_NOTHING] for _ in range(self.num_stages)]
        self._add_anew(range(len(self._groups)))
        self._mark_again(plan.recompute)

    def _common(self, name: str) -> int:
        """The code of all that a representative stands for, −1 where they differ."""
        codes = {self._now[one] for one in self.space.equals[name]}
        return codes.pop() if len(codes) == 1 else -1

    def _exchange(self, names: Sequence[str], plan: Plan) -> None:
        """Adds what has changed with these decisions."""
        changed = set[str]()
        for name in names:
            old, new = self._now[name], self._code(option_of(plan, name))
            if old != new:
                self._digest ^= self._digest_of(name, old) ^ self._digest_of(name, new)
                self._now[name] = new
                changed.add(self._representative(name))
        for name in changed:
            self._alike[name] = self._common(name) if name in self.space.equals else self._now[name]
        self._add_anew({number for name in changed for number in self._of_decision[name]})

    def _add_anew(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            group = self._groups[number]
            group.ways = self._ways(group)
            row = self._group_row(group, {})
            assert row is not None, "a draft has a way for each of its tensors"
            _replace(self._totals[group.stage], self._rows[number], row)
            self._rows[number] = row

    def _mark_again(self, recompute: Sequence[str]) -> None:
        """Notes what is computed again from now on."""
        found: dict[int, set[int]] = defaultdict(set)
        for name in self.prices.computed_again(recompute):
            for number, place in self._uses[name]:
                if self._groups[number].is_node:
                    found[number].add(place)
        changed = [n for n, group in enumerate(self._groups) if group.again != found.get(n, set())]
        for number in changed:
            self._groups[number].again = found.get(number, set())
        self._add_anew(changed)

    def _again_ns(self, recompute: Sequence[str]) -> list[int]:
        """What a draft's operators come to, stage by stage, where others of them are computed again."""
        found = [0] * self.num_stages
        for name in self.prices.computed_again(recompute):
            for number, place in self._uses[name]:
                group = self._groups[number]
                row = self._worth(group, place, (self._now[name],)) if group.is_node else None
                found[group.stage] += row.again_ns if row is not None else 0
        return found

    def _ways(self, group: _EqualWorth) -> list[_Alike]:
        """How the members are decided, each way once."""
        alike, now = self._alike, self._now
        codes = tuple([alike[name] for name in group.shared])
        if -1 not in codes:
            return [_Alike(codes, 0, len(group.members), len(group.again))]
        places: dict[Codes, list[int]] = {}
        for place, names in enumerate(group.decisions):
            places.setdefault(tuple([now[name] for name in names]), []).append(place)
        return [_Alike(own, at[0], len(at), len(group.again.intersection(at))) for own, at in places.items()]

    def _group_row(self, group: _EqualWorth, options: Mapping[str, int]) -> Sequence[int] | None:
        """What a whole group comes to. options: what is set, by representative."""
        total: list[int] | None = None
        for codes, place, num_members, num_again in group.ways:
            if options:
                pairs = zip(group.shared, codes, strict=True)
                codes = tuple([options.get(name, code) for name, code in pairs])
            one = self._worth(group, place, codes)
            if one is None:
                return None
            row = [num_members * amount for amount in one]
            row[_AGAIN] = num_again * one.again_ns
            if total is None:
                total = row
            else:
                _add(total, row)
        return total

    def least_ns(self, plan: Plan, change: Change | None = None) -> int:
        """At most the step time of a plan with a change; more than anything where it has no plan."""
        self._follow(plan)
        if change is None:
            return self._bound(self._totals)
        options = {name: self._code(option) for name, option in change.options.items()}
        totals = [[*row] for row in self._totals]
        possible = self._change_all(options, totals) if change.together else self._change_some(options, totals)
        if change.recompute is not None:
            for total, again_ns in zip(totals, self._again_ns(change.recompute), strict=True):
                total[_AGAIN] = 0 if options else again_ns
        return self._bound(totals) if possible else NEVER

    def key(self, plan: Plan, change: Change) -> int:
        """Equal for equal decisions of a plan with a change: a digest, of which no two are equal by chance."""
        self._follow(plan)
        digest, equals, now = self._digest, self.space.equals, self._now
        for name, option in change.options.items():
            code = self._code(option)
            for one in equals.get(name, (name,)) if change.together else (name,):
                if now[one] != code:
                    digest ^= self._digest_of(one, now[one]) ^ self._digest_of(one, code)
        return digest

    def _digest_of(self, name: str, code: int) -> int:
        """Of one decision; that of several is their sum without carries, which each can be taken out of again."""
        known = self._digests.get((name, code))
        if known is None:
            text = f"{name} {code}".encode()
            known = self._digests[name, code] = int.from_bytes(blake2b(text, digest_size=16).digest())
        return known

    def _change_all(self, options: Mapping[str, int], totals: list[list[int]]) -> bool:
        """Adds what changes with options of representatives and all that they stand for."""
        for number in {number for name in options for number in self._of_decision[name]}:
            group = self._groups[number]
            row = self._group_row(group, options)
            if row is None:
                return False
            _replace(totals[group.stage], self._rows[number], row)
        return True

    def _change_some(self, options: Mapping[str, int], totals: list[list[int]]) -> bool:
        """Adds what changes with options of these names alone."""
        now = self._now
        for number, place in {use for name in options for use in self._uses[name]}:
            group = self._groups[number]
            names = group.decisions[place]
            old = self._worth(group, place, tuple([now[name] for name in names]))
            new = self._worth(group, place, tuple([options[name] if name in options else now[name] for name in names]))
            if old is None or new is None:
                return False
            total = totals[group.stage]
            _replace(total, old, new)
            if place not in group.again:
                total[_AGAIN] += old.again_ns - new.again_ns
        return True

    def _bound(self, totals: Sequence[Sequence[int]]) -> int:
        """The time of the slowest stage, with what other stages do before its first pass and after its last."""
        count, before, after, most = self.microbatches, 0, 0, 0
        if self.stages is None:
            return self._alone(totals[0], self._counts[0])
        for submesh in dict.fromkeys(self.stages.submesh_of):
            own = [n for n, where in enumerate(self.stages.submesh_of) if where == submesh]
            total = [sum(column) for column in zip(*(totals[n] for n in own), strict=True)]
            alone = self._alone(total, sum(self._counts[n] for n in own))
            passes = count * (total[0] + total[1] + total[_AGAIN])
            most = max(most, before + alone, before + passes + after)
            if len(own) == 1:
                before += total[0] if self.stages.is_row[0] else 0
                after += total[1] if self.stages.is_row[1] else 0
        return most

    def _alone(self, total: Sequence[int], tensors: int) -> int:
        forward, backward, inside, across, moved, again = total
        busy = self.microbatches * (forward + backward + again) + self.prices.optimizer_ns(moved, tensors)
        return max(busy, inside, across)


def _row(spent: Spent, moved_bytes: int = 0) -> Worth:
    return Worth(spent.forward_ns, spent.backward_ns, spent.inside_ns, spent.across_ns, moved_bytes, spent.again_ns)


def _add(total: list[int], row: Iterable[int]) -> None:
    for place, amount in enumerate(row):
        total[place] += amount


def _replace(total: list[int], old: Sequence[int], new: Sequence[int]) -> None:
    """Adds a new row in place of an old one."""
    for place in _COLUMNS:
        total[place] += new[place] - old[place]
