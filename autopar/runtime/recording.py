"""Runs the traced program of a folder for some steps and writes what a profiler saw: what `autopar run --trace` starts.

    torchrun --nproc-per-node 4 -m autopar.runtime.recording FOLDER --into TRACES

Each rank writes `rank_00000.json`, a Kineto trace, for Perfetto and for `Plan.compare`. Batches and weights are those
of the folder's train.py, so that data that was put there is what is traced. A profiler slows a step down; so as many
steps are timed without it before those that it sees, and after them.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.runtime.allocation import keep_freed_memory
from autopar.runtime.building import build
from autopar.runtime.errors import ProgramError
from autopar.runtime.ranges import OPTIMIZER, STEP, part
from autopar.runtime.rank import Rank

TRACED, EXPECTED = "traced.py", "expected.json"
MOST_BATCHES = 8  # among which those of the planned shape are looked for
WARM_UP = 3  # steps before any is looked at


def record(folder: Path, into: Path, steps: int) -> Path:
    """Traces so many steps of the folder's program on this rank; returns the trace's file."""
    keep_freed_memory()
    script = _script(folder)
    rank = build(script.program.Program, timeout_s=300)
    script.initialise(rank)
    step = _RecordedStep(rank, script)
    for _ in range(WARM_UP):
        step.run()
    plain = [step.timed() for _ in range(steps)]
    with _profiler(rank) as profiler:
        traced = [step.timed() for _ in range(steps)]
    plain += [step.timed() for _ in range(steps)]  # on both sides: how busy a host is changes
    told = {
        "expected": json.loads((folder / EXPECTED).read_text(encoding="utf-8")),
        "rank": rank.number,
        "num_ranks": rank.num_ranks,
        "host": socket.gethostname(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if rank.device.type == "cuda" else rank.device.type,
        "event_ns": _event_ns(),
        "slowdown": _slowdown(rank),
        "plain_ns": [one.clock_ns for one in plain],
        "plain_process_ns": [one.process_ns for one in plain],
        "plain_thread_ns": [one.thread_ns for one in plain],
        "traced_ns": [one.clock_ns for one in traced],
    }
    into.mkdir(parents=True, exist_ok=True)
    path = into / f"rank_{rank.number:05d}.json"
    profiler.export_chrome_trace(str(path))
    seen = json.loads(path.read_text(encoding="utf-8"))  # what is told while it records is not kept by every torch
    path.write_text(json.dumps({**seen, "autopar": told}), encoding="utf-8")
    return path


class _StepTime(NamedTuple):
    """Nanoseconds of a step: by the clock, of a processor by this process, and by its thread that runs the step."""

    clock_ns: int
    process_ns: int
    thread_ns: int


class _RecordedStep:
    """A step of training (or a batch of inference) as the folder's script runs it."""

    def __init__(self, rank: Rank, script: ModuleType) -> None:
        self._rank = rank
        self._trains = hasattr(script, "arguments")
        self._batches: Iterator[dict[str, Any]] = itertools.cycle(_of_planned_shape(rank, script.batches()))
        fused = rank.device.type == "cuda" or None
        self._optimizer = torch.optim.AdamW(rank.parameters(), lr=1e-4, fused=fused) if self._trains else None

    def run(self) -> None:
        batch = next(self._batches)
        with part(STEP):
            if self._optimizer is None:
                self._rank(**batch)
                return
            self._optimizer.zero_grad()
            self._rank.train_step(**batch)
            with part(OPTIMIZER):
                self._optimizer.step()
            if self._rank.device.type == "cuda":
                torch.cuda.synchronize()

    def timed(self) -> _StepTime:
        """A step. All ranks begin together."""
        if dist.is_initialized() and self._rank.num_ranks > 1:
            dist.barrier()
        clocks = time.perf_counter_ns, time.process_time_ns, time.thread_time_ns
        began = [clock() for clock in clocks]
        self.run()
        return _StepTime(*(clock() - start for clock, start in zip(clocks, began, strict=True)))


def _of_planned_shape(rank: Rank, batches: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two batches of the shape for which the step was predicted: short ones, and others, take another time."""
    planned = {spec.name: tuple(spec.shape) for spec in rank.programs[0].INPUTS}
    first = list(itertools.islice(batches, MOST_BATCHES))
    found = [one for one in first if all(tuple(one[name].shape) == shape for name, shape in planned.items())]
    if not found:
        shapes = [{name: tuple(one[name].shape) for name in planned} for one in first[:1]]
        raise ProgramError(f"expected a batch of {planned} among the first {MOST_BATCHES}, found {shapes} and others")
    return found[:2]


def _slowdown(rank: Rank) -> float:
    """How many times longer a rank computes as others of the run share this host's cores."""
    if rank.device.type != "cpu":
        return 1.0
    threads = torch.get_num_threads() * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1.0, threads / len(os.sched_getaffinity(0)))


def _event_ns(count: int = 2000, tries: int = 5) -> float:
    """What a profiler adds to an operator of torch: the median over tries of many small ones with and without it."""
    x = torch.zeros(1)

    def spent() -> int:
        began = time.thread_time_ns()
        for _ in range(count):
            x.view(1)
        return time.thread_time_ns() - began

    added = []
    for _ in range(tries):
        plain = spent()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            traced = spent()
        added.append(max(0, traced - plain) / count)
    return statistics.median(added)


def _profiler(rank: Rank) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if rank.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def _script(folder: Path) -> ModuleType:
    """The folder's train.py (or evaluate.py), which is given the traced program in the place of program.py."""
    names = [name for name in ("train", "evaluate") if (folder / f"{name}.py").is_file()]
    missing = [name for name in (TRACED, EXPECTED) if not (folder / name).is_file()]
    if missing or not names:
        raise ProgramError(
            f"expected {TRACED}, {EXPECTED} and train.py or evaluate.py in {folder}, found no "
            f"{' and no '.join(missing or ['script'])}; `autopar run MODEL PLAN -o {folder} --trace TRACES` writes them"
        )
    with _named("program", _imported(folder / TRACED)):
        return _imported(folder / f"{names[0]}.py")


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None, "a file of Python"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _named(name: str, module: ModuleType) -> Iterator[None]:
    """Imports of that name find the module meanwhile."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before


def main(given: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="that autopar run --trace, or parallelize(…).save(traced=True), wrote"
    )
    parser.add_argument("--into", type=Path, required=True, help="the folder for a trace of each rank")
    parser.add_argument("--steps", type=int, default=8, help="that are traced, after a few that warm up")
    options = parser.parse_args(given)
    path = record(options.folder, options.into, max(1, options.steps))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"written to {path.parent}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
