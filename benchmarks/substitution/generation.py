"""Generates the rules at three operators, and at four over a few operators, and writes generation.json and .md.

    python -m benchmarks.substitution.generation [--operators 3 4] [--instances 1000] [--workers 2]

What is not run anew keeps its numbers. The rule file is written by `python -m rulemaking.generate`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.facts import facts
from rulemaking.generate import regenerated
from rulemaking.verify import INSTANCES

FOLDER = Path(__file__).parent
ONLY: Mapping[int, tuple[str, ...]] = {3: (), 4: ("linear", "concat", "first", "second", "add")}
"""Operators that are enumerated, by how many a term has at most; () for all."""
STEPS = ("enumerate", "test", "derive from stated", "prune")
"""The steps of generation; "verify" and "coverage" come after it."""

TEXT = """
Two terms whose values agree on fixed inputs are a candidate. A candidate that another one says already (variables that
coincide, weights for matrices, a part that may be any tensor) is a special case and not looked at. The others are
tested at uneven sizes, with groups, zero sizes and negative values; convolutions are tried without a guard and with
`groups == 1`. A sound rule is pruned where its two sides meet in an e-graph under the rules stated by hand and those
kept before it. What is kept is attacked, differentiated and proved as the stated rules are.

Coverage is the share of the sound generated rules whose two sides meet in an e-graph under the rules that hold (at most
4 rounds, 800 nodes, half a second each; sizes and attributes are large random numbers that meet the rule's conditions).
Rules that hold themselves count as derivable.

At four operators, those are enumerated that merging and splitting parallel products takes. The rule file has the rules
of three operators: of these more than 90% are proved.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs both generations and writes what they came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", type=int, nargs="+", default=[3, 4], choices=[*ONLY])
    parser.add_argument("--instances", type=int, default=INSTANCES, help="random instances a rule, when verifying")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    path = FOLDER / "generation.json"
    runs = {run["operators"]: run for run in json.loads(path.read_text(encoding="utf-8"))["runs"]}
    for operators in options.operators:
        report = regenerated(operators, ONLY[operators], options.instances, options.workers)[1]
        runs[operators] = {**asdict(report), **facts("benchmarks.substitution.generation")}
    write([runs[operators] for operators in sorted(runs)])


def write(runs: Sequence[Mapping[str, Any]]) -> None:
    """Writes generation.json and generation.md of the reports of some runs."""
    (FOLDER / "generation.json").write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    (FOLDER / "generation.md").write_text("\n".join(["# Generated rules", TEXT, *_table(runs), ""]), encoding="utf-8")


def _table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [_row(run) for run in runs]
    return [
        "| " + " | ".join(["", *(f"{run['operators']} operators" for run in runs)]) + " |",
        "|---" * (len(runs) + 1) + "|",
        *("| " + " | ".join([name, *(str(row[name]) for row in rows)]) + " |" for name in rows[0]),
    ]


def _row(run: Mapping[str, Any]) -> dict[str, object]:
    seconds = run["seconds"]
    return {
        "operators enumerated": ", ".join(run["only"]) or "all of worlds.py",
        "terms": run["terms"],
        "candidates": run["candidates"],
        "special cases of others": run["special_cases"],
        "sound": run["sound"],
        "derivable from the stated rules": run["derivable_from_stated"],
        "kept after pruning": run["kept"],
        "rules that hold, with the stated ones": run["shipped"],
        "of them proved": f"{run['proved']} ({run['proved'] / run['shipped']:.1%})",
        "sound rules derivable from those that hold": f"{run['derivable_from_shipped'] / max(run['sound'], 1):.1%}",
        "generation, s": round(sum(seconds.get(step, 0) for step in STEPS)),
        "verification and coverage, s": round(sum(seconds.values()) - sum(seconds.get(step, 0) for step in STEPS)),
        "most memory of a process, MiB": run.get("peak_mib") or "not noted",
        "command": f"`{run['command']}`",
        "machine": run["machine"],
        "date": run["date"],
    }


if __name__ == "__main__":
    main()
