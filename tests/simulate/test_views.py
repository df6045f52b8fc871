"""What others read of a simulated step says the same as the step: the picture for pages, and the trace for Perfetto."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.profiler import load_profile
from autopar.show.perfetto import microseconds
from autopar.show.picture import picture
from autopar.simulate import Timeline, simulate
from tests.simulate.test_conservation import PLANS, case_of

NAMES = sorted(PLANS)


@cache
def step_of(name: str) -> Timeline:
    return simulate(*case_of(name), load_profile("a100"))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_along_axes_adds_up_to_the_traffic(name: str) -> None:
    for lane in step_of(name).lanes:
        by_collective = Counter[str]()
        busy = Counter[str]()
        for (_, kind), sent in lane.along.items():
            by_collective[kind.split()[-1]] += sent.num_bytes
            busy[kind] += sent.duration_ns
        assert by_collective == Counter(dict(lane.comm_bytes))
        ran = Counter[str]()
        for piece in lane.pieces:
            for stream, _, start, end, kind in piece.tasks:
                if stream != "compute":
                    ran[kind] += end - start
        is_shared = any("axis" in stream for piece in lane.pieces for stream, *_ in piece.tasks)
        longer = [ran[kind] - busy[kind] for kind in busy | ran]
        assert all(more >= 0 if is_shared else more == 0 for more in longer), "what is on the wire, by kind"


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_has_every_task_of_the_step(name: str) -> None:
    timeline = step_of(name)
    drawn, found = json.loads(json.dumps(picture(timeline))), Counter[tuple[Any, ...]]()
    for lane in drawn["lanes"]:
        begins, numbers, labels = lane["passes"]
        for begin, number, label in zip(accumulate(begins), numbers, labels, strict=True):
            streams, names, starts, lengths, kinds = drawn["passes"][number]
            for stream, text, start, length, kind in zip(
                streams, names, accumulate(starts), lengths, kinds, strict=True
            ):
                label_text = f" {drawn['labels'][label]}" if drawn["labels"][label] else ""
                where = (lane["ranks"][0], drawn["streams"][stream])
                found[where, drawn["names"][text] + label_text, begin + start, begin + start + length] += 1
                assert drawn["kinds"][kind]
    assert found == Counter(tuple(event)[:4] for event in timeline.events if event.end_ns > event.start_ns)


def test_equal_passes_are_written_once() -> None:
    """Of eight microbatches on two stages, most passes are alike."""
    drawn = picture(step_of("1f1b"))
    assert 2 * len(drawn["passes"]) < sum(len(lane["passes"][1]) for lane in drawn["lanes"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("most", [1, 7, 10**6])
def test_samples_of_memory_are_moments_of_the_step_and_have_its_peak(name: str, most: int) -> None:
    timeline = step_of(name)
    for lane in timeline.lanes:
        samples = lane.memory_samples(timeline.step_time_ns, most)
        totals = [sum(sizes) for sizes in zip(*samples.by_kind.values(), strict=True)]
        assert len(samples.times_ns) <= most and samples.times_ns == sorted(samples.times_ns)
        assert max(totals) == lane.peak_bytes
        at_peak = {kind: sizes[totals.index(lane.peak_bytes)] for kind, sizes in samples.by_kind.items()}
        assert {kind: size for kind, size in at_peak.items() if size} == lane.memory_at_peak
        assert set(zip(samples.times_ns, totals, strict=True)) <= set(lane.memory)


def read_by_perfetto(value: float) -> int:
    """Nanoseconds: `CoerceToTs` of its JSON importer multiplies by a thousand and cuts off the rest."""
    return int(value * 1000.0)


@given(st.integers(0, 10**13))
def test_perfetto_reads_times_to_the_nanosecond(time_ns: int) -> None:
    assert read_by_perfetto(json.loads(json.dumps(microseconds(time_ns)))) == time_ns


def test_plain_division_would_lose_nanoseconds() -> None:
    """Why `microseconds` is there: slices that end a nanosecond late overlap the next, and Perfetto drops it."""
    assert any(read_by_perfetto(time_ns / 1000) != time_ns for time_ns in range(1000, 2000))


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_has_a_process_a_lane_and_a_thread_a_stream_whose_slices_do_not_overlap(name: str) -> None:
    timeline = step_of(name)
    events = json.loads(json.dumps(timeline.to_chrome()))["traceEvents"]
    metadata = [event for event in events if event["ph"] == "M"]
    assert events[: len(metadata)] == metadata, "names come first"
    times = [event["ts"] for event in events[len(metadata) :]]
    assert times == sorted(times)
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in metadata}
    assert len(names) == len(metadata)
    assert all(e["pid"] > 0 and e["tid"] > 0 for e in events), "0 is the idle task of Linux"
    owners = {(tid, pid) for _, pid, tid in names}
    assert len(owners) == len({tid for tid, _ in owners}), "a thread is in one process"

    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["name"] and event["cat"]
            start = read_by_perfetto(event["ts"])
            slices[event["pid"], event["tid"]].append((start, start + read_by_perfetto(event["dur"])))
    assert all(("thread_name", *thread) in names and ("thread_sort_index", *thread) in names for thread in slices)
    for spans in slices.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))
    assert max(end for spans in slices.values() for _, end in spans) == timeline.step_time_ns
    shown = Counter(span for spans in slices.values() for span in spans)
    assert shown == Counter((e.start_ns, e.end_ns) for e in timeline.events if e.end_ns > e.start_ns)


@pytest.mark.parametrize("name", NAMES)
def test_the_counters_of_the_trace_add_up_to_the_memory(name: str) -> None:
    timeline = step_of(name)
    by_process: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in timeline.to_chrome()["traceEvents"]:
        if event["ph"] == "C":
            by_process[event["pid"]].append(event)
    assert len(by_process) == len(timeline.lanes)
    for (_, samples), lane in zip(sorted(by_process.items()), timeline.lanes, strict=True):
        held: dict[str, int] = {}
        totals = []
        for total, own in zip(samples[::2], samples[1::2], strict=True):
            held[own["name"]] = own["args"]["bytes"]
            assert total["name"] == "memory" and sum(held.values()) == total["args"]["bytes"]
            totals.append((read_by_perfetto(total["ts"]), total["args"]["bytes"]))
        assert tuple(totals) == lane.memory


def test_a_trace_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, timeline = tmp_path / "new" / "trace.json", step_of("1f1b")
    timeline.save(path)
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        step_of("data").save(path)
    assert path.read_text() == before and [item.name for item in path.parent.iterdir()] == ["trace.json"]
