"""Whether a found plan's program runs eagerly or with its blocks compiled.

A compiled program has fewer kernels and may keep more for its backward pass. It is taken where its plan fits and its
step is shorter by more than the profile can tell; else the eager one, which starts at once and whose statements a trace
can name. Placements are those that were found for the eager program.
"""

from __future__ import annotations

from autopar.errors import InfeasibleError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import COMPILED, EAGER, Plan
from autopar.odds import with_odds
from autopar.profiler import profiles_of
from autopar.step import with_simulator
from autopar.zero import in_bits, in_eight_bits, with_in_bits

EITHER = "either"


def checked_runs(runs: str) -> str:
    """Raises PlanError for what is no way of running."""
    if runs not in (EAGER, COMPILED, EITHER):
        raise PlanError(f"expected runs as {EAGER!r}, {COMPILED!r} or {EITHER!r}, found {runs!r}")
    return runs


def running(plan: Plan, graph: Graph, runs: str, memory_limit: int | None) -> Plan:
    """The plan of a program that runs so; of either, the better. graph: the plan's, of the whole batch. memory_limit:
    bytes a device, None for what the profiles leave.

    Raises InfeasibleError where it is to be compiled and takes more than the limit then.
    """
    spares = plan.copied_out or in_bits(plan) or in_eight_bits(plan)  # which no compiled program does
    if runs == plan.runs or (runs == EITHER and spares):
        return plan
    if runs == COMPILED:
        plan = with_in_bits(plan, ())
    if plan.copied_out:
        raise PlanError(
            f"expected a program that runs eagerly where activations wait on the host, found runs={runs!r}; plan with "
            f'runs={EAGER!r}, or without allow=("offload",)'
        )
    compiled = with_odds(with_simulator(plan, graph).compiled(), graph)
    limit, needed = memory_limit or _least_usable(plan), compiled.predicted.peak_bytes
    if runs == COMPILED and needed > limit:
        raise InfeasibleError(
            f"expected a compiled program within {limit:,} bytes a device, found one that takes {needed:,} where the "
            f"eager one takes {plan.predicted.peak_bytes:,}; raise memory_limit, or plan with runs={EAGER!r}", needed
        )  # fmt: skip
    shorter = plan.predicted.step_time_ns > compiled.predicted.step_time_ns * (1 + _resolution(plan))
    return compiled if runs == COMPILED or (needed <= limit and shorter) else plan


def _least_usable(plan: Plan) -> int:
    return min(profile.usable_bytes for profile in profiles_of(plan.mesh).values())


def _resolution(plan: Plan) -> float:
    """By how much steps must differ to be told apart, where a profile says so."""
    known = [profile.steps.resolution for profile in profiles_of(plan.mesh).values() if profile.steps]
    return max(known, default=0.0)
