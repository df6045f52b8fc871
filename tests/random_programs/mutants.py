"""Mutants of random plans: what the verifier lets through must still compute what the model computes."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator

from autopar.errors import PlacementError, PlanError
from autopar.ir.plan import Plan
from autopar.microbatch import check_plan
from autopar.simulate import traffic
from tests.equivalence.mutations import Mutation, mutations
from tests.random_programs.cases import Case, cases_of
from tests.random_programs.check import plan_problems
from tests.random_programs.plans import make_plan

MUTANTS_A_PLAN, RUNS_A_PLAN = 60, 8


def mutants_of(seed: int) -> Iterator[tuple[Case, Plan, Mutation]]:
    """Some mutants of each plan of a program's seed, whether they verify or not."""
    rng = random.Random(f"mutants of {seed}")
    for case in cases_of(seed, plans=3):
        if case.choices.microbatches == 1 and case.subject.mode == "train":
            plan, _ = make_plan(case.subject.graph, case.choices)
            for mutation in _some_of_each_kind(mutations(case.subject.graph, plan), rng):
                yield case, plan, mutation


def _some_of_each_kind(found: list[Mutation], rng: random.Random) -> list[Mutation]:
    """As many that change an input, a storage, an operator, or conversions alone: there are far more of the last."""
    kinds: dict[str, list[Mutation]] = {}
    for mutation in found:
        kind = next((kind for kind in ("inputs", "storage", "nodes") if getattr(mutation, kind)), "conversions")
        kinds.setdefault(kind, []).append(mutation)
    share = MUTANTS_A_PLAN // len(kinds)
    chosen = [mutation for group in kinds.values() for mutation in rng.sample(group, min(share, len(group)))]
    rng.shuffle(chosen)
    return chosen


def wrong_mutants(seed: int) -> Iterator[str]:
    """What is wrong with the mutants that verify, as far as they are run."""
    runs: dict[str, int] = {}
    for case, plan, mutation in mutants_of(seed):
        mutant = mutation.apply(plan)
        try:
            check_plan(case.subject.graph, mutant)
        except (PlanError, PlacementError):
            continue
        runs[case.name] = runs.get(case.name, 0) + 1
        if runs[case.name] <= RUNS_A_PLAN:
            text = outcome_of(case, mutant)
            if text:
                yield f"{case.name}, {mutation.what}: {text}"


def outcome_of(case: Case, plan: Plan) -> str:
    """What is wrong with a plan that verifies; empty when nothing is."""
    try:
        predicted = traffic(case.subject.graph, plan)
        return "\n".join(plan_problems(case.subject, plan, predicted))
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
