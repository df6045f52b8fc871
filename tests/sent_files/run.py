"""Changes every field of plans and profiles: python -m tests.sent_files.run --cases 5000 --seed 1

Each case is a plan or a profile of some form with one to three changes. Counted: what was refused, what was as good as
before, what was another program that computes the same. Whatever else happens is printed; ends with 1 then.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

from tests.sent_files.bases import plans, profiles
from tests.sent_files.check import KEPT, REFUSED, RIGHT, check_profile, outcome, plan_faults
from tests.sent_files.mutations import mutated

FINE = (REFUSED, KEPT, RIGHT)


def case(name: str) -> tuple[str, str]:
    """Of a case such as "plan stages 17": what it is of, and what comes of it."""
    kind, form, seed = name.partition(" ")[0], name.partition(" ")[2].rpartition(" ")[0], name.rpartition(" ")[2]
    text = plans()[form].text if kind == "plan" else profiles()[form]
    base = plans()[form if kind == "plan" else "one stage"]
    check = partial(plan_faults if kind == "plan" else check_profile, base)
    return f"{kind} {form}", outcome(check, mutated(text, random.Random(name + seed)))


def names(seed: int) -> Iterator[str]:
    """Three plans for each profile, every form in turn."""
    forms, devices = [*plans()], [*profiles()]
    number = seed * 1_000_003
    while True:
        number += 1
        yield f"plan {forms[number % len(forms)]} {number}"
        if number % 3 == 0:
            yield f"profile {devices[number // 3 % len(devices)]} {number}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", help="one by its name, such as 'plan stages 17'")
    options = parser.parse_args()
    if options.case:
        print(*case(options.case), sep=": ")
        return 0
    found: dict[str, Counter[str]] = {}
    wrong, began = 0, time.monotonic()
    for number, name in enumerate(names(options.seed), 1):
        form, result = case(name)
        found.setdefault(form, Counter())[result if result in FINE else "wrong"] += 1
        if result not in FINE:
            wrong += 1
            print(f"\ncase {name!r}: {result}", flush=True)
        if number == options.cases:
            break
    for form, counts in sorted(found.items()):
        print(f"{form.ljust(24)} {', '.join(f'{what} {counts[what]}' for what in (*FINE, 'wrong') if counts[what])}")
    seconds = time.monotonic() - began
    print(f"{options.cases} cases of seed {options.seed}: {wrong} wrong, in {seconds:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
