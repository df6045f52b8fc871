"""A traced run beside its simulated step, by traces that are made up, so that no test depends on how fast a host is."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import cli
from autopar.cost.compute import call_time_ns, gradient_time_ns, priced_call_ns, priced_gradient_ns
from autopar.cost.profile import Profile, Runtime, profile_from_json, profile_to_json
from autopar.cost.seen import (
    NOTHING_SEEN,
    REACH,
    SeenCall,
    SeenGradients,
    SeenRuns,
    log_factor,
    seen_from_json,
    seen_to_json,
)
from autopar.errors import TraceFileError
from autopar.ir.plan import Plan
from autopar.observed.expected import digest
from autopar.observed.form import FORMAT
from autopar.observed.kineto import read_traces
from autopar.observed.learning import learned, within
from autopar.observed.measured import measured
from autopar.ops.work import WorkKey
from autopar.profiler import template_profile
from autopar.program import PlannedProgram
from autopar.runtime.ranges import MARK
from autopar.show.report import page
from models import gpt
from tests.observed.made import Writer, write_run

CONFIG = gpt.Config(num_layers=2, hidden_size=64, num_heads=4, seq_len=32, vocab_size=128, batch_size=4, mlp_ratio=16)


@cache
def program_on(profile: str, ranks: int = 1, **template: int) -> PlannedProgram:
    mesh, batch = autopar.Mesh(profile, devices_per_node=ranks), gpt.example_inputs(CONFIG)
    plan = autopar.template_plan(gpt.build(CONFIG), mesh, batch, check=False, **template)
    return autopar.parallelize(gpt.build(CONFIG), mesh, batch, plan=plan, check=False)


def slowed(profile: Profile, family: str, times: float) -> dict[str, Any]:
    """The profile in which an operator's curve is so many times too slow."""
    data = json.loads(json.dumps(profile_to_json(profile)))
    for item in data["operators"]:
        if item["family"] == family:
            for side in ("forward", "backward"):
                item[side] = [[work, efficiency / times] for work, efficiency in item[side]]
            item["call_ns"] = item["call_ns"] and [round(ns * times) for ns in item["call_ns"]]
    return data


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A profile that has GELU three times too slow."""
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(slowed(template_profile(), template_profile().curve("gelu").family, 3.0)))
    return path


def right(tmp_path: Path) -> str:
    path = tmp_path / "right.json"
    if not path.exists():
        path.write_text(json.dumps(profile_to_json(template_profile())))
    return str(path)


def run_of(folder: Path, what: PlannedProgram, **how: Any) -> Path:
    return write_run(folder, what._graph, what.plan, what.plan, **how)


def test_a_run_as_predicted_has_nothing_wrong(tmp_path: Path) -> None:
    program = program_on("cpu", 2, tp=2)
    found = program.plan.compare(run_of(tmp_path, program))
    assert abs(found.error) < 0.01 and sum(cause.difference_ns for cause in found.causes) == (
        found.measured_ns - found.predicted_ns
    )
    assert max(abs(line.difference_ns) for line in found.lines) < 0.01 * found.measured_ns


def test_a_slow_statement_is_named_with_its_line(tmp_path: Path) -> None:
    program = program_on("cpu", 2, tp=2)
    found = program.plan.compare(run_of(tmp_path, program, factors={"linear_5": 40.0}))
    assert found.statements[0].name == "linear_5" and found.lines[0].statements == ("linear_5",)
    assert (found.lines[0].module, found.lines[0].source) == ("of.linear_5", "model.py:1")
    operators = next(cause for cause in found.causes if cause.name == "operators")
    assert operators.difference_ns == pytest.approx(found.measured_ns - found.predicted_ns, rel=0.05)
    assert "linear_5" in str(found) and "operators" in str(found)


def test_a_late_rank_is_waiting_and_no_slow_collective(tmp_path: Path) -> None:
    program = program_on("cpu", 2, tp=2)
    found = program.plan.compare(run_of(tmp_path, program, late_ns={1: 5_000_000}))
    causes = {cause.name: cause.difference_ns for cause in found.causes}
    num_collectives = sum(one.sent_measured_ns > 0 for one in found.statements)
    assert causes["waiting"] == pytest.approx(num_collectives * 5_000_000 / 2, rel=0.01)  # the mean of two ranks
    assert abs(causes["operators"]) < 100_000 and num_collectives > 2


def test_what_no_range_accounts_for_is_the_host(tmp_path: Path) -> None:
    program = program_on("cpu", 2, tp=2)
    found = program.plan.compare(run_of(tmp_path, program, host_ns=7_000_000))
    causes = {cause.name: cause.difference_ns for cause in found.causes}
    assert causes["host"] == pytest.approx(7_000_000, rel=0.05) and abs(causes["contention"]) < 100_000


def test_a_plan_from_a_file_is_compared_as_it_was_predicted(tmp_path: Path) -> None:
    program = program_on("cpu", 2, tp=2)
    traces = run_of(tmp_path / "traces", program)
    program.plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert digest(loaded) == digest(program.plan)
    assert loaded.compare(traces).causes == program.plan.compare(traces).causes


def test_a_trace_of_another_plan_is_refused(tmp_path: Path) -> None:
    traces = run_of(tmp_path, program_on("cpu", 2, tp=2))
    with pytest.raises(TraceFileError, match="another plan"):
        program_on("cpu", 2, dp=2).plan.compare(traces)
    (tmp_path / "rank_00000.json").write_text("{}")
    with pytest.raises(TraceFileError, match="autopar run --trace"):
        read_traces(tmp_path)
    with pytest.raises(TraceFileError, match="rank_00000"):
        read_traces(tmp_path / "nowhere" if (tmp_path / "nowhere").mkdir() is None else tmp_path)


def test_traces_of_some_ranks_and_of_other_versions_are_refused(tmp_path: Path) -> None:
    traces = run_of(tmp_path, program_on("cpu", 2, tp=2))
    (traces / "rank_00000.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(TraceFileError, match=r"all 2 ranks in .*, found none of 0; copy"):
        read_traces(traces)
    data = json.loads((traces / "rank_00001.json").read_text())
    data["autopar"]["expected"]["format"] = 1
    (traces / "rank_00001.json").write_text(json.dumps(data))
    with pytest.raises(TraceFileError, match="found one of format 1"):
        read_traces(traces / "rank_00001.json")


def test_what_the_host_takes_is_learned_for_models_of_more_or_fewer_calls(tmp_path: Path) -> None:
    """7 ms around statements, which no profile knows of: the next prediction has them, also of a model half as deep."""
    program = program_on(right(tmp_path))
    folder = run_of(tmp_path / "traces", program, host_ns=7_000_000)
    before = program.plan.compare(folder)
    found = learned(template_profile(), read_traces(folder), "2026-11-27")
    assert "host (around each of" in "\n".join(map(str, found.lessons))
    path = tmp_path / "seen.json"
    path.write_text(json.dumps(profile_to_json(found.profile)))
    after = program_on(str(path)).plan.compare(folder)
    assert before.error < -0.10 and abs(after.error) < 0.02
    half = gpt.Config(**{**vars(CONFIG), "num_layers": 1})
    plans = [autopar.template_plan(gpt.build(half), autopar.Mesh(profile, devices_per_node=1), gpt.example_inputs(half),
                                   check=False) for profile in (right(tmp_path), str(path))]  # fmt: skip
    added = plans[1].predicted.step_time_ns - plans[0].predicted.step_time_ns
    assert 3_000_000 < added < 5_500_000


def written(folder: Path, rank: int, steps: list[tuple[int, int]], thread_ns: list[int]) -> Path:
    """A rank's trace of steps in which a sum of gradients is started, and waited for so much later, so long; before it
    three gradients come, each of which takes 200 ns."""
    writer = Writer()
    for between, waited in steps:
        step = writer.begin(f"{MARK}step")
        for _ in range(3):
            taking = writer.begin(f"{MARK}gradient | 4096")
            writer.wait(200)
            writer.end(taking, 200)
        started = writer.begin(f"{MARK}start all_reduce | 12288 | dp")
        writer.end(started, 0)
        writer.wait(between)
        sent = writer.begin(f"{MARK}collective all_reduce | 12288 | dp")
        writer.wait(waited)
        writer.end(sent, 0)
        writer.end(step)
    told = {
        "expected": {"format": FORMAT}, "rank": rank, "num_ranks": 2, "device": "cpu", "host": "host", "torch": "2.13",
        "plain_ns": thread_ns, "plain_process_ns": thread_ns, "plain_thread_ns": thread_ns, "event_ns": 0.0,
        "slowdown": 1.0,
    }  # fmt: skip
    path = folder / f"rank_{rank:05d}.json"
    path.write_text(json.dumps({"traceEvents": writer.events, "autopar": told}))
    return path


def test_a_step_lasts_until_its_last_rank_has_done(tmp_path: Path) -> None:
    """Each rank is fast in every second step; the step never is."""
    for rank, spent in enumerate(([100_000, 50_000] * 4, [50_000, 100_000] * 4)):
        written(tmp_path, rank, [(0, 0)], spent)
    found = measured(read_traces(tmp_path), range(2))
    assert found.last_busy_ns == 100_000 and found.host_ns == pytest.approx(100_000, rel=0.01)


def test_what_is_sent_beside_compute_is_known_within_bounds(tmp_path: Path) -> None:
    """No shorter than the last rank waited, no longer than passed since it started; that of gradients is told apart."""
    written(tmp_path, 0, [(5_000, 9_000)] * 4, [50_000] * 4)
    written(tmp_path, 1, [(5_000, 1_000)] * 4, [50_000] * 4)
    found = measured(read_traces(tmp_path), range(2))
    (journey,) = found.journeys.values()
    assert journey.waited_ns == pytest.approx(1_000, abs=20) and journey.passed_ns == pytest.approx(6_000, abs=40)
    assert found.gradients == {4096: 3} and found.gradients_ns == 600
    assert next(iter(found.sent_calls.values()), 1) == 1
    for priced, expected in ((500, 1_000), (3_000, 3_000), (90_000, 6_000)):
        assert within(journey, priced) == pytest.approx(expected, abs=40)


def test_what_takes_gradients_is_learned_as_that(tmp_path: Path) -> None:
    """Twice as long as it is priced, with nothing left for the host."""
    profile = template_profile()
    assert gradient_time_ns(4096, profile) == 0  # it says nothing of the runtime
    profile = replace(profile, runtime=Runtime((0, 0), 50_000, 0, (0, 0), profile.facts.provenance))
    priced = priced_gradient_ns(4096, profile)
    seen = SeenRuns(gradients=(SeenGradients(3 * priced, 6 * priced, 1, 4, profile.facts.provenance),))
    assert gradient_time_ns(4096, replace(profile, seen=seen)) == 2 * priced > 0
    assert seen_from_json(seen_to_json(seen)).gradients == seen.gradients
    again = profile_from_json(json.loads(json.dumps(profile_to_json(replace(profile, seen=seen)))), "again")
    assert gradient_time_ns(4096, again) == 2 * priced


def test_an_operator_that_was_not_seen_follows_those_of_its_curve() -> None:
    plain = template_profile()
    spent = priced_call_ns(GELU, plain)
    item = SeenCall(GELU, 3 * spent[0], 3 * spent[1], 1, 4, plain.facts.provenance)
    profile = replace(plain, seen=SeenRuns((item,)), _shared={})
    alike = GELU._replace(op="aten.tanh.default")
    other = GELU._replace(op="aten.add.Tensor")
    assert call_time_ns(alike, profile)[0] > 1.5 * priced_call_ns(alike, plain)[0]
    assert call_time_ns(other, profile) == priced_call_ns(other, plain)


def test_a_traced_program_runs_the_shapes_of_the_program(tmp_path: Path) -> None:
    """Other shapes, and what fills up short batches."""
    mesh, batch = autopar.Mesh("cpu", devices_per_node=1), gpt.example_inputs(CONFIG)
    model = gpt.build(CONFIG)
    plan = autopar.template_plan(model, mesh, batch, check=False)
    rows = {name: (2, *value.shape[1:]) for name, value in batch.items()}
    program = autopar.parallelize(model, mesh, batch, plan=plan, shapes=[rows], check=False)
    source = (program.save_traced(tmp_path) / "traced.py").read_text()
    assert "Program.OTHERS = (Program1,)" in source and source.count("RAN = {") == 2


def test_a_wrong_curve_is_found_by_name_and_mended(tmp_path: Path, wrong: Path) -> None:
    """The profile has GELU three times too slow; the run is what the right profile says."""
    program, true = program_on(str(wrong)), program_on(right(tmp_path))
    folder = write_run(tmp_path / "traces", true._graph, true.plan, program.plan)
    before = program.plan.compare(folder)
    assert before.statements[0].name.startswith("gelu") and before.error > 0.10
    found = learned(profile_from_json(json.loads(wrong.read_text()), "wrong"), read_traces(folder), "2026-11-27")
    assert found.lessons[0].op.startswith("aten.gelu") and "gelu" in str(found.lessons[0])
    mended = tmp_path / "mended.json"
    mended.write_text(json.dumps(profile_to_json(found.profile)))
    again = program_on(str(mended))
    after = again.plan.compare(folder).error
    assert abs(after) < before.error / 2 and abs(after) < 0.02
    assert any("seen" in name for name in again.plan.sources)


GELU = WorkKey("aten.gelu_tanh.default", ((64, 1024),), ((64, 1024),), (4,), (4,), (True,), "float32")


def sized(rows: int) -> WorkKey:
    return GELU._replace(operand_shapes=((rows, 1024),), result_shapes=((rows, 1024),))


def test_what_was_seen_reaches_what_is_near_and_nothing_else() -> None:
    plain = template_profile()
    plain = replace(plain, facts=replace(plain.facts, cores=2), _shared={})
    priced = call_time_ns(GELU, plain)
    item = SeenCall(GELU, 2 * priced[0], None, 1, 4, plain.facts.provenance)
    profile = replace(plain, seen=SeenRuns((item,)), _shared={})
    assert call_time_ns(GELU, profile) == (2 * priced[0], priced[1])  # backward was not seen
    near, far = call_time_ns(sized(96), profile)[0], call_time_ns(sized(64 * 64), profile)[0]
    assert priced_call_ns(sized(96), plain)[0] < near < 2 * priced_call_ns(sized(96), plain)[0]
    assert far == priced_call_ns(sized(64 * 64), plain)[0]
    other = GELU._replace(dtype="bfloat16", operand_itemsizes=(2,), result_itemsizes=(2,))
    assert call_time_ns(other, profile) == call_time_ns(other, plain)
    crowded = profile.shared_by(8)
    assert call_time_ns(GELU, crowded) == priced_call_ns(GELU, crowded)  # it was seen on a rank with a core of its own


def test_the_factor_fades_to_nothing() -> None:
    points = ((0.0, 1.0), (2.0, 3.0))
    assert log_factor(points, 0.0) == 1.0 and log_factor(points, 2.0) == 3.0
    assert log_factor(points, 2.0 + REACH) == log_factor(points, -2 * REACH) == log_factor((), 1.0) == 0.0
    assert 0.0 < log_factor(points, 2.0 + REACH / 2) < 3.0


def test_what_is_seen_twice_is_joined_by_how_often(tmp_path: Path) -> None:
    program = program_on(right(tmp_path))
    first = run_of(tmp_path / "first", program, factors={"gelu": 2.0, "gelu_1": 2.0})
    second = run_of(tmp_path / "second", program, factors={"gelu": 8.0, "gelu_1": 8.0})
    once = learned(template_profile(), read_traces(first), "2026-11-27").profile
    twice = learned(once, read_traces(second), "2026-11-27").profile
    (before, after) = ([i for i in p.seen.calls if "gelu" in i.call.op] for p in (once, twice))
    assert len(before) == len(after) == 1 and after[0].count == 2 * before[0].count
    assert after[0].forward_ns == pytest.approx(2 * (before[0].forward_ns or 0), rel=0.01)  # √(2 · 8) = 4


def test_a_profile_with_what_was_seen_is_read_as_it_was_written(tmp_path: Path) -> None:
    program = program_on(right(tmp_path), 2, tp=2)
    found = learned(template_profile(), read_traces(run_of(tmp_path / "traces", program)), "2026-11-27").profile
    data = json.loads(json.dumps(profile_to_json(found)))
    read = profile_from_json(data, "seen")
    assert (read.seen.calls, read.seen.collectives, read.seen.updates) == (
        found.seen.calls, found.seen.collectives, found.seen.updates,
    )  # fmt: skip
    assert read.seen.collectives and read.seen.updates and "seen" not in profile_to_json(template_profile())
    assert not template_profile().seen and not NOTHING_SEEN


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = program_on("cpu", 2, tp=2)
    traces = run_of(tmp_path / "traces", program, factors={"linear_5": 40.0})
    program.plan.save(tmp_path / "plan.json")
    assert cli.main(["compare", str(tmp_path / "plan.json"), str(traces), "-o", str(tmp_path / "page.html")]) == 0
    assert "linear_5" in capsys.readouterr().out and "linear_5" in (tmp_path / "page.html").read_text()
    assert cli.main(["profile", "--from-trace", str(traces), "-o", str(tmp_path / "seen.json")]) == 0
    told = capsys.readouterr().out
    assert "aten.linear.default (linear_5" in told and "as they were seen" in told
    assert cli.main(["profile", "--from-trace", str(traces)]) == 2


def test_the_page_has_what_ran(tmp_path: Path) -> None:
    program = program_on("cpu", 2, tp=2)
    found = program.plan.compare(run_of(tmp_path, program))
    assert '"observed":{"ranks":[0,2]' in page(program.plan, observed=found)
    assert '"observed":null' in page(program.plan)
