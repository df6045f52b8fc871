"""Tokens exchanged for experts, or gathered: what is predicted to be faster on four CPU ranks, and what is.

    python -m benchmarks.routing.gathered [--steps 20] [--output benchmarks/routing/gathered]

Two layers of sixteen experts, a quarter on each rank, of which each token takes 1 to 12. Exchanged, a choice travels to
its expert and back; gathered, every rank has all tokens, computes what its own experts make of them, and the sums are
scattered. Each is planned with its way pinned and all else open. The two programs step in turn on the same ranks, so
that what else the machine does meets both; measured is the median step of the slowest rank. Where predictions are
within 10% of each other, none is said to win. Ends with status 1 where the predicted side loses.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.program import load_source, model_state
from autopar.trace import trace
from benchmarks.facts import facts, write_record
from tests.rank_pool import RankPool

WORLD, TOKENS, WIDTH, HIDDEN, EXPERTS, LAYERS = 4, 2_048, 256, 256, 16, 2
CHOICES = (1, 2, 4, 8, 12)
TOLD_APART = 0.1
Batch = dict[str, Tensor]


class ManyExperts(nn.Module):
    """Layers of Mixtral's experts whose routers are linear."""

    def __init__(self, choices: int) -> None:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        super().__init__()
        config = MixtralConfig(
            hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=choices,
            experts_implementation="grouped_mm",
        )  # fmt: skip
        self.choices, self.first = choices, nn.Linear(WIDTH, WIDTH)
        self.routers = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(LAYERS))
        self.layers = nn.ModuleList(MixtralExperts(config) for _ in range(LAYERS))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for router, experts in zip(self.routers, self.layers, strict=True):
            weights, ids = router(x).topk(self.choices, -1)
            x = x + experts(x, ids, weights.softmax(-1))
        return x.square().mean()


def planned(model: nn.Module, batch: Batch, is_exchanged: bool) -> Any:
    """The program whose experts are split, and whose tokens are exchanged for them or gathered."""
    names = [node.results[0] for node in trace(model, batch).nodes if node.op == ROUTED_EXPERTS]
    rules = [autopar.Constraint("x", ("S(0)",), what="input"), autopar.Constraint("layers.*", ("S(0)",), what="used")]
    ways = (("S(0)",), "operands") if is_exchanged else (("P",), "tensor")
    rules += [autopar.Constraint(name, ways[0], what=ways[1]) for name in names]  # type: ignore[arg-type]
    rules.append(autopar.Constraint(stages=1, microbatches=1))
    mesh = autopar.Mesh("cpu", devices_per_node=WORLD)
    return autopar.parallelize(model, mesh, batch, constraints=rules, search="fast", check=False)


def step_times(rank: int, world: int, sources: list[str], state: Batch, batch: Batch, steps: int) -> list[list[float]]:
    """Seconds of each step of each program on one rank, in turn."""
    import torch.distributed as dist

    from autopar import runtime as rt

    built = [rt.build(load_source(source).Program) for source in sources]
    optimizers = []
    for one in built:
        one.init_from(state, broadcast=False)
        optimizers.append(torch.optim.AdamW(one.parameters(), lr=1e-4))
    found: list[list[float]] = [[] for _ in built]
    for number in range(steps + 2):
        for one, optimizer, own in zip(built, optimizers, found, strict=True):
            dist.barrier()
            began = time.perf_counter()
            optimizer.zero_grad()
            one.train_step(**batch)
            optimizer.step()
            own += [time.perf_counter() - began] if number >= 2 else []
    return found


def measured(choices: int, steps: int, ranks: RankPool) -> dict[str, Any]:
    """Milliseconds, predicted and measured, of both ways."""
    torch.manual_seed(0)
    model, batch = ManyExperts(choices), {"x": torch.randn(TOKENS, WIDTH)}
    programs = {"exchanged": planned(model, batch, True), "gathered": planned(model, batch, False)}
    sources = [program.source for program in programs.values()]
    assert "exchanged=" in sources[0] and "exchanged=" not in sources[1], "the ways are pinned"
    results = ranks.run(step_times, sources, model_state(model), batch, steps)
    slowest = [[max(own[way][step] for own in results) for step in range(steps)] for way in range(2)]
    row: dict[str, Any] = {"choices": choices}
    for (way, program), seconds in zip(programs.items(), slowest, strict=True):
        row[f"{way}_predicted_ms"] = round(program.plan.predicted.step_time_ns / 1e6, 2)
        row[f"{way}_measured_ms"] = round(statistics.median(seconds) * 1e3, 2)
    return row | {"wins": wins(row)}


def wins(row: dict[str, Any]) -> bool | None:
    """Whether what is predicted to be faster is; None where the profile does not tell the two apart."""
    ways = sorted(("exchanged", "gathered"), key=lambda way: row[f"{way}_predicted_ms"])
    if row[f"{ways[1]}_predicted_ms"] < row[f"{ways[0]}_predicted_ms"] * (1 + TOLD_APART):
        return None
    faster, slower = (row[f"{way}_measured_ms"] for way in ways)
    return bool(faster < slower)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--choices", nargs="*", type=int, default=[*CHOICES])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    ranks, rows = RankPool(WORLD, timeout_s=900.0), []
    for choices in options.choices:
        rows.append(measured(choices, options.steps, ranks))
        print(rows[-1], flush=True)
    ranks.stop()
    told = [row["wins"] for row in rows if row["wins"] is not None]
    print(f"the predicted side wins in {sum(told)} of {len(told)}, of {len(rows)}")
    if options.output:
        write_record(options.output, facts("benchmarks.routing.gathered"), {"rows": rows})
    return int(not all(told))


if __name__ == "__main__":
    sys.exit(main())
