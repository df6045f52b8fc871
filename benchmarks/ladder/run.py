"""A ladder of Llama-3-8B beside searches of its rungs by themselves: processor time, and how much slower its plans are.

    python -m benchmarks.ladder.run --kind h100 [--own all|few|none | --rungs 8:384 …] [--counts 8 …] [--batches 384 …]

The ladder is made from the model on; each search of its own too, as a user would call `parallelize(search="fast")`,
without emitting. Processor time of this process; the ladder is made before these searches and once more after them, so
that both are timed under the same load. Written to results.json and results.md, a kind as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.errors import AutoparError
from autopar.ladders import Ladder, Rung
from autopar.ladders.forms import Observed, fitted
from autopar.ladders.text import outline_text
from autopar.pipeline import planned_jointly
from autopar.request import BUDGETS, Request
from autopar.trace import trace
from benchmarks.facts import facts, profile_told, write_record
from models import llama

FILE = Path(__file__).with_name("results")
COUNTS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
BATCHES = (384, 768, 1536)
FEW = (
    (8, 384), (16, 768), (24, 384), (64, 384), (96, 1536), (128, 1536), (256, 384), (320, 384), (448, 384), (448, 768),
    (512, 384), (512, 1536),
)  # fmt: skip
"""The ends of the ladder, sizes that are no power of two, and rungs in between."""
Alone = tuple[autopar.Plan | None, float, str]


def model_and_inputs(batch: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Llama-3-8B in bfloat16, without weights."""
    config = llama.llama3_8b()
    with torch.device("meta"):
        model = llama.build(config).to(torch.bfloat16)
    tokens = torch.empty((batch, config.seq_len), dtype=torch.long, device="meta")
    return model, {"tokens": tokens, "labels": tokens}


def mesh(kind: str, devices: int) -> autopar.Mesh:
    return autopar.Mesh(kind, nodes=devices // 8, devices_per_node=8)


def made(kind: str, counts: tuple[int, ...], batches: tuple[int, ...]) -> tuple[Ladder, float]:
    """The ladder, and what it took."""
    began = time.process_time()
    model, inputs = model_and_inputs(max(batches))
    found = autopar.ladder(
        model, inputs, [mesh(kind, n) for n in counts], global_batches=batches, check=False, progress=print
    )  # fmt: skip
    return found, time.process_time() - began


def alone(kind: str, devices: int, batch: int) -> Alone:
    """A search of its own: the plan (None where nothing fits), processor seconds, and the plan in words."""
    began = time.process_time()
    graph = trace(*model_and_inputs(batch))
    try:
        plan = planned_jointly(graph, Request(mesh(kind, devices), "train", "adamw", None, (), BUDGETS["fast"]))[1]
    except AutoparError as error:
        return None, time.process_time() - began, str(error)
    return plan, time.process_time() - began, outline_text(plan)


def _steps(ladder: Ladder) -> list[int]:
    return [rung.step_ns if rung.fits else 0 for rung in ladder.rungs]


def row(rung: Rung, own: Alone | None) -> dict[str, Any]:
    found: dict[str, Any] = {"devices": rung.devices, "batch": rung.global_batch, "refusal": rung.refusal}
    if rung.plan is not None:
        found |= {"step_ns": rung.step_ns, "plan": outline_text(rung.plan), "how": rung.how}
        found |= {"fits": rung.plan.predicted.fits_probability}
    if own is not None:
        told = None if own[0] is None else own[0].predicted
        found |= {"own_ns": told and told.step_time_ns, "own_fits": told and told.fits_probability}
        found |= {"own_processor_s": round(own[1], 1), "own_plan": own[2]}
    return found


def _off(rows: list[dict[str, Any]]) -> str:
    """Mean and largest error of each form that is fitted to the rungs."""
    points = [
        Observed(r["devices"], r["devices"] // 8, r["batch"], r["step_ns"] / 1e9) for r in rows if r.get("step_ns")
    ]
    errors = {form: fitted(points, form).error for form in ("optimus", "pollux")}
    return ", ".join(f"{mean:.1%} in the mean and {most:.1%} at most ({form})" for form, (mean, most) in errors.items())


def text(kinds: dict[str, Any]) -> str:
    said = list[str]()
    for kind, one in kinds.items():
        rows = one["rows"]
        ratios = [r["step_ns"] / r["own_ns"] for r in rows if r.get("step_ns") and r.get("own_ns")]
        times = [r["own_processor_s"] for r in rows if "own_processor_s" in r]
        said.append(f"**{kind}** ({one['profile']}, {one['command']}, {one['date']}): {len(rows)} rungs in "
                    f"{one['processor_s']:.1f} s of processor time")  # fmt: skip
        if one.get("again_s"):
            said[-1] += f" ({one['again_s']:.1f} s when made again after the searches beside it)"
        if times:
            most, fewest = max(one["processor_s"], one.get("again_s", 0.0)), min(r["devices"] for r in rows)
            has_largest = any("own_ns" in r for r in rows if r["devices"] == fewest)
            unknown = f"of which none on {fewest} devices, where they take longest"
            said[-1] += f"; the largest of {len(times)} searches of their own {max(times):.1f} s, "
            said[-1] += f"ratio {most / max(times):.2f}" if has_largest else unknown
            said[-1] += f"; all of these {sum(times):.0f} s"
        if ratios:
            said[-1] += f". Step of the ladder's plan over that of its own search: mean {statistics.mean(ratios):.4f}, "
            said[-1] += f"worst {max(ratios):.4f}, best {min(ratios):.4f}, above 1.01 in "
            said[-1] += f"{sum(ratio > 1.01 for ratio in ratios)} of {len(ratios)}"
        said[-1] += f". {one['note']}" if "note" in one else ""
        said[-1] += f". Forms that schedulers read, off by {_off(rows)} of a rung's step"
        said += ["", "| devices | batch | step (s) | plan | own search (s) | ratio | own plan | processor s |"]
        said.append("|---" * 8 + "|")
        for r in rows:
            step, own = r.get("step_ns"), r.get("own_ns")
            said.append(
                f"| {r['devices']} | {r['batch']} | {step / 1e9 if step else 0:.3f} | {r.get('plan', r['refusal'])} | "
                f"{f'{own / 1e9:.3f}' if own else ''} | {f'{step / own:.4f}' if step and own else ''} | "
                f"{r.get('own_plan', '')} | {r.get('own_processor_s', '')} |"
            )
        said.append("")
    return "\n".join(said)


def _rung_of(text: str) -> tuple[int, int]:
    devices, _, batch = text.partition(":")
    return int(devices), int(batch)


def main() -> None:
    """Measures one kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="h100")
    parser.add_argument("--own", choices=("all", "few", "none"), default="few")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rungs", type=_rung_of, nargs="+", help="devices:batch of those that are searched beside")
    options = parser.parse_args()
    ladder, spent = made(options.kind, tuple(options.counts), tuple(options.batches))
    print(ladder)
    place = FILE.with_suffix(".json")
    kinds = json.loads(place.read_text())["kinds"] if place.exists() else {}
    rows = [row(rung, None) for rung in ladder.rungs]
    told = facts("benchmarks.ladder.run")
    kinds[options.kind] = {**told, "profile": profile_told(options.kind), "processor_s": round(spent, 1), "rows": rows}
    every = {(rung.devices, rung.global_batch) for rung in ladder.rungs}
    wanted = every & set(options.rungs or {"all": every, "few": FEW, "none": ()}[options.own])
    for number, rung in enumerate(ladder.rungs):
        if (rung.devices, rung.global_batch) in wanted:
            rows[number] = row(rung, alone(options.kind, rung.devices, rung.global_batch))
            print(rows[number], flush=True)
            write_record(FILE, told, {"kinds": kinds}, text(kinds))
    if wanted:
        again, spent = made(options.kind, tuple(options.counts), tuple(options.batches))
        assert _steps(again) == _steps(ladder), "expected the same ladder again"
        kinds[options.kind]["again_s"] = round(spent, 1)
    write_record(FILE, told, {"kinds": kinds}, text(kinds))


if __name__ == "__main__":
    main()
