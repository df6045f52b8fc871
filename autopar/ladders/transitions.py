"""From one plan's state to another's: the bytes that each rank sends and receives, and the seconds that it takes.

    wire      ranks of the old plan that survive keep what they have; each rank of the new plan takes what it lacks from
              a survivor that has it: itself, one of its own node, or else the n-th of those that have it, n being the
              rank's number. All that goes from one rank to another goes in one message.
    storage   the old plan's ranks write a checkpoint, each element once; the new plan's ranks read all that they keep

What no survivor has (`lost_bytes`) is with no one: it comes of copies on neighbours that are made while training
(`mirrored_bytes`, each step), or the training goes back to its last checkpoint. The global batch stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.cost.collectives import sends_time_ns
from autopar.cost.profile import ACROSS, INSIDE, Profile
from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ladders.layouts import Box, StateLayout, StateTensor, check_comparable, overlap
from autopar.ladders.stores import StateStore


@dataclass(frozen=True)
class StateMoves:
    """What goes over the wire. sent: bytes by (from, to), both as numbers of the new plan's ranks, or for a survivor
    that has no part in it as −1 − its number in the old plan. kept_bytes: what ranks have already. lost_bytes: what no
    survivor has, each element once. read_bytes: by rank of the new plan, all that it keeps."""

    sent: Mapping[tuple[int, int], int]
    kept_bytes: int
    lost_bytes: int
    read_bytes: tuple[int, ...]

    @cached_property
    def total_bytes(self) -> int:
        """Over the wire, of all ranks together."""
        return sum(self.sent.values())

    @cached_property
    def received(self) -> list[int]:
        """By each rank of the new plan."""
        found = [0] * len(self.read_bytes)
        for (_, to), count in self.sent.items():
            found[to] += count
        return found


@dataclass(frozen=True)
class Transition:
    """Of two rungs: what moves, and the seconds of both ways to move it. lost: ranks of the old plan that are gone.

    wire_s: None where something is lost, so that the wire alone does not do it. written_s and read_s: by a checkpoint.
    """

    lost: tuple[int, ...]
    moves: StateMoves = field(repr=False)
    wire_s: float | None
    written_s: float
    read_s: float

    @property
    def pause_s(self) -> float:
        """Of the faster way, without what starting anew takes: over the wire where that is possible, else from a
        checkpoint that is there already."""
        return self.read_s if self.wire_s is None else self.wire_s


def survivors(old: int, new: int, lost: Iterable[int] = ()) -> list[int | None]:
    """For each rank of the new plan, which of the old plan's it was; None for one that is new. Those that are left keep
    their order. By default, what a smaller plan has no room for are the old plan's last."""
    gone = set(lost)
    left = [rank for rank in range(old) if rank not in gone]
    return [left[rank] if rank < len(left) else None for rank in range(new)]


def moves(old: StateLayout, new: StateLayout, was: Sequence[int | None], lost: Iterable[int], mesh: Mesh) -> StateMoves:
    """What goes over the wire where rank r of the new plan was rank `was[r]` of the old one. mesh: the new plan's.

    Raises PlanError where these are plans of different state."""
    check_comparable(old, new)
    gone = set(lost)
    number = {rank: now for now, rank in enumerate(was) if rank is not None}
    places = {rank: number.get(rank, -1 - rank) for rank in range(old.ranks) if rank not in gone}
    found = _SummedMoves([places.get(rank) for rank in range(old.ranks)], mesh)
    alike = Counter((old.tensors[name].key, tensor.key) for name, tensor in new.tensors.items())
    some = {(old.tensors[name].key, tensor.key): name for name, tensor in new.tensors.items()}
    for key, count in alike.items():
        name = some[key]
        found.add(old.tensors[name], new.tensors[name], count)
    return StateMoves(dict(found.sent), found.kept, found.lost, tuple(new.bytes_by_rank()))


class _SummedMoves:
    """Sums up the moves of one tensor after the other. places: of each old rank, as `StateMoves.sent` numbers them."""

    def __init__(self, places: Sequence[int | None], mesh: Mesh) -> None:
        self._places, self._mesh = places, mesh
        self.sent: Counter[tuple[int, int]] = Counter()
        self.kept = self.lost = 0

    def add(self, old: StateTensor, new: StateTensor, count: int) -> None:
        """Of so many tensors that are alike."""
        sources = {
            box: [place for rank in ranks if (place := self._places[rank]) is not None]
            for box, ranks in old.owners.items()
        }
        self.lost += count * sum(old.bytes_of(box) for box, held in sources.items() if not held)
        for source, target in _meeting([box for box, held in sources.items() if held], list(new.owners)):
            both = overlap(source, target)
            if both is not None:
                self._take(sources[source], new.owners[target], count * new.bytes_of(both))

    def _take(self, held: Sequence[int], takers: Iterable[int], num_bytes: int) -> None:
        known = set(held)
        for taker in takers:
            if taker in known:
                self.kept += num_bytes
            else:
                self.sent[self._source(held, taker), taker] += num_bytes

    def _source(self, held: Sequence[int], taker: int) -> int:
        """Who sends: of the taker's node where one has it. Spread, so that no one sends to all."""
        node = self._mesh.node_of(taker)
        near = [place for place in held if place >= 0 and self._mesh.node_of(place) == node]
        from_here = sorted(near or held)
        return from_here[taker % len(from_here)]


def _meeting(some: Sequence[Box], others: Sequence[Box]) -> list[tuple[Box, Box]]:
    """The pairs of slices that have something in common."""
    if not some or not others or not some[0]:
        return [(one, other) for one in some for other in others]
    one, other = np.array(some)[:, None], np.array(others)[None]
    meet = np.minimum(one[..., 1], other[..., 1]) > np.maximum(one[..., 0], other[..., 0])
    return [(some[i], others[j]) for i, j in np.argwhere(meet.all(-1))]


def transition(
    old: StateLayout, new: StateLayout, mesh: Mesh, profiles: Mapping[str, Profile], *, old_nodes: int = 1,
    lost: Sequence[int] | None = None, store: StateStore | None = None,
) -> Transition:  # fmt: skip
    """What going from one plan to another takes. mesh: of the new plan. lost: ranks of the old plan that are gone; by
    default those that a smaller new plan has no room for. profiles: by kind of device, whose links say the seconds.

    Raises PlanError for plans of different state.
    """
    gone = tuple(range(new.ranks, old.ranks)) if lost is None else tuple(sorted(set(lost)))
    if any(not 0 <= rank < old.ranks for rank in gone):
        raise PlanError(f"expected ranks of the old plan, 0 to {old.ranks - 1}, to be lost, found {list(gone)}")
    store = store or StateStore()
    found = moves(old, new, survivors(old.ranks, new.ranks, gone), gone, mesh)
    wire_s = None if found.lost_bytes else _wire_ns(found, mesh, profiles) / 1e9
    by_node: Counter[int] = Counter()
    for rank, count in enumerate(found.read_bytes):
        by_node[mesh.node_of(rank)] += count
    read_s = max(by_node.values(), default=0) / store.read_bytes_s
    return Transition(gone, found, wire_s, old.num_bytes / (old_nodes * store.write_bytes_s), read_s)


def _wire_ns(found: StateMoves, mesh: Mesh, profiles: Mapping[str, Profile]) -> int:
    """Until the last rank is done: each sends and receives at a time, inside its node and across nodes."""
    ways: dict[int, Counter[tuple[str, str]]] = {}
    sizes: dict[int, Counter[tuple[str, str]]] = {}
    for (source, taker), count in found.sent.items():
        is_near = source >= 0 and mesh.node_of(source) == mesh.node_of(taker)
        for rank, way in ((source, "out"), (taker, "in")):
            ways.setdefault(rank, Counter())[way, INSIDE if is_near else ACROSS] += 1
            sizes.setdefault(rank, Counter())[way, INSIDE if is_near else ACROSS] += count
    slowest = 0
    for rank, messages in ways.items():
        group = mesh.group_of(range(max(rank, 0), max(rank, 0) + 1))
        profile = profiles[group.profile].shared_by(group.devices_per_node)
        for way in ("out", "in"):
            spent = sum(
                sends_time_ns(messages[way, level], sizes[rank][way, level], level, group.devices_per_node, profile)
                for level in (INSIDE, ACROSS) if messages[way, level]
            )  # fmt: skip
            slowest = max(slowest, spent)
    return slowest


def mirrored_bytes(layout: StateLayout, ranks_per_node: int, mirrors: int = 1) -> list[int]:
    """Bytes that each rank sends after each step, so that as many nodes may be lost at once as there are mirrors: each
    slice is to be on one node more, and the first rank that keeps it sends it to as many as lack it."""
    found = [0] * layout.ranks
    nodes = -(-layout.ranks // ranks_per_node)
    for tensor, count in layout.alike:
        for box, ranks in tensor.owners.items():
            known = len({rank // ranks_per_node for rank in ranks})
            found[ranks[0]] += count * max(0, min(mirrors + 1, nodes) - known) * tensor.bytes_of(box)
    return found
