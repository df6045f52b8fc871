"""A case: a model with constructs under a plan. Its verdict, the fewest constructs that give it too, and its script."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.constructs.check import EQUAL, PLANS, REFUSED, WHOLE, InvalidModel, Run, Verdict, judged, run_in_threads
from tests.constructs.models import KINDS, Model, loaded, random_model


@dataclass(frozen=True)
class Case:
    """A plan for a model; `name` finds it again."""

    model: Model
    plan: str
    name: str = ""

    def verdict(self, run: Run = run_in_threads) -> Verdict:
        return judged(self.model, self.plan, run)

    @property
    def may_not_be_refused(self) -> bool:
        """Whether nothing in it gives a reason to refuse it."""
        return self.plan in WHOLE and self.model.must_run


def cases(seed: int, kinds: Sequence[str] = KINDS) -> Iterator[tuple[Case, Verdict]]:
    """Endless cases from a seed on, with their verdicts; models that do not even run alone are left out."""
    while True:
        case = case_of(seed, kinds)
        seed += 1
        try:
            verdict = case.verdict()
        except InvalidModel:
            continue
        yield case, verdict


def case_of(seed: int, kinds: Sequence[str] = KINDS) -> Case:
    """The case of a seed. Masks that are drawn are drawn for whole steps, on one stage."""
    model = random_model(seed, kinds)
    plans = WHOLE if model.is_random else PLANS
    return Case(model, random.Random(f"plan {seed}").choice(plans), str(seed))


def shrunk(case: Case, kind: str, run: Run = run_in_threads) -> Case:
    """The case with the fewest constructs, the plainest plan and sizes that has a verdict of that kind, too."""

    def holds(other: Case) -> bool:
        try:
            return other.verdict(run).kind == kind
        except InvalidModel:
            return False

    smaller = True
    while smaller:
        smaller = False
        for one in case.model.used:
            other = replace(case, model=replace(case.model, used=tuple(u for u in case.model.used if u != one)))
            if holds(other):
                case, smaller = other, True
                break
    plain = [replace(case, plan=plan) for plan in ("dp", "tp") if plan != case.plan]
    case = next(filter(holds, plain), case)
    usual = replace(case, model=replace(case.model, batch=8, width=8, classes=6))
    return usual if usual != case and holds(usual) else case


def code(case: Case, verdict: Verdict) -> str:
    """A script that runs the case again."""
    first = verdict.text.splitlines()[0].replace('"""', "'''") if verdict.text else ""
    return "\n".join([
        f'r"""{verdict.kind} under {case.plan}: {first}"""', "",
        f"MODEL = r'''{case.model.source}'''", "",
        "from tests.constructs.cases import replay", "",
        f"print(replay(MODEL, {case.plan!r}, seed={case.model.seed}, is_random={case.model.is_random}))", "",
    ])  # fmt: skip


@dataclass(frozen=True)
class Written(Model):
    """A model that is given by its source."""

    text: str = ""
    draws: bool = False

    @property
    def source(self) -> str:
        return self.text

    @property
    def is_random(self) -> bool:
        return self.draws


def replay(source: str, plan: str, *, seed: int = 0, is_random: bool = False) -> str:
    """The verdict on a printed case."""
    verdict = judged(Written((), seed=seed, text=source, draws=is_random), plan)
    return f"{verdict.kind}\n{verdict.text}" if verdict.kind != EQUAL else EQUAL


__all__ = ["EQUAL", "REFUSED", "Case", "case_of", "cases", "code", "loaded", "replay", "shrunk"]
