"""Operators that keep bits for their backward pass: predicted beside measured peaks and steps, and where a search takes
them.

    python -m benchmarks.in_bits.run [--rounds 8] [--page FILE] [--searched]

Each case is a data-parallel plan of a model on two gloo ranks of one thread each, as the template says, and with all
operators in bits that gain by it. Peaks are those of torch's own allocations in a step, on the fuller rank; gradients
of both programs are compared bit for bit. Steps are measured in turn, in processor time of a rank, which other programs
on the machine change little: the median of rounds. --searched adds what searches find under a limit, and takes minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import autopar
from autopar import pipeline
from autopar import runtime as rt
from autopar.ir.plan import Plan
from autopar.program import load_source, model_state
from autopar.step import simulated_again
from autopar.trace import trace
from autopar.zero import in_bits, rungs_in_bits, with_in_bits
from benchmarks.accuracy.memory import measure_rank, own_shard
from benchmarks.facts import facts
from models import vgg
from tests.rank_pool import RankPool

WORLD = 2
Batch = Mapping[str, Tensor]


class Encoder(nn.Module):
    """Blocks of the Transformer's feed-forward part: linear, ReLU, dropout, linear, dropout, a sum and a norm."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, sequence, width) → a scalar."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class FeedForward(nn.Module):
    """As in Vaswani et al., 2017, section 3.3, with dropout between the products as torch's layer has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)
        self.inner, self.outer = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, sequence, width) → the same shape."""
        hidden = self.inner(torch.relu(self.up(x)))
        out: Tensor = self.norm(x + self.outer(self.down(hidden)))
        return out


def vgg_case() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    config = vgg.Config((2, 2, 2), (16, 32, 64), 64, 64, 10, 16)
    return vgg.build(config), vgg.example_inputs(config)


def encoder_case() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return Encoder(6, 128), {"x": torch.randn(8, 128, 128)}


CASES: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {"vgg": vgg_case, "feed-forward": encoder_case}


def plans(case: str) -> tuple[Plan, Plan]:
    """As the template says, and in bits."""
    model, batch = CASES[case]()
    graph = trace(model, batch)
    plain = autopar.template_plan(model, autopar.Mesh("cpu", devices_per_node=WORLD), batch, dp=WORLD)
    kept = with_in_bits(plain, rungs_in_bits(graph, "cpu")[-1])
    return plain, simulated_again(kept, graph)


# The ranks ----------------------------------------


def gradients(rank: int, world: int, source: str, state: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Of one step."""
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    rt.seed_dropout(5)
    return built.train_step(**batch), built.full_gradients()


def processor_ns(rank: int, world: int, sources: list[str], state: Any, batch: Batch, rounds: int) -> list[float]:
    """Of a step of each program, in turn."""
    torch.set_num_threads(1)
    built = [rt.build(load_source(source).Program) for source in sources]
    for one in built:
        one.init_from(state, broadcast=False)
    shards = [own_shard(one, batch) for one in built]
    times: list[list[float]] = [[] for _ in built]
    for number in range(rounds + 1):
        for one, shard, known in zip(built, shards, times, strict=True):
            start = time.process_time()
            one.train_step(*shard, local=True)
            if number:
                known.append((time.process_time() - start) * 1e9)
    return [statistics.median(known) for known in times]


class Row(NamedTuple):
    """Of a program: what was predicted, and what was measured."""

    case: str
    kept: str
    predicted_bytes: int
    peak_bytes: int
    predicted_ns: int
    processor_ns: float


def measure(case: str, rounds: int) -> list[Row]:
    """Both programs of a case. Raises AssertionError where their gradients differ in a bit."""
    model, batch = CASES[case]()
    found, state = plans(case), model_state(model) or {}
    mesh = autopar.Mesh("cpu", devices_per_node=WORLD)
    sources = [autopar.parallelize(model, mesh, batch, plan=plan, check=False).source for plan in found]
    peaks = []
    for source in sources:  # in processes of their own
        ranks = RankPool(WORLD, timeout_s=600)
        try:
            peaks.append(max(one.peak_bytes for one, _ in ranks.run(measure_rank, source, state, batch)))
        finally:
            ranks.stop()
    ranks = RankPool(WORLD, timeout_s=600)
    try:
        (loss, plain), (kept_loss, kept) = (ranks.run(gradients, source, state, batch)[0] for source in sources)
        assert torch.equal(loss, kept_loss) and all(torch.equal(kept[name], value) for name, value in plain.items())
        times = [max(pair) for pair in zip(*ranks.run(processor_ns, sources, state, batch, rounds), strict=True)]
    finally:
        ranks.stop()
    return [
        Row(case, kept_text(plan), plan.predicted.peak_bytes, peak, plan.predicted.step_time_ns, ns)
        for plan, peak, ns in zip(found, peaks, times, strict=True)
    ]  # fmt: skip


def kept_text(plan: Plan) -> str:
    """How many operators keep bits."""
    return f"{len(in_bits(plan))} in bits" if in_bits(plan) else "as torch does"


# Searches ----------------------------------------


def searched(limit: int) -> list[str]:
    """Rows: VGG-19 on eight H100s within a limit, with what the search may do and without bits."""
    config = vgg.vgg19(256)
    with torch.device("meta"):
        model, batch = vgg.build(config), vgg.example_inputs(config)
    budget = autopar.SearchBudget(10, substitutions=False, proposals=0)
    every, lines = pipeline.PASSES, []
    for name, passes in (("yes", every), ("no", tuple(one for one in every if one.__name__ != "in_bits"))):
        pipeline.PASSES = passes
        mesh, start = autopar.Mesh("h100", devices_per_node=8), time.process_time()
        plan = autopar.parallelize(model, mesh, batch, search=budget, check=False, memory_limit=limit).plan
        lines.append(
            f"| {limit / 1e9:.1f} GB | {name} | {plan.predicted.step_time_ns / 1e6:.2f} ms | "
            f"{plan.predicted.peak_bytes / 1e9:.2f} GB | {len(in_bits(plan))} | {len(plan.recompute)} | "
            f"{plan.microbatches} | {time.process_time() - start:.0f} s |"
        )
    pipeline.PASSES = every
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--searched", action="store_true")
    options = parser.parse_args()
    lines = [
        "| model | kept | peak, predicted | measured | step, predicted | processor time of a rank, measured |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case in CASES:
        for row in measure(case, options.rounds):
            lines.append(
                f"| {row.case} | {row.kept} | {row.predicted_bytes:,} | {row.peak_bytes:,} | "
                f"{row.predicted_ns / 1e6:.1f} ms | {row.processor_ns / 1e6:.1f} ms |"
            )
            print(lines[-1], flush=True)
    if options.searched:
        lines += [
            "", "VGG-19, 256 images, on `h100:1x8`, within a limit:", "",
            "| limit | bits | step | peak | in bits | computed again | microbatches | planning, processor time |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |", *searched(2_400_000_000),
        ]  # fmt: skip
    text = "\n".join(
        [*lines, "", *(f"{name}: {value}  " for name, value in facts("benchmarks.in_bits.run").items()), ""]
    )
    print(text)
    if options.page is not None:
        options.page.write_text(f"# Operators that keep bits: predicted beside measured\n\n{text}")


if __name__ == "__main__":
    main()
