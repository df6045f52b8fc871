"""Runs random programs: python -m tests.random_programs.run --cases 10000 --gloo 200 --seed 1

In-process cases first, then some on gloo processes; with --stages, their plans are of several stages. Each mismatch is
made small and printed as a script that runs it again. Ends with 1 when there was any.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from typing import Any

from tests.random_programs.cases import Case, StagedCase, cases_of, code, outcome, staged_cases_of
from tests.random_programs.shrink import shrink, shrink_staged

Done = tuple[str, str, str, bool]  # name, mesh, what is wrong, whether it was compared for equality


def main() -> int:
    arguments = _arguments()
    print(f"seed {arguments.seed}", flush=True)
    print("model and plan", "on threads:" if not arguments.case else arguments.case, flush=True)
    if arguments.case:
        return _again(arguments.case, arguments.stages)
    seeds = range(arguments.seed, arguments.seed + arguments.cases)  # of programs: each has several cases
    with ExitStack() as stack:
        each: Callable[..., Iterator[list[Done]]] = map
        if arguments.processes > 1:
            each = stack.enter_context(get_context("spawn").Pool(arguments.processes)).imap
        done = itertools.chain.from_iterable(each(partial(_outcomes, arguments.stages), seeds))
        wrong = _tell(done, arguments.cases, arguments.shrink, "threads", arguments.stages)
    if arguments.gloo:
        first = arguments.seed + 10_000_019  # other programs than those above
        cases = _cases(first, 4, arguments.stages)
        on_gloo = ((case.name, str(case.choices.sizes), *_judged(case, _outcome_on_gloo)) for case in cases)
        wrong += _tell(on_gloo, arguments.gloo, False, "gloo", arguments.stages)
    return 1 if wrong else 0


def _outcomes(stages: bool, seed: int) -> list[Done]:
    """All cases of a program: their names, meshes, what is wrong, and whether they were compared for equality."""
    cases = staged_cases_of(seed) if stages else cases_of(seed)
    return [(case.name, str(case.choices.sizes), *_judged(case, outcome)) for case in cases]


def _judged(case: Any, run: Callable[[Any], str]) -> tuple[str, bool]:
    text = run(case)
    return text, case.subject.mode == "train" and not text and case.subject.is_exact


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200, help="how many in-process cases")
    parser.add_argument("--gloo", type=int, default=0, help="how many cases on gloo processes")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000, help="of the first program")
    parser.add_argument("--case", help="one case by its name, such as 17.3")
    parser.add_argument("--stages", action="store_true", help="plans of several stages")
    parser.add_argument("--processes", type=int, default=1, help="that share the in-process cases")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True, help="make mismatches small")
    return parser.parse_args()


def _cases(seed: int, plans: int = 10, stages: bool = False) -> Iterator[Case | StagedCase]:
    for number in itertools.count(seed):
        yield from staged_cases_of(number, plans) if stages else cases_of(number, plans)


def _again(name: str, stages: bool) -> int:
    case = _named(name, stages)
    text = outcome(case)
    print(code(case, text), text or "equal", sep="\n")
    return 1 if text else 0


def _named(name: str, stages: bool) -> Case | StagedCase:
    seed = int(name.split(".")[0])
    return next(case for case in (staged_cases_of(seed) if stages else cases_of(seed)) if case.name == name)


def _tell(cases: Iterator[Done], count: int, small: bool, where: str, stages: bool) -> int:
    """How many of so many cases are wrong."""
    started, wrong, exact = time.monotonic(), 0, 0
    for number, (name, sizes, text, is_exact) in enumerate(itertools.islice(cases, count), 1):
        exact += is_exact
        if text:
            wrong += 1
            _report(name, sizes, text, small, stages)
        if number % 200 == 0 or number == count:
            seconds = time.monotonic() - started
            print(
                f"{number} cases on {where}: {wrong} wrong, {exact} compared for equality, the last is {name} "
                f"({seconds:.0f} s, {number / seconds:.1f} a second)",
                flush=True,
            )
    return wrong


def _report(name: str, sizes: str, text: str, small: bool, stages: bool) -> None:
    print(f"\ncase {name} on {sizes}: {text}", flush=True)
    found: Any = _named(name, stages)
    if small:
        found = shrink_staged(found) if stages else shrink(found)
    print(f"\n{code(found, outcome(found) if small else text)}", flush=True)


def _outcome_on_gloo(case: Case | StagedCase) -> str:
    from tests.random_programs.gloo import run_on_gloo

    return outcome(case, run_on_gloo)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
