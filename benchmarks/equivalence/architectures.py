"""Architectures of the transformers library against one device: three plans each, on two ranks. The table of results.

    python -m benchmarks.equivalence.architectures [--only Llama Bert …] [--again] [--output benchmarks/equivalence]

Run from the root of the repository. The list is `tests/equivalence/architectures.py`; ranks are threads of this process
with the real runtime (tests/random_programs/world.py), and three SGD steps are compared: losses, every gradient, what
is stored after each forward. What earlier runs have found is kept, but for those named by `--only`, or all with
`--again`; so a run that was interrupted goes on. Writes architectures.json and architectures.md after each
architecture, and ends with status 1 where a program differs from its model, or planning ends in another error than
autopar's own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from autopar import AutoparError, Mesh, parallelize, template_plan
from autopar.program import PlannedProgram
from benchmarks.facts import facts, write_record
from tests.equivalence.architectures import ARCHITECTURES, Architecture
from tests.equivalence.on_threads import program_differences
from tests.equivalence.planned import slow_mesh

PLACE = Path(__file__).parent
_PACKAGES = f"{Path(transformers.__file__).parents[1]}/"
"""Left out of what errors say, which is not of this machine then."""
PLANS: dict[str, dict[str, int]] = {"dp=2": {"dp": 2}, "tp=2": {"tp": 2}, "searched": {}}
Row = dict[str, Any]


def compare(architecture: Architecture, plan: str) -> Row:
    """Plans, emits, runs and compares: a row of the table."""
    began = time.process_time()
    model, batch = architecture.build()
    row: Row = {"name": architecture.name, "kind": architecture.kind, "plan": plan}
    try:
        program = _program(model, batch, PLANS[plan])
        row |= _split(program)
        found = program_differences(model, batch, program)
        row |= {"result": "WRONG", "why": found[:3]} if found else {"result": "equal"}
    except AutoparError as error:
        row |= {
            "result": "refused",
            "why": [f"{type(error).__name__}: {' '.join(str(error).split())}".replace(_PACKAGES, "")],
        }
    except Exception as error:  # any other is what the table is to show
        row |= {"result": "CRASH", "why": [f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"]}
    return row | {"seconds": round(time.process_time() - began, 1)}


def _program(model: torch.nn.Module, batch: dict[str, Any], choices: dict[str, int]) -> PlannedProgram:
    if not choices:
        return parallelize(model, slow_mesh(2), batch, search="fast")
    mesh = Mesh("cpu", devices_per_node=2)
    return parallelize(model, mesh, batch, plan=template_plan(model, mesh, batch, **choices))


def _split(program: PlannedProgram) -> Row:
    """How it is split, and what is not for want of a rule: what is all replicated would be equal anyway."""
    plan = program.plan
    stored = [kept.placement for stage in plan.stages for kept in stage.storage.values()]
    cut = sum(any(type_.kind == "S" for type_ in placement) for placement in stored)
    batch = any(
        type_.kind == "S" for stage in plan.stages for placement in stage.inputs.values() for type_ in placement
    )
    how = [f"{len(plan.stages)} stages"] if len(plan.stages) > 1 else []
    how += (["batch"] if batch else []) + ([f"{cut} of {len(stored)} stored tensors"] if cut else [])
    replicated = [op for op, source in plan.coverage.items() if source.startswith("replicated")]
    return {"split": ", ".join(how) or "nothing", "replicated": replicated}


def table(rows: list[Row]) -> str:
    """The rows as Markdown: an architecture a line."""
    counts = Counter(row["result"] for row in rows)
    names = dict.fromkeys(row["name"] for row in rows)
    kinds = Counter({row["name"]: row["kind"] for row in rows}.values())
    lines = [
        f"{len(names)} architectures ({', '.join(f'{n} {kind}' for kind, n in kinds.items())}), "
        f"{len(rows)} programs: {', '.join(f'{n} {result}' for result, n in sorted(counts.items()))}.",
        "",
        f"| architecture | kind | {' | '.join(PLANS)} | replicated operators |",
        "|---" * (len(PLANS) + 3) + "|",
    ]
    for name in names:
        own = {row["plan"]: row for row in rows if row["name"] == name}
        cells = [_cell(own[plan]) if plan in own else "" for plan in PLANS]
        replicated = dict.fromkeys(op for row in own.values() for op in row.get("replicated", ()))
        kind = next(iter(own.values()))["kind"]
        lines.append(f"| {name} | {kind} | {' | '.join(cells)} | {', '.join(replicated) or 'none'} |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    if row["result"] == "equal":
        return f"equal ({row['split']})"
    return f"{row['result']}: {row['why'][0][:300]}".replace("|", "/")


def _known(place: Path) -> list[Row]:
    path = place.with_suffix(".json")
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def main() -> None:
    """Runs what is asked for, or lacking."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [item.name for item in ARCHITECTURES]
    parser.add_argument("--only", nargs="*", default=[], choices=names, metavar="NAME")
    parser.add_argument("--again", action="store_true", help="forget what earlier runs have found")
    parser.add_argument("--output", type=Path, default=PLACE, help="folder for the results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    place = options.output / "architectures"
    rows = [] if options.again else [row for row in _known(place) if row["name"] not in options.only]
    for architecture in ARCHITECTURES:
        for plan in PLANS if not options.only or architecture.name in options.only else ():
            if any((row["name"], row["plan"]) == (architecture.name, plan) for row in rows):
                continue
            rows.append(compare(architecture, plan))
            print(f"{architecture.name} {plan}: {_cell(rows[-1])} ({rows[-1]['seconds']} s)", flush=True)
        order = {name: number for number, name in enumerate(names)}
        rows.sort(key=lambda row: (order[row["name"]], list(PLANS).index(row["plan"])))
        told = {
            **facts("benchmarks.equivalence.architectures"), "transformers": transformers.__version__,
            "equal": "three SGD steps on two ranks: losses, all gradients and what is stored as on one device "
            "(2e-4 of the largest element)", "searched": "for two devices so slow that tiny models are worth splitting",
        }  # fmt: skip
        write_record(place, told, {"rows": rows}, table(rows))
    sys.exit(any(row["result"] in ("WRONG", "CRASH") for row in rows))


if __name__ == "__main__":
    main()
