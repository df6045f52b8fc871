"""Nodes that are killed for good, and that come back: training goes on under another rung, from the last step."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cli import main
from autopar.errors import PlanError
from autopar.ladders import Ladder, Rung
from autopar.ladders.elastic import Rendezvous, mirror_price, save_elastic
from autopar.ladders.layouts import layout_of
from autopar.pipeline import traced
from autopar.runtime.elastic.held import HeldState, lacking
from autopar.runtime.elastic.joining import ElasticRung, ElasticSteps, read_steps, rung_for, store_of_round
from autopar.runtime.elastic.snapshots import KeptNote, Snapshots, StepSnapshot
from autopar.runtime.elastic.training import Elastic, Resumed
from autopar.runtime.errors import ProgramError, WorldError
from models import mlp
from tests.ladder.nodes import Nodes
from tests.runtime.test_lost_ranks import single_device

STEPS = 100


def ladder_of(zero: dict[int, int], batch: int = 24) -> tuple[Ladder, torch.nn.Module, Any]:
    """Rungs of so many nodes of one rank, with parameters sharded so far."""
    torch.manual_seed(0)
    config = mlp.Config(batch_size=batch)
    model, inputs = mlp.build(config), mlp.example_inputs(config)
    graph = traced(model, inputs, None, None, check=False)[0]
    rungs = []
    for count, stage in zero.items():
        mesh = autopar.Mesh("cpu", nodes=count)
        plan = autopar.template_plan(model, mesh, inputs, dp=count, zero=stage)
        rungs.append(Rung(mesh, batch, plan, "given", laid_out=partial(layout_of, graph, plan)))
    return Ladder("mlp", tuple(rungs)), model, inputs


def predicted_bytes(ladder: Ladder, old: int, new: int) -> int:
    """Where as many survive as there are ranks on the smaller."""
    rungs = {rung.devices: rung for rung in ladder.rungs}
    return ladder.transition(rungs[old], rungs[new]).moves.total_bytes


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_training_goes_on_when_nodes_are_killed_and_come_back(tmp_path: Path) -> None:
    """Of four nodes, of which each alone has a quarter of the state, two are killed, come back, and then one is. Every
    loss is that of one device, and each start goes on after the last step that was done."""
    ladder, model, inputs = ladder_of({4: 3, 3: 0, 2: 0})
    folder = save_elastic(ladder, tmp_path / "ladder", model, inputs, rendezvous=Rendezvous(2, 4, 6))
    nodes = Nodes(folder, tmp_path / "work", STEPS, 2, 4, step_s=0.5)
    try:
        nodes.start(0, 1, 2, 3)
        nodes.trains_on(4)
        nodes.kill(1, 3)
        nodes.trains_on(2)
        nodes.start(1, 3)
        nodes.trains_on(4)
        nodes.kill(2)
        nodes.trains_on(3, steps=1)
        nodes.hurry()
        assert nodes.join() == [0, 0, 0]
        log = nodes.logged()
    except BaseException:
        print(nodes.text())
        raise
    finally:
        nodes.stop()
    done = -1
    for line in log:
        if "ranks" in line:
            assert line["from"] == "ranks" and line["goes_on_after"] in (done, done - 1)
            assert line["pause_s"] > 0 and line["predicted_pause_s"] > 0
            done = line["goes_on_after"]
        else:
            assert line["step"] == done + 1
            done = line["step"]
    assert done == STEPS - 1 and not list((tmp_path / "work").glob("kept_*"))
    expected = single_device(folder, model, STEPS)
    for line in (line for line in log if "loss" in line):
        assert line["loss"] == pytest.approx(expected[line["step"]], abs=1e-4)
    went_on = [line for line in log if "ranks" in line]
    assert [line["ranks"] for line in went_on][-3:] == [2, 4, 3]
    assert went_on[-2]["moved_bytes"] == predicted_bytes(ladder, 2, 4) > 0


def test_the_largest_rung_that_there_are_processes_for_is_taken(tmp_path: Path) -> None:
    ladder, model, inputs = ladder_of({4: 0, 2: 0})
    save_elastic(ladder, tmp_path, model, inputs)
    steps = read_steps(tmp_path)
    assert [rung_for(steps.rungs, count).ranks for count in (2, 3, 4, 9)] == [2, 2, 4, 4]
    with pytest.raises(WorldError, match="at least 2 processes for the smallest rung"):
        rung_for(steps.rungs, 1)
    assert all(rung.program.is_file() and rung.predicted_s > 0 for rung in steps.rungs)
    (tmp_path / "elastic.json").write_text(json.dumps({"rungs": []}))
    with pytest.raises(ProgramError, match="autopar ladder --elastic"):
        read_steps(tmp_path)


def test_what_is_no_folder_to_train_in(tmp_path: Path) -> None:
    one, model, inputs = ladder_of({2: 0})
    other, *_ = ladder_of({2: 0}, batch=12)
    with pytest.raises(PlanError, match="rungs of one global batch"):
        save_elastic(Ladder("mlp", (*one.rungs, *other.rungs)), tmp_path, model, inputs)
    unequal = replace(one.rungs[0], mesh=autopar.Mesh("cpu", devices_per_node=3))
    with pytest.raises(PlanError, match="nodes of 1 and 3"):
        save_elastic(Ladder("mlp", (*one.rungs, unequal)), tmp_path, model, inputs)
    with pytest.raises(PlanError, match="whole number from 1 up"):
        Rendezvous(keep_alive_s=0)


def test_the_commands_write_and_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun gets the nodes of the smallest and the largest rung, and is told as the pauses were predicted."""
    folder = tmp_path / "ladder"
    ladder_options = ["ladder", "models.mlp", "--mesh", "cpu:2x1", "--mesh", "cpu:1x1", "--batch", "8"]
    assert main([*ladder_options, "--elastic"]) == 2
    assert "expected -o beside" in capsys.readouterr().err
    assert main([*ladder_options, "--elastic", "-o", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "cpu:2x1: each rank keeps" in printed
    assert "resharding, batch 8" in printed and "autopar launch" in printed.splitlines()[-1]
    transitions = json.loads((folder / "ladder.json").read_text())["transitions"]
    assert [(one["from"], one["to"]) for one in transitions] == [("cpu:1x1", "cpu:2x1"), ("cpu:2x1", "cpu:1x1")]
    asked: list[tuple[list[str], dict[str, str]]] = []

    def started(command: list[str], env: dict[str, str], check: bool) -> subprocess.CompletedProcess[bytes]:
        asked.append((command, env))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", started)
    assert main(["launch", str(folder), "--elastic", "--rendezvous", "here:1234", "--arguments=--steps 7"]) == 0
    ((command, variables),) = asked
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1" and command[-2:] == ["--steps", "7"]
    assert "--nnodes=1:2" in command and "--rdzv-endpoint=here:1234" in command
    assert "--rdzv-conf=keep_alive_interval=5,keep_alive_max_attempt=3,last_call_timeout=5" in command
    assert main(["launch", str(folder), "--elastic"]) == 2
    (folder / "elastic.json").unlink()
    assert main(["launch", str(folder), "--elastic", "--rendezvous", "here:1234"]) == 2
    assert "autopar ladder --elastic" in capsys.readouterr().err


def test_what_mirrors_take_is_told() -> None:
    """Of four ranks with a quarter each, that is what goes to the next; of two that have all, nothing does."""
    ladder, *_ = ladder_of({4: 3, 2: 0})
    quarter, whole = map(mirror_price, ladder.rungs)
    state = ladder.rungs[1].layout
    assert state is not None and whole == (state.num_bytes, 0, 0.0) and "several nodes have all" in str(whole)
    assert quarter.sent_bytes == quarter.kept_bytes == state.num_bytes / 4 and quarter.seconds > 0
    assert mirror_price(ladder.rungs[1], mirrors=2).sent_bytes == 0  # there is no third node


def test_a_rank_without_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept_000001_0000000002_000003.part").touch()
    snapshots = Snapshots(tmp_path)
    assert not list(tmp_path.iterdir())
    held = HeldState({("model.weight", (0,)): torch.zeros(10)}, {"model.weight": ((10,), "float32")})
    note = KeptNote(0.0, 1, ((1, 2.0), (4, 9.0)), 0.5)
    for step in (1, 2):
        snapshots.write(0, StepSnapshot((1, step), held, held.whole, note))
    snapshots.drop_before((1, 2))
    (found,) = snapshots.read(0, 1)
    assert found.kept == note and [note.start_s(count) for count in (1, 2, 3, 4)] == [2.0, 2.0, 9.0, 9.0]
    assert found.label == (1, 2) and torch.equal(found.held.pieces["model.weight", (0,)], torch.zeros(10))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 61, 39))  # type: ignore[attr-defined]
    with pytest.raises(ProgramError, match=r"40 bytes that a rank keeps.*found 39"):
        snapshots.write(0, StepSnapshot((1, 3), held, held.whole, KeptNote(0.0, 1)))


def test_what_a_pause_is_made_of() -> None:
    """Nodes that come: a checkpoint is written before, as long as the last took, if there was one. A lost node: it is
    missed first. Where not all nodes are back, torchrun waits for further ones."""
    rungs = tuple(ElasticRung(count, "", Path(), 1.0, 3.0 / count) for count in (4, 3, 2))
    elastic = Elastic.__new__(Elastic)
    elastic.steps = ElasticSteps(rungs, noticed_s=10.0, met_s=5.0, ended_s=3.0, polled_s=1.0, wire_bytes_s=1e9)
    for size, kept, expected in (
        (4, KeptNote(0.0, 2, ((2, 7.0), (4, 9.0))), 9.0 + 1.0 + 1.0 + 1.5 + 3.0),
        (4, KeptNote(0.0, 2, ((2, 7.0),), 0.25), 7.0 + 1.0 + 1.0 + 0.25 + 3.0),
        (3, KeptNote(0.0, 2, ((2, 7.0),), 0.25), 7.0 + 1.0 + 4 / 3 + 0.25 + 3.0 + 5.0),
        (2, KeptNote(0.0, 4, ((4, 9.0),)), 9.0 + 1.0 + 2.0 + 10.0 + 5.0),
    ):
        elastic.size, elastic.rung = size, rung_for(rungs, size)
        assert elastic._predicted_s(Resumed(3, "ranks", 4 * 10**9, 0.0, kept), kept) == pytest.approx(expected)


def test_what_is_not_whole_is_missed() -> None:
    """A part of a tensor, all of one, what is no tensor; parts that overlap count once."""
    whole = {"model.a": ((4, 2), "float32"), "model.b": ((), "float32"), "extra": None}
    pieces = [
        (("model.a", (0, 0)), (2, 2)),
        (("model.a", (2, 0)), (2, 2)),
        (("model.b", ()), ()),
        (("extra", ()), (7,)),
    ]
    assert lacking(whole, pieces) == []
    larger = (("model.a", (0, 0)), (3, 2))
    assert lacking(whole, [*pieces, larger]) == [] and lacking(whole, [larger, *pieces[2:]]) == ["model.a"]
    for place, name in enumerate(("model.a", "model.a", "model.b", "extra")):
        assert lacking(whole, pieces[:place] + pieces[place + 1 :]) == [name]


def test_a_store_for_all_starts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that come later would not find it."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(ProgramError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        store_of_round(0, 2, 1.0)
