"""What the ranks of a lane did in a step, by their traces: quartiles over steps, means over ranks.

A quarter of all steps are faster than what counts here as typical. On a device of its own that is next to the median;
on a host that others use as well, the slower ones are those in which others ran.

A collective that stops its ranks ends for all of them when the last has come. So what it takes is what it takes the
rank that comes last, the least of all ranks; what others stand still longer, they wait for another rank. That needs no
clock that ranks share.

On CPUs a rank's thread spends on the host what it spends in a step without a profiler, less all of that: the same
however many others run there. Of several ranks, what counts in each step is when the last of them has done so. A
profiler makes statements longer; together they never take more than that thread did.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.observed.kineto import (
    END,
    NOTHING,
    OPTIMIZER,
    RECEIVE,
    RangeTime,
    RankTrace,
    SentJourney,
    SentOnce,
    StatementPass,
    TracedStep,
    typical_ns,
)


@dataclass(frozen=True)
class Measured:
    """Of the ranks of a lane, in nanoseconds of a step. step_ns: until the last rank of all ends, without a profiler;
    busy_ns: what the lane's processes spent of a processor meanwhile, and last_busy_ns, until the threads of all have
    done what they do. work: by statement and direction, without what it
    stands still for; sent: what collectives of a statement take the rank that comes last; waited_ns: what others wait
    for that one; beside_ns: what is waited for that no statement stands still for, such as gradients; receive_ns: for
    messages of other stages; host_ns: around statements, of the thread that runs them, or on GPUs while no kernel ran;
    gradients_ns: of that, what the runtime does with gradients of parameters that go home, as they come and at the end
    of the step; gradients: how many of so many bytes come in a step. journeys: of what is sent beside compute, on CPUs,
    that of the rank that comes last.
    calls, sent_calls: how often each ran in a step. where: module and source line."""

    step_ns: int
    busy_ns: int
    last_busy_ns: int
    work: Mapping[StatementPass, float]
    calls: Mapping[StatementPass, int]
    sent: Mapping[SentOnce, float]
    sent_calls: Mapping[SentOnce, int]
    waited_ns: float
    beside_ns: float
    receive_ns: float
    optimizer_ns: float
    host_ns: float
    gradients_ns: float
    gradients: Mapping[int, int]
    journeys: Mapping[SentOnce, SentJourney]
    where: Mapping[str, tuple[str, str]]
    num_steps: int


def measured(traces: Sequence[RankTrace], ranks: range) -> Measured:
    """What the ranks of one lane did. traces: of all ranks that were traced."""
    own = [trace for trace in traces if trace.rank in ranks] or list(traces)
    work, calls = _mean_work(own)
    optimizer_ns = _mean(own, lambda trace, step: _net(trace, step.parts.get(OPTIMIZER, NOTHING)))
    work, optimizer_ns, host_ns = _around(own, work, optimizer_ns)
    stopped = [_stopped(trace) for trace in own]
    names = dict.fromkeys(key for rank in stopped for key in rank)
    least = {key: min(rank.get(key, 0.0) for rank in stopped) for key in names}
    held = statistics.fmean(sum(rank.values()) for rank in stopped)
    return Measured(
        step_ns=_step_ns(traces),
        busy_ns=typical_ns(ns for trace in own for ns in trace.process_ns),
        last_busy_ns=typical_ns(_until_last_ns(own)),
        work=work,
        calls=calls,
        sent=least,
        sent_calls={key: _count(own, key) for key in names},
        waited_ns=held - sum(least.values()),
        beside_ns=_mean(own, _beside),
        receive_ns=_mean(own, lambda trace, step: step.parts.get(RECEIVE, NOTHING).duration_ns),
        optimizer_ns=optimizer_ns,
        host_ns=host_ns,
        gradients_ns=_mean(own, _gradients_ns),
        gradients={size: spent.count for size, spent in own[0].steps[-1].gradients.items()},
        journeys=_journeys(own),
        where={name: place for trace in own for name, place in trace.where.items()},
        num_steps=len(own[0].steps),
    )


def _around(
    traces: Sequence[RankTrace], work: dict[StatementPass, float], optimizer_ns: float
) -> tuple[dict[StatementPass, float], float, float]:
    """Work, the update, and what is left for the host."""
    if traces[0].steps[0].idle_ns is not None:
        return work, optimizer_ns, _mean(traces, lambda trace, step: step.idle_ns)
    thread: float = typical_ns(_until_last_ns(traces))
    thread -= _mean(traces, lambda trace, step: trace.slowdown * step.sending_ns)
    own = sum(work.values()) + optimizer_ns
    factor = min(1.0, thread / own) if own and thread > 0 else 1.0
    work = {key: spent * factor for key, spent in work.items()}
    return work, optimizer_ns * factor, max(0.0, thread - own)


def _until_last_ns(traces: Sequence[RankTrace]) -> list[float]:
    """Of each step without a profiler: until the last rank has spent what its thread does of a processor, or, of ranks
    that share cores, until these have done what all of them spend. A core may be slower than another for a step or two;
    the step ends with the last rank."""
    by_step = zip(*(trace.thread_ns for trace in traces), strict=False)
    return [max(*spent, traces[0].slowdown * statistics.fmean(spent)) for spent in by_step]


def _net(trace: RankTrace, spent: RangeTime) -> float:
    """Without what the profiler added, on cores that others share."""
    return trace.slowdown * max(0.0, spent.duration_ns - trace.event_ns * spent.num_events)


def _mean(traces: Sequence[RankTrace], of: object) -> float:
    """Over ranks, of medians over steps."""
    return statistics.fmean(typical_ns(of(trace, step) for step in trace.steps) for trace in traces)  # type: ignore[operator]


def _mean_work(traces: Sequence[RankTrace]) -> tuple[dict[StatementPass, float], dict[StatementPass, int]]:
    keys = dict.fromkeys(key for trace in traces for step in trace.steps for key in step.work)
    work = {key: _mean(traces, lambda trace, step, key=key: _net(trace, step.work.get(key, NOTHING))) for key in keys}
    calls = {key: max(step.work.get(key, NOTHING).count for trace in traces for step in trace.steps) for key in keys}
    return work, calls


def _stopped(trace: RankTrace) -> dict[SentOnce, float]:
    """What a rank stands still for in its statements."""
    keys = dict.fromkeys(key for step in trace.steps for key in step.sent if key.name)
    return {key: typical_ns(step.sent.get(key, NOTHING).duration_ns for step in trace.steps) for key in keys}


def _gradients_ns(trace: RankTrace, step: TracedStep) -> float:
    own = sum(_net(trace, spent) for spent in step.gradients.values())
    return own + _net(trace, step.parts.get(END, NOTHING)) if step.gradients else 0.0


def _journeys(traces: Sequence[RankTrace]) -> dict[SentOnce, SentJourney]:
    """Once the last rank has started it, a collective only takes what it takes: so the shortest of all ranks."""
    names = dict.fromkeys(key for trace in traces for step in trace.steps for key in step.journeys)
    return {key: min((_journey(trace, key) for trace in traces), key=lambda one: one.passed_ns) for key in names}


def _journey(trace: RankTrace, key: SentOnce) -> SentJourney:
    """A typical one of a rank."""
    found = [one for step in trace.steps for one in step.journeys.get(key, ())]
    return SentJourney(typical_ns(one.waited_ns for one in found), typical_ns(one.passed_ns for one in found))


def _count(traces: Sequence[RankTrace], key: SentOnce) -> int:
    return max(1, *(step.sent.get(key, NOTHING).count for trace in traces for step in trace.steps))


def _beside(trace: RankTrace, step: TracedStep) -> float:
    if step.exposed_ns is not None:
        held = sum(spent.duration_ns for key, spent in step.sent.items() if key.name)
        return max(0.0, step.exposed_ns - held)
    return sum(spent.duration_ns for key, spent in step.sent.items() if not key.name)


def _step_ns(traces: Sequence[RankTrace]) -> int:
    """Until the last rank ends. A single rank on a CPU waits for nobody: its step is what it spends of a processor,
    which is the same however many others run on the host."""
    if len(traces) == traces[0].num_ranks == 1 and traces[0].device == "cpu":
        return typical_ns(traces[0].process_ns)
    by_step: dict[int, int] = defaultdict(int)
    for trace in traces:
        for number, duration in enumerate(trace.plain_ns):
            by_step[number] = max(by_step[number], duration)
    return typical_ns(by_step.values())
