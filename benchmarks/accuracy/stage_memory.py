"""Plans of several stages under the smallest memory limit that the planner accepts, run on gloo ranks.

    python -m benchmarks.accuracy.stage_memory [--cases gpt/pp2 …] [--output benchmarks/accuracy]

Run from the root of the repository. For each case the planner is asked for a plan within one byte; it refuses and names
the smallest limit that can be met; under that limit it makes the plan that is run. Measured is the peak of every rank
in a whole step (with AdamW), after a first step: every allocation and release of torch's CPU allocator (lifetimes.py).
Writes stage_memory.json and stage_memory.md, and ends with status 1 when a rank takes more than the limit, or more than
3% above what was predicted for it.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.pipeline import simulated_step, template_of_graph
from autopar.profiler import profiles_of
from autopar.program import load_source
from autopar.staging import cut, stages_of_sizes
from autopar.trace import find_blocks, trace
from benchmarks.accuracy.lifetimes import Lifetimes, live_storages, track
from benchmarks.accuracy.reports import write_report
from models import gpt, llama, moe, unet
from tests.rank_pool import RankPool, pool

HERE = Path(__file__).parent
UNDER = 0.03
Batch = dict[str, Tensor]


# Models ----------------------------------------


def _own(module: Any, **sizes: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    def make() -> tuple[nn.Module, Batch]:
        config = module.Config(**sizes)
        return module.build(config), module.example_inputs(config)

    return make


def _tokens() -> Batch:
    return {"input_ids": torch.randint(0, 1024, (16, 64)), "labels": torch.randint(0, 1024, (16, 64))}


def _gpt2() -> tuple[nn.Module, Batch]:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=128, n_head=4, n_positions=64, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0, bos_token_id=1,
        eos_token_id=1, vocab_size=1024, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), _tokens()


def _t5() -> tuple[nn.Module, Batch]:
    config = transformers.T5Config(
        d_model=128, d_kv=32, d_ff=512, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0,
        vocab_size=1024, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), _tokens()


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "gpt": _own(gpt, num_layers=4, hidden_size=128, num_heads=4, seq_len=64, vocab_size=1024, batch_size=16),
    "llama": _own(
        llama, num_layers=4, hidden_size=128, num_heads=4, num_kv_heads=2, mlp_size=352, seq_len=64, vocab_size=1024,
        batch_size=16,
    ),
    "moe": _own(
        moe, num_layers=4, hidden_size=96, num_heads=3, num_experts=4, seq_len=64, vocab_size=1024, batch_size=16
    ),
    "unet": _own(unet, base_channels=32, image_size=16, attention_sizes=(8,), batch_size=16),
    "hf_gpt2": _gpt2,
    "hf_t5": _t5,
}  # fmt: skip


@cache
def build(name: str) -> tuple[nn.Module, Batch]:
    """A model of MODELS with random weights, and its global batch; the same for the same name."""
    torch.manual_seed(0)
    return MODELS[name]()


@cache
def traced(name: str) -> Graph:
    """The model's graph on its batch."""
    return trace(*build(name))


# Plans ----------------------------------------

TEMPLATES: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2, "microbatches": 4},
    "pp2-single": {"pp": 2, "microbatches": 1},
    "pp4": {"pp": 4, "microbatches": 4},
    "pp-dp": {"pp": 2, "dp": 2, "microbatches": 4},
    "pp-tp": {"pp": 2, "tp": 2, "microbatches": 4},
    "pp-zero1": {"pp": 2, "dp": 2, "microbatches": 4, "zero": 1},
    "pp-zero2": {"pp": 2, "dp": 2, "microbatches": 4, "zero": 2},
    "pp-zero3": {"pp": 2, "dp": 2, "microbatches": 4, "zero": 3},
    "gpipe": {"pp": 2, "microbatches": 4, "schedule": "gpipe"},
    "gpipe-zero3": {"pp": 2, "dp": 2, "microbatches": 4, "zero": 3, "schedule": "gpipe"},
    "interleaved": {"pp": 2, "microbatches": 4, "schedule": "interleaved"},
    "interleaved-zero3": {"pp": 2, "dp": 2, "microbatches": 4, "zero": 3, "schedule": "interleaved"},
    "zero_bubble": {"pp": 2, "microbatches": 4, "schedule": "zero_bubble"},
    "zero_bubble-4": {"pp": 4, "microbatches": 4, "schedule": "zero_bubble"},
    "zero_bubble-dp": {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "zero_bubble"},
    "zero_bubble-zero3": {"pp": 2, "dp": 2, "microbatches": 4, "zero": 3, "schedule": "zero_bubble"},
    "dualpipev": {"pp": 2, "microbatches": 8, "schedule": "dualpipev"},
    "dualpipev-dp": {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "dualpipev"},
    "dualpipev-zero3": {"pp": 2, "dp": 2, "microbatches": 4, "zero": 3, "schedule": "dualpipev"},
    "interleaved_zero_bubble": {"pp": 2, "microbatches": 4, "schedule": "interleaved_zero_bubble"},
    "zero_bubble_v": {"pp": 2, "microbatches": 4, "schedule": "zero_bubble_v"},
    "recompute": {"pp": 2, "microbatches": 4, "recompute": "full"},
    "recompute-4": {"pp": 4, "microbatches": 4, "recompute": "full"},
    "recompute-block": {"pp": 2, "microbatches": 4, "recompute": "block"},
    "recompute-zero3": {"pp": 2, "dp": 2, "microbatches": 4, "zero": 3, "recompute": "full"},
}
#: by name: what each stage has, as `template_plan` is asked for it
UNEQUAL: dict[str, tuple[dict[str, Any], ...]] = {
    "1+2": ({}, {"dp": 2}),
    "1+3": ({}, {"dp": 3}),
    "2+1 tp": ({"tp": 2}, {}),
    "2+2 tp dp": ({"tp": 2}, {"dp": 2, "zero": 1}),
    "2+1 zero3": ({"dp": 2, "zero": 3}, {}),
}


class Case(NamedTuple):
    """A model of MODELS in a plan of TEMPLATES or UNEQUAL."""

    model: str
    plan: str

    def __str__(self) -> str:
        return f"{self.model}/{self.plan}"


def planned(case: Case) -> Plan:
    """The plan under the smallest limit that the planner accepts, which its `memory_limit` says."""
    if case.plan in UNEQUAL:
        return _unequal(case)
    choices = TEMPLATES[case.plan]
    mesh = autopar.Mesh("cpu", devices_per_node=_world(choices))
    try:
        template_of_graph(traced(case.model), mesh, memory_limit=1, **choices)
    except InfeasibleError as error:
        assert error.smallest_bytes is not None
        return template_of_graph(traced(case.model), mesh, memory_limit=error.smallest_bytes, **choices)
    raise AssertionError("expected no plan within a byte")


def _world(choices: dict[str, Any]) -> int:
    return int(choices.get("pp", 1) * choices.get("dp", 1) * choices.get("tp", 1))


def _unequal(case: Case) -> Plan:
    """Equal numbers of blocks on unequal submeshes; no search makes it, so that its predicted peak is the limit."""
    whole, shapes = traced(case.model), UNEQUAL[case.plan]
    sizes = [_world(shape) for shape in shapes]
    plans = [
        template_of_graph(whole, autopar.Mesh("cpu", 1, size), microbatches=4, **shape)
        for size, shape in zip(sizes, shapes, strict=True)
    ]
    paths = [path for group in find_blocks(whole).paths for path in group]
    each = len(paths) // len(sizes)
    members = stages_of_sizes(whole, paths, [each] * (len(sizes) - 1) + [len(paths) - each * (len(sizes) - 1)])
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    mesh = autopar.Mesh("cpu", devices_per_node=sum(sizes))
    plan = cut(whole, plans, members, firsts, "1f1b", mesh, profiles_of(mesh))
    return replace(plan, memory_limit=simulated_step(whole, plan).peak_bytes)


# Runs ----------------------------------------


@dataclass(frozen=True)
class Row:
    """The rank of a case that is most under-predicted, and the limit against the fullest."""

    case: str
    limit_bytes: int
    peak_bytes: int
    rank: int
    predicted_bytes: int
    measured_bytes: int
    predicted_at_peak: dict[str, int]
    measured_at_peak: list[tuple[str, int]]
    measured_in: str

    @property
    def error(self) -> float:
        """Above zero where more was predicted than measured."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def fits(self) -> bool:
        """Whether no rank takes more than the limit."""
        return self.peak_bytes <= self.limit_bytes


def measure_rank(rank: int, world: int, source: str, state: Batch, batch: Batch) -> Lifetimes:
    """The memory of the second step of the program on one rank."""
    from autopar import runtime as rt

    before = live_storages()
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4)
    shard = _own_shard(built, batch)

    def step() -> None:
        built.train_step(**shard, local=True)
        optimizer.step()

    step()
    optimizer.zero_grad()
    return track(step, before)


def _own_shard(rank: Any, batch: Batch) -> dict[str, Tensor | None]:
    """What the stages of a rank read of the global batch, in memory of its own."""
    from autopar.runtime.inputs import split_named

    shard: dict[str, Tensor | None] = dict.fromkeys(batch)
    for part in rank._locals:
        columns = zip(*split_named(type(part.program), batch, part.mesh, False), strict=True)
        for spec, parts in zip(type(part.program).INPUTS, columns, strict=False):
            dim = spec.microbatch_dim
            shard[spec.name] = parts[0].clone() if dim is None else torch.cat(parts, dim)
    return shard


def measure(case: Case, ranks_of: Callable[[int], RankPool] = pool) -> Row:
    """Plans, runs, and puts both beside each other."""
    model, batch = build(case.model)
    plan = planned(case)
    program = autopar.parallelize(model, plan.mesh, batch, plan=plan)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = ranks_of(plan.mesh.num_devices).run(measure_rank, program.source, state, batch)
    lanes: Any = simulated_step(traced(case.model), plan).lanes
    pairs = [(rank, lane) for lane in lanes for rank in lane.ranks]
    rank, lane = min(pairs, key=lambda pair: pair[1].peak_bytes / results[pair[0]].peak_bytes)
    return Row(
        case=str(case),
        limit_bytes=plan.memory_limit,
        peak_bytes=max(result.peak_bytes for result in results),
        rank=rank,
        predicted_bytes=lane.peak_bytes,
        measured_bytes=results[rank].peak_bytes,
        predicted_at_peak=dict(lane.memory_at_peak),
        measured_at_peak=list(results[rank].at_peak),
        measured_in=results[rank].peak_in,
    )


# Cases ----------------------------------------


def _cases() -> Iterator[Case]:
    everywhere = "pp2 pp4 pp-tp pp-zero1 pp-zero3 interleaved zero_bubble gpipe recompute 1+2"
    for model in ("gpt", "hf_gpt2", "llama", "moe", "hf_t5", "unet"):
        yield from (Case(model, plan) for plan in everywhere.split())
    for plan in (*TEMPLATES, *UNEQUAL):
        if plan not in everywhere.split():
            yield Case("gpt", plan)


CASES = tuple(_cases())


# Results ----------------------------------------


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    heads = ("case", "limit MB", "peak MB", "of limit", "rank", "predicted MB", "measured MB", "error", "measured in")
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for row in rows:
        cells = (
            row.case, f"{row.limit_bytes / 1e6:.3f}", f"{row.peak_bytes / 1e6:.3f}",
            f"{row.peak_bytes / row.limit_bytes:.2%}", str(row.rank), f"{row.predicted_bytes / 1e6:.3f}",
            f"{row.measured_bytes / 1e6:.3f}", f"{row.error:+.2%}", row.measured_in,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: list[Row]) -> tuple[str, bool]:
    """What was to be shown, in figures, and whether it holds."""
    fitting = sum(row.fits for row in rows)
    fullest, lowest = max(rows, key=lambda r: r.peak_bytes / r.limit_bytes), min(rows, key=lambda r: r.error)
    most = fullest.peak_bytes / fullest.limit_bytes
    text = (
        f"{len(rows)} plans: {fitting} within their limit, most of it taken {most:.2%} ({fullest.case}); "
        f"ranks predicted most under {lowest.error:+.2%} ({lowest.case}; target {-UNDER:.0%})."
    )
    return text, fitting == len(rows) and lowest.error >= -UNDER


def write(folder: Path, rows: list[Row]) -> None:
    """Writes stage_memory.json and stage_memory.md."""
    write_report(folder, "stage_memory", rows, summary(rows)[0], table(rows))


def main() -> None:
    """Measures the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {str(case): case for case in CASES}
    parser.add_argument("--cases", nargs="*", default=[*names], metavar="MODEL/PLAN")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in options.cases:
        try:
            row = measure(Case(*name.split("/", 1)))
        except autopar.AutoparError as error:
            print(f"{name}: no such plan ({error})", flush=True)
            continue
        rows.append(row)
        print(
            f"{name}: {row.error:+.2%} rank {row.rank}, {row.peak_bytes / row.limit_bytes:.2%} of the limit", flush=True
        )
    write(options.output, rows)
    text, holds = summary(rows)
    print(text)
    sys.exit(not holds)


if __name__ == "__main__":
    main()
