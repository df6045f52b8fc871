"""The search for a rewritten graph in two ways: whole regions, and cut ones.

    python -m benchmarks.substitution.searches [--models nas_rnn … llama_70b] [--modes train inference]
                                               [--profiles cpu h100] [--seconds 10]

"whole": backtracking on each region as it is. "cut": large regions in parts (`substitute.cutting`); what ships.
Llama-70B (80 layers, on the meta device) is searched for as it trains on h100 alone, in `LARGE_S` seconds at most.
Gains are predicted: of a step, before over after. Limits are of the wall; seconds in the table are of the processor,
which other programs stretch least: on one thread, those of the wall on an idle machine.
Printed and written to searches.json and searches.md with command, machine, load and date.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from autopar.profiler import load_profile
from autopar.substitute import load_rules, substituted
from autopar.substitute.searching import Limits
from autopar.trace import find_blocks, trace
from benchmarks.facts import facts, write_record
from benchmarks.plan_time.run import llama_70b
from benchmarks.substitution.graphs import GRAPHS, build

HERE = Path(__file__).parent
LARGE, LARGE_S = "llama_70b", 20.0
WAYS = {"whole": Limits(1 << 30), "cut": Limits()}


def rows(name: str, mode: str, profiles: list[str], seconds: float) -> list[dict[str, Any]]:
    """One for each profile and way."""
    model, batch = llama_70b()[:2] if name == LARGE else build(name, mode)
    graph = trace(model, batch, mode=mode)
    blocks = find_blocks(graph)
    found = []
    for profile in profiles:
        for way, limits in WAYS.items():
            begin = time.process_time()
            result = substituted(
                graph, blocks.paths, blocks.node_representative, load_rules(), load_profile(profile),
                trains=mode == "train", seconds=seconds, limits=limits,
            )  # fmt: skip
            found.append({
                "model": name, "mode": mode, "profile": profile, "way": way, "before_ns": result.before_ns,
                "after_ns": result.best.cost_ns, "gain": round(result.before_ns / result.best.cost_ns, 4),
                "seconds": round(result.seconds, 2), "processor_s": round(time.process_time() - begin, 2),
                "rules": dict(Counter(s.rule for s in result.best.steps)),
            })  # fmt: skip
            print(found[-1], flush=True)
    return found


def table(found: list[dict[str, Any]]) -> str:
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in found:
        key = row["model"], row["mode"], row["profile"]
        cells.setdefault(key, {})[row["way"]] = f"{row['gain']:.3f} ({row['processor_s']:.1f} s)"
    lines = ["| graph | mode | profile | " + " | ".join(WAYS) + " |", "|---" * (3 + len(WAYS)) + "|"]
    return "\n".join(lines + [f"| {' | '.join([*key, *(ways[way] for way in WAYS)])} |" for key, ways in cells.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*GRAPHS, LARGE], choices=[*GRAPHS, LARGE], metavar="NAME")
    parser.add_argument("--modes", nargs="+", default=["train", "inference"], choices=["train", "inference"])
    parser.add_argument("--profiles", nargs="+", default=["cpu", "h100"])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--output", type=Path, default=HERE)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = []
    for name in options.models:
        for mode in options.modes if name != LARGE else ():
            found += rows(name, mode, options.profiles, options.seconds)
    if LARGE in options.models:
        found += rows(LARGE, "train", ["h100"], LARGE_S)
    told = facts("benchmarks.substitution.searches")
    write_record(options.output / "searches", told, {"rows": found}, table(found))


if __name__ == "__main__":
    main()
