"""What catches a planted fault: each check gives the first thing that it finds wrong, or nothing."""

from __future__ import annotations

import itertools
import os
import random
import shlex
from collections.abc import Callable, Iterator

import pytest

from tests.random_programs.cases import Case, cases_of, outcome
from tests.random_programs.check import Subject
from tests.random_programs.generate import program_with
from tests.random_programs.mutants import wrong_mutants
from tests.random_programs.plans import MESHES, random_plan

PROGRAMS, PLANS = 8, 14  # of small programs around one operator
RANDOM_PROGRAMS, MUTATED_PROGRAMS = 24, 8
SEED = 7_000


def first_catch(checks: tuple[str, ...]) -> str:
    """The first check that finds something wrong, with what it finds; empty when none does."""
    for check in checks:
        kind, _, what = check.partition(":")
        found = _CHECKS[kind](what)
        if found:
            return f"{check}: {found}"
    return ""


def _around(op: str) -> str:
    """Small programs that have the operator, each under plans on several meshes."""
    return _first_wrong(_cases_around(op))


def _cases_around(op: str) -> Iterator[Case]:
    for seed in range(PROGRAMS):
        rng = random.Random(f"{op} {seed}")
        subject = Subject(program_with(op, seed))
        for _ in range(PLANS):
            choices = random_plan(subject.graph, rng.choice(MESHES), rng)
            if choices is not None:
                yield Case(subject, choices, f"{op} {seed}")


def _of_all_kinds(_: str) -> str:
    return _first_wrong(case for seed in range(RANDOM_PROGRAMS) for case in cases_of(SEED + seed, plans=4))


def _first_wrong(cases: Iterator[Case]) -> str:
    count = 0
    for count, case in enumerate(cases, 1):  # noqa: B007
        text = outcome(case)
        if text:
            return f"case {case.name} on {case.choices.sizes}: {text.splitlines()[0]}"
    return "" if count else "no case could be made"


def _mutated(_: str) -> str:
    wrong = itertools.chain.from_iterable(wrong_mutants(SEED + seed) for seed in range(MUTATED_PROGRAMS))
    return next((text.splitlines()[0] for text in wrong), "")


def _selected_tests(selection: str) -> str:
    arguments = [*shlex.split(selection), "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    with open(os.devnull, "w") as nowhere:
        held = os.dup(1)
        os.dup2(nowhere.fileno(), 1)
        try:
            code = pytest.main(arguments)
        finally:
            os.dup2(held, 1)
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"pytest {selection}: {code!r}"
    return "failed" if code == pytest.ExitCode.TESTS_FAILED else ""


_CHECKS: dict[str, Callable[[str], str]] = {
    "op": _around,
    "random": _of_all_kinds,
    "mutants": _mutated,
    "tests": _selected_tests,
}
