"""An audit as text, for a screen."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from autopar.auditing.job import TrainingJob
from autopar.auditing.result import Audit, lines_left
from autopar.ir.naming import printable

if TYPE_CHECKING:
    from autopar.auditing.prediction import JobPrediction

SURELY = 0.95


def audit_text(found: Audit) -> str:
    """All of it."""
    return printable("\n".join([*_head(found), *_left(found), *searched_lines(found)]))


def _head(found: Audit) -> Iterator[str]:
    job = found.job
    what = f"a decoder of {_count(job.model.parameters)} parameters" if job.model else "a model"
    where = f" on {job.mesh}" if job.devices and job.gpu else ""
    yield f"{found.file.name}: {job.framework}, {what}{where}"
    is_open = found.verdict == "fine" and not found.is_searched
    words = {"legal": "legal; whether it fits and how long it takes follows"}
    yield f"  verdict      {'legal, and fits' if is_open else words.get(found.verdict, found.verdict)}"
    yield f"  job          {job_text(job)}"
    if found.faults:
        for fault in found.faults:
            yield f"  illegal      {fault}"
        return
    yield "  legal        yes: degrees, heads, layers, sequence and batch divide as they must"
    if found.predicted is not None:
        yield from _forecast(found.predicted)
    elif found.refusal:
        yield f"  no forecast  {found.refusal}"


def _forecast(found: JobPrediction) -> Iterator[str]:
    from autopar.show.text import bytes_text, time_text

    told = found.plan.predicted
    word = "yes" if found.odds >= SURELY else "perhaps" if found.fits else "no"
    taken = told.taken_bytes or told.peak_bytes
    capacity = f" of {bytes_text(told.capacity_bytes)}" if told.capacity_bytes else ""
    peak = bytes_text(told.peak_bytes)
    yield (f"  fits         {word}: {peak} allocated at the peak, {bytes_text(taken)}{capacity} taken "
           f"of the fullest device; enough with {found.odds:.1%}")  # fmt: skip
    interval = told.step_time_interval_ns
    spread = f", {time_text(interval[0])} to {time_text(interval[1])} in nine of ten runs" if interval else ""
    yield f"  step         {time_text(found.step_ns)} predicted{spread}"
    if found.flops:
        yield f"  speed        {found.flops_a_second / 1e12:,.0f} TFLOP/s a device, {found.utilisation:.1%} MFU"
    parts = ", ".join(f"{name} {time_text(ns)}" for name, ns in found.parts.items() if ns)
    yield f"  bound by     {found.bound} ({parts})"


def _left(found: Audit) -> Iterator[str]:
    for kind, items in lines_left(found):
        if kind == "does not matter":
            yield (
                f"  not needed   {len(items)} keys that no plan depends on: {', '.join(item.key for item in items[:6])}"
                + (", …" if len(items) > 6 else "")
            )
            continue
        for item in items:
            yield f"  {kind:<12} {item}"


def searched_lines(found: Audit) -> list[str]:
    """The part that the search takes seconds for."""
    lines = list[str]()
    base = found.predicted if found.fits else None
    if found.better is not None:
        is_same = found.better is found.predicted
        gain = f", {found.gain:.1%} faster" if base and not is_same else ""
        what = "this is the best" if is_same else f"{job_text(found.better.job)}: {_short(found.better)}{gain}"
        lines.append(f"  better       {what}, of {found.tried} configurations that {found.job.framework} can say")
    elif found.tried:
        lines.append(f"  better       none of {found.tried} configurations that were simulated fits")
    if found.own is not None:
        from autopar.show.text import time_text

        other = found.better or base
        own_ns = found.own.predicted.step_time_ns
        beyond = f", {other.step_ns / max(1, own_ns) - 1:.1%} faster than that" if other else ""
        where = str(found.own).split("\n", 1)[0]
        lines.append(f"  ours         {time_text(own_ns)}{beyond}: {where}")
    return lines


def _short(found: JobPrediction) -> str:
    from autopar.show.text import time_text

    return f"{time_text(found.step_ns)}, fits with {found.odds:.1%}"


def _stages(job: TrainingJob) -> Iterator[str]:
    yield job.schedule
    if job.chunks > 1:
        yield f"{job.chunks} chunks"
    layers = job.layers_of_stages or ()
    if len(set(layers)) > 1:
        runs = ((count, len(list(same))) for count, same in groupby(layers))
        yield "layers " + " ".join(f"{times}×{count}" if times > 1 else str(count) for count, times in runs)


def job_text(job: TrainingJob) -> str:
    """A job in one line."""
    degrees = [f"dp {job.data}"] if job.data else []
    if job.zero and job.ranks_of_data * job.cp > 1:
        among = f" among {job.sharding_ranks}" if job.sharding_ranks < job.ranks_of_data else ""
        degrees[-1:] = [f"{degrees[-1]} with ZeRO-{job.zero}{among}"] if degrees else [f"ZeRO-{job.zero}"]
    degrees += [f"tp {job.tp}" + (" with sequence parallelism" if job.sequence_parallel else "")] if job.tp > 1 else []
    degrees += [f"pp {job.pp} ({', '.join(_stages(job))})"] if job.pp > 1 else []
    degrees += [f"cp {job.cp} ({job.context})"] if job.cp > 1 else []
    degrees += [f"ep {job.ep}"] if job.ep > 1 else []
    again = f"{job.recompute} recomputation" if job.recompute != "none" else "no recomputation"
    again += f" of {job.recompute_layers} layers a stage" if job.recompute_layers else ""
    again += f" of every {job.recompute_every}th layer" if job.recompute_every > 1 else ""
    size = f"batch {job.global_batch} (micro {job.micro_batch}, {job.microbatches} microbatches) of {job.seq} tokens"
    return "; ".join([" × ".join(degrees) or "one device", size, again, job.precision, job.optimizer])


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
