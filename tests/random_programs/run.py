"""Runs random programs: python -m tests.random_programs.run --cases 10000 --gloo 200 --seed 1

In-process cases first, then some on gloo processes. Each mismatch is made small and printed as a script that runs it
again. Ends with 1 when there was any.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator

from tests.random_programs.cases import Case, cases_of, code, outcome
from tests.random_programs.shrink import shrink


def main() -> int:
    arguments = _arguments()
    print(f"seed {arguments.seed}", flush=True)
    print("model and plan", "on threads:" if not arguments.case else arguments.case, flush=True)
    if arguments.case:
        return _again(arguments.case)
    wrong = _run_all(_cases(arguments.seed), arguments.cases, arguments.shrink, on_gloo=False)
    if arguments.gloo:
        first = arguments.seed + 10_000_019  # other programs than those above
        wrong += _run_all(_cases(first, plans=4), arguments.gloo, False, on_gloo=True)
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200, help="how many in-process cases")
    parser.add_argument("--gloo", type=int, default=0, help="how many cases on gloo processes")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000, help="of the first program")
    parser.add_argument("--case", help="one case by its name, such as 17.3")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True, help="make mismatches small")
    return parser.parse_args()


def _cases(seed: int, plans: int = 10) -> Iterator[Case]:
    for number in itertools.count(seed):
        yield from cases_of(number, plans)


def _again(name: str) -> int:
    case = next(case for case in cases_of(int(name.split(".")[0])) if case.name == name)
    text = outcome(case)
    print(code(case, text), text or "equal", sep="\n")
    return 1 if text else 0


def _run_all(cases: Iterator[Case], count: int, small: bool, on_gloo: bool) -> int:
    """How many of so many cases are wrong."""
    started, wrong, exact = time.monotonic(), 0, 0
    where = "gloo" if on_gloo else "threads"
    for number, case in enumerate(itertools.islice(cases, count), 1):
        text = _outcome_on_gloo(case) if on_gloo else outcome(case)
        exact += case.subject.mode == "train" and not text and case.subject.is_exact
        if text:
            wrong += 1
            _report(case, text, small)
        if number % 200 == 0 or number == count:
            seconds = time.monotonic() - started
            print(
                f"{number} cases on {where}: {wrong} wrong, {exact} compared for equality, the last is {case.name} "
                f"({seconds:.0f} s, {number / seconds:.1f} a second)",
                flush=True,
            )
    return wrong


def _report(case: Case, text: str, small: bool) -> None:
    print(f"\ncase {case.name} on {case.choices.sizes}: {text}", flush=True)
    found = shrink(case) if small else case
    print(f"\n{code(found, outcome(found) if small else text)}", flush=True)


def _outcome_on_gloo(case: Case) -> str:
    from tests.random_programs.gloo import run_on_gloo

    return outcome(case, run_on_gloo)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
