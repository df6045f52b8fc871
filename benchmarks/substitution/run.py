"""Search time, predicted and measured gain of substitutions on nine graphs.

    python -m benchmarks.substitution.run [--models bert vgg19 …] [--modes train inference] [--rounds 15] [--most 90]
                                          [--profile cpu] [--elsewhere h100] [--seconds 10] [--keep] [--output FOLDER]

Run from the root of the repository. Each graph of graphs.py is traced for training (a step is forward and backward) and
for inference (forward), and rewritten for the CPU by the search, with the costs of --profile. Both graphs are emitted
for one rank in the same way, compared with the model (loss, every gradient, buffers), and timed in turns on one
thread, in one process that keeps its freed memory. A measured gain is the median of the rounds' ratios of processor
time: on one thread that is the time of the wall but for what other programs take. As many rounds again are added, up
to --most, until the median is known to `NOISE` or to be far from 1: by its confidence interval of 95%, from the ratios'
order alone. The program of the graph as it was is timed twice; the gain of one over the other, "control", says how far
gains can be told apart on this machine.
For the devices --elsewhere, the gain is only predicted. A graph that the search leaves as it is, is not timed: its
gain is 1. With --keep, the rows of graphs that are not asked for stay as results.json has them, so that all may be made
in parts.

Printed and written to results.json and results.md with command, machine and date: the table; how many graphs are
predicted and measured on the same side of 1 (what is within `NOISE` of it counts as 1); the mean error of the predicted
gain, |predicted / measured − 1|. Ends with status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from autopar import runtime
from autopar.profiler import load_profile
from autopar.substitute.backtracking import RESOLUTION
from autopar.trace import trace
from benchmarks.facts import facts, write_record
from benchmarks.substitution.graphs import GRAPHS, SIZES, build
from benchmarks.substitution.searching import Found, search
from benchmarks.substitution.timing import (
    Call,
    Times,
    call_of,
    compare_with_model,
    gain,
    interval_of_gain,
    program_of,
    times,
)

HERE = Path(__file__).parent
NOISE = RESOLUTION
FAR = 1.1  # a gain that no noise makes of 1
SEARCH_S, MEAN_ERROR, SLOWEST = 10.0, 0.20, 1 / 1.02
#: gains that are to be reached, by model, mode and where
TARGETS = {
    ("llama_lora", "train", "measured"): 1.1,
    ("llama_lora_weight", "train", "measured"): 1.1,
    ("nas_rnn", "train", "h100"): 1.4,
    ("bert", "train", "h100"): 1.1,
}


@dataclass(frozen=True)
class Row:
    """A graph before and after; gains are times before over times after, `elsewhere` predicted by profile."""

    model: str
    mode: str
    operators: tuple[int, int]
    search_s: float
    stop: str
    applied: dict[str, int]
    predicted: float
    elsewhere: dict[str, float]
    elsewhere_s: dict[str, float]
    measured: float
    quartiles: tuple[float, float]
    interval: tuple[float, float]
    rounds: int
    measured_wall: float
    control: float
    before_ms: float | None
    after_ms: float | None
    faults: tuple[str, ...]
    differences: dict[str, float] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether prediction and measurement lie on the same side of 1, or close together."""
        return _side(self.predicted) == _side(self.measured) or abs(self.predicted - self.measured) <= NOISE

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)


def _side(gained: float) -> int:
    return 0 if abs(gained - 1) <= NOISE else 1 if gained > 1 else -1


def row(name: str, mode: str, options: argparse.Namespace) -> Row:
    """Traces, searches, compares and times one graph."""
    model, batch = build(name, mode)
    graph = trace(model, batch, mode=mode)
    found = search(graph, load_profile(options.profile), mode, options.seconds)
    others = {other: search(graph, load_profile(other), mode, options.seconds) for other in options.elsewhere}
    before, after = (program_of(each, model, mode) for each in (graph, found.graph))
    ranks = [program.build() for program in (before, after, before)]
    compared = [compare_with_model(rank, model, batch, mode) for rank in ranks[:2]]
    worst = compared[1]
    return Row(
        model=name,
        mode=mode,
        operators=(len(graph.nodes), len(found.graph.nodes)),
        search_s=round(found.seconds, 2),
        stop=found.stop,
        applied=dict(Counter(found.applied)),
        predicted=round(found.gain, 4),
        elsewhere={other: round(result.gain, 4) for other, result in others.items()},
        elsewhere_s={other: round(result.seconds, 2) for other, result in others.items()},
        faults=tuple(
            f"{which}: {fault}"
            for which, each in zip(("before", "after"), compared, strict=True)
            for fault in each.faults()
        ),
        differences={"loss": worst.loss, "gradient": worst.gradient, "buffer": worst.buffer},
        **_measured(ranks, batch, mode, found, before.source == after.source, options),
    )


def _measured(ranks: list, batch: dict, mode: str, found: Found, same: bool, options: argparse.Namespace) -> dict:
    """The measured fields of a row."""
    if same:
        return {"measured": 1.0, "quartiles": (1.0, 1.0), "interval": (1.0, 1.0), "rounds": 0, "measured_wall": 1.0,
                "control": 1.0, "before_ms": None, "after_ms": None}  # fmt: skip
    before, after, again = _settled([call_of(rank, batch, mode) for rank in ranks], options.rounds, options.most)
    gained, (low, high) = gain(before.cpu, after.cpu)
    least, greatest = interval_of_gain(before.cpu, after.cpu)
    return {
        "measured": round(gained, 4),
        "quartiles": (round(low, 4), round(high, 4)),
        "interval": (round(least, 4), round(greatest, 4)),
        "rounds": len(before.cpu),
        "measured_wall": round(gain(before.wall, after.wall)[0], 4),
        "control": round(gain(before.cpu, again.cpu)[0], 4),
        "before_ms": round(statistics.median(before.cpu), 3),
        "after_ms": round(statistics.median(after.cpu), 3),
    }


def _settled(calls: list[Call], rounds: int, most: int) -> list[Times]:
    """Times of the calls, the graph before first, that after second, in as many rounds as it takes."""
    found = times(calls, rounds)
    while len(found[0].cpu) + rounds <= most and not _is_settled(*interval_of_gain(found[0].cpu, found[1].cpu)):
        found = [known + added for known, added in zip(found, times(calls, rounds), strict=True)]
    return found


def _is_settled(least: float, greatest: float) -> bool:
    """Whether a gain in this interval is known well enough."""
    return greatest - least <= NOISE or least > FAR or greatest < 2 - FAR


# Results ----------------------------------------


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    others = list(rows[0].elsewhere) if rows else []
    head = [
        "graph", "mode", "operators", "search s", "rules applied", "predicted", "measured", "95% interval", "rounds",
        "by the wall", "control", "ms", "error", "equal", *(f"{other}, predicted" for other in others),
    ]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(_cells(each, others))} |" for each in rows]
    return "\n".join(lines)


def _cells(each: Row, others: list[str]) -> list[str]:
    timed = "same program" if each.before_ms is None else f"{each.before_ms:.2f} → {each.after_ms:.2f}"
    return [
        each.model, each.mode, "{} → {}".format(*each.operators), f"{each.search_s:.1f}",
        ", ".join(f"{rule} ×{count}" for rule, count in each.applied.items()) or "none", f"{each.predicted:.3f}",
        f"{each.measured:.3f}", "{:.3f} … {:.3f}".format(*each.interval), str(each.rounds),
        f"{each.measured_wall:.3f}", f"{each.control:.3f}", timed, f"{each.error:.1%}",
        "yes" if not each.faults else "NO: " + "; ".join(each.faults),
        *(f"{each.elsewhere[other]:.3f} ({each.elsewhere_s[other]:.1f} s)" for other in others),
    ]  # fmt: skip


def missed(rows: list[Row]) -> list[str]:
    """The targets that are not met, one line each."""
    found = [f"{each.model} {each.mode}: {fault}" for each in rows for fault in each.faults]
    for each in rows:
        where = f"{each.model} {each.mode}"
        if max(each.search_s, *each.elsewhere_s.values(), 0.0) > SEARCH_S:
            found.append(f"{where}: searched {each.search_s} s, and {each.elsewhere_s}; at most {SEARCH_S} s")
        if each.measured < SLOWEST:
            found.append(f"{where}: measured gain {each.measured:.3f}, at least {SLOWEST:.3f}")
        if not each.agrees:
            found.append(f"{where}: predicted gain {each.predicted:.3f}, measured {each.measured:.3f}")
        for (model, mode, place), least in TARGETS.items():
            gained = each.measured if place == "measured" else each.elsewhere.get(place, least)
            if (model, mode) == (each.model, each.mode) and gained < least:
                found.append(f"{where}: gain {gained:.3f} ({place}), at least {least}")
    mean = statistics.mean(each.error for each in rows)
    return found if mean <= MEAN_ERROR else [*found, f"mean error {mean:.1%}, at most {MEAN_ERROR:.0%}"]


def summary(rows: list[Row]) -> str:
    """What was to be shown, in figures."""
    mean = statistics.mean(each.error for each in rows)
    slowest, longest = min(each.measured for each in rows), max(each.search_s for each in rows)
    return (
        f"{sum(each.agrees for each in rows)} of {len(rows)} predicted and measured on the same side of 1; mean error "
        f"of the predicted gain {mean:.1%} (target {MEAN_ERROR:.0%}); least measured gain {slowest:.3f} (target "
        f"{SLOWEST:.3f}); longest search {longest:.1f} s (target {SEARCH_S:.0f} s). Missed: "
        + ("; ".join(missed(rows)) or "nothing")
        + "."
    )


def kept(folder: Path, new: list[Row]) -> list[Row]:
    """The rows that the folder's results have, with the new ones in the place of theirs, in the order of `GRAPHS`."""
    file = folder / "results.json"
    items = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    known = {(item["model"], item["mode"]): _row_of(item) for item in items if item["model"] in GRAPHS}
    found = {**known, **{(each.model, each.mode): each for each in new}}
    order = {name: number for number, name in enumerate(GRAPHS)}
    return sorted(found.values(), key=lambda each: (order[each.model], each.mode != "train"))


def _row_of(item: dict[str, Any]) -> Row:
    fields = {name: value for name, value in item.items() if name not in ("error", "agrees")}
    return Row(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def write(folder: Path, rows: list[Row], options: argparse.Namespace) -> None:
    """Writes results.json and results.md."""
    told = {
        **facts("benchmarks.substitution.run"),
        "threads": str(torch.get_num_threads()),
        "rounds": str(options.rounds),
        "sizes (batches of one)": "; ".join(
            f"{name}: {SIZES[name]}" for name in dict.fromkeys(each.model for each in rows)
        ),
    }
    items = [{**asdict(each), "error": round(each.error, 4), "agrees": each.agrees} for each in rows]
    write_record(folder / "results", told, {"rows": items}, f"{summary(rows)}\n\n{table(rows)}")


def main() -> None:
    """Measures the graphs asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*GRAPHS], choices=[*GRAPHS], metavar="NAME")
    parser.add_argument("--modes", nargs="+", default=["train", "inference"], choices=["train", "inference"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--most", type=int, default=90, help="rounds where gains are near 1")
    parser.add_argument("--profile", default="cpu", help="of this host, by name or file")
    parser.add_argument("--elsewhere", nargs="*", default=["h100"], help="profiles to predict for")
    parser.add_argument("--seconds", type=float, default=SEARCH_S, help="that a search may take")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the results")
    parser.add_argument("--keep", action="store_true", help="rows of other graphs that the folder has")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runtime.keep_freed_memory()
    rows = []
    for name in options.models:
        for mode in options.modes:
            rows.append(row(name, mode, options))
            print(" | ".join(_cells(rows[-1], options.elsewhere)), flush=True)
    rows = kept(options.output, rows) if options.keep else rows
    write(options.output, rows, options)
    print(summary(rows))
    sys.exit(bool(missed(rows)))


if __name__ == "__main__":
    main()
