"""A thousand drawn routings on four gloo ranks, against the memory that is predicted at the 99th percentile.

    python -m benchmarks.routing.memory [--draws 1000] [--tracked 14] [--ways] [--replicas 2]
                                        [--output benchmarks/routing/memory]

A step's memory grows with the rows of the busiest rank, which are counted in every draw. Tracked is the peak of a whole
step (forward, backward, AdamW) of the rank that holds most, by the record of torch's allocator
(benchmarks/accuracy/lifetimes.py), in the draws with most rows, over all layers: since every other draw has fewer, as
many draws are above the prediction as there are tracked ones above it. Ends with status 1 where that is more than one
in a hundred and two standard errors of it, or where all that were tracked are above. With --ways, of a plan on two
nodes that exchanges tokens by load, each way that a table may say, against the one prediction. With --replicas, of a
plan in which every rank has replicas of so many experts, those with most rows.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.ir.exchange_table import EXCHANGES
from autopar.program import load_source, model_state
from benchmarks.accuracy.lifetimes import live_storages, track
from benchmarks.accuracy.memory import own_shard
from benchmarks.facts import facts, write_record
from benchmarks.routing.drawn import CHOICES, EXPERTS, GivenRouting, batch
from tests.rank_pool import RankPool

WORLD = 4
ROUTINGS = {
    "balanced": autopar.Routing.balanced(),
    "power law 1.2": autopar.Routing.power_law(1.2),
    "histogram": autopar.Routing.histogram([9, 1, 6, 2, 3, 3, 1, 1]),
}


def peaks(rank: int, world: int, source: str, state: dict[str, Any], routing: str, draws: list[int]) -> list[int]:
    """The peak of a step of each of these draws on one rank."""
    from autopar import runtime as rt

    law, before = autopar.Routing.parse(routing), live_storages()
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4)
    found = []
    for draw in (draws[0], *draws):  # the first makes the optimizer's state
        optimizer.zero_grad()
        shard = own_shard(built, batch(law, draw))

        def step(shard: Any = shard) -> None:
            built.train_step(*shard, local=True)
            optimizer.step()

        found.append(track(step, before).peak_bytes)
    return found[1:]


def measured(
    routing: autopar.Routing, draws: int, tracked: int, ranks: RankPool, way: str = "", replicas: int = 0
) -> dict[str, Any]:
    """What is predicted, and what the draws took. way: the one that ranks take, of a plan by load."""
    model = GivenRouting()
    mesh = autopar.Mesh("cpu", 2, WORLD // 2) if way else autopar.Mesh("cpu", devices_per_node=WORLD)
    plan = autopar.template_plan(
        model, mesh, batch(routing, 0), dp=WORLD, ep=WORLD, routing=routing, exchange="adaptive" if way else "flat",
        replicas=replicas,
    )  # fmt: skip
    source = autopar.parallelize(model, mesh, batch(routing, 0), plan=plan).source
    source = re.sub(r"rt\.LoadTable\(\(\(.*?\),\),", f"rt.LoadTable({way},", source) if way else source
    rows = {draw: busiest_rows(batch(routing, draw)["scores"], replicas) for draw in range(draws)}
    most = sorted(rows, key=lambda draw: -rows[draw])[:tracked]
    results = ranks.run(peaks, source, model_state(model), routing.text, most)
    found = [max(own) for own in zip(*results, strict=True)]
    predicted = plan.predicted.peak_bytes
    above = sum(one > predicted for one in found)
    return {
        "predicted_bytes": predicted, "draws": draws, "tracked": tracked, "rows": [rows[draw] for draw in most],
        "mean_rows": sum(rows.values()) / draws, "tracked_bytes": found, "above": above,
        "holds": above < tracked and above <= 0.01 * draws + 2 * math.sqrt(0.0099 * draws),
    }  # fmt: skip


def busiest_rows(scores: torch.Tensor, replicas: int) -> int:
    """Rows of the rank that has most of them in all layers, of scores (tokens, layers, experts)."""
    chosen = scores.topk(CHOICES, -1).indices
    ranks = chosen // (EXPERTS // WORLD)
    home = torch.arange(len(scores)) * WORLD // len(scores)
    for layer in range(scores.size(1)):
        hottest = torch.bincount(chosen[:, layer].reshape(-1), minlength=EXPERTS).argsort(descending=True)[:replicas]
        is_hot = torch.isin(chosen[:, layer], hottest)
        ranks[:, layer] = torch.where(is_hot, home.unsqueeze(1), ranks[:, layer])
    return int(torch.bincount(ranks.reshape(-1), minlength=WORLD).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1_000)
    parser.add_argument("--tracked", type=int, default=14)
    parser.add_argument("--routings", nargs="*", choices=[*ROUTINGS], default=[*ROUTINGS])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--ways", action="store_true")
    parser.add_argument("--replicas", type=int, default=0)
    options = parser.parse_args()
    ranks, rows = RankPool(WORLD, timeout_s=900.0), {}
    ways = [f"((0, {how!r}, {chunks}),)" for how in EXCHANGES for chunks in (1, 8)] if options.ways else [""]
    for routing, way in itertools.product(options.routings, ways):
        name = f"{routing} {way}".strip()
        row = rows[name] = measured(ROUTINGS[routing], options.draws, options.tracked, ranks, way, options.replicas)
        print(
            f"{name.ljust(14)} predicted {row['predicted_bytes']:,} bytes; of {row['draws']:,} draws (the busiest "
            f"rank's rows: {row['mean_rows']:.0f} in the mean, {row['rows'][0]} at most) {row['tracked']} with most "
            f"rows took {min(row['tracked_bytes']):,} to {max(row['tracked_bytes']):,}; {row['above']} above: "
            f"{'holds' if row['holds'] else 'MISSED'}",
            flush=True,
        )
    ranks.stop()
    if options.output:
        write_record(options.output, facts("benchmarks.routing.memory"), {"rows": rows})
    return 0 if all(row["holds"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
