"""The fewest hosts, or the cheapest, exactly: sessions' rests on hosts, and each host's period.

    z_sk    session s on hosts of kind k                         Σ_k z = 1
    x_skj   its rest on host j of that kind                      Σ_j x = z
    y_kjd   host j has period d, one of its sessions' `periods`  Σ_d y ≤ 1
    y_kjd ⇒ Σ_s x_skj · latency_s(d) ≤ d,  Σ_s x_skj · bytes_s(d) ≤ what a device has,  no s that d is too long for
    hosts of kind k, those of whole sessions too                 ≤ what is available
    minimise Σ_k cost_k · hosts_k

Only ends of intervals are periods here: as long as no session's program changes and all bounds hold, a longer period
leaves more time, so that nothing is lost. CP-SAT (ortools) solves it in integers, beginning with what Nexus' greedy
method finds; where the work that it may do ends before, its bound says how far from the best the result may be. No rest
is cut in two: a session takes whole hosts, as many as it fills, and one place beside others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from autopar.colocation.periods import Demand, HostChoice
from autopar.colocation.sessions import HostKind
from autopar.colocation.squishy import Bin

_KIB = 1 << 10


class Solved(NamedTuple):
    """Choices of all sessions, and the hosts of their rests. cost and bound: of all hosts, whole ones too; equal where
    nothing is better."""

    chosen: tuple[HostChoice, ...]
    bins: tuple[Bin, ...]
    cost: int
    bound: int


def cost_of(chosen: Sequence[HostChoice], bins: Sequence[Bin], costs: Mapping[str, int]) -> int:
    """Of all hosts."""
    return sum(costs[one.kind] * one.whole.hosts for one in chosen) + sum(costs[one.kind] for one in bins)


def solved(
    options: Sequence[Sequence[HostChoice]], hosts: Mapping[str, HostKind], costs: Mapping[str, int],
    hint: tuple[Sequence[HostChoice], Sequence[Bin]], work_s: float,
) -> Solved | None:  # fmt: skip
    """The packing of least cost. None where what is available does not do. hint: one that may be as good. work_s: of
    CP-SAT's deterministic time."""
    model = _Model(options, hosts, costs)
    model.begin_with(*hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work_s
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        return None
    if status == cp_model.UNKNOWN:  # nothing found in time, not even what was hinted at: that stands
        return Solved(tuple(hint[0]), tuple(hint[1]), cost_of(*hint, costs), 0)
    chosen, bins = model.read(solver)
    return Solved(chosen, bins, cost_of(chosen, bins, costs), round(solver.best_objective_bound))


@dataclass(eq=False)
class _OpenHost:
    """A host that may be used, with the rests that may be on it (by session) and its periods."""

    kind: str
    rests: dict[int, tuple[Demand, Any]]
    periods: dict[int, Any]


class _Model:
    """The variables, and what holds of them."""

    def __init__(
        self, options: Sequence[Sequence[HostChoice]], kinds: Mapping[str, HostKind], costs: Mapping[str, int]
    ) -> None:  # fmt: skip
        self.model, self.kinds = cp_model.CpModel(), kinds
        self.taken = [[(one, self.model.new_bool_var("z")) for one in own] for own in options]
        for own in self.taken:
            self.model.add_exactly_one(z for _, z in own)
        self.hosts = [host for kind in kinds for host in self._hosts_of(kind)]
        counts = {kind: self._count(kind) for kind in kinds}
        for kind, host in kinds.items():
            if host.available is not None:
                self.model.add(counts[kind] <= host.available)
        self.model.minimize(sum(costs[kind] * count for kind, count in counts.items()))

    def _hosts_of(self, kind: str) -> list[_OpenHost]:
        """As many as there are rests; the n-th rest is on one of the first n, since hosts are alike."""
        rests = [(one.rest, z) for own in self.taken for one, z in own if one.kind == kind and one.rest is not None]
        found = list[_OpenHost]()
        for number in range(len(rests)):
            own = {rest.session: (rest, self.model.new_bool_var("x")) for rest, _ in rests[number:]}
            periods = sorted({d for rest, _ in own.values() for d in rest.periods})
            found.append(_OpenHost(kind, own, {d: self.model.new_bool_var("y") for d in periods}))
            self._share(found[-1])
        for rest, z in rests:
            self.model.add(sum(host.rests[rest.session][1] for host in found if rest.session in host.rests) == z)
        return found

    def _share(self, host: _OpenHost) -> None:
        """What holds of a host in each of its periods."""
        self.model.add_at_most_one(host.periods.values())
        capacity = self.kinds[host.kind].capacity_bytes // _KIB
        for rest, x in host.rests.values():
            allowed = [y for d, y in host.periods.items() if rest.program(d) is not None]
            self.model.add_bool_or([*allowed, x.negated()])
        for period, y in host.periods.items():
            runs = [(rest.program(period), x) for rest, x in host.rests.values()]
            spent = sum(point.latency_ns * x for point, x in runs if point is not None)
            held = sum(-(-point.peak_bytes // _KIB) * x for point, x in runs if point is not None)
            self.model.add(spent <= period).only_enforce_if(y)
            self.model.add(held <= capacity).only_enforce_if(y)

    def _count(self, kind: str) -> Any:
        used = sum(y for host in self.hosts if host.kind == kind for y in host.periods.values())
        return used + sum(one.whole.hosts * z for own in self.taken for one, z in own if one.kind == kind)

    def begin_with(self, chosen: Sequence[HostChoice], bins: Sequence[Bin]) -> None:
        """Hints at a packing."""
        for own, one in zip(self.taken, chosen, strict=True):
            for choice, z in own:
                self.model.add_hint(z, choice is one)

    def read(self, solver: cp_model.CpSolver) -> tuple[tuple[HostChoice, ...], tuple[Bin, ...]]:
        chosen = tuple(next(one for one, z in own if solver.value(z)) for own in self.taken)
        bins = list[Bin]()
        for host in self.hosts:
            rests = tuple(rest for rest, x in host.rests.values() if solver.value(x))
            if rests:
                period = next(d for d, y in host.periods.items() if solver.value(y))
                bins.append(Bin(host.kind, rests, period))
        return chosen, tuple(bins)
