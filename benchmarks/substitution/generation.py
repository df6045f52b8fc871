"""Generates the rules at three operators, and at four over a few operators, and writes generation.json and .md.

`python -m benchmarks.substitution.generation` writes no rule file: `python -m autopar.substitute.rules.generate` does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from autopar.cost.host import cpu_model
from autopar.substitute.rules.generate import regenerated
from autopar.substitute.rules.verify import INSTANCES

FOLDER = Path(__file__).parent
FOUR = ("linear", "concat", "first", "second", "add")
STEPS = ("enumerate", "test", "derive from stated", "prune")
"""The steps of generation; "verify" and "coverage" come after it."""

TEXT = """
Two terms whose values agree on fixed inputs are a candidate. A candidate that another one says already (variables that
coincide, weights for matrices, a part that may be any tensor) is a special case and not looked at. The others are
tested at uneven sizes, with groups, zero sizes and negative values; convolutions are tried without a guard and with
`groups == 1`. A sound rule is pruned where its two sides meet in an e-graph under the rules stated by hand and those
kept before it. What is kept is attacked, differentiated and proved as the stated rules are, and shipped if it holds.

Coverage is the share of the sound generated rules whose two sides meet in an e-graph under the shipped rules (at most
4 rounds, 800 nodes, half a second each; sizes and attributes are large random numbers that meet the rule's conditions).
Rules that were shipped themselves count as derivable.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs both generations and writes what they came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=INSTANCES, help="random instances a rule, when verifying")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    runs = [asdict(regenerated(3, (), options.instances, options.workers)[1])]
    runs.append(asdict(regenerated(4, FOUR, options.instances, options.workers)[1]))
    write(runs, " ".join(["python -m benchmarks.substitution.generation", *sys.argv[1:]]))


def write(runs: Sequence[Mapping[str, Any]], command: str) -> None:
    """Writes generation.json and generation.md of the reports of some runs."""
    facts = {
        "command": command,
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()}",
        "date": date.today().isoformat(),
    }
    (FOLDER / "generation.json").write_text(json.dumps({**facts, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    lines = ["# Generated rules", "", *(f"{key}: {value}  " for key, value in facts.items()), TEXT, *_table(runs), ""]
    (FOLDER / "generation.md").write_text("\n".join(lines), encoding="utf-8")


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
        "rules shipped": run["shipped"],
        "of them proved": f"{run['proved']} ({run['proved'] / run['shipped']:.1%})",
        "sound rules derivable from the shipped": f"{run['derivable_from_shipped'] / max(run['sound'], 1):.1%}",
        "generation, s": round(sum(seconds.get(step, 0) for step in STEPS)),
        "verification and coverage, s": round(sum(seconds.values()) - sum(seconds.get(step, 0) for step in STEPS)),
    }


if __name__ == "__main__":
    main()
