"""Which rungs to take: the cheapest that train so many tokens by a deadline, or the fastest under a budget. Exact.

    jobs j = 1 … J, equal and independent (one by default; more for a sweep), each on one rung r for the time t_r
    m_r  meshes like that of rung r, of n_r devices, at most a_k devices of kind k at a time
    y_r  jobs that run there, one after another on each mesh

    Σ y_r = J       y_r ≤ m_r · ⌊deadline / t_r⌋       Σ_{r of k} m_r · n_r ≤ a_k       Σ y_r · c_r ≤ budget
    least money     minimise Σ y_r · c_r, among equals the least Σ y_r · t_r
    least time      minimise the time T when the last job ends: y_r ≤ m_r · ⌊T / t_r⌋, T one of the k · t_r

A grouped knapsack over kinds and counts: kinds are mixed where jobs are several, since one training is no faster for
devices that it does not know. (One that spans unequal devices is a rung by itself.) CP-SAT (ortools) solves it in
integers, nanoseconds and millionths of a unit of money, to proven optimality; what is infeasible is named with the
least deadline or budget that would do, or with the devices that lack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ortools.sat.python import cp_model

from autopar.errors import PlanError
from autopar.ladders.rungs import HOUR_NS, Ladder, Rung

MILLIONTHS = 10**6
_MOST = 2**62  # of CP-SAT's sums


@dataclass(frozen=True)
class Needs:
    """What is wanted. tokens: of each job. deadline: hours. budget: money in all. available: devices by kind, as many
    as are asked for where not said. jobs: equal trainings, independent of each other.
    """

    tokens: float
    deadline: float | None = None
    budget: float | None = None
    jobs: int = 1
    available: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tokens", "deadline", "budget"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise PlanError(f"expected {name} as a number above 0, found {value!r}")
        if not isinstance(self.jobs, int) or self.jobs < 1:
            raise PlanError(f"expected jobs as a number from 1 up, found {self.jobs!r}")


class Offer(NamedTuple):
    """A rung as the optimisation sees it: devices of one kind, what a job takes there (ns) and costs (millionths)."""

    kind: str
    devices: int
    time_ns: int
    money: int


class Rented(NamedTuple):
    """So many meshes of a rung, on which so many jobs run."""

    rung: Rung
    meshes: int
    jobs: int


@dataclass(frozen=True)
class Capacity:
    """What to take. hours: until the last job ends; money: in all (None where there are no prices). objective: "money"
    or "time", of which none in the ladder does with less: `proof` says how that is known. lacks: why there is nothing,
    and what would do.
    """

    needs: Needs
    objective: str
    taken: tuple[Rented, ...] = ()
    hours: float | None = None
    money: float | None = None
    proof: str = ""
    lacks: str = ""


def capacity(ladder: Ladder, needs: Needs, objective: str | None = None) -> Capacity:
    """The rungs to take, with a proof, or what lacks.

    objective: "money" or "time"; by default money where there is a deadline, and time where there is none. Raises
    PlanError where that asks for prices or tokens that the ladder does not have.
    """
    objective = objective or ("money" if needs.deadline is not None else "time")
    if objective not in ("money", "time"):
        raise PlanError(f'expected objective as "money" or "time", found {objective!r}')
    rungs = [rung for rung in ladder.fitting if rung.tokens_s]
    priced = needs.budget is not None or objective == "money"
    if ladder.fitting and not rungs:
        raise PlanError("expected tokens_per_sample, since the model's inputs have no length, found none")
    if priced and any(rung.price is None for rung in rungs):
        unknown = ", ".join(sorted({rung.kind for rung in rungs if rung.price is None}))
        raise PlanError(f"expected prices of all kinds of devices, found none of {unknown}")
    offers = [_offer(rung, needs.tokens) for rung in rungs]
    found = Selection(offers, needs.jobs, needs.available)
    deadline = None if needs.deadline is None else int(needs.deadline * HOUR_NS)
    budget = None if needs.budget is None else int(needs.budget * MILLIONTHS)
    chosen = found.best(objective, deadline, budget)
    if chosen is None:
        return Capacity(needs, objective, lacks=_lacks(found, rungs, needs, deadline, budget))
    taken = tuple(Rented(rung, m, y) for rung, m, y in zip(rungs, chosen.meshes, chosen.jobs, strict=True) if y)
    money = None if any(rung.price is None for rung in rungs) else chosen.money / MILLIONTHS
    return Capacity(needs, objective, taken, chosen.time_ns / HOUR_NS, money, chosen.proof)


def _offer(rung: Rung, tokens: float) -> Offer:
    samples = tokens / (rung.tokens_per_sample or 1)
    steps = math.ceil(samples / rung.global_batch)
    time_ns = steps * rung.step_ns
    money = 0 if rung.price is None else math.ceil(rung.price * MILLIONTHS * time_ns / HOUR_NS)
    return Offer(rung.kind, rung.devices, time_ns, money)


# The optimisation ----------------------------------------


class Selected(NamedTuple):
    """Of each offer the meshes and jobs; what all cost, when the last ends, and how it is known that none is better."""

    meshes: tuple[int, ...]
    jobs: tuple[int, ...]
    money: int
    time_ns: int
    proof: str


class Selection:
    """Jobs to be shared out over offers."""

    def __init__(self, offers: Sequence[Offer], jobs: int, available: Mapping[str, int]) -> None:
        self.offers, self.jobs, self.available = list(offers), jobs, dict(available)
        if any(jobs * offer.money >= _MOST for offer in offers):
            raise PlanError(
                f"expected jobs that cost less than {_MOST / MILLIONTHS:.3g} together, found more; ask for fewer "
                "tokens or jobs, or give prices in a larger unit of money"
            )
        most_ns = max((offer.time_ns for offer in offers), default=0)
        self._unit = max(1, jobs * most_ns // 2**53)  # ns: times that are compared are sums of 64 bits

    def best(self, objective: str, deadline_ns: int | None = None, budget: int | None = None) -> Selected | None:
        """None where nothing does it. objective: "money" or "time"."""
        ends = self._ends(deadline_ns)
        if not ends:
            return None
        if objective == "money":
            return self._cheapest(ends[-1], budget)
        first, last = 0, len(ends) - 1
        if self._cheapest(ends[last], budget) is None:
            return None
        while first < last:  # what can be done in a time can be done in more
            middle = (first + last) // 2
            first, last = (first, middle) if self._cheapest(ends[middle], budget) else (middle + 1, last)
        found = self._cheapest(ends[first], budget)
        assert found is not None
        proof = f"none ends before: CP-SAT proves that the next shorter time of {len(ends)} has no choice"
        return found._replace(proof=proof if first else f"no job of the ladder is shorter than {ends[0] / 1e9:.0f} s")

    def _ends(self, deadline_ns: int | None) -> list[int]:
        """When the last job may end, ascending."""
        most = math.inf if deadline_ns is None else deadline_ns
        return sorted({k * o.time_ns for o in self.offers for k in range(1, self.jobs + 1) if k * o.time_ns <= most})

    def _cheapest(self, until_ns: int, budget: int | None) -> Selected | None:
        """The choice of least money whose last job ends by then, among equals that of least time of devices."""
        model = cp_model.CpModel()
        meshes = [model.new_int_var(0, self.jobs, f"m{n}") for n in range(len(self.offers))]
        jobs = [model.new_int_var(0, self.jobs, f"y{n}") for n in range(len(self.offers))]
        model.add(sum(jobs) == self.jobs)
        for offer, m, y in zip(self.offers, meshes, jobs, strict=True):
            model.add(y <= m * min(self.jobs, until_ns // offer.time_ns))
            model.add(m <= y)
        for kind, most in self.available.items():
            own = [m * o.devices for m, o in zip(meshes, self.offers, strict=True) if o.kind == kind]
            if own:
                model.add(sum(own) <= most)
        money = sum(y * o.money for y, o in zip(jobs, self.offers, strict=True))
        if budget is not None and budget < _MOST:
            model.add(money <= budget)
        model.minimize(money)
        solver = self._solved(model)
        if solver is None:
            return None
        least = sum(solver.value(y) * o.money for y, o in zip(jobs, self.offers, strict=True))
        model.add(money == least)
        model.minimize(sum(y * -(-o.time_ns // self._unit) for y, o in zip(jobs, self.offers, strict=True)))
        solver = self._solved(model) or solver
        taken, counts = (tuple(solver.value(v) for v in variables) for variables in (meshes, jobs))
        ends = [-(-y // m) * o.time_ns for y, m, o in zip(counts, taken, self.offers, strict=True) if y]
        return Selected(taken, counts, least, max(ends), "CP-SAT: optimal, its bound is the choice's own money")

    @staticmethod
    def _solved(model: cp_model.CpModel) -> cp_model.CpSolver | None:
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            return None
        assert status == cp_model.OPTIMAL, f"CP-SAT ends with {solver.status_name(status)}"
        return solver


def _lacks(
    found: Selection, rungs: Sequence[Rung], needs: Needs, deadline_ns: int | None, budget: int | None
) -> str:  # fmt: skip
    """Why there is nothing, and the least that would do of what was limited."""
    if not rungs:
        return "no rung of the ladder has a plan that fits: take more devices, larger ones, or a smaller global batch"
    said = list[str]()
    anyhow = found.best("money")
    if anyhow is None:
        most = {rung.kind: max(r.devices for r in rungs if r.kind == rung.kind) for rung in rungs}
        least = {kind: min(r.devices for r in rungs if r.kind == kind) for kind in most}
        told = ", ".join(
            f"{count} of {kind} ({needs.available.get(kind, 'any')} available)" for kind, count in least.items()
        )
        return f"no rung's devices are available; the smallest of each kind take {told}"
    if deadline_ns is not None:
        fastest = found.best("time", None, budget)
        if fastest is not None:
            under = "" if budget is None else f" under a budget of {needs.budget:g}"
            said.append(
                f"a deadline of {fastest.time_ns / HOUR_NS:.3g} h is the least{under}, found {needs.deadline:g} h"
            )
    if budget is not None:
        cheapest = found.best("money", deadline_ns)
        if cheapest is not None:
            by = "" if deadline_ns is None else f" by a deadline of {needs.deadline:g} h"
            said.append(f"a budget of {cheapest.money / MILLIONTHS:.4g} is the least{by}, found {needs.budget:g}")
    if not said:
        fastest, cheapest = found.best("time"), anyhow
        assert fastest is not None
        said.append(
            f"neither alone will do: the fastest takes {fastest.time_ns / HOUR_NS:.3g} h, the cheapest costs "
            f"{cheapest.money / MILLIONTHS:.4g}"
        )
    return "; or ".join(said)


def with_needs(ladder: Ladder, needs: Needs, objective: str | None = None) -> Ladder:
    """The ladder with what to take of it."""
    return replace(ladder, capacity=capacity(ladder, needs, objective))
