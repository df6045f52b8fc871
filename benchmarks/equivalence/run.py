"""Every model of the zoo in every kind of plan against the model on one device: the table of results.

    python -m benchmarks.equivalence.run [--models gpt hf_t5 …] [--plans dp tp …] [--output benchmarks/equivalence]

Run from the root of the repository. Models, plans, tolerances and the comparison are those of tests/equivalence (see
step.py there); each program runs one training step on gloo ranks of this host. Writes results.json and results.md,
and ends with status 1 when a program is not equal to its model.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.program import PlannedProgram
from autopar.rewrites import graph_of
from benchmarks.facts import facts, write_record
from tests.equivalence import planned, zoo
from tests.equivalence.step import BUFFER, GRADIENT, LOSS, Step, compare, step_alone, step_on_rank
from tests.rank_pool import pool

HERE = Path(__file__).parent
MODELS = (*zoo.NAMES, *zoo.STEP_NAMES)


@dataclass(frozen=True)
class Row:
    """One program against its model; differences are relative, `share` is of the matrix products of one device."""

    model: str
    plan: str
    mesh: str
    equal: bool
    faults: tuple[str, ...]
    loss: float
    gradient: float
    parameter: str
    buffer: float
    bytes_equal: bool
    sent: dict[str, int]
    sharded_parameters: int
    parameters: int
    share: float
    replicated: tuple[str, ...]
    seconds: float


def compare_plan(model_name: str, plan_name: str, single: Step) -> Row:
    """Plans, emits, runs on ranks and compares."""
    started = time.perf_counter()
    model, batch = zoo.build(model_name)
    program = planned.program(model_name, planned.plan(model_name, plan_name))
    state = {**model.state_dict(), **dict(model.named_buffers())}
    ranks = pool(program.plan.mesh.num_devices).run(step_on_rank, program.source, state, batch)
    found = compare(single, ranks, program.plan.predicted.comm_bytes)
    faults = tuple(found.faults())
    return Row(
        model=model_name,
        plan=plan_name,
        mesh=" × ".join(f"{axis.name}={axis.size}" for axis in program.plan.stage.axes),
        equal=not faults,
        faults=faults,
        loss=found.loss,
        gradient=found.gradient,
        parameter=found.parameter,
        buffer=found.buffer,
        bytes_equal=found.sent == found.predicted,
        sent=dict(sorted(found.sent.items())),
        **_split(model_name, program),
        seconds=round(time.perf_counter() - started, 2),
    )


def _split(model_name: str, program: PlannedProgram) -> dict[str, object]:
    """How much the plan splits: a program that replicates everything would be equal trivially."""
    plan, graph = program.plan, graph_of(program.plan, planned.graph(model_name))
    stored = [plan.stage.storage[s.tensor].placement for s in graph.stored if s.kind == "parameter"]
    return {
        "sharded_parameters": sum(any(type_.kind == "S" for type_ in placement) for placement in stored),
        "parameters": len(stored),
        "share": round(planned.work_share(graph, plan), 4),
        "replicated": tuple(op for op, source in plan.coverage.items() if source.startswith("replicated")),
    }


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    head = (
        "model", "plan", "mesh", "equal", "loss", "worst gradient", "of parameter", "buffers", "bytes as predicted",
        "sharded parameters", "products a rank", "replicated operators", "seconds",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = (
            row.model, row.plan, row.mesh, "yes" if row.equal else "NO: " + "; ".join(row.faults), f"{row.loss:.1e}",
            f"{row.gradient:.1e}", row.parameter, f"{row.buffer:.1e}", "yes" if row.bytes_equal else "NO",
            f"{row.sharded_parameters} of {row.parameters}", f"{row.share:.0%}", ", ".join(row.replicated) or "none",
            f"{row.seconds:.1f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def about() -> dict[str, str]:
    """Where and how the rows came about."""
    return {
        **facts("benchmarks.equivalence.run"),
        "equal": f"loss within {LOSS:g}, each parameter's gradient within {GRADIENT:g}, buffers within {BUFFER:g} "
        "(relative, float32), the same loss on every rank, and bytes of each collective exactly as predicted",
        "searched": "for four devices so slow that tiny models are worth splitting",
    }


def write(folder: Path, rows: list[Row]) -> None:
    """Writes results.json and results.md."""
    summary = f"{sum(row.equal for row in rows)} of {len(rows)} programs equal their model."
    found = {"rows": [asdict(row) for row in rows]}
    write_record(folder / "results", about(), found, f"{summary}\n\n{table(rows)}")


def main() -> None:
    """Runs every model in every plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS, metavar="NAME")
    parser.add_argument("--plans", nargs="*", default=planned.STEP_PLANS, choices=planned.STEP_PLANS, metavar="NAME")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for world in (2, 4):
        pool(world).run(max)  # any function of (rank, world): starts the ranks before anything is timed
    rows = []
    for model_name in arguments.models:
        single = step_alone(*zoo.build(model_name))
        for plan_name in arguments.plans:
            rows.append(compare_plan(model_name, plan_name, single))
            row = rows[-1]
            print(f"{row.model} {row.plan}: {'equal' if row.equal else row.faults} ({row.seconds} s)", flush=True)
    write(arguments.output, rows)
    print(f"{sum(row.equal for row in rows)} of {len(rows)} programs equal their model: {arguments.output}/results.md")
    sys.exit(not all(row.equal for row in rows))


if __name__ == "__main__":
    main()
