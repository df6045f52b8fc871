"""A ladder's curve beside a measured one: the Ultra-Scale Playbook's grid of plans on 1 to 64 nodes of 8 H100.

    python -m benchmarks.ladder.playbook FILE.csv [--every-plan] [--no-ladder]

FILE is a grid of measured plans (`benchmarks.accuracy.gpu.rows`). Of each model and number of nodes:

    measured     tokens a second of the fastest measured plan
    predicted    what is predicted of that plan, run by the software that was measured (`benchmarks.accuracy.gpu`)
    near it      of the fastest measured plans there, the median of measured over predicted seconds: 1 where predictions
                 hold, and far from it where all runs on so many nodes were slowed by what no plan says
    stalled      the share of runs there that take so much longer a microbatch than the same plan (but for data
                 parallelism) on another number of nodes that no plan explains it (`STALL_S`); from measurements alone
    ranked       with --every-plan: of the plan that is predicted to be the fastest of all that are predicted to fit
    ladder       what `autopar.ladder` predicts of its own plan for the same model, batch and mesh, run as emitted

Knees are those of `autopar.ladders.rungs`. Written to playbook.json and playbook.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.ladders.rungs import knee_of
from autopar.ladders.text import outline_text
from benchmarks.accuracy.gpu import decoder
from benchmarks.accuracy.gpu.plans import config_of, profiles_of
from benchmarks.accuracy.gpu.predictions import planned, predict
from benchmarks.accuracy.gpu.rows import Row, read_rows
from benchmarks.accuracy.gpu.softwares import read_softwares, software_of
from benchmarks.facts import facts, write_record

FILE = Path(__file__).with_name("playbook")
NEAR = 14
"""Of the fastest measured plans on so many nodes, how many are predicted beside the best."""
STALL_S = 0.4
"""Seconds a microbatch beyond the least of the same tp, pp, ZeRO and micro batch on any number of nodes. All runs are
either within tenths of it, or beyond: 0.5 to 0.9 s with two stages and 1.0 to 1.6 with more, of 1B and 3B alike, of any
micro batch. So it is neither computation nor bytes; and the more nodes a run has, the likelier it is."""
MOST_STALLED = 0.5
LEAST_ALIKE = 3
"""Runs of the same plan on as many numbers of nodes say what a microbatch takes."""
Cells = dict[str, dict[int, list[Row]]]


def cells(rows: Sequence[Row]) -> Cells:
    """By model and nodes, those with the batch that most have."""
    found: Cells = defaultdict(lambda: defaultdict(list))
    usual = statistics.mode(row.global_batch for row in rows)
    for row in (row for row in rows if row.global_batch == usual):
        found[row.model][row.gpus // row.per_node].append(row)
    return found


def tokens_s(row: Row, seconds: float) -> float:
    return row.global_batch * row.seq / seconds


def best_measured(rows: Sequence[Row]) -> Row:
    return fastest(rows)[0]


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Some, the fastest first."""
    return sorted((row for row in rows if row.measured_s), key=lambda row: row.measured_s or 0.0)[:NEAR]


def stalled_shares(cell: Mapping[int, Sequence[Row]]) -> dict[int, float]:
    """By nodes, of the runs of one model that can be told: the share that stalled."""
    alike: dict[tuple[int, ...], list[tuple[int, float]]] = defaultdict(list)
    for nodes, row in ((nodes, row) for nodes, rows in cell.items() for row in rows if row.measured_s):
        plan = (row.tp, row.pp, row.zero, row.global_batch // (row.dp * row.microbatches))
        alike[plan].append((nodes, (row.measured_s or 0.0) / row.microbatches))
    told = defaultdict[int, list[bool]](list)
    for runs in (runs for runs in alike.values() if len(runs) >= LEAST_ALIKE):
        least = min(seconds for _, seconds in runs)
        for nodes, seconds in runs:
            told[nodes].append(seconds > least + STALL_S)
    return {nodes: statistics.mean(found) for nodes, found in told.items()}


def predicted_of(rows: Sequence[Row]) -> dict[str, tuple[float, bool]]:
    """Of each row that can be planned: seconds, and whether it fits."""
    softwares = read_softwares()
    profiles = profiles_of(rows)
    found: dict[str, tuple[float, bool]] = {}
    for item in planned(rows, softwares):
        told = predict(item, softwares, profiles)
        if not told.reason:
            found[item.row.id] = told.seconds, told.fits
    return found


def ladder_of(model: str, cell: Mapping[int, Sequence[Row]]) -> dict[int, tuple[float, str]]:
    """Tokens a second of the ladder's rungs, by nodes, and their plans."""
    row = next(iter(cell.values()))[0]
    config = config_of(row, software_of(row.framework, read_softwares()))
    built, inputs = decoder.build(config, row.global_batch)
    meshes = [autopar.Mesh("h100", nodes=nodes, devices_per_node=row.per_node) for nodes in sorted(cell)]
    found = autopar.ladder(built, inputs, meshes, precision="bf16", tokens_per_sample=row.seq, check=False)
    return {rung.mesh.nodes: (rung.tokens_s or 0.0, outline_text(rung.plan)) for rung in found.rungs if rung.plan}


def curve(model: str, cell: Mapping[int, Sequence[Row]], every_plan: bool, has_ladder: bool) -> list[dict[str, Any]]:
    """A row a number of nodes."""
    wanted = [row for rows in cell.values() for row in (rows if every_plan else fastest(rows))]
    told, own = predicted_of(wanted), ladder_of(model, cell) if has_ladder else {}
    stalled, found = stalled_shares(cell), []
    for nodes, rows in sorted(cell.items()):
        best = best_measured(rows)
        one: dict[str, Any] = {
            "model": model, "nodes": nodes, "measured": tokens_s(best, best.measured_s or 0.0),
            "measured_plan": best.plan_text,
            "predicted": tokens_s(best, told[best.id][0]) if best.id in told else None,
            "near": statistics.median(row.measured_s / told[row.id][0] for row in fastest(rows)
                                      if row.measured_s and row.id in told),
            "stalled": stalled.get(nodes, 0.0),
        }  # fmt: skip
        if every_plan:
            fitting = [row for row in rows if told.get(row.id, (0.0, False))[1]]
            first = min(fitting, key=lambda row: told[row.id][0])
            one |= {"ranked": tokens_s(first, told[first.id][0]), "ranked_plan": first.plan_text}
        if nodes in own:
            one |= {"ladder": own[nodes][0], "ladder_plan": own[nodes][1]}
        found.append(one)
        print(one, flush=True)
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table a model, the mean error of each curve, and the knees."""
    said = list[str]()
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        curves = [name for name in ("predicted", "ranked", "ladder") if all(row.get(name) for row in own)]
        said.append(f"**{model}**, knee of what was measured: {_knee(own, 'measured')} nodes")
        steady = [row for row in own if row["stalled"] <= MOST_STALLED]
        for name in curves:
            said[-1] += (
                f"; {name}: mean error {statistics.mean(_errors(own, name)):.1%} "
                f"({statistics.mean(_errors(steady, name)):.1%} where at most half of the runs stalled), worst "
                f"{max(_errors(own, name)):.1%}, knee {_knee(own, name)} nodes"
            )
        said += ["", f"| nodes | measured tokens/s | plan | near it | stalled | {' | '.join(curves)} |"]
        said.append("|---" * (5 + len(curves)) + "|")
        for row in own:
            told = " | ".join(f"{row[name]:,.0f} ({row[name] / row['measured'] - 1:+.1%})" for name in curves)
            said.append(
                f"| {row['nodes']} | {row['measured']:,.0f} | {row['measured_plan']} | {row['near']:.2f} "
                f"| {row['stalled']:.0%} | {told} |"
            )
        said.append("")
    said.append(
        f"near it: of the {NEAR} fastest measured plans on so many nodes, measured over predicted seconds (median); "
        "far above 1, runs on so many nodes were slowed by what no plan says. stalled: of all runs on so many nodes, "
        f"those that take {STALL_S} s a microbatch longer than the same tp, pp, ZeRO and micro batch on another number "
        "of nodes, which is known without a prediction. Ladders have all schedules, "
        "placements and collectives that emitted programs have, and are not run by the software that was measured."
    )
    return "\n".join(said)


def _errors(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [abs(row[name] / row["measured"] - 1) for row in rows]


def _knee(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return int(rows[knee_of([(row["nodes"], row[name]) for row in rows])]["nodes"])


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--every-plan", action="store_true", help="predict all plans of the grid, not the best alone")
    parser.add_argument("--no-ladder", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [
        row
        for model, cell in cells(read_rows(options.csv)).items()
        for row in curve(model, cell, options.every_plan, not options.no_ladder)
    ]
    write_record(FILE, facts("benchmarks.ladder.playbook"), {"rows": found}, summary(found))


if __name__ == "__main__":
    main()
