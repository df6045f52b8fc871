"""Served decoders on CPU ranks: the batch that a latency bound allows, and steps that are measured against the bound.

    python -m benchmarks.serving.run --ranks 2 --bounds 40 150 --tail 2  # stated beforehand
    python -m benchmarks.serving.run [--ranks 2 4] [--priority 0]  # by the tail that is measured

Run from the root of the repository. A Llama of transformers with random weights is planned for gloo ranks of this host,
with a small and a large batch. Ranks fill all slots and decode; a measured step is `Server.decode` with
`Server.chosen`, as a server calls them, on the rank that took longest. With bounds, in milliseconds, and the tail that
is counted on, `LatencyCurve.largest`, which `autopar.serve` asks, takes the batch of three, and its steps are
measured. Without, the tail is measured first: the p99 of steps over what is predicted, the larger of both batches; a
bound is then what either is predicted to take with that tail, and half as much again, which says little of the
prediction. Writes results.json and results.md here; ends with status 1 where a measured p99 is over its bound.
priority: of the ranks while they are measured, on a host that others use, such as -15.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import autopar
from autopar.errors import InfeasibleError
from autopar.runtime.serving import Server
from autopar.serving import LatencyCurve, ServedProgram
from autopar.serving.program import state_of
from benchmarks.facts import facts, write_record
from tests.rank_pool import RankPool
from tests.serving.jobs import server

HERE = Path(__file__).parent
LENGTH, PROMPT, BATCHES = 256, 64, (2, 32)
BOUND_BATCHES = (2, 8, 32)
MARGIN = 1.5


def model() -> Any:
    """6.9M parameters, grouped heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=LENGTH,
        )
    ).eval()  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Milliseconds of a decode and a prefill step, and what was asked for."""

    ranks: int
    bound_ms: float | None
    layout: str
    batch: int
    tail: float
    predicted_ms: float
    processor_ms: float
    median_ms: float
    p99_ms: float
    predicted_prefill_ms: float
    prefill_ms: float
    load: float

    @property
    def holds(self) -> bool:
        return self.bound_ms is None or self.p99_ms <= self.bound_ms


def measure(
    rank: int, world: int, source: str, state: dict[str, Tensor], steps: int, priority: int
) -> tuple[list[float], ...]:  # fmt: skip
    """Seconds of each decode step and each prefill step on one rank, and processor seconds of each decode step."""
    own, before = server(source, state, LENGTH), os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, priority)
    try:
        return _steps(own, steps)
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def _steps(own: Server, steps: int) -> tuple[list[float], ...]:
    generator = torch.Generator().manual_seed(0)
    decoded, filled, worked = list[float](), list[float](), list[float]()
    while len(decoded) < steps:
        own.release(range(own.max_batch))
        prompts = {s: torch.randint(8192, (PROMPT,), generator=generator).tolist() for s in range(own.max_batch)}
        start = time.perf_counter()
        last = own.chosen(own.prefill(prompts))
        filled.append(time.perf_counter() - start)
        for _ in range(min(LENGTH - PROMPT, steps - len(decoded))):
            start, busy = time.perf_counter(), time.process_time()
            last = own.chosen(own.decode(last))
            decoded.append(time.perf_counter() - start)
            worked.append(time.process_time() - busy)
    return decoded, filled, worked


def planned(world: int, batch: int) -> ServedProgram:
    """The model served by so many ranks."""
    return autopar.serve(
        model(), autopar.Mesh("cpu", devices_per_node=world), max_batch=batch, max_length=LENGTH,
        prompt_lengths=[PROMPT], check=False, dp=1, tp=world, pp=1,
    )  # fmt: skip


def row(
    ranks: RankPool, program: ServedProgram, options: argparse.Namespace, bound_ms: float | None = None,
    tail: float = 1.0,
) -> Row:  # fmt: skip
    """Measures a program."""
    found = ranks.run(measure, program.source, state_of(model()), options.steps, options.priority)
    decoded, filled, worked = (torch.tensor([one[kind] for one in found]).amax(0).mul(1e3) for kind in range(3))
    own = program.latency
    assert own.decode is not None
    return Row(
        ranks.world, bound_ms, own.layout, own.batch, tail, own.decode.predicted_ns / 1e6,
        float(worked[1:].median()), float(decoded[1:].median()), float(decoded[1:].quantile(0.99)),
        own.prefill[PROMPT].predicted_ns / 1e6, float(filled.median()), os.getloadavg()[0],
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    heads = ("ranks", "layout", "bound", "tail", "batch", "predicted step", "processor time", "median", "p99", "within",
             "prefill predicted", "prefill median", "load")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for one in rows:
        cells = (
            one.ranks, one.layout, f"{one.bound_ms:.0f} ms" if one.bound_ms else "none", f"{one.tail:.1f}", one.batch,
            f"{one.predicted_ms:.1f} ms",
            f"{one.processor_ms:.1f} ms", f"{one.median_ms:.1f} ms", f"{one.p99_ms:.1f} ms",
            "yes" if one.holds else "no",
            f"{one.predicted_prefill_ms:.0f} ms", f"{one.prefill_ms:.0f} ms", f"{one.load:.1f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def stated(world: int, options: argparse.Namespace) -> list[Row]:
    """Of bounds that were stated beforehand, the batch that the prediction allows, measured."""
    ranks, programs = RankPool(world, timeout_s=900.0), {batch: planned(world, batch) for batch in BOUND_BATCHES}
    curve = LatencyCurve(tuple(program.latency for program in programs.values()))
    rows = list[Row]()
    for bound in options.bounds:
        try:
            taken = programs[curve.largest(bound, tail=options.tail).batch]
        except InfeasibleError as error:
            print(f"{world} ranks, {bound:g} ms: {error}", flush=True)
            continue
        rows.append(row(ranks, taken, options, bound, options.tail))
    print(table(rows), flush=True)
    ranks.stop()
    return rows


def main() -> int:
    """Measures each bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--priority", type=int, default=0)
    parser.add_argument("--bounds", type=float, nargs="*", default=[], help="milliseconds of a decode step")
    parser.add_argument("--tail", type=float, default=1.0, help="of the slowest of a hundred steps, with --bounds")
    options = parser.parse_args()
    rows = list[Row]()
    for world in options.ranks if options.bounds else ():
        rows += stated(world, options)
    for world in () if options.bounds else options.ranks:
        ranks, programs = RankPool(world, timeout_s=900.0), {batch: planned(world, batch) for batch in BATCHES}
        curve = LatencyCurve(tuple(program.latency for program in programs.values()))
        ends = [row(ranks, program, options) for program in programs.values()]
        tail = max(1.0, *(one.p99_ms / one.predicted_ms for one in ends))
        bounds = [MARGIN * tail * one.predicted_ms for one in ends]
        taken = [programs[curve.largest(bound, tail=tail).batch] for bound in bounds]
        held = [row(ranks, one, options, bound, tail) for one, bound in zip(taken, bounds, strict=True)]
        rows += [*ends, *held]
        print(table(rows[-4:]), flush=True)
        ranks.stop()
    told = facts("benchmarks.serving.run")
    write_record(HERE / "results", told, {"rows": [asdict(one) for one in rows]}, table(rows))
    return 0 if all(one.holds for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
