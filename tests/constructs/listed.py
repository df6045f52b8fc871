"""Each listed line alone under each plan of its kind: python -m tests.constructs.listed [--kind routing] [TEXT …]

Of `positions` and `families`, plans that split sequences; of `routings`, plans whose ranks share experts; of
`practice`, whole models, plans of any kind. What is wrong
or crashes is printed whole, what is refused in one line. Ends with 1 when a case was wrong or crashed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.constructs import families, positions, practice, routings
from tests.constructs.check import CRASHED, REFUSED, WRONG, Verdict, judged
from tests.constructs.written import Written

WHOLE = ("tp", "sequence", "zero3", "stages")
PLANS = {
    "position": ("gather", "ring", "heads", "ring zero3", *WHOLE[1:]),
    "family": ("gather", "ring", "heads", "ring zero3"),
    "routing": ("exchange", "exchange in chunks", "exchange of microbatches", *WHOLE),
    "practice": ("zero3", "tp", "dp", "recompute", "microbatches", "stages", "samples"),
}
LISTED = {"position": positions.CASES, "family": families.CASES, "routing": routings.CASES, "practice": practice.CASES}
EVERY = {"position": 22, "family": 40, "routing": 22, "practice": 12}
"""How many models stand for each that is run with the suite."""
Listed = tuple[Written, str]
"""A model, and the plan that it is run in."""


def all_cases(kinds: Sequence[str] = tuple(LISTED)) -> list[Listed]:
    """Every model in every plan of its kind."""
    return [(model, plan) for kind in kinds for model in LISTED[kind] for plan in PLANS[kind]]


def in_turn() -> list[Listed]:
    """Every so many models of a kind, each in one plan, the plans in turn."""
    return [
        (model, PLANS[kind][number % len(PLANS[kind])])
        for kind, models in LISTED.items()
        for number, model in enumerate(models[:: EVERY[kind]])
    ]


def verdicts(cases: Sequence[Listed]) -> Iterator[tuple[Listed, Verdict]]:
    """What comes of each."""
    for model, plan in cases:
        yield (model, plan), judged(model, plan)


def main() -> int:
    """Prints what is not equal, and how many are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=tuple(LISTED), action="append", help="default: all")
    parser.add_argument("--plan", action="append", help="default: all of the kind")
    parser.add_argument("texts", nargs="*", help="parts of the names of lines")
    options = parser.parse_args()
    chosen = [
        (model, plan)
        for model, plan in all_cases(options.kind or tuple(LISTED))
        if plan in (options.plan or (plan,)) and any(text in model.what for text in options.texts or ("",))
    ]
    counts = Counter[str]()
    for (model, plan), verdict in verdicts(chosen):
        counts[verdict.kind] += 1
        if verdict.kind in (WRONG, CRASHED):
            print(f"{verdict.kind} | {model.what} | {plan}\n{verdict.text}", flush=True)
        elif verdict.kind == REFUSED:
            print(f"refused | {model.what} | {plan} | {' '.join(verdict.text.split())[:160]}", flush=True)
    print(", ".join(f"{number} {kind}" for kind, number in counts.most_common()))
    return int(bool(counts[WRONG] or counts[CRASHED]))


if __name__ == "__main__":
    sys.exit(main())
