"""The SOAP search on small drawn graphs, beside the best of all their plans, each of which is looked at.

    python -m benchmarks.soap.optimum [--graphs 100] [--most 60000]

Graphs of 2 to 5 operators on 4 `h100` devices, on each logical mesh; parameters stored whole in every other graph, as
any ZeRO stage allows in the rest; those with more than `--most` plans are left out, and counted. The chain has the
default budget and seed, and begins at the intra-op search's plan, and once more at a drawn plan.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import autopar
from autopar.ir.mesh import logical_meshes
from autopar.planning import SearchBudget
from autopar.refinement import space_of
from autopar.simulate import Incremental
from autopar.soap import Budget, Start, World, refine
from benchmarks.facts import facts
from tests.soap.drawn import drawn_graph, drawn_place, drawn_plan, first_plan, least_step_ns, num_plans

MESH = autopar.Mesh("h100", devices_per_node=4)


def main() -> None:
    """Compares, and writes optimum.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=100)
    parser.add_argument("--most", type=int, default=60_000)
    options = parser.parse_args()
    looked_at, plans, left_out, missed = 0, 0, 0, list[str]()
    for seed in range(options.graphs):
        graph = drawn_graph(seed, 2 + seed % 4)
        for axes in logical_meshes(MESH):
            place = drawn_place(graph, axes, MESH, is_whole=seed % 8 < 4)
            space, placed = space_of(place), first_plan(place)
            if num_plans(space) > options.most:
                left_out += 1
                continue
            score = Incremental(graph, place.shared_profile)
            for name, plan in (("placed", placed), ("drawn", drawn_plan(space, placed, seed))):
                budget = Budget(SearchBudget().proposals, 600.0)
                (_, found), _ = refine([Start(name, World(space, score), plan)], budget)
                reached = score.step_time_ns(found)
                least = least_step_ns(space, plan, score, reached + 1)
                if reached != least:
                    missed.append(f"graph {seed} on {len(axes)} axes from {name}: {reached} ns, best {least} ns")
                    print(missed[-1], flush=True)
            looked_at += 1
            plans += num_plans(space)
        print(f"{seed + 1} graphs, {looked_at} searched spaces, {plans:,} plans, {len(missed)} missed", flush=True)
    report = {
        **facts("benchmarks.soap.optimum"),
        "spaces": looked_at, "plans": plans, "left_out": left_out, "missed": missed,
    }  # fmt: skip
    (Path(__file__).parent / "optimum.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
