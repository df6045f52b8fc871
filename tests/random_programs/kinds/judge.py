"""What is wrong with random plans of a kind."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from autopar import runtime as rt
from autopar.errors import AutoparError, InternalError
from tests.random_programs.cases import Case, StagedCase, outcome
from tests.random_programs.check import Subject
from tests.random_programs.kinds.row import Row, subject_of
from tests.random_programs.plans import random_plan
from tests.random_programs.staged import random_staged_plan

SIZES = ((2,), (2,), (2,), (3,), (4,), (2, 2), (2, 2))
REFUSED = "refused: "


def judged(kind: Row, seed: int, plans: int, staged: int) -> Iterator[tuple[str, str]]:
    """Of each plan that was found, its name and what is wrong: nothing, or a refusal where it starts with `REFUSED`."""
    yield from judged_subject(subject_of(kind, seed), f"{kind.name} {seed}", plans, staged)


def judged_subject(subject: Subject, name: str, plans: int, staged: int) -> Iterator[tuple[str, str]]:
    """The same of any model."""
    wrong = _untraced(subject)
    if wrong:
        yield name, wrong
        return
    for number in range(plans):
        yield from _judged(subject, f"{name} plan {number}", is_staged=False)
    for number in range(staged):
        yield from _judged(subject, f"{name} staged {number}", is_staged=True)


def _untraced(subject: Subject) -> str:
    """Why there is nothing to plan; a row that does not run on one device, or gives no numbers, is wrong itself."""
    try:
        first, second, _ = subject.steps
    except Exception as error:
        return f"does not run on one device: {type(error).__name__}: {error}"
    gradients = [g for step in (first, second) for g in step.gradients.values() if g is not None]
    if not all(torch.isfinite(tensor).all() for tensor in (first.loss, second.loss, *gradients)):
        return "has no finite loss and gradients on one device"
    try:
        subject.graph  # noqa: B018
    except InternalError as error:
        return f"InternalError: {error}"
    except AutoparError as error:
        return f"{REFUSED}{error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _judged(subject: Subject, name: str, is_staged: bool) -> Iterator[tuple[str, str]]:
    rng = random.Random(name)
    try:
        if is_staged:
            stages = random_staged_plan(subject.graph, rng)
            if stages is not None:
                yield name, outcome(StagedCase(subject, stages, name))
        else:
            choices = random_plan(subject.graph, rng.choice(SIZES), rng)
            if choices is not None:
                yield name, outcome(Case(subject, choices, name))
    except InternalError as error:
        yield name, f"InternalError: {error}"
    except AutoparError as error:
        yield name, f"{REFUSED}{error}"
    finally:
        rt.seed_dropout(0)
