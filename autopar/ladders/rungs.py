"""Ladders: plans of one model for many meshes and global batches, and what may be read off them. Plain frozen data.

    efficiency   a rung's samples a second and device, over those of the rung of its kind and batch with fewest devices
    knee         of one kind and batch, the last rung up to which each more device brings at least half (`KNEE`) of
                 what one brought on the rung before: (T₂ / T₁ − 1) / (n₂ / n₁ − 1) ≥ KNEE, from the first rung on
    overtaken    a rung is by the fastest one of fewer devices of its kind and batch, where that is no slower: the more
                 devices are rented for nothing (their batch does not divide, or only worse schedules fit it)
    front        of one global batch, the rungs than which none is both faster and cheaper a sample (Pareto)

Time is predicted by the simulator; money is devices × hours × the price of a device hour, where prices are given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.writing import write_whole
from autopar.ladders.layouts import StateLayout
from autopar.ladders.stores import StateStore
from autopar.ladders.transitions import Transition, transition
from autopar.profiler import profiles_of
from autopar.views import view

KNEE = 0.5
"""Of what a device brings, what one more must bring."""
HOUR_NS = 3_600 * 10**9


@dataclass(frozen=True)
class Rung:
    """A mesh and a global batch with the plan that is best there, or with what keeps it from having one.

    plan: whole, as `parallelize` returns it: it emits and verifies for inputs of this batch. how: "shared" where it was
    found among what all rungs share, "searched" where by a search of its own. bound_ns: what a step takes at least,
    all that is computed being shared out evenly and nothing sent. price: of all devices an hour; None where not said.
    state_bytes: of parameters and optimizer state, whole: what a checkpoint holds. laid_out: finds out which rank keeps
    what of it. refusal: why there is no plan.
    """

    mesh: Mesh
    global_batch: int
    plan: Plan | None = None
    how: str = ""
    bound_ns: int = 0
    tokens_per_sample: int | None = None
    price: float | None = None
    state_bytes: int = 0
    refusal: str = ""
    laid_out: Callable[[], StateLayout] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def layout(self) -> StateLayout | None:
        """Which rank keeps what of the state; None where that is not known."""
        return None if self.laid_out is None else self.laid_out()

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not None

    @property
    def kind(self) -> str:
        """The devices' kinds, joined by "+"."""
        return "+".join(dict.fromkeys(group.profile for group in self.mesh.groups))

    @property
    def devices(self) -> int:
        return self.mesh.num_devices

    @property
    def name(self) -> str:
        """Of its plan's file."""
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', str(self.mesh)).strip('-')}-batch{self.global_batch}"

    @property
    def step_ns(self) -> int:
        """Of a step. Raises PlanError where there is no plan."""
        if self.plan is None:
            raise PlanError(
                f"expected a plan on {self.mesh} with batch {self.global_batch}, found none: {self.refusal}"
            )
        return self.plan.predicted.step_time_ns

    @property
    def samples_s(self) -> float:
        """Throughput."""
        return self.global_batch * 1e9 / self.step_ns

    @property
    def tokens_s(self) -> float | None:
        return None if self.tokens_per_sample is None else self.samples_s * self.tokens_per_sample

    @property
    def money_per_sample(self) -> float | None:
        """What a sample costs, in the unit of prices."""
        return None if self.price is None else self.price / 3_600 / self.samples_s

    def seconds(self, samples: float) -> float:
        """What so many samples take."""
        return samples / self.samples_s

    def money(self, samples: float) -> float | None:
        """What so many samples cost."""
        return None if self.money_per_sample is None else samples * self.money_per_sample


@dataclass(frozen=True)
class Ladder:
    """Rungs by kind, global batch and number of devices.

    capacity: what to take for so many tokens by a deadline or under a budget, where that was asked
    (`ladder.capacity.Capacity`). processor_s: what all of it took. store: where checkpoints go, for transitions.
    """

    model: str
    rungs: tuple[Rung, ...]
    capacity: Any = None
    processor_s: float = 0.0
    store: StateStore = field(default_factory=StateStore)

    def __str__(self) -> str:
        return str(view("ladder_text")(self))

    @property
    def fitting(self) -> list[Rung]:
        """Those that have a plan."""
        return [rung for rung in self.rungs if rung.fits]

    @property
    def curves(self) -> dict[tuple[str, int], list[Rung]]:
        """By kind and global batch, the rungs that have a plan, of few devices first."""
        found: dict[tuple[str, int], list[Rung]] = {}
        for rung in sorted(self.fitting, key=lambda rung: (rung.kind, rung.global_batch, rung.devices)):
            found.setdefault((rung.kind, rung.global_batch), []).append(rung)
        return found

    def of(self, kind: str, global_batch: int) -> list[Rung]:
        """One curve. Raises PlanError where there is none."""
        curve = self.curves.get((kind, global_batch))
        if curve is None:
            have = ", ".join(f"{kind} with batch {batch}" for kind, batch in self.curves) or "none that fits"
            raise PlanError(f"expected a curve of the ladder ({have}), found {kind} with batch {global_batch}")
        return curve

    def efficiency(self, rung: Rung) -> float:
        """Of what its devices would do if they were as fast as on the smallest mesh of its curve."""
        first = self.of(rung.kind, rung.global_batch)[0]
        return (rung.samples_s / rung.devices) / (first.samples_s / first.devices)

    def knee(self, kind: str, global_batch: int) -> Rung:
        """Where more devices begin to bring less than half each (see above)."""
        curve = self.of(kind, global_batch)
        return curve[knee_of([(rung.devices, rung.samples_s) for rung in curve])]

    def overtaken_by(self, rung: Rung) -> Rung | None:
        """The fastest rung of fewer devices of the same kind and batch, where it is at least as fast; else None."""
        fewer = [one for one in self.of(rung.kind, rung.global_batch) if one.devices < rung.devices]
        fastest = min(fewer, key=lambda one: (one.step_ns, one.devices), default=None)
        return fastest if fastest is not None and fastest.step_ns <= rung.step_ns else None

    def front(self, global_batch: int) -> list[Rung]:
        """Of all kinds with this batch, the fastest first: none is both faster and cheaper than one of these."""
        priced = [rung for rung in self.fitting if rung.global_batch == global_batch and rung.price is not None]
        found, least = list[Rung](), float("inf")
        for rung in sorted(priced, key=lambda rung: (-rung.samples_s, rung.money_per_sample or 0.0)):
            money = rung.money_per_sample or 0.0
            if money < least:
                found.append(rung)
                least = money
        return found

    def transition(self, old: Rung, new: Rung, lost: Sequence[int] | None = None) -> Transition:
        """What going from one rung to another of the same global batch takes, in bytes and seconds. lost: ranks of the
        old plan that are gone; by default those that a smaller new plan has no room for, its last. Raises PlanError
        for rungs of other batches, or without plans."""
        if old.layout is None or new.layout is None or old.global_batch != new.global_batch:
            raise PlanError(
                f"expected two rungs of one global batch that have plans, found {old.mesh} with batch "
                f"{old.global_batch} and {new.mesh} with batch {new.global_batch}"
            )
        key = id(old), id(new), None if lost is None else tuple(lost)
        if key not in self._transitions:
            self._transitions[key] = transition(
                old.layout, new.layout, new.mesh, profiles_of(new.mesh), old_nodes=old.mesh.nodes, lost=lost,
                store=self.store,
            )  # fmt: skip
        return self._transitions[key]

    @cached_property
    def _transitions(self) -> dict[Any, Transition]:
        return {}

    def neighbours(self, global_batch: int) -> list[Rung]:
        """The rungs of a batch between which one may go, of few devices first."""
        known = [rung for rung in self.rungs if rung.global_batch == global_batch and rung.laid_out is not None]
        return sorted(known, key=lambda rung: (rung.devices, rung.kind))

    def to_json(self) -> str:
        """For schedulers: `ladder.schema.json` says what each field means."""
        return str(view("ladder_json")(self))

    def save(self, folder: str | Path) -> Path:
        """Writes ladder.json, ladder.html, and each rung's plan into plans/, each whole or not at all."""
        folder = Path(folder)
        for rung in self.fitting:
            assert rung.plan is not None
            rung.plan.save(folder / "plans" / f"{rung.name}.json")
        write_whole(folder / "ladder.json", self.to_json())
        self.report(folder / "ladder.html")
        return folder

    def report(self, path: str | Path) -> None:
        """Writes a page with the curves, their knees, and the front of time and money."""
        write_whole(Path(path), str(view("ladder_page")(self)))


def knee_of(curve: Sequence[tuple[int, float]]) -> int:
    """The place of the knee in a curve of devices and throughput, of few devices first."""
    for place, ((few, slow), (many, fast)) in enumerate(pairwise(curve)):
        if fast / slow - 1 < KNEE * (many / few - 1):
            return place
    return len(curve) - 1
