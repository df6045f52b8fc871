"""A plan as tables for a terminal (`rich.print(plan)`, `autopar show`): what `print(plan)` says, easier to scan."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.labels import use_text
from autopar.ir.naming import printable
from autopar.ir.placement import Placement, Type
from autopar.ir.plan import Breakdown, Plan
from autopar.show.text import axes_text, bytes_text, plan_text, screen_rows, stage_blocks, time_text

STYLES = {"S0": "white on blue", "S1": "black on yellow", "S2": "white on green", "P": "white on red", "R": "reverse"}

BREAKDOWN = {
    "compute_ns": "compute",
    "recompute_ns": "recomputation",
    "exposed_communication_ns": "exposed communication",
    "bubble_ns": "bubble",
    "optimizer_ns": "optimizer",
}


def plan_tables(plan: Plan) -> RenderableType:
    """The head of the printed plan, then what it says in lines and here in tables: time, memory, stages, parameters.

    Names in a plan are set as text, in which nothing is markup.
    """
    title, *lines = plan_text(plan).partition("\n\n")[0].splitlines()
    said = [line for line in lines if not line.lstrip().startswith(("step time", "memory", "stage"))]
    parts: list[RenderableType] = [Text(title, style="bold"), Text("\n".join(said)), _time(plan), _memory(plan)]
    parts += [_stages(plan)] if len(plan.stages) > 1 else []
    parts += [_parameters(plan)] if any(stage.axes for stage in plan.stages) else []
    return Group(*parts)


def breakdown_rows(parts: Breakdown) -> list[tuple[str, int]]:
    """The parts of the step that are not 0, by their names for people."""
    return [(BREAKDOWN[key], spent) for key, spent in asdict(parts).items() if spent]


def _time(plan: Plan) -> Table:
    step = plan.predicted.step_time_ns
    table = _table(f"step time {time_text(step)}", "part", "time", "share")
    for name, spent in breakdown_rows(plan.predicted.breakdown):
        table.add_row(name, time_text(spent), f"{spent / max(1, step):.1%}")
    return table


def _memory(plan: Plan) -> Table:
    peak, limit = plan.predicted.peak_bytes, plan.memory_limit
    table = _table(f"memory {bytes_text(peak)} of {bytes_text(limit)} a device", "kind", "bytes", "share")
    for kind, size in sorted(plan.predicted.memory.items(), key=lambda item: -item[1]):
        table.add_row(Text(printable(kind)), bytes_text(size), f"{size / max(1, peak):.1%}")
    return table


def _stages(plan: Plan) -> Table:
    table = _table("stages", "stage", "ranks", "as", "runs")
    for number, stage in enumerate(plan.stages):
        ranks = f"{stage.ranks.start} to {stage.ranks.stop - 1}"
        table.add_row(str(number), ranks, Text(axes_text(stage.axes)), Text(stage_blocks(plan, stage)))
    return table


def _parameters(plan: Plan) -> Table:
    axes = next(stage.axes for stage in plan.stages if stage.axes)
    table = _table(f"parameters over {axes_text(axes)}", "parameter", "", "stored", "used")
    for row in screen_rows(plan):
        gathered = use_text(row.storage)
        count = f"×{row.times}" if row.times > 1 else ""
        table.add_row(Text(row.name), count, tiles(row.storage.placement) + gathered, Text(" | ".join(row.used)))
    return table


def tiles(placement: Placement) -> Text:
    """ "S0 I" in the colours of the page: one tile a mesh axis."""
    return Text(" ").join(Text(f" {tile_text(kind)} ", style=STYLES.get(tile_text(kind), "")) for kind in placement)


def tile_text(kind: Type) -> str:
    """ "S0" for S(0); the others by their letter."""
    return f"S{kind.dim}" if kind.kind == "S" else kind.kind


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title, style="italic"), title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in ("time", "bytes", "share") else "left")
    return table
