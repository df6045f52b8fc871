"""Audits the configurations of `cases`, to results.md: python -m benchmarks.audit.run [--search fast] [FILE …]."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import autopar
from autopar.auditing.text import job_text
from autopar.errors import PlanError
from autopar.show.text import time_text
from benchmarks.audit.cases import CASES, AuditCase
from benchmarks.facts import facts

RESULTS = Path(__file__).parent / "results.md"
INTRODUCTION = """# Public configurations, audited

Each file of `tests/auditing/configs` holds the facts of a public configuration; its source is named in `cases.py`, and
below. The verdict is what `autopar audit` says of it on the devices beside it, without a search; *by hand* is what
a sum on paper says (`cases.py` has the terms), written down before the audit ran, and kept where the two differ.
*took* is seconds of the clock in one process, after what the first imports; `price.md` has processor seconds of each in
a process of its own.

One verdict of 36 differs from the sum: 70B on eight B200 leaves 38% that it fits. The sum ends at 160 to 190 of 192
GB, and the file steps the optimizer inside the backward pass, which no plan carries and which frees up to 18 GB of
gradients; the audit names it as not carried. The V100 of these profiles has 16 GB: the sums of two rows said 32 GB at
first, and the 1-bit Adam row, which fits in 32, is now on A100 of 40 GB. The last three rows are refused with what has
to be said beside them.
"""


def rows(cases: list[AuditCase], search: str | None) -> Iterator[list[str]]:
    """A row a case."""
    for case in cases:
        begun = time.perf_counter()
        try:
            found = autopar.audit(case.path, case.mesh, case.model_path, search=search, **case.given)
        except PlanError as error:
            yield _refused(case, str(error))
            continue
        seconds = time.perf_counter() - begun
        told = found.predicted
        verdict = "fits" if found.verdict in ("fine", "slow") and search is None else found.verdict
        agrees = "" if verdict.startswith(case.expected) or search else f" (**expected: {case.expected}**)"
        took = (
            [time_text(told.step_ns), told.bound, f"{told.utilisation:.0%}", f"{told.odds:.0%}"]
            if told
            else ["", "", "", ""]
        )
        what = str(found.faults[0]) if found.faults else job_text(found.job)
        better = ""
        if found.better is not None:
            better = "as it is" if found.better is told else f"{found.gain:.0%} faster: {job_text(found.better.job)}"
        left = ", ".join(
            dict.fromkeys(f"{item.key} ({item.kind})" for item in found.left if item.kind != "does not matter")
        )
        yield [f"`{case.file}`", case.mesh, verdict + agrees, *took, what, better, left, case.by_hand, case.source,
               f"{seconds:.1f} s"]  # fmt: skip
        print(f"{case.file} {case.mesh}: {verdict}{agrees}, {seconds:.1f} s, {' '.join(took)} {better}", flush=True)


def _refused(case: AuditCase, why: str) -> list[str]:
    agrees = "" if case.expected == "refused" else f" (**expected: {case.expected}**)"
    print(f"{case.file} {case.mesh}: refused{agrees}, {why}", flush=True)
    return [f"`{case.file}`", case.mesh, f"refused{agrees}", "", "", "", "", why, "", "", case.by_hand, case.source, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--search", choices=("fast", "default", "thorough"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("files", nargs="*", help="only these")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.files or case.file in options.files]
    head = ["file", "devices", "verdict", "step", "bound by", "MFU", "fits with", "job, or what is wrong", "better",
            "not carried", "by hand", "source", "took"]  # fmt: skip
    table = [head, ["---"] * len(head), *rows(cases, options.search)]
    told = "; ".join(f"{key} {value}" for key, value in facts("benchmarks.audit.run").items())
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table)
    options.output.write_text(f"{INTRODUCTION}\n{told}\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
