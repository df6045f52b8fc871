"""The SOAP search on small drawn graphs, beside the best of all their plans.

    python -m benchmarks.soap.optimum [--graphs 100] [--limit 300000] [--output benchmarks/soap/optimum.json]

Graphs of 2 to 5 operators on 4 `h100` devices, on each logical mesh; parameters stored whole in every other graph, as
any ZeRO stage allows in the rest. The chain has the default budget and seed, and begins at the intra-op search's plan,
and once more at a drawn plan. That no plan is better than what it reached is proved by branch and bound
(`benchmarks.soap.exhaustive`, which the tests compare with looking at each plan); where more than `--limit` plans would
be simulated, that is not proved, and the space is counted apart, but as missed where a better plan was seen.

`reached_ns` is the best that the chain came by; `returned_ns` the plan that the search returns, after decisions were
taken back that gain next to nothing (`soap.refining.RESOLUTION`, a thousandth of a step, against its first plan).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import autopar
from autopar.ir.mesh import LogicalMesh, logical_meshes
from autopar.refinement import space_of
from autopar.request import SearchBudget
from autopar.simulate import Incremental, prices_of
from autopar.soap import Budget, Ledger, Start, World, refine
from benchmarks.facts import facts, write_record
from benchmarks.soap.exhaustive import least_step
from tests.soap.drawn import drawn_graph, drawn_place, drawn_plan, first_plan, num_plans

MESH = autopar.Mesh("h100", devices_per_node=4)


def compared(seed: int, axes: LogicalMesh, limit: int) -> dict[str, Any]:
    """What the chain reaches on a drawn graph, and the best there is."""
    graph = drawn_graph(seed, 2 + seed % 4)
    place = drawn_place(graph, axes, MESH, is_whole=seed % 8 < 4)
    space, placed, profile = space_of(place), first_plan(place), place.shared_profile
    score, prices = Incremental(graph, profile), prices_of(graph, place.draft(), profile, MESH.devices_per_node)
    world = World(space, score, ledger=Ledger(space, prices, 1))
    reached, returned = dict[str, int](), dict[str, int]()
    for name, plan in (("placed", placed), ("drawn", drawn_plan(space, placed, seed))):
        budget = Budget(SearchBudget().proposals, 600.0)
        (_, found), report = refine([Start(name, world, plan)], budget)
        reached[name], returned[name] = report.trace[-1][2], score.step_time_ns(found)
    proof = least_step(space, placed, score, Ledger(space, prices, 1), min(reached.values()) + 1, limit)
    return {
        "graph": seed, "operators": len(graph.nodes), "axes": [axis.size for axis in axes], "plans": num_plans(space),
        "reached_ns": reached, "returned_ns": returned, "least_ns": proof.step_ns, "proved": proof.is_proved,
        "simulated": proof.simulated,
    }  # fmt: skip


def main() -> None:
    """Compares, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=100)
    parser.add_argument("--limit", type=int, default=300_000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for seed in range(options.graphs):
        for axes in logical_meshes(MESH):
            rows.append(compared(seed, axes, options.limit))
            print(rows[-1], flush=True)
    missed = [row for row in rows if max(row["reached_ns"].values()) > row["least_ns"]]
    counts = {
        "spaces": len(rows),
        "plans": sum(row["plans"] for row in rows),
        "proved": sum(row["proved"] for row in rows),
        "reached_where_proved": sum(row["proved"] and row not in missed for row in rows),
        "missed": len(missed),
        "furthest_missed": max((max(row["reached_ns"].values()) / row["least_ns"] - 1.0 for row in rows), default=0.0),
        "furthest_returned": max(
            (max(row["returned_ns"].values()) / row["least_ns"] - 1.0 for row in rows), default=0.0
        ),
    }
    print(counts)
    if options.output:
        write_record(options.output, facts("benchmarks.soap.optimum"), {**counts, "rows": rows})


if __name__ == "__main__":
    main()
