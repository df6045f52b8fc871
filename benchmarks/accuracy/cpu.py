"""Predicted beside measured step times of real training steps on two gloo ranks of one thread each.

    python -m benchmarks.accuracy.cpu [--models gpt-small bert-wide ...] [--rounds 6] [--settling 16] [--profile FILE]
                                      [--windows 3] [--pause 30] [--result FILE] [--folder FOLDER]

One profile is measured beforehand (or read from --profile), in windows that lie --pause seconds apart. Each pair of
`pairs.py` is planned, emitted and built in the same two processes; a step is zero_grad, train_step and AdamW's step.
The pairs are timed in rounds, so that a drift of the machine hits all alike: model by model, to bound memory, and all
models over again `PASSES` times; in a round every pair of a model runs one step to warm up, then `STEPS` steps between
two barriers. What part of the machine's cores other programs used meanwhile is noted too. A pair's time is the median
over the rounds in which others took at most `QUIET` of the cores, or over the third that was disturbed least; its
spread is their range over it.
In --folder, programs and times are kept, and a later run adds its rounds to them.

Which of a model's plans is the fastest is not for these rounds to say where several lie as near to each other as a
plan's own rounds do. So those within `NEAR` of the fastest, and the one predicted best, are timed again, in --settling
rounds of their own; how much slower the one predicted best is than another is the median over these rounds of the two
times' ratio in one round. The rounds that chose who takes part count no more.

The ranks keep the memory that they free, as train.py does: otherwise page faults make equal steps differ by a fifth.

Cores of a rented machine are not as fast at all times. So before and after a pair's steps both ranks measure a few
products of the profile again (`REFERENCES`), `REPEATS` times each, in the way in which the profile was measured; how
much longer these take now, by the median of each product on the slower rank, is the pair's `slowdown`. All figures are
given twice: of the times as measured, and of the times divided by their slowdown, which is what the profile can know
of. No step and no prediction is in that factor.

Printed and written to benchmarks/accuracy/cpu.json with command, machine and date: the table, the mean absolute
percentage error, Spearman's rank correlation, the worst error, and for each model by how much the plan predicted best
is slower than the plan measured best, with the quartiles of that ratio.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from autopar import runtime
from autopar.profiler import load_profile
from autopar.profiler.measure import Case, WorkTimer, measure_case, operator_cases
from benchmarks.accuracy.pairs import MODELS, PAIRS, WORLD, Pair, build_model, plan_pair
from benchmarks.facts import facts
from benchmarks.runtime.run import free_port, machine

STEPS, PASSES, REPEATS = 2, 2, 3
QUIET = 0.02
NEAR = 0.10
TIMES, SETTLED = "times.json", "settled.json"
REFERENCES = ((64, 512, 512), (256, 512, 512), (256, 512, 2048))
"""Rows, columns and inner dims of the products that say how fast the cores are: vertices of the profile's table."""

Timed = tuple[float, float, float, float]
"""Milliseconds a step, others' share of the cores, milliseconds of CPU time a rank, and how much slower the cores were
than when the profile was measured."""

Times = dict[str, list[Timed]]
"""By pair, of each round."""

TARGETS = {"mape": 0.10, "spearman": 0.95, "worst": 0.25, "best_plan": 0.03}


class Row(NamedTuple):
    """One pair: milliseconds a step, the range over the median of the rounds that count, others' share of the cores.

    `cpu_ms` is the CPU time that a rank's threads took, gloo's too, which other programs stretch least; `slowdown` how
    much longer the references took than in the profile, and `even_ms` the step at the profile's speed.
    """

    pair: Pair
    predicted_ms: float
    measured_ms: float
    spread: float
    disturbed: float
    cpu_ms: float
    slowdown: float
    even_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def even(self) -> Row:
        """The row as if the machine had been as fast as when the profile was measured."""
        return self._replace(measured_ms=self.even_ms)


# Before: profile and programs ----------------------------------------


def write_programs(chosen: Sequence[Pair], profile: Path, folder: Path) -> dict[Pair, float]:
    """Plans and emits the pairs that the folder lacks; the predicted milliseconds of all."""
    file = folder / "predicted.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    for pair in (pair for pair in chosen if str(pair) not in known):
        program = plan_pair(pair, str(profile))
        source_of(pair, folder).write_text(program.source)
        known[str(pair)] = program.plan.predicted.step_time_ns / 1e6
        file.write_text(json.dumps(known))
        print(f"planned {pair}: {known[str(pair)]:.1f} ms", flush=True)
    return {pair: known[str(pair)] for pair in chosen}


def source_of(pair: Pair, folder: Path) -> Path:
    """Where the pair's emitted program lies."""
    return folder / f"{pair.model} {pair.plan}.py"


# The ranks ----------------------------------------


class Trainer:
    """A pair's program on this rank, with optimizer and batch."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        from autopar.program import load_source

        model, self.batch = build_model(pair.model)
        source = source_of(pair, folder).read_text()
        self.rank = runtime.build(load_source(source).Program)
        self.rank.init_from(model, broadcast=False)
        self.optimizer = torch.optim.AdamW(self.rank.parameters(), lr=1e-4)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.rank.train_step(**self.batch)
        self.optimizer.step()
        return loss


class Reference(NamedTuple):
    """The profile's products that are measured again, and what each took then, in ns."""

    cases: tuple[Case, ...]
    known_ns: tuple[float, ...]
    clock: WorkTimer

    def measure(self) -> list[list[float]]:
        """How much longer each takes now on this rank, `REPEATS` times; both ranks measure at the same time."""
        dist.barrier()
        return [
            [measure_case(case, self.clock)[0] / ns for _ in range(REPEATS)]
            for case, ns in zip(self.cases, self.known_ns, strict=True)
        ]


def slowdown_of(before: list[list[float]], after: list[list[float]]) -> float:
    """The mean product's, of which each takes its median time."""
    return statistics.geometric_mean(statistics.median([*a, *b]) for a, b in zip(before, after, strict=True))


def reference(profile: Path) -> Reference:
    """That of a profile."""
    table = load_profile(str(profile)).tables["NT"]
    cases = tuple(case for case in operator_cases() if case.kind == "NT" and case.shape in REFERENCES)
    known = tuple(2 * math.prod(case.shape) * table.ns_per_flop(case.shape) for case in cases)
    return Reference(cases, known, WorkTimer("cpu"))


def timed(trainer: Trainer, products: Reference) -> Timed:
    """Times STEPS steps, as the slower rank needs for them, after one that warms caches and allocator."""
    before = products.measure()
    trainer.step()
    dist.barrier()
    busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
    for _ in range(STEPS):
        trainer.step()
    elapsed, own = time.perf_counter() - start, time.process_time() - own
    longest, together = torch.tensor([elapsed]), torch.tensor([own])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    dist.all_reduce(together)
    others = (busy_seconds() - busy - together.item()) / longest.item() / (os.cpu_count() or 1)
    slowdown = torch.tensor([slowdown_of(before, products.measure())])
    dist.all_reduce(slowdown, dist.ReduceOp.MAX)
    step_ms, cpu_ms = longest.item() / STEPS * 1e3, together.item() / WORLD / STEPS * 1e3
    return step_ms, max(0.0, others), cpu_ms, slowdown.item()


def busy_seconds() -> float:
    """How long this machine's cores have been busy since it was started, all of them together (Linux)."""
    user, nice, system, _, _, interrupt, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")


def run_rank(rank: int, port: int, chosen: Sequence[Pair], file: Path, rounds: int, profile: Path) -> None:
    """Times all pairs, whose programs lie beside the file, in rounds on one rank; rank 0 adds to the file what the
    slower rank took in each round."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runtime.keep_freed_memory()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo")
    times: Times = json.loads(file.read_text()) if file.exists() else {}
    dist.barrier()
    passes, products = min(PASSES, rounds), reference(profile)
    for _ in range(passes):
        for model in dict.fromkeys(pair.model for pair in chosen):
            own = [pair for pair in chosen if pair.model == model]
            time_model(own, file.parent, -(-rounds // passes), times, products)
            if rank == 0:
                print(f"timed {model}", flush=True)
                file.write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def time_model(chosen: Sequence[Pair], folder: Path, rounds: int, times: Times, products: Reference) -> None:
    """Adds rounds of one model's pairs, interleaved."""
    trainers = {pair: Trainer(pair, folder) for pair in chosen}
    for trainer in trainers.values():
        trainer.step()
    for _ in range(rounds):
        for pair, trainer in trainers.items():
            times.setdefault(str(pair), []).append(timed(trainer, products))
    trainers.clear()
    build_model.cache_clear()
    gc.collect()


# After: how good the predictions were ----------------------------------------


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How far the predictions are off."""
    errors = [abs(row.error) for row in rows]
    return {
        "pairs": len(rows),
        "mape": statistics.mean(errors),
        "spearman": spearman([row.predicted_ms for row in rows], [row.measured_ms for row in rows]),
        "worst": max(errors),
    }


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Each model's rows, the one predicted best first."""
    models = dict.fromkeys(row.pair.model for row in rows)
    return {
        model: sorted((row for row in rows if row.pair.model == model), key=lambda row: row.predicted_ms)
        for model in models
    }


def contenders(rows: Sequence[Row]) -> list[Pair]:
    """Of each model the plan predicted best, and those that may be the fastest; none where it has no rival."""
    found = list[Pair]()
    for first, *others in by_model(rows).values():
        fastest = min(row.measured_ms for row in (first, *others))
        rivals = [row.pair for row in others if row.measured_ms <= fastest * (1 + NEAR)]
        found += [first.pair, *rivals] if rivals else []
    return found


class Loss(NamedTuple):
    """How much slower the plan predicted best is than the fastest other, with the quartiles; 0 where none is near."""

    share: float
    quartiles: tuple[float, float]
    against: str


def losses(rows: Sequence[Row], settled: Times) -> dict[str, Loss]:
    """By model: of the rounds between contenders."""
    return {
        model: _loss(first.pair, [row.pair for row in others], settled)
        for model, (first, *others) in by_model(rows).items()
    }


def _loss(chosen: Pair, others: Sequence[Pair], settled: Times) -> Loss:
    """The greatest of the median ratios of the chosen plan's time to another's in one round."""
    found = list[Loss]()
    for other in (pair for pair in others if str(pair) in settled):
        ratios = [own[0] / its[0] - 1 for own, its in zip(settled[str(chosen)], settled[str(other)], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        found.append(Loss(middle, (low, high), other.plan))
    return max(found, default=Loss(0.0, (0.0, 0.0), ""))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's correlation of the ranks (there are no ties among measured times)."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def table(rows: Sequence[Row], slower: dict[str, Loss]) -> str:
    """All rows, then the figures beside their targets."""
    lines = [
        f"{row.pair!s:28s} predicted {row.predicted_ms:8.1f} ms   measured {row.measured_ms:8.1f} ms   "
        f"{row.error:+7.1%}   spread {row.spread:5.1%}   others {row.disturbed:4.0%}   CPU {row.cpu_ms:8.1f} ms   "
        f"cores {row.slowdown:4.2f}x   evened {row.even_ms:8.1f} ms {row.even.error:+7.1%}"
        for row in rows
    ]
    lines += ["", "As measured:", _figures(summary(rows))]
    lines += ["At the profile's speed:", _figures(summary([row.even for row in rows]))]
    within = sum(loss.share <= TARGETS["best_plan"] for loss in slower.values())
    lines += [
        "",
        f"The plan predicted best is within {TARGETS['best_plan']:.0%} of the plan measured best for {within} of "
        f"{len(slower)} models; slower than the fastest other plan by, with quartiles:",
        *(f"  {model:18s} {_loss_text(loss)}" for model, loss in slower.items()),
    ]
    return "\n".join(lines)


def _loss_text(loss: Loss) -> str:
    if not loss.against:
        return f"no other plan is within {NEAR:.0%}"
    low, high = loss.quartiles
    return f"{loss.share:+6.1%}  ({low:+.1%} … {high:+.1%})  {loss.against}"


def _figures(found: dict[str, Any]) -> str:
    """Those that the targets are about, beside these."""
    return (
        f"{found['pairs']} pairs: MAPE {found['mape']:.1%} (≤ {TARGETS['mape']:.0%})   "
        f"Spearman {found['spearman']:.3f} (≥ {TARGETS['spearman']})   "
        f"worst {found['worst']:.1%} (≤ {TARGETS['worst']:.0%})"
    )


def rows_of(predicted: dict[Pair, float], times: Times) -> list[Row]:
    """Predictions joined with the rounds' times."""
    return [Row(pair, guess, *measured(times[str(pair)])) for pair, guess in predicted.items()]


def measured(rounds: Sequence[Timed]) -> tuple[float, float, float, float, float, float]:
    """Of the quiet rounds, or the third that was disturbed least: median, relative range, others' share, CPU time,
    slowdown, and the median of the times without it."""
    quiet = [item for item in rounds if item[1] <= QUIET]
    least = max(quiet, sorted(rounds, key=lambda item: item[1])[: max(1, -(-len(rounds) // 3))], key=len)
    times, shares, worked, slowdowns = zip(*least, strict=True)
    median, even = statistics.median(times), statistics.median(item[0] / item[3] for item in least)
    spread = (max(times) - min(times)) / median
    return median, spread, statistics.median(shares), statistics.median(worked), statistics.median(slowdowns), even


def main() -> None:
    """Profiles, plans, times, prints, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--settling", type=int, default=16, help="rounds between plans that are near the fastest")
    parser.add_argument("--windows", type=int, default=3, help="of the profile that is measured")
    parser.add_argument("--pause", type=float, default=30.0, help="seconds between these windows")
    parser.add_argument("--profile", type=Path, help="a profile's JSON file; default: this host is measured first")
    parser.add_argument("--result", type=Path, default=Path(__file__).with_name("cpu.json"))
    parser.add_argument("--folder", type=Path, help="where to keep programs and times; default: a temporary one")
    options = parser.parse_args()
    if options.settling < 2:
        parser.error(f"expected at least 2 rounds to tell near plans apart, found --settling {options.settling}")
    chosen = [pair for pair in PAIRS if pair.model in options.models]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        profile = options.profile or _measured_profile(folder, options.windows, options.pause)
        predicted = write_programs(chosen, profile, folder)
        times = timed_in(folder / TIMES, chosen, options.rounds, profile)
        rows = rows_of(predicted, times)
        (folder / SETTLED).unlink(missing_ok=True)  # others may take part this time
        settled = timed_in(folder / SETTLED, contenders(rows), options.settling, profile)
    slower = losses(rows, settled)
    print(table(rows, slower))
    options.result.write_text(json.dumps(_record(rows, slower, options), indent=1) + "\n")


def timed_in(file: Path, chosen: Sequence[Pair], rounds: int, profile: Path) -> Times:
    """What a file has of earlier rounds, and these."""
    if chosen and rounds:
        mp.spawn(run_rank, (free_port(), chosen, file, rounds, profile), nprocs=WORLD)
    found: Times = json.loads(file.read_text()) if file.exists() else {}
    return found


def _measured_profile(folder: Path, windows: int, pause_s: float) -> Path:
    from autopar.profiler import measure_profile

    return measure_profile(folder / "profile.json", windows=windows, pause_s=pause_s)[1]


def _record(rows: Sequence[Row], slower: dict[str, Loss], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": facts("benchmarks.accuracy.cpu")["command"],
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "rounds": options.rounds,
        "settling_rounds": options.settling,
        "targets": TARGETS,
        "summary": summary(rows),
        "summary_at_the_profile_s_speed": summary([row.even for row in rows]),
        "predicted_best_slower_by": {model: loss._asdict() for model, loss in slower.items()},
        "rows": [{**row._asdict(), "pair": str(row.pair), "error": row.error} for row in rows],
    }


if __name__ == "__main__":
    main()
