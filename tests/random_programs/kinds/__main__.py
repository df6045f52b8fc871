"""Runs kinds of models: python -m tests.random_programs.kinds [--only TEXT] [--plans N] [--staged N] [--seed S]

Each is drawn in sizes that do not divide; whole models (`constructs.practice`) are taken as they are. Plans are random,
of one stage and of several, on ranks that are threads.
Ends with 1 where something is wrong; what autopar refuses is told and is not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator


def main() -> int:
    arguments = _arguments()
    from tests.random_programs.kinds.judge import REFUSED

    total = Counter[str]()
    for name, text in _found(arguments):
        what = "equal" if not text else "refused" if text.startswith(REFUSED) else "wrong"
        total[what] += 1
        if text:
            print(f"{what}: {name}: {text}", flush=True)
    print(dict(sorted(total.items())), flush=True)
    return 1 if total["wrong"] or not total else 0


def _found(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    from tests.random_programs.kinds.judge import judged, judged_subject
    from tests.random_programs.kinds.practice import MODELS, practice_subject
    from tests.random_programs.kinds.table import KINDS

    seed, counts = arguments.seed, (arguments.plans, arguments.staged)
    for kind in KINDS.values():
        if arguments.only in kind.name:
            yield from judged(kind, seed, *counts)
    for name, model in MODELS.items():
        if arguments.only in name:
            yield from judged_subject(practice_subject(model, seed), f"{name} {seed}", *counts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--plans", type=int, default=6, help="how many of one stage, a kind")
    parser.add_argument("--staged", type=int, default=2, help="how many of several stages, a kind")
    parser.add_argument("--seed", type=int, default=1, help="of sizes, weights, batches and plans")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
