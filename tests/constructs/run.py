"""Runs random models with constructs: python -m tests.constructs.run --cases 1000 --gloo 100 --seed 1

In-process cases first, then some on gloo processes. What is wrong or crashes is made small and printed as a script that
runs it again. Then the verdicts by kind of construct, and what was refused why. Ends with 1 when a case was wrong,
crashed, or was refused though nothing in it is a reason to.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch

from tests.constructs.cases import Case, case_of, cases, code, shrunk
from tests.constructs.check import CRASHED, EQUAL, PLANS, REFUSED, WHOLE, WRONG, Run, Verdict, run_in_threads
from tests.constructs.models import CONSTRUCTS, KINDS, Model, placed

VERDICTS = (EQUAL, REFUSED, WRONG, CRASHED)


@dataclass
class Summary:
    """What came of all cases so far."""

    verdicts: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[tuple[str, str]] = field(default_factory=Counter)
    by_plan: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    needless: list[str] = field(default_factory=list)
    without_line: int = 0

    def add(self, case: Case, verdict: Verdict) -> None:
        self.verdicts[verdict.kind] += 1
        self.by_plan[case.plan, verdict.kind] += 1
        for kind in {used.what.kind for used in case.model.used}:
            self.by_kind[kind, verdict.kind] += 1
        if verdict.kind == REFUSED:
            self.reasons[shape_of(verdict.text)] += 1
            self.without_line += not verdict.names_a_line
            if case.may_not_be_refused:
                self.needless.append(case.name)

    @property
    def failed(self) -> bool:
        """Whether something was not as promised."""
        return bool(self.verdicts[WRONG] or self.verdicts[CRASHED] or self.needless)

    @property
    def refused_share(self) -> float:
        """Of all cases."""
        return self.verdicts[REFUSED] / max(1, self.verdicts.total())

    def lines(self) -> Iterator[str]:
        """The summary as text."""
        yield f"{self.verdicts.total()} cases: " + ", ".join(f"{self.verdicts[kind]} {kind}" for kind in VERDICTS)
        without = f"{self.without_line} without a line; without a reason: {self.needless}"
        yield f"refused: {self.refused_share:.0%}, of these {without}"
        for title, counts in (("kind", self.by_kind), ("plan", self.by_plan)):
            yield f"{title:18}" + "".join(f"{verdict:>9}" for verdict in VERDICTS)
            for name in sorted({name for name, _ in counts}):
                yield f"{name:18}" + "".join(f"{counts[name, verdict]:9}" for verdict in VERDICTS)
        for reason, count in self.reasons.most_common():
            yield f"{count:5} × {reason}"


def shape_of(text: str) -> str:
    """A refusal without what differs from model to model."""
    text = re.sub(r"constructs_\w+", "…", " ".join(text.split()))
    return re.sub(r"\d+", "#", text)[:150]


def tell(judged: Iterator[tuple[Case, Verdict]], count: int, where: str, run: Run | None) -> Summary:
    """Takes so many cases; with a way to run them, those that fail are made small and printed."""
    began, summary = time.process_time(), Summary()
    for number, (case, verdict) in enumerate(itertools.islice(judged, count), 1):
        summary.add(case, verdict)
        needless = verdict.kind == REFUSED and case.may_not_be_refused
        if verdict.kind in (WRONG, CRASHED) or needless:
            print(f"\ncase {case.name}, {case.plan}: {verdict.kind}: {verdict.text.strip()[:600]}", flush=True)
            if run is not None:
                small = shrunk(case, verdict.kind, run)
                print(f"\n{code(small, small.verdict(run))}", flush=True)
        if number % 100 == 0 or number == count:
            seconds = time.process_time() - began
            print(f"{number} cases on {where}: {dict(summary.verdicts)} ({seconds:.0f} s of one core)", flush=True)
    return summary


def _on_gloo(seed: int, kinds: Sequence[str]) -> Iterator[tuple[Case, Verdict]]:
    from tests.constructs.gloo import run_on_gloo

    for number in itertools.count(seed):
        case = case_of(number, kinds)
        yield case, case.verdict(run_on_gloo)


def _again(name: str, kinds: Sequence[str]) -> int:
    case = case_of(int(name), kinds)
    verdict = case.verdict()
    print(code(case, verdict), verdict.kind, verdict.text, sep="\n")
    return verdict.kind in (WRONG, CRASHED)


def _each(plans: Sequence[str], kinds: Sequence[str]) -> Iterator[tuple[Case, Verdict]]:
    """Every construct alone at one of its places under each plan."""
    for key, construct in CONSTRUCTS.items():
        for plan in plans:
            if construct.kind in kinds and (plan in WHOLE or not construct.random):
                used = placed(construct, 0, random.Random(f"{key} {plan}"))
                case = Case(Model((used,)), plan, f"{key} ({used.place})")
                yield case, case.verdict()


def record(seed: int, found: Sequence[Summary]) -> str:
    """What came of a run, with all that tells how to run it again; a summary of threads, then one of gloo, if any."""
    command = " ".join(["python -m tests.constructs.run", *sys.argv[1:]])
    seeded = command if "--seed" in command else f"{command} --seed {seed}"
    facts = f"{date.today()}, torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}"
    titles = ("Ranks as threads of one process", "Ranks as processes on gloo")
    parts = [
        "\n".join(["", f"## {title}", "", "```", *summary.lines(), "```"])
        for title, summary in zip(titles, found, strict=False)
    ]
    return "\n".join(["# Random models with constructs", "", f"    {seeded}", "", facts, *parts, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200, help="how many in-process cases")
    parser.add_argument("--gloo", type=int, default=0, help="how many cases on gloo processes")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000, help="of the first model")
    parser.add_argument("--each", nargs="+", choices=PLANS, help="instead: each construct alone under these plans")
    parser.add_argument("--case", help="one case by its name, such as 17")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="of constructs")
    parser.add_argument("--record", type=Path, help="a file that gets the summary, such as benchmarks/constructs/a.md")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True, help="make failures small")
    arguments = parser.parse_args()
    if arguments.case:
        return _again(arguments.case, arguments.kinds)
    if arguments.each:
        summary = tell(_each(arguments.each, arguments.kinds), 1_000_000, "threads", None)
        print("", *summary.lines(), sep="\n", flush=True)
        return int(summary.failed)
    print(f"seed {arguments.seed}", flush=True)
    run = run_in_threads if arguments.shrink else None
    found = [tell(cases(arguments.seed, arguments.kinds), arguments.cases, "threads", run)]
    if arguments.gloo:
        on_gloo = _on_gloo(arguments.seed + 10_000_019, arguments.kinds)  # other models than those above
        found.append(tell(on_gloo, arguments.gloo, "gloo", None))
    for summary in found:
        print("", *summary.lines(), sep="\n", flush=True)
    if arguments.record:
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        arguments.record.write_text(record(arguments.seed, found), encoding="utf-8")
    return int(any(summary.failed for summary in found))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
