"""Toy schedulers that make published decisions from what a ladder exports, and from nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ladders.forms import FittedForm, statistical_efficiency


def form(data: Mapping[str, Any], kind: str) -> FittedForm:
    """What an export of `optimus` or `pollux` says of a kind."""
    own = data["kinds"][kind]
    return FittedForm(data["scheduler"], kind, own["parameters"], (own["mean_error"], own["largest_error"]))


@dataclass(frozen=True)
class Job:
    """Steps that remain, samples of each, and how fast the job is."""

    speed: FittedForm
    batch: int
    steps: float

    def seconds(self, devices: int) -> float:
        return self.steps * self.speed.seconds(devices, self.batch, nodes=-(-devices // 8))


def optimus(jobs: Sequence[Job], devices: int) -> list[int]:
    """One device for each job, then each to the job whose remaining time it shortens most; none where it shortens
    none (EuroSys'18, section 4.1, of equal resources)."""
    held = [1] * len(jobs)
    for _ in range(devices - len(jobs)):
        gains = [job.seconds(count) - job.seconds(count + 1) for job, count in zip(jobs, held, strict=True)]
        best = max(range(len(jobs)), key=lambda number: gains[number])
        if gains[best] <= 0:
            break
        held[best] += 1
    return held


@dataclass(frozen=True)
class Adaptive:
    """A job whose batch the scheduler sets: its noise scale and base batch, in samples."""

    speed: FittedForm
    noise_scale: float
    base: int
    batches: Sequence[int]

    def best(self, devices: int) -> tuple[float, int]:
        """Goodput on so many devices, and the batch that has it."""
        nodes = -(-devices // 8)
        speeds = {size: self.speed.samples_s(devices, size, nodes) for size in self.batches}
        return max(
            (speed * statistical_efficiency(size, self.noise_scale, self.base), size) for size, speed in speeds.items()
        )  # fmt: skip


def pollux(jobs: Sequence[Adaptive], devices: int) -> tuple[int, ...]:
    """The allocation of the largest mean speedup, in goodput over that of a fair share (OSDI'21, eq. 11, p = 1)."""
    fair = devices // len(jobs)

    def fitness(held: tuple[int, ...]) -> float:
        speedups = [job.best(count)[0] / job.best(fair)[0] for job, count in zip(jobs, held, strict=True)]
        return sum(speedups) / len(jobs)

    every = itertools.product(range(1, devices + 1), repeat=len(jobs))
    return max((held for held in every if sum(held) <= devices), key=fitness)


def gandiva_packs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two jobs run on the same devices: where memory has room for both and neither slows the other much, as
    what they keep busy is not more than there is (OSDI'18, section 3.2)."""
    room = other["peak_bytes"] <= one["left_bytes"]
    shares = ("compute_share", "inside_share", "across_share")
    return room and all(one[name] + other[name] <= 1 for name in shares)


def gandiva_slice_s(row: Mapping[str, Any], overhead: float = 0.1) -> float:
    """Time-slices so long that pausing and resuming is at most a part of them."""
    return float((row["stop_s"] + row["resume_s"]) / overhead)


def tiresias(rows: Sequence[Mapping[str, Any]], ran_s: Sequence[float], threshold: float, devices: int) -> list[int]:
    """The jobs that run: those below the threshold of service (devices × seconds) first, each queue in order of
    arrival (NSDI'19, discretised two-dimensional least attained service)."""
    order = sorted(range(len(rows)), key=lambda n: (rows[n]["devices"] * ran_s[n] >= threshold, n))
    running, left = list[int](), devices
    for number in order:
        if rows[number]["devices"] <= left:
            running.append(number)
            left -= rows[number]["devices"]
    return running


def hare(tasks: Sequence[Mapping[str, Mapping[str, float]]], steps: Sequence[int]) -> dict[int, str]:
    """Jobs to kinds, one each: the least sum of times, of which changing a job is a part (heterogeneity-aware)."""
    kinds = sorted({kind for task in tasks for kind in task})
    every = itertools.permutations(kinds, len(tasks))

    def total(order: tuple[str, ...]) -> float:
        return sum(
            task[kind]["step_s"] * count + task[kind]["switch_s"]
            for task, kind, count in zip(tasks, order, steps, strict=True)
        )

    return dict(enumerate(min(every, key=total)))
