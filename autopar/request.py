"""What the user asks of a search: for which mesh and mode, under which constraints, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import PlanError
from autopar.ir.constraint import Constraint
from autopar.ir.mesh import Mesh
from autopar.ir.offload import BOTH, NOT_OFFLOADED, OPTIMIZER


@dataclass(frozen=True)
class SearchBudget:
    """How much the search may do, how near is near enough, and the seed.

    seconds: of work over all logical meshes, as an idle core does it. Work is counted, so that a search ends at the
    same point, with the same plan, on any machine and however busy that is. By the clock a search may take `GUARD`
    times as long; where that ends it, the plan's report says so.
    gap: the search of a mesh stops once (cost − lower bound) / cost is at most this; the plan states which.
    stages: plans of several pipeline stages are looked for, too; if not, only where constraints pin their number.
    substitutions: equal graphs are looked for and planned as well, near the plan of the model's own graph: on logical
    meshes and in numbers of stages and microbatches that were good there. The fastest plan of all wins.
    everywhere: equal graphs are looked for longer, and planned in all ways; this takes a multiple of the time.
    proposals: what the SOAP search by MCMC may try around the plan that was found, 0 for none; refine_seconds: of
    work at most, where the model is so large that this is less.
    """

    seconds: float = 20.0
    seed: int = 0
    gap: float = 0.002
    stages: bool = True
    substitutions: bool = True
    everywhere: bool = False
    proposals: int = 1_000
    refine_seconds: float = 4.0

    def __post_init__(self) -> None:
        for name in ("seconds", "gap", "proposals", "refine_seconds", "seed"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < 2**63:
                raise PlanError(f"expected SearchBudget({name}=…) as a number from 0 up, found {value!r}")


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    mesh: Mesh
    mode: str
    optimizer: str | None
    memory_limit: int | None
    constraints: tuple[Constraint, ...]
    budget: SearchBudget
    precision: str | None = None
    recompute: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()  # of `arguments.ALLOWED`
    offload: str = NOT_OFFLOADED  # what a template has on the host, by name
    copied_out: tuple[str, ...] = ()
    in_bits: tuple[str, ...] = ()  # nodes that keep bits for their backward pass
    in_eight_bits: tuple[str, ...] = ()  # and those that keep 8 of each activation

    @property
    def is_compact(self) -> bool:
        """Whether any keeps fewer bits than torch does."""
        return bool(self.in_bits or self.in_eight_bits)

    @property
    def may_offload(self) -> bool:
        """Whether anything may be kept on the host."""
        return "offload" in self.allow or self.offload != NOT_OFFLOADED

    @property
    def may_offload_state(self) -> bool:
        """Whether parameters, with gradients and optimizer state, may be."""
        return "offload" in self.allow or self.offload in (OPTIMIZER, BOTH)

    def recomputing(self, modules: tuple[str, ...]) -> Request:
        """The request with these modules computed again."""
        return replace(self, recompute=modules)


BUDGETS = {
    "fast": SearchBudget(10.0, gap=0.01, substitutions=False, proposals=0),
    "default": SearchBudget(20.0),
    "thorough": SearchBudget(300.0, gap=0.0, everywhere=True, proposals=50_000, refine_seconds=120.0),
}
"""By name."""


def budget_of(search: str | SearchBudget) -> SearchBudget:
    if isinstance(search, SearchBudget):
        return search
    if not isinstance(search, str) or search not in BUDGETS:
        raise PlanError(f"expected search as one of {', '.join(BUDGETS)} or a SearchBudget, found {search!r}")
    return BUDGETS[search]


def memory_limit_of(memory_limit: Any) -> int | None:
    """Bytes a device, where they were asked for; at least one, so that 0 is refused with what would do."""
    is_number = isinstance(memory_limit, (int, float)) and not isinstance(memory_limit, bool)
    if memory_limit is None:
        return None
    if not is_number or not 0 <= memory_limit < 2**63:
        raise PlanError(f"expected memory_limit in bytes a device, such as 16_000_000_000, found {memory_limit!r}")
    return max(1, int(memory_limit))
