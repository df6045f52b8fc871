"""A ladder of Llama-3-8B beside searches of its rungs by themselves: processor time, and how much slower its plans are.

    python -m benchmarks.ladder.run --kind h100 a100 [--own all|few|none | --rungs 8:384 …] [--counts 8 …] [--again]

Interleaved: as soon as the ladder has a rung, the rung's own search runs in a process of its own (`benchmarks.ladder.
alone`), which begins from nothing, as a user's would; both are processor time, so both are timed in the same minutes.
What is searched beside is said before anything runs. Written to results.json and results.md after each search. A run
that was cut off is taken up again: searches of the same sources and cost profile are not run twice, except those of
the fewest devices, which take longest and which the ladder's time is held against; --again runs all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.ladders import Ladder, Rung
from autopar.ladders.forms import Observed, fitted
from autopar.ladders.making import ladder, sorted_meshes
from autopar.ladders.text import outline_text
from benchmarks.facts import facts, profile_told, write_record
from benchmarks.ladder.alone import mesh, model_and_inputs

FILE = Path(__file__).with_name("results")
COUNTS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
BATCHES = (384, 768, 1536)
FEW = (
    (8, 384), (16, 768), (24, 384), (64, 384), (96, 1536), (128, 1536), (256, 384), (320, 384), (448, 384), (448, 768),
    (512, 384), (512, 1536),
)  # fmt: skip
"""The ends of the ladder, sizes that are no power of two, and rungs in between."""
Point = tuple[int, int]
"""Devices, and global batch."""


def tree() -> str:
    """Of the compiler's sources as they are committed; figures change with it."""
    asked = ["git", "rev-parse", "--short", "HEAD:autopar"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def alone(kind: str, point: Point) -> dict[str, Any]:
    """What a search of its own finds, and its processor time."""
    asked = [sys.executable, "-m", "benchmarks.ladder.alone", kind, *map(str, point)]
    found: dict[str, Any] = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    return {"devices": point[0], "batch": point[1], **found, "tree": tree()}


def row(rung: Rung) -> dict[str, Any]:
    """A rung as data."""
    found: dict[str, Any] = {"devices": rung.devices, "batch": rung.global_batch, "refusal": rung.refusal}
    if rung.plan is not None:
        found |= {"step_ns": rung.step_ns, "plan": outline_text(rung.plan), "how": rung.how}
        found |= {"fits": rung.plan.predicted.fits_probability}
    return found


class Interleaved:
    """A kind's ladder, rung by rung, and the searches beside it."""

    def __init__(self, kind: str, points: Iterable[Point], beside: set[Point], kinds: dict[str, Any]) -> None:
        self.kind, self.kinds, self.spent_s = kind, kinds, 0.0
        points = list(points)
        self.batches = sorted({batch for _, batch in points})
        meshes = sorted_meshes(mesh(kind, devices) for devices, _ in points)
        self.meshes = meshes
        # The order in which `autopar.ladder` makes rungs.
        self._left = [(one.num_devices, batch) for one in meshes for batch in reversed(self.batches)]
        self._beside = beside

    def made(self) -> Ladder:
        """The ladder; `spent_s` is its processor time, without that of the searches."""
        began = time.process_time()
        model, inputs = model_and_inputs(max(self.batches))
        found = ladder(
            model, inputs, self.meshes, global_batches=self.batches, check=False, progress=self._rung_is_made
        )
        self.spent_s = time.process_time() - began
        return found

    def _rung_is_made(self, line: str) -> None:
        print(line, flush=True)
        point = self._left.pop(0)
        if point not in self._beside:
            return
        own = alone(self.kind, point)
        print(f"  by itself: {own}", flush=True)
        every = [one for one in self.kinds[self.kind]["own"] if (one["devices"], one["batch"]) != point]
        self.kinds[self.kind]["own"] = sorted([*every, own], key=lambda one: (one["batch"], one["devices"]))
        write_record(FILE, facts("benchmarks.ladder.run"), {"kinds": self.kinds}, text(self.kinds))


def _off(rows: list[dict[str, Any]]) -> str:
    """Mean and largest error of each form that is fitted to the rungs."""
    points = [
        Observed(r["devices"], r["devices"] // 8, r["batch"], r["step_ns"] / 1e9) for r in rows if r.get("step_ns")
    ]
    errors = {form: fitted(points, form).error for form in ("optimus", "pollux")}
    return ", ".join(f"{mean:.1%} in the mean and {most:.1%} at most ({form})" for form, (mean, most) in errors.items())


def _pairs(one: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each rung with its own search; empty where there is none."""
    own = {(found["devices"], found["batch"]): found for found in one["own"]}
    return [(r, own.get((r["devices"], r["batch"]), {})) for r in one["rows"]]


def _summary(kind: str, one: dict[str, Any]) -> str:
    """In a paragraph."""
    pairs, times = _pairs(one), [own["processor_s"] for own in one["own"]]
    said = f"**{kind}** ({one['profile']}, {one['command']}, {one['date']}, {one['machine'].rpartition(', ')[2]}): "
    said += f"{len(pairs)} rungs in {one['processor_s']:.1f} s of processor time"
    if times:
        said += f", interleaved with {len(times)} searches of their own, of which the largest took {max(times):.1f} s: "
        said += f"ratio {one['processor_s'] / max(times):.2f}; all of these {sum(times):.0f} s"
    ratios = [r["step_ns"] / own["own_ns"] for r, own in pairs if r.get("step_ns") and own.get("own_ns")]
    if ratios:
        said += f". Step of the ladder's plan over that of its own search: mean {statistics.mean(ratios):.4f}, "
        said += f"worst {max(ratios):.4f}, best {min(ratios):.4f}, above 1.01 in "
        said += f"{sum(ratio > 1.01 for ratio in ratios)} of {len(ratios)}"
    return f"{said}. Forms that schedulers read, off by {_off(one['rows'])} of a rung's step"


def text(kinds: dict[str, Any]) -> str:
    """For people: kinds that are whole."""
    said = list[str]()
    for kind, one in kinds.items():
        if not one["rows"]:
            continue
        said += [_summary(kind, one), "", "| devices | batch | step (s) | plan | own search (s) | ratio | own plan | "
                 "processor s |", "|---" * 8 + "|"]  # fmt: skip
        for r, own in _pairs(one):
            step, own_ns = r.get("step_ns"), own.get("own_ns")
            said.append(
                f"| {r['devices']} | {r['batch']} | {step / 1e9 if step else 0:.3f} | {r.get('plan', r['refusal'])} | "
                f"{f'{own_ns / 1e9:.3f}' if own_ns else ''} | {f'{step / own_ns:.4f}' if step and own_ns else ''} | "
                f"{own.get('own_plan', '')} | {own.get('processor_s', '')} |"
            )
        said.append("")
    return "\n".join(said)


def measured(kind: str, options: argparse.Namespace, kinds: dict[str, Any]) -> None:
    """Makes a kind's ladder with the searches beside it, and writes both."""
    points = [(devices, batch) for devices in options.counts for batch in options.batches]
    wanted = set(options.rungs or {"all": points, "few": FEW, "none": ()}[options.own]) & set(points)
    profile, before = profile_told(kind), kinds.get(kind, {})
    kept = [
        own for own in before.get("own", ())
        if (own["devices"], own["batch"]) in wanted and own["tree"] == tree() and before["profile"] == profile
        and own["devices"] > min(options.counts) and not options.again
    ]  # fmt: skip
    kinds[kind] = {**facts("benchmarks.ladder.run"), "profile": profile, "own": kept, "rows": []}
    beside = wanted - {(own["devices"], own["batch"]) for own in kept}
    print(f"{kind}: {len(points)} rungs, {len(beside)} to be searched beside, {len(kept)} known", flush=True)
    interleaved = Interleaved(kind, points, beside, kinds)
    found = interleaved.made()
    kinds[kind] |= {"processor_s": round(interleaved.spent_s, 1), "rows": [row(rung) for rung in found.rungs]}
    write_record(FILE, facts("benchmarks.ladder.run"), {"kinds": kinds}, text(kinds))
    print(_summary(kind, kinds[kind]), flush=True)


def _point_of(text: str) -> Point:
    devices, _, batch = text.partition(":")
    return int(devices), int(batch)


def main() -> None:
    """Measures one kind after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", default=["h100"])
    parser.add_argument("--own", choices=("all", "few", "none"), default="few")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rungs", type=_point_of, nargs="+", help="devices:batch of those that are searched beside")
    parser.add_argument("--again", action="store_true", help="runs searches again that are known")
    options = parser.parse_args()
    place = FILE.with_suffix(".json")
    known = json.loads(place.read_text())["kinds"] if place.exists() else {}
    kinds = {kind: one for kind, one in known.items() if "own" in one}  # others are of runs that were not interleaved
    for kind in options.kind:
        try:
            measured(kind, options, kinds)
        except AutoparError as error:
            print(f"{kind}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
