"""The best of the configurations that people run, beside the plan that the search finds.

    python -m benchmarks.quality.experts.run [--row NAME …] [--search fast --search default] [--no-grid | --no-search]

Of each row (`rows`) the grid (`grid`) is played by the simulator, in the order of an estimate. Not played is what
cannot be faster than the best that fits, by a bound; what computes more again than what fits, or is slower; and what an
estimate says is far slower (`--beyond`) or larger: a count says how many of each. What is played is played until it
must be slower than the best. Then the same request is searched for. Of plans that a profile cannot tell from the
fastest, the search takes the one that fits most surely: so how likely the grid's best and the plan that was found fit
is noted beside both steps and their ratio, and the step and ratio of the fastest that it simulated and that fits.
Written to results.json and results.md, a row as soon as it is there; rows of other requests are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.recompute import again_text
from autopar.ir.schedule import SCHEDULES
from autopar.ir.tried import Tried
from autopar.pipeline import planned_jointly
from autopar.profiler import load_profile
from autopar.request import BUDGETS, Request
from benchmarks.facts import facts, profile_told, write_record
from benchmarks.quality.experts.best import best_of
from benchmarks.quality.experts.grid import PIPELINE, Expert, placements_of, ways_of
from benchmarks.quality.experts.played import Player
from benchmarks.quality.experts.rows import ROWS, Row

FILE = Path(__file__).with_name("results")


def experts_of(row: Row, layers: int, schedules: Sequence[str]) -> Iterator[Expert]:
    """The grid of a row."""
    for pp in PIPELINE:
        if pp <= layers and row.devices % pp == 0:
            for placed in placements_of(row.devices, row.sequences, pp):
                yield from ways_of(placed, pp, layers, schedules)


def best_of_grid(
    row: Row, graph: Graph, schedules: Sequence[str], most: int, beyond: float, than_ns: float
) -> dict[str, Any]:
    """Plays what may be the best of a row's grid, and faster than a step that is given."""
    player = Player(graph, row.mesh)
    found = best_of(player, experts_of(row, player.layers.count, schedules), than_ns, beyond, most)
    return {**found, "profile": profile_told(row.mesh.profile), "date": date.today().isoformat()}


def searched(row: Row, graph: Graph, search: str) -> dict[str, Any]:
    """What the search finds for a row's request."""
    began = time.process_time()
    plan = planned_jointly(graph, Request(row.mesh, "train", "adamw", None, (), BUDGETS[search]))[1]
    for one in plan.search.tried if plan.search else ():
        print(*(_simulated(one) if one.step_time_ns and one.peak_bytes else ()), end="", flush=True)
    fitting = (one for one in plan.search.tried if (one.peak_bytes or plan.memory_limit + 1) <= plan.memory_limit)
    return {
        "step_time_ns": plan.predicted.step_time_ns, "peak_bytes": plan.predicted.peak_bytes,
        "fastest_ns": min([plan.predicted.step_time_ns, *(one.step_time_ns for one in fitting if one.step_time_ns)]),
        "processor_s": round(time.process_time() - began, 1), "plan": _told(plan),
        "profile": profile_told(row.mesh.profile), "date": date.today().isoformat(),
    }  # fmt: skip


def _simulated(one: Tried) -> Iterator[str]:
    """A line of what was simulated of a plan, beside its estimate where there was one."""
    stages = f"{one.stages} submeshes of {one.mesh}, {one.schedule}, recompute={one.recompute}" if one.stages else ""
    what = ", ".join(filter(None, (stages, one.template and f"template {one.template}")))
    yield f"  {one.step_time_ns / 1e9:.3f} s, {one.peak_bytes / 1e9:.1f} GB: {what}, {one.microbatches} microbatches"
    if one.estimated_ns and one.estimated_bytes:
        yield f"(estimated {one.estimated_ns / 1e9:.3f} s, {one.estimated_bytes / 1e9:.1f} GB)"
    yield "\n"


def _none(grid: dict[str, Any]) -> str:
    """What is said of a grid of which nothing fits that was played."""
    than_ns = grid.get("faster_than_ns")
    return f"none below {than_ns / 1e9:.3f} s" if than_ns else "none fits"


def _told(plan: Plan) -> str:
    """A plan in a line."""
    axes = dict.fromkeys("×".join(str(axis.size) for axis in stage.axes) or "1" for stage in plan.stages)
    submeshes = len({stage.first_rank for stage in plan.stages})
    said = [f"{submeshes} submeshes of {' + '.join(axes)}", f"microbatches={plan.microbatches}"]
    if submeshes > 1:
        said += [f"schedule={plan.schedule}", f"stages={len(plan.stages)}"]
    said += [f"{again_text(plan.recompute)} recomputed"] if plan.recompute else []
    return ", ".join([*said, plan.search.method.split(":")[0]])


HEAD = ("row", "best of the grid", "s", "fits", "found", "s", "fits", "ratio", "fastest", "ratio", "processor s")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For people."""
    said = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for one in rows:
        for search, found in one.get("searched", {}).items():
            best = one["grid"]["best"][:1] if "grid" in one else []
            nothing = "not played" if "grid" not in one else _none(one["grid"])
            name, step, fits = (best[0]["expert"], *_step(one["row"], best[0])) if best else (nothing, "", "")
            fastest_ns = found.get("fastest_ns", found["step_time_ns"])
            ratios = [
                f"{ns / best[0]['step_time_ns']:.3f}" if best else "" for ns in (found["step_time_ns"], fastest_ns)
            ]
            columns = (
                f"{one['row']}, {search}", name, step, fits, found["plan"], *_step(one["row"], found), ratios[0],
                f"{fastest_ns / 1e9:.3f}", ratios[1], found["processor_s"],
            )  # fmt: skip
            said.append(f"| {' | '.join(map(str, columns))} |")
    return "\n".join(said)


def _step(row: str, one: dict[str, Any]) -> tuple[str, str]:
    """What a plan takes, and how likely it fits."""
    profile = load_profile(ROWS[row].mesh.profile)
    memory = profile.memory
    taken = None if memory is None else memory.taken_bytes(one["peak_bytes"])
    fits = "" if memory is None else f"{memory.fits_probability(taken, profile.facts.capacity_bytes):.2f}"
    return f"{one['step_time_ns'] / 1e9:.3f}", fits


def main() -> None:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", choices=ROWS)
    parser.add_argument("--search", action="append", choices=BUDGETS)
    parser.add_argument("--schedule", action="append", choices=SCHEDULES)
    parser.add_argument("--most", type=int, default=2000, help="configurations that are played of a row")
    parser.add_argument("--beyond", type=float, default=1.2, help="times the best that an estimate may be to be played")
    parser.add_argument("--within", type=float, help="plays what may take so many times what the record has")
    parser.add_argument("--no-grid", action="store_true")
    parser.add_argument("--no-search", action="store_true")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args()
    for name in options.row or ROWS:
        row, graph = ROWS[name], ROWS[name].graph()
        print(f"{name} ({profile_told(row.mesh.profile)})", flush=True)
        found: dict[str, Any] = {}
        if not options.no_grid:
            schedules = options.schedule or [*SCHEDULES]
            than_ns = options.within * _known_ns(options.output, name) if options.within else math.inf
            found["grid"] = best_of_grid(row, graph, schedules, options.most, options.beyond, than_ns)
            print(json.dumps(found["grid"], indent=1), flush=True)
            _write(options.output, name, found)
        for search in () if options.no_search else options.search or ("fast", "default"):
            found["searched"] = {search: searched(row, graph, search)}
            print(json.dumps(found["searched"]), flush=True)
            _write(options.output, name, found)


def _known_ns(place: Path, name: str) -> float:
    """The step of the best plan that the record has of a row."""
    rows = json.loads(place.with_name(f"{place.name}.json").read_text())["rows"]
    steps = (found["step_time_ns"] for one in rows if one["row"] == name for found in one["searched"].values())
    return float(min(steps))


def _write(place: Path, name: str, found: dict[str, Any]) -> None:
    """Into the record, in which what else is known of rows is kept."""
    file = place.with_name(f"{place.name}.json")
    rows = {one["row"]: one for one in json.loads(file.read_text())["rows"]} if file.exists() else {}
    known = rows.setdefault(name, {"row": name})
    known |= {"grid": found["grid"]} if "grid" in found else {}
    known["searched"] = known.get("searched", {}) | found.get("searched", {})
    ordered = [rows[each] for each in ROWS if each in rows]
    write_record(place, facts("benchmarks.quality.experts.run"), {"rows": ordered}, table(ordered))


if __name__ == "__main__":
    main()
