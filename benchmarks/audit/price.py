"""Processor seconds of an audit's verdict, each configuration in a process of its own, beside another tree's in turn:
python -m benchmarks.audit.price [--beside TREE] [FILE …], to price.md."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.audit.cases import CASES, ROOT
from benchmarks.facts import facts

RESULTS = Path(__file__).parent / "price.md"
INTRODUCTION = """# What a verdict costs

Processor seconds of a process that reads a configuration, says whether it is legal, whether it fits, its step and what
bounds it, without a search. *torch* is `import torch` alone, below which no verdict falls that needs a price; what is
illegal, or refused, needs none. *imports* are the others, *graph* is the model's, *price* the plan and its simulation,
*all* the whole process.
"""
CHILD = """
import time; start = time.process_time()
import json, sys
from benchmarks.audit.cases import CASES
from autopar.errors import PlanError
import autopar.auditing.result as result
case, spent = CASES[int(sys.argv[1])], dict.fromkeys(("torch", "imports", "graph", "price"), 0.0)
def timed(name, call, *given):
    begun = time.process_time()
    try: return call(*given)
    finally: spent[name] += time.process_time() - begun
priced = result._priced
def traced(model, own=result._traced_models):
    timed("torch", __import__, "torch")
    models = timed("imports", own, model)
    graph = models.graph
    def once(job):
        before = spent["graph"]
        found = timed("graph", graph, job)
        spent["price"] -= spent["graph"] - before
        return found
    models.graph = once
    return models
result._traced_models = traced
result._priced = lambda found, models: timed("price", priced, found, models)
try: verdict = result.audit(case.path, case.mesh, case.model_path, search=None, **case.given).verdict
except PlanError: verdict = "refused"
print(json.dumps({"verdict": verdict, **spent, "all": time.process_time() - start}))
"""
PARTS = ("torch", "imports", "graph", "price", "all")


def spent(number: int, tree: Path) -> dict[str, float | str]:
    """Of a case, by its number, in a process of its own that imports a tree."""
    command = [sys.executable, "-c", CHILD, str(number)]
    told = subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True
    )
    found: dict[str, float | str] = json.loads(told.stdout.splitlines()[-1])
    return found


def row(number: int, trees: list[Path]) -> list[str]:
    """A configuration's: its verdict, and each part, the other tree's before this one's where there is one."""
    found = [spent(number, tree) for tree in trees]
    case = CASES[number]
    assert len({str(one["verdict"]) for one in found}) == 1, f"{case.file}: {[one['verdict'] for one in found]}"
    cells = [" → ".join(f"{one[part]:.2f}" for one in found) for part in PARTS]
    print(case.file, case.mesh, *cells, flush=True)
    return [f"`{case.file}`", case.mesh, str(found[0]["verdict"]), *cells]


def middle(rows: list[list[str]]) -> list[str]:
    """The median of each part, over what has a price."""
    priced = [cells[3:] for cells in rows if not cells[3].startswith("0.00")]
    cells = []
    for part in zip(*priced, strict=True):
        trees = zip(*(map(float, cell.split(" → ")) for cell in part), strict=True)
        cells.append(" → ".join(f"{median(one):.2f}" for one in trees))
    return ["median of those with a price", "", "", *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path, help="another tree, which runs before this one in turn")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("files", nargs="*", help="only these")
    options = parser.parse_args()
    trees = [options.beside.resolve(), ROOT] if options.beside else [ROOT]
    numbers = [number for number, case in enumerate(CASES) if not options.files or case.file in options.files]
    rows = [row(number, trees) for number in numbers]
    head = ["file", "devices", "verdict", *PARTS]
    table = [head, ["---"] * len(head), *rows, middle(rows)]
    told = "; ".join(f"{key} {value}" for key, value in facts("benchmarks.audit.price").items())
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    options.output.write_text(f"{INTRODUCTION}\n{told}\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
