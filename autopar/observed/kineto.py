"""Reads a rank's Kineto trace of a traced program: what each statement, collective and part of a step took.

Ranges of the program (`runtime.ranges`) say which statement runs. What autograd makes of it later has no range; but
each function that autograd keeps has a number, which the trace gives beside the operator that made it and beside its
backward pass. An operator is given the number that the next function gets; so of several with one number the last has
made it.

The time of a range is its own: without ranges inside it, such as what a recomputed block runs again inside a backward
pass, or the collective that an operator waits for. On CPUs it is what the thread spent of a processor, where the range
says so; on GPUs the time of the kernels that were started in it. What autograd runs has no range, and is told by the
clock: of that counts the share that the step's thread had of a processor outside of ranges. What stands still for
others is told by the clock.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from autopar.errors import TraceFileError
from autopar.ir.schedule import BACKWARD, FORWARD
from autopar.observed.form import FORMAT
from autopar.runtime.ranges import (
    AGAIN,
    COLLECTIVE,
    END,
    GRADIENT,
    MARK,
    OPTIMIZER,
    RECEIVE,
    SPENT,
    STARTED,
    STEP,
    from_ascii,
)

RECOMPUTE = "recompute"
_BACKWARD = "autograd::engine::evaluate_function: "
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


class StatementPass(NamedTuple):
    """A statement in a direction: forward, backward or recompute."""

    name: str
    direction: str


class SentJourney(NamedTuple):
    """A collective that a rank started and waited for later, in nanoseconds by the clock. passed: from its start until
    it was there; waited: of that, at the end. It took something between the two."""

    waited_ns: int
    passed_ns: int


class SentOnce(NamedTuple):
    """A collective that a rank stood still for. name: of the statement that it belongs to; "" beside them all, such as
    of gradients."""

    name: str
    collective: str
    num_bytes: int
    axis: str


@dataclass(frozen=True)
class RangeTime:
    """Nanoseconds, how often, and events of torch in them, each of which the profiler has made longer."""

    duration_ns: int
    count: int
    num_events: int

    def plus(self, duration_ns: int, num_events: int, count: int = 1) -> RangeTime:
        """With another range."""
        return RangeTime(self.duration_ns + duration_ns, self.count + count, self.num_events + num_events)


NOTHING = RangeTime(0, 0, 0)


@dataclass
class TracedStep:
    """One step of one rank. idle_ns: on GPUs, when no kernel ran; exposed_ns: when none but collectives did.
    sending_ns: of a processor, that the thread took to start collectives and wait for them. journeys: of those that
    it started and waited for later. gradients: what the runtime does with those of parameters, by their bytes."""

    duration_ns: int
    work: dict[StatementPass, RangeTime] = field(default_factory=lambda: defaultdict(lambda: NOTHING))
    sent: dict[SentOnce, RangeTime] = field(default_factory=lambda: defaultdict(lambda: NOTHING))
    parts: dict[str, RangeTime] = field(default_factory=lambda: defaultdict(lambda: NOTHING))
    idle_ns: int | None = None
    exposed_ns: int | None = None
    sending_ns: int = 0
    journeys: dict[SentOnce, list[SentJourney]] = field(default_factory=lambda: defaultdict(list))
    gradients: dict[int, RangeTime] = field(default_factory=lambda: defaultdict(lambda: NOTHING))


@dataclass(frozen=True)
class RankTrace:
    """What one rank's trace says. plain_ns: of steps that ran without the profiler; where: module and source line of
    each statement; event_ns: what the profiler adds to an event of torch; expected: what the planner wrote beside the
    program (`observed.expected`). slowdown: how many times longer it computes as ranks share cores."""

    path: Path
    rank: int
    num_ranks: int
    device: str
    host: str
    torch: str
    expected: Mapping[str, Any]
    plain_ns: tuple[int, ...]
    process_ns: tuple[int, ...]
    thread_ns: tuple[int, ...]
    event_ns: float
    slowdown: float
    steps: tuple[TracedStep, ...]
    where: Mapping[str, tuple[str, str]]


def read_trace(path: Path) -> RankTrace:
    """Reads a rank's file. Raises TraceFileError where it is no trace of a traced program."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        told = data["autopar"]
        _check_format(path, told["expected"].get("format"))
        reader = _TraceReader(data["traceEvents"])
        steps = reader.read()
        found = RankTrace(
            path, told["rank"], told["num_ranks"], told["device"], told["host"], told["torch"], told["expected"],
            tuple(told["plain_ns"]), tuple(told["plain_process_ns"]), tuple(told["plain_thread_ns"]),
            float(told["event_ns"]), float(told["slowdown"]), steps, reader.where,
        )  # fmt: skip
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceFileError(
            f"expected a trace that `autopar run --trace` wrote at {path}, found none: {type(error).__name__}: {error}"
        ) from error
    if not steps:
        raise TraceFileError(
            f"expected ranges named {MARK + STEP!r} in {path}, found none; traces of other programs do not say what "
            "belongs to a plan: take `autopar run MODEL PLAN --trace FOLDER`"
        )
    return found


def _check_format(path: Path, found: object) -> None:
    if found != FORMAT:
        raise TraceFileError(
            f"expected a trace of format {FORMAT}, found one of format {found} in {path}, of another version of "
            "autopar; trace the program again with `autopar run MODEL PLAN --trace FOLDER`"
        )


def read_traces(path: str | Path) -> list[RankTrace]:
    """The traces of a folder, or of one file, by rank. Raises TraceFileError where one is of another run."""
    given = Path(path)
    paths = sorted(given.glob("rank_*.json")) if given.is_dir() else [given]
    if not paths:
        raise TraceFileError(f"expected files rank_00000.json and so on in {given}, found none")
    found = sorted(map(read_trace, paths), key=lambda trace: trace.rank)
    first = found[0]
    for other in found[1:]:
        if other.expected != first.expected or other.num_ranks != first.num_ranks:
            raise TraceFileError(f"expected traces of one run, found those of two: {first.path} and {other.path}")
    missing = sorted(set(range(first.num_ranks)) - {trace.rank for trace in found})
    if missing and given.is_dir():
        raise TraceFileError(
            f"expected traces of all {first.num_ranks} ranks in {given}, found none of {', '.join(map(str, missing))}; "
            "copy those that other nodes wrote there, or name one rank's file"
        )
    return found


def typical_ns(values: Iterable[float]) -> int:
    """The lower quartile; 0 of nothing."""
    known = sorted(values)
    return round(statistics.quantiles(known, n=4, method="inclusive")[0]) if len(known) > 1 else round(sum(known))


# Reading ----------------------------------------


@dataclass(slots=True, eq=False)
class _Frame:
    """A range that time is counted for. spent_ns: of a processor, if it is told; inner_spent_ns: in ranges inside."""

    kind: str  # "work", "sent", "gradient" or "part"
    key: Any
    start_ns: int
    end_ns: int
    parent: _Frame | None
    inner_ns: int = 0
    num_events: int = 0
    spent_ns: int | None = None
    inner_spent_ns: int = 0
    kernel_ns: int = 0
    starts: bool = False  # a collective, and goes on

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def is_by_clock(self) -> bool:
        """Whether it does not tell what it spent of a processor, of work."""
        return self.spent_ns is None and self.kind == "work"

    def is_in(self, whole: _Frame) -> bool:
        """Whether it ran in that one, on its thread."""
        around = self.parent
        while around is not None and around is not whole:
            around = around.parent
        return around is whole

    @property
    def is_outermost(self) -> bool:
        """Whether it tells what it spent of a processor, and none around it does but the step."""
        around = self.parent
        while around is not None and around.spent_ns is None:
            around = around.parent
        return self.spent_ns is not None and (around is None or around.key == STEP)

    @property
    def own_ns(self) -> int:
        if self.spent_ns is None or self.kind == "sent" or self.key == RECEIVE:
            return self.length_ns - self.inner_ns
        return max(0, self.spent_ns - self.inner_spent_ns)


class _TraceEvent(NamedTuple):
    start_ns: int
    end_ns: int
    name: str
    category: str
    args: Mapping[str, Any]


class _TraceReader:
    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.where: dict[str, tuple[str, str]] = {}
        self._threads: dict[Any, list[_TraceEvent]] = defaultdict(list)
        self._kernels: list[_TraceEvent] = []
        self._makers: dict[int, tuple[str, str]] = {}  # by number of autograd's function: statement, torch's operator
        self._ran: set[int] = set()  # numbers of functions that have run backward
        self._launched: dict[int, _Frame] = {}  # what a kernel is launched as -> the range in which it was
        for event in events:
            if event.get("ph") == "X":
                self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        start = round(event["ts"] * 1000)
        category = event.get("cat", "")
        made = _TraceEvent(
            start, start + round(event.get("dur", 0) * 1000), event["name"], category, event.get("args") or {}
        )
        if category in _KERNELS:
            self._kernels.append(made)
        elif category in ("cpu_op", "user_annotation", *_LAUNCHES):
            self._threads[event["tid"]].append(made)

    def read(self) -> tuple[TracedStep, ...]:
        """The steps. The thread that runs them is read first: it makes what others run backward."""
        main = [thread for thread, events in self._threads.items() if any(e.name == MARK + STEP for e in events)]
        frames = [
            frame for thread in sorted(self._threads, key=lambda thread: thread not in main)
            for frame in self._frames(self._threads[thread], thread in main)
        ]  # fmt: skip
        for kernel in self._kernels:
            frame = self._launched.get(kernel.args.get("correlation", -1))
            if frame is not None:
                frame.kernel_ns += kernel.end_ns - kernel.start_ns
        starts = [frame for frame in frames if frame.key == STEP and frame.kind == "part"]
        return tuple(self._step(start, frames) for start in starts)

    def _frames(self, events: list[_TraceEvent], is_main: bool) -> Iterator[_Frame]:
        open_: list[tuple[int, _Frame | None]] = []  # when it ends, the innermost range
        for event in sorted(events, key=lambda event: (event.start_ns, -event.end_ns)):
            while open_ and open_[-1][0] <= event.start_ns:
                open_.pop()
            around = open_[-1][1] if open_ else None
            frame = self._frame(event, around)
            if frame is not None:
                if around is not None:
                    around.inner_ns += frame.length_ns
                yield frame
            elif around is not None:
                self._count(event, around, is_main)
            open_.append((event.end_ns, frame or around))

    def _count(self, event: _TraceEvent, around: _Frame, is_main: bool) -> None:
        """An event of torch in a range."""
        if event.category in _LAUNCHES:
            self._launched[event.args.get("correlation", -1)] = around
            return
        if event.name.startswith(MARK + SPENT):
            around.spent_ns = int(event.name.removeprefix(MARK + SPENT))
            if around.parent is not None:
                around.parent.inner_spent_ns += around.spent_ns
            return
        around.num_events += 1
        number = event.args.get("Sequence number")
        if is_main and number is not None and around.kind == "work" and around.key.direction == FORWARD:
            self._makers[number] = around.key.name, event.name

    def _frame(self, event: _TraceEvent, around: _Frame | None) -> _Frame | None:
        kind, key = self._key(event, around)
        starts = event.name.startswith(MARK + STARTED)
        return _Frame(kind, key, event.start_ns, event.end_ns, around, starts=starts) if kind else None

    def _key(self, event: _TraceEvent, around: _Frame | None) -> tuple[str, Any]:
        name = event.name
        if name.startswith(AGAIN):
            return "work", StatementPass(self._statement(name.removeprefix(AGAIN)), RECOMPUTE)
        for mark in (MARK + COLLECTIVE, MARK + STARTED):
            if name.startswith(mark):
                collective, num_bytes, axis = name.removeprefix(mark).split(" | ")
                return "sent", SentOnce(_owner(around), collective, int(num_bytes), axis)
        if name.startswith(MARK + GRADIENT):
            return "gradient", int(name.removeprefix(MARK + GRADIENT))
        if name.startswith(MARK) and not name.startswith(MARK + SPENT):
            told = name.removeprefix(MARK)
            return ("work", StatementPass(self._statement(told), FORWARD)) if " | " in told else ("part", told)
        maker = self._maker(event) if name.startswith(_BACKWARD) else ""
        return ("work", StatementPass(maker, BACKWARD)) if maker else ("", None)

    def _maker(self, event: _TraceEvent) -> str:
        """The statement whose function of autograd runs backward. Torch does not tell the numbers of functions with
        hooks; they run in order all the same: it is the latest of its kind that has not run."""
        number = event.args.get("Sequence number")
        if number is None:
            kind = event.name.removeprefix(_BACKWARD).partition("Backward")[0].lower()
            alike = (n for n, (_, op) in self._makers.items() if n not in self._ran and _plain(op) == kind)
            number = max(alike, default=None)
        if number is None or number not in self._makers:
            return ""
        self._ran.add(number)
        return self._makers[number][0]

    def _statement(self, told: str) -> str:
        name, module, source = from_ascii(told).split(" | ")
        self.where[name] = module, source
        return name

    def _step(self, whole: _Frame, frames: Sequence[_Frame]) -> TracedStep:
        step = TracedStep(whole.end_ns - whole.start_ns)
        inside = [one for one in frames if whole.start_ns <= one.start_ns < whole.end_ns and one is not whole]
        on_gpu = bool(self._kernels)
        share = _processor_share(whole, [frame for frame in inside if frame.is_in(whole)])
        tables = {"work": step.work, "sent": step.sent, "part": step.parts, "gradient": step.gradients}
        for frame in inside:
            spent = frame.kernel_ns if on_gpu and frame.key != RECEIVE else frame.own_ns
            if frame.is_by_clock and not on_gpu and frame.is_in(whole):
                spent = round(spent * share)
            table: Any = tables[frame.kind]
            table[frame.key] = table[frame.key].plus(spent, 0 if on_gpu else frame.num_events, not frame.starts)
            step.sending_ns += frame.spent_ns or 0 if frame.kind == "sent" else 0
        if on_gpu:
            self._on_gpu(step, whole)
        else:
            _note_journeys(step, [frame for frame in inside if frame.kind == "sent"])
        return step

    def _on_gpu(self, step: TracedStep, whole: _Frame) -> None:
        """When kernels that compute ran, and when only collectives did."""
        inside = [kernel for kernel in self._kernels if whole.start_ns <= kernel.start_ns < whole.end_ns]
        sends = [kernel for kernel in inside if self._is_sent(kernel)]
        computes = [kernel for kernel in inside if not self._is_sent(kernel)]
        busy, any_ = _covered(computes), _covered(inside)
        step.exposed_ns, step.idle_ns = (any_ - busy if sends else 0), max(0, step.duration_ns - any_)

    def _is_sent(self, kernel: _TraceEvent) -> bool:
        frame = self._launched.get(kernel.args.get("correlation", -1))
        return "nccl" in kernel.name.lower() or (frame is not None and frame.kind == "sent")


def _note_journeys(step: TracedStep, sent: Sequence[_Frame]) -> None:
    """Pairs what a rank starts with what it waits for, in the order of each."""
    started: dict[SentOnce, list[_Frame]] = defaultdict(list)
    for frame in sorted(sent, key=lambda frame: frame.start_ns):
        same = frame.key._replace(name="")  # what is started for one statement may be waited for in another
        if frame.starts:
            started[same].append(frame)
        elif started[same]:
            step.journeys[same].append(SentJourney(frame.length_ns, frame.end_ns - started[same].pop(0).start_ns))


def _processor_share(whole: _Frame, inside: Sequence[_Frame]) -> float:
    """Of a step's thread, outside of ranges that tell what they spent: what it had of a processor, of all the time."""
    if whole.spent_ns is None:
        return 1.0
    told = [frame for frame in inside if frame.is_outermost]
    spent = whole.spent_ns - sum(frame.spent_ns or 0 for frame in told)
    passed = whole.length_ns - sum(frame.length_ns for frame in told)
    return min(1.0, max(0.0, spent / passed)) if passed > 0 else 1.0


def _plain(operator: str) -> str:
    """How torch names the function of an operator: AddBackward0 is that of aten::add_."""
    return operator.rpartition(":")[2].replace("_", "").lower()


def _owner(frame: _Frame | None) -> str:
    """The statement that a range is in; none where it is in the update or around the step."""
    while frame is not None:
        if frame.kind == "work":
            return str(frame.key.name)
        frame = frame.parent
    return ""


def _covered(events: Sequence[_TraceEvent]) -> int:
    """Nanoseconds in which any of them runs."""
    total = end = 0
    for event in sorted(events):
        total += max(0, event.end_ns - max(end, event.start_ns))
        end = max(end, event.end_ns)
    return total


__all__ = [
    "END",
    "NOTHING",
    "OPTIMIZER",
    "RECEIVE",
    "RECOMPUTE",
    "RangeTime",
    "RankTrace",
    "SentJourney",
    "SentOnce",
    "StatementPass",
    "TracedStep",
    "read_trace",
    "read_traces",
    "typical_ns",
]  # fmt: skip
