"""Models of four blocks or more, and the plans of several stages that they are proved in.

`python -m tests.equivalence.pipelines --output benchmarks/equivalence` proves all of them and writes the table; the
tests take a sample.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

import autopar
from autopar.emit import emit
from autopar.errors import AutoparError, InternalError, PlanError
from autopar.interop import block_layers
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.schedule import SCHEDULES
from autopar.microbatch import check_plan
from autopar.pipeline import template_of_graph
from autopar.profiler import profiles_of
from autopar.profiler.host import cpu_model
from autopar.rewrites import graph_of
from autopar.staging import cut, stages_of_sizes
from autopar.trace import find_blocks, trace
from models import gpt, llama, moe, unet
from tests.equivalence.harness import differences, run_rank, run_single
from tests.equivalence.predicted import bytes_by_submesh
from tests.rank_pool import pool

OPTIMIZERS = ("adamw",)
Options = Mapping[str, Any]


class Variant(NamedTuple):
    """A model of so many blocks, on a batch of so many samples; with its head tied to its embedding, or as it is."""

    name: str
    blocks: int = 4
    batch: int = 8
    tied: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of plan: what `template_plan` is asked for; for unequal stages, each one's own, and its blocks.

    interleaved: the blocks of twice as many stages, in turn on the same submeshes. long: blocks of the model that an
    interleaved schedule needs. depth: blocks of the model, whatever the schedule. turned: the first stage on the last
    ranks.
    """

    options: Options = field(default_factory=dict)
    shapes: tuple[Options, ...] = ()
    blocks: tuple[int, ...] = ()
    interleaved: tuple[int, ...] = ()
    long: int = 4
    depth: int = 0
    batch: int = 8
    tied: bool = False
    turned: bool = False

    @property
    def world(self) -> int:
        """How many ranks."""
        return sum(map(_num_ranks, self.shapes)) or _num_ranks(self.options)

    def variant(self, model_name: str, schedule: str) -> Variant:
        """The model that the plan is for."""
        if self.shapes:
            blocks = sum(self.interleaved if SCHEDULES[schedule].has_chunks else self.blocks)
        else:
            blocks = self.long if SCHEDULES[schedule].has_chunks else max(4, self.options.get("pp", 1))
            blocks = self.depth or blocks
        return Variant(model_name, blocks, self.batch * self._times(schedule), self.tied)

    def microbatches(self, schedule: str) -> int:
        """As many as it says, or as the schedule needs at least."""
        submeshes = len(self.shapes) or self.options["pp"]
        return max(self._said, SCHEDULES[schedule].fewest(submeshes))

    @property
    def _said(self) -> int:
        return self.options.get("microbatches", 2)  # type: ignore[no-any-return] # a number

    def _times(self, schedule: str) -> int:
        """How much larger a batch more microbatches need, so that each has a sample for every rank."""
        count = self.microbatches(schedule)
        ranks = max(shape.get("dp", 1) for shape in self.shapes or (self.options,))
        return 1 if count == self._said or self.batch % (count * ranks) == 0 else -(-count // self._said)


def _num_ranks(options: Options) -> int:
    return math.prod(options.get(name, 1) for name in ("pp", "dp", "cp", "tp"))


def _template(long: int = 4, depth: int = 0, tied: bool = False, **options: Any) -> Kind:
    return Kind({"pp": 2, "microbatches": 4, **options}, long=long, depth=depth, tied=tied)


PLANS: dict[str, Kind] = {
    "pp2": _template(),
    "pp4": _template(pp=4, long=8),
    "pp_dp": _template(dp=2),
    "pp_tp": _template(tp=2),
    "pp_cp": _template(cp=2, microbatches=2),
    "pp_zero1": _template(dp=2, zero=1),
    "pp_zero2": _template(dp=2, zero=2),
    "pp_zero3": _template(dp=2, zero=3),
    "pp_recompute": _template(dp=2, recompute="full"),
    "pp_attention_again": _template(recompute="block"),
    "pp_operators_again": _template(dp=2, recompute="selective"),
    "pp_few": _template(microbatches=1),
    "pp_tied": _template(tied=True),
    "pp_tied_zero3": _template(tied=True, dp=2, zero=3),
    "pp2_of_3": _template(depth=3),
    "pp2_of_7_in_3": _template(depth=7, chunks=3),
    "pp2_of_6_in_4": _template(depth=6, chunks=4),
    "pp4_of_6": _template(pp=4, depth=6, tied=True),
    "pp2_dp2_of_5": _template(dp=2, depth=5, zero=1, microbatches=2),
    "unequal_stages": Kind(shapes=({}, {}), blocks=(1, 3), interleaved=(1, 2, 1, 2)),
    "unequal_stages_dp": Kind(shapes=({"dp": 2}, {"dp": 2}), blocks=(3, 1), interleaved=(2, 1, 2, 1)),
    "submeshes_1_3": Kind(shapes=({}, {"dp": 3}), blocks=(1, 3), interleaved=(1, 2, 1, 2), batch=10),
    "submeshes_3_1": Kind(shapes=({"dp": 3, "zero": 3}, {}), blocks=(3, 1), interleaved=(2, 1, 2, 1), batch=10),
    "submeshes_1_3_tied": Kind(shapes=({}, {"dp": 3}), blocks=(1, 3), interleaved=(1, 2, 1, 2), batch=10, tied=True),
    "submeshes_dp_tp": Kind(shapes=({"dp": 2}, {"tp": 2}), blocks=(2, 2), interleaved=(1, 1, 1, 1)),
    "submeshes_2_1_turned": Kind(shapes=({"tp": 2}, {}), blocks=(3, 1), interleaved=(2, 1, 2, 1), turned=True),
    "submeshes_1_2_1": Kind(shapes=({}, {"tp": 2}, {}), blocks=(1, 2, 1), interleaved=(1, 2, 1, 1, 2, 1)),
}

#: on eight ranks
LARGE_PLANS: dict[str, Kind] = {
    "pp4_dp2": _template(pp=4, dp=2, long=8),
    "pp4_tp2": _template(pp=4, tp=2, long=8),
    "pp2_tp2_dp2": _template(tp=2, dp=2),
    "pp2_tp2_zero3": _template(tp=2, dp=2, zero=3),
    "pp2_hsdp": _template(dp=4, hsdp=2, zero=2, microbatches=2),
    "pp8": _template(pp=8, microbatches=8),
    "submeshes_1_3_4": Kind(
        shapes=({}, {"dp": 3}, {"dp": 2, "tp": 2}), blocks=(1, 1, 2), interleaved=(1, 1, 2, 1, 1, 2), batch=10
    ),
    "submeshes_4_4": Kind(shapes=({"dp": 4}, {"dp": 2, "tp": 2, "zero": 1}), blocks=(1, 3), interleaved=(1, 1, 1, 1)),
}
ALL_PLANS = {**PLANS, **LARGE_PLANS}


# Models ----------------------------------------


@cache
def build(variant: Variant) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model with random weights and its batch. Raises PlanError where there is nothing like it."""
    torch.manual_seed(0)
    model, batch = MODELS[variant.name](variant)
    if variant.tied and len(dict(model.named_parameters(remove_duplicate=False))) == len(
        dict(model.named_parameters())
    ):
        raise PlanError(f"{variant.name} ties no parameters")
    return model, batch


def _own(module: Any, variant: Variant, **changes: Any) -> Any:
    config = replace(module.Config(), batch_size=variant.batch, **changes)
    return module.build(config), module.example_inputs(config)


def _tokens(batch: int) -> dict[str, torch.Tensor]:
    labels = torch.randint(0, 128, (batch, 16))
    labels[0, :7] = -100  # microbatches hold unequal counts
    return {"input_ids": torch.randint(0, 128, (batch, 16)), "labels": labels}


def _gpt2(variant: Variant) -> Any:
    config = transformers.GPT2Config(
        n_layer=variant.blocks, n_embd=32, n_head=4, n_positions=64, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0,
        bos_token_id=1, eos_token_id=1, vocab_size=128, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), _tokens(variant.batch)


def _t5(variant: Variant) -> Any:
    """Half of the blocks in the encoder."""
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=variant.blocks // 2,
        num_decoder_layers=variant.blocks - variant.blocks // 2, num_heads=4, dropout_rate=0, vocab_size=128,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), _tokens(variant.batch)


def _unet(variant: Variant) -> Any:
    """Its blocks are as many as it has: the count is not a choice."""
    return _own(unet, variant)


MODELS = {
    "gpt": lambda variant: _own(gpt, variant, num_layers=variant.blocks, tie_head=variant.tied),
    "llama": lambda variant: _own(llama, variant, num_layers=variant.blocks),
    "hf_gpt2": _gpt2,
    "hf_t5": _t5,
    "unet": _unet,
    "moe": lambda variant: _own(moe, variant, num_layers=variant.blocks + variant.blocks % 2, tie_head=variant.tied),
}


@cache
def graph(variant: Variant) -> Graph:
    """The model's graph on its batch."""
    return trace(*build(variant))


@cache
def single(variant: Variant) -> Any:
    """What the model computes on one device, in one step and in three of AdamW."""
    return run_single(*build(variant), OPTIMIZERS)


# Plans ----------------------------------------


def plan(model_name: str, plan_name: str, schedule: str) -> Plan:
    """The plan. Raises PlanError where the schedule does not go with it."""
    kind = ALL_PLANS[plan_name]
    whole = graph(kind.variant(model_name, schedule))
    mesh = autopar.Mesh("cpu", devices_per_node=kind.world)
    if not kind.shapes:
        options = {**kind.options, "microbatches": kind.microbatches(schedule)}
        return template_of_graph(whole, mesh, schedule=schedule, **options)
    found = _unequal_plan(whole, kind, schedule, mesh)
    check_plan(whole, found)
    return found


def _unequal_plan(whole: Graph, kind: Kind, schedule: str, mesh: autopar.Mesh) -> Plan:
    """Each stage planned on a mesh of its own."""
    sizes = list(map(_num_ranks, kind.shapes))
    row = SCHEDULES[schedule]
    blocks = kind.interleaved if row.has_chunks else kind.blocks
    plans = [
        template_of_graph(whole, autopar.Mesh("cpu", 1, size), microbatches=kind.microbatches(schedule), **shape)
        for size, shape in zip(sizes, kind.shapes, strict=True)
    ]
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    if kind.turned:
        firsts = [sum(sizes) - first - size for first, size in zip(firsts, sizes, strict=True)]
    chunks = len(blocks) // len(plans)
    paths = [path for group in find_blocks(whole).paths for path in group]
    members = stages_of_sizes(whole, paths, _shared_out(whole, paths, blocks))
    own = row.in_turn(plans, chunks), members, row.in_turn(firsts, chunks)
    return cut(whole, *own, schedule, mesh, profiles_of(mesh))


def _shared_out(whole: Graph, paths: list[str], blocks: tuple[int, ...]) -> list[int]:
    """The blocks of each stage, in the same proportion where the model has another number of them."""
    count = block_layers(whole, paths).count
    ends = [round(count * sum(blocks[: index + 1]) / sum(blocks)) for index in range(len(blocks))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


# The proof ----------------------------------------


def faults(model_name: str, plan_name: str, schedule: str) -> list[str]:
    """Runs the plan on gloo ranks. What is out of tolerance, or not as predicted, one line each; raises like `plan`."""
    chosen = plan(model_name, plan_name, schedule)
    variant = ALL_PLANS[plan_name].variant(model_name, schedule)
    model, batch = build(variant)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    planned = graph_of(chosen, graph(variant))
    source = emit(planned, chosen)
    results = pool(chosen.mesh.num_devices).run(run_rank, source, state, batch, OPTIMIZERS)
    found = differences(single(variant), results[0])
    if len({(loss.item(), norm.item()) for loss, _, norm, *_ in results}) > 1:
        found.append("ranks disagree about the loss or the norm")
    return found + wrong_bytes(chosen, planned, [result[4] for result in results])


def wrong_bytes(chosen: Plan, whole: Graph, counted: list[Mapping[str, int]]) -> list[str]:
    """Collectives as predicted on the first rank of each submesh (others have no more where a dim is cut unevenly),
    sends on the busiest."""
    found = []
    for ranks, predicted in bytes_by_submesh(chosen, whole):
        busiest = max(counted[rank].get("send", 0) for rank in ranks)
        own = {**counted[ranks.start], **({"send": busiest} if busiest else {})}
        if own != predicted:
            found.append(f"rank {ranks.start} sent {own}, predicted {predicted}")
    return found


@dataclass(frozen=True)
class Row:
    """What came of a plan: "equal", "no such plan", or "WRONG", and why."""

    model: str
    plan: str
    schedule: str
    outcome: str
    why: str = ""


def prove(model_name: str, plan_name: str, schedule: str) -> Row:
    """The row of one plan."""
    try:
        found = faults(model_name, plan_name, schedule)
    except InternalError as error:
        return Row(model_name, plan_name, schedule, "WRONG", str(error))
    except AutoparError as error:
        return Row(model_name, plan_name, schedule, "no such plan", str(error))
    except Exception as error:  # goes into the table, and the others are still run
        return Row(model_name, plan_name, schedule, "WRONG", f"{type(error).__name__}: {error}")
    return Row(model_name, plan_name, schedule, "WRONG" if found else "equal", "; ".join(found))


def main() -> int:
    """Proves every model in every plan and schedule that goes with it; prints a line each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", nargs="*", default=[*MODELS])
    parser.add_argument("--plans", nargs="*", default=[*ALL_PLANS])
    parser.add_argument("--schedules", nargs="*", default=[*SCHEDULES])
    parser.add_argument("--output", type=Path, help="folder for the table")
    options = parser.parse_args()
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    rows, started = [], time.monotonic()
    for model_name, plan_name, schedule in itertools.product(options.models, options.plans, options.schedules):
        rows.append(prove(model_name, plan_name, schedule))
        row = rows[-1]
        print(f"{model_name} {plan_name} {schedule}: {row.outcome}{f' ({row.why})' if row.why else ''}", flush=True)
    if options.output:
        (options.output / "pipelines.md").write_text(_text(rows, time.monotonic() - started), encoding="utf-8")
    wrong = sum(row.outcome == "WRONG" for row in rows)
    print(f"{wrong} wrong of {len(rows)}")
    return int(wrong > 0)


def _text(rows: list[Row], seconds: float) -> str:
    counts = Counter(row.outcome for row in rows)
    facts = {
        "command": " ".join(["python -m tests.equivalence.pipelines", *sys.argv[1:]]),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
        "date": date.today().isoformat(),
        "seconds": f"{seconds:.0f}",
        "equal": "loss within 1e-5, each gradient and the clipped norm within 1e-4, weights after three AdamW steps "
        "within 1e-3 (relative, float32), the same loss and norm on every rank, bytes of each collective on the first "
        "rank of each submesh and of sends on the busiest exactly as predicted",
        "rows": ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())),
    }
    known = {(row.model, row.plan, row.schedule): row.outcome for row in rows}
    schedules = list(dict.fromkeys(row.schedule for row in rows))
    lines = [*(f"{key}: {value}  " for key, value in facts.items()), ""]
    lines += [f"| model | plan | ranks | {' | '.join(schedules)} |", "|---" * (len(schedules) + 3) + "|"]
    for model_name, plan_name in dict.fromkeys((row.model, row.plan) for row in rows):
        cells = [known[model_name, plan_name, schedule] for schedule in schedules]
        lines.append(f"| {model_name} | {plan_name} | {ALL_PLANS[plan_name].world} | {' | '.join(cells)} |")
    lines += ["", "## Why not", ""]
    for row in rows:
        if row.outcome != "equal":
            lines.append(f"- {row.model} {row.plan} {row.schedule}, {row.outcome}: {' '.join(row.why.split())[:400]}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    raise SystemExit(main())
