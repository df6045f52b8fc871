"""Solves public strategy-selection instances within their time limits and compares with the best known costs.

    python benchmarks/ilp/run.py PATH [--only B G] [--seed 0] [--output FOLDER]

PATH is a folder of `.json` or `.json.gz` instances in the format of github.com/google/iopddl, as downloaded.
Every instance is solved with the same settings; only the time limit, which includes reading the file, differs
(`known.json`). Writes `results.json` and `results.md` beside this script, or to --output.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.profiler.host import cpu_model
from autopar.selection.evaluator import evaluate
from autopar.selection.problem import load_problem
from autopar.selection.solver import solve

HERE = Path(__file__).parent
KNOWN = json.loads((HERE / "known.json").read_text(encoding="utf-8"))
UNKNOWN_LIMIT_S = 60
"""For instances that are not in known.json."""
COLUMNS = {
    "instance": "instance", "cost": "cost", "best known": "best_known", "above best known %": "above_best_percent",
    "lower bound": "lower_bound", "gap to bound %": "gap_percent", "stopped": "stop_reason", "seconds": "seconds",
    "limit s": "limit_s", "load before": "load_before", "load after": "load_after",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One instance solved."""

    instance: str
    cost: int
    best_known: int | None
    above_best_percent: float | None
    """Negative: better than the best known."""
    lower_bound: int
    gap_percent: float
    """(cost − lower bound) / cost."""
    stop_reason: str
    seconds: float
    """From opening the file to the checked choice."""
    limit_s: float
    load_before: float
    load_after: float
    """Load averages of the last minute: above the number of cores, others were at work too."""


def run(path: Path, seed: int) -> Run:
    """Reads, solves and re-evaluates one instance."""
    known = KNOWN["instances"].get(path.name.partition(".")[0], {})
    limit_s, best = known.get("limit_s", UNKNOWN_LIMIT_S), known.get("best_known")
    load_before, started = os.getloadavg()[0], time.monotonic()
    problem = load_problem(path)
    solution = solve(problem, limit_s - (time.monotonic() - started), seed)
    evaluation = evaluate(problem, solution.choice)
    seconds = time.monotonic() - started
    assert evaluation.feasible and evaluation.cost == solution.cost
    above = None if best is None else round(100 * (solution.cost - best) / best, 4)
    return Run(
        path.name.partition(".")[0], solution.cost, best, above, solution.lower_bound,
        round(100 * solution.gap, 3), solution.stop_reason, round(seconds, 1), limit_s,
        round(load_before, 1), round(os.getloadavg()[0], 1),
    )  # fmt: skip


def table(runs: list[Run]) -> str:
    """Returns the runs as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for one in runs:
        lines.append("| " + " | ".join(_cell(getattr(one, field)) for field in COLUMNS.values()) + " |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else str(value)


def facts(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns what makes the figures comparable: command, machine, date."""
    return {
        "command": f"python benchmarks/ilp/run.py PATH --seed {arguments.seed}",
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
        "date": datetime.date.today().isoformat(),
        "known": KNOWN["provenance"],
    }


def write(folder: Path, about: dict[str, str], runs: list[Run]) -> None:
    """Writes results.json and results.md."""
    text = json.dumps({**about, "runs": [asdict(one) for one in runs]}, indent=2, ensure_ascii=False)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    lines = [f"{key}: {value}  " for key, value in about.items()]
    (folder / "results.md").write_text("\n".join([*lines, "", table(runs), ""]), encoding="utf-8")


def main() -> None:
    """Runs all instances, smallest file first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder of instances")
    parser.add_argument("--only", nargs="*", default=[], help="ends of the names of the instances to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the results")
    arguments = parser.parse_args()
    paths = sorted(arguments.path.glob("*.json*"), key=lambda path: path.stat().st_size)
    ends = tuple(arguments.only)
    chosen = [path for path in paths if not ends or path.name.partition(".")[0].endswith(ends)]
    if not chosen:
        sys.exit(f"{arguments.path}: expected .json or .json.gz instances, found none to run")
    runs = []
    for path in chosen:
        runs.append(run(path, arguments.seed))
        print(runs[-1], flush=True)
    write(arguments.output, facts(arguments), runs)
    print(table(runs))


if __name__ == "__main__":
    main()
