"""A rank that is killed or hangs: the others end with an error that says so, and training resumes where it was."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.program import PlannedProgram
from autopar.runtime import comm
from autopar.runtime.errors import CollectiveError
from autopar.runtime.mesh import own_group
from models import mlp
from tests.rank_pool import _free_port, pool

ROOT = Path(__file__).parents[2]
STEPS = 6

# Runs train.py; one rank sends itself a signal in the midst of a step, the first time.
_DRIVER = """
import os, signal, sys
from pathlib import Path
import torch
here = Path(__file__).parent
sys.path.insert(0, str(here))
import train
from autopar import runtime as rt
marker, victim, name, timeout_s = here / "struck", os.environ["VICTIM"], os.environ["STRIKE"], os.environ["TIMEOUT_S"]
build = rt.build
rt.build = lambda program, timeout_s=None: build(program, timeout_s=float(os.environ["TIMEOUT_S"]))
steps = 0
def strike(grad):
    global steps
    steps += 1
    if steps == 4 and os.environ["RANK"] == victim and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), getattr(signal, name))
    return grad
initialise = train.initialise
def watched(rank, weights):
    initialise(rank, weights)
    leaf = next(slot.leaf for part in rank._locals for bucket in part.reducer.buckets for slot in bucket.slots)
    leaf.register_hook(strike)  # in the backward pass, before the first bucket of gradients is sent
train.initialise = watched
torch.set_num_threads(1)
train.main(train.arguments(["--steps", os.environ["STEPS"], "--save-every", "2", "--log-file", str(here / "log")]))
"""


def program(world: int) -> tuple[PlannedProgram, torch.nn.Module]:
    torch.manual_seed(0)
    config = mlp.Config(batch_size=24)
    model, batch = mlp.build(config), mlp.example_inputs(config)
    mesh = autopar.Mesh("cpu", devices_per_node=world)
    plan = autopar.template_plan(model, mesh, batch, dp=world)
    return autopar.parallelize(model, mesh, batch, plan=plan), model


def environment(**variables: object) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in variables.items()}}


def lose_a_rank(folder: Path, world: int, strike: str, timeout_s: float) -> tuple[list[tuple[int, str]], float]:
    """Starts ranks by hand; returns (exit code, what it printed) of each and how long the others outlived it."""
    port, processes = _free_port(), []
    for rank in range(world):
        variables = environment(
            RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            VICTIM=1, STRIKE=strike, TIMEOUT_S=timeout_s, STEPS=STEPS,
        )  # fmt: skip
        command = [sys.executable, str(folder / "driver.py")]
        processes.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        found = {rank: processes[rank].communicate(timeout=60)[0] for rank in range(world) if rank != 1}
        seconds = time.time() - (folder / "struck").stat().st_mtime
    finally:
        for process in processes:
            process.kill()
    found[1] = processes[1].communicate()[0]
    return [(processes[rank].returncode, found[rank]) for rank in range(world)], seconds


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "strike", "timeout_s", "bound_s"), [(3, "SIGKILL", 60, 20), (2, "SIGSTOP", 4, 25)])
def test_the_others_end_in_bounded_time(
    world: int, strike: str, timeout_s: float, bound_s: float, tmp_path: Path
) -> None:
    program(world)[0].save(tmp_path)
    (tmp_path / "driver.py").write_text(_DRIVER)
    ranks, seconds = lose_a_rank(tmp_path, world, strike, timeout_s)
    assert seconds < bound_s
    assert ranks[1][0] == -signal.SIGKILL
    for rank in {*range(world)} - {1}:
        code, text = ranks[rank]
        assert code == 1, text
        error = re.search(rf"CollectiveError: rank {rank} of {world}: (\w+) of [\d,]+ bytes over axis dp did not", text)
        assert error is not None, text
        assert f"did not answer within {timeout_s} s" in text
        assert "train.py goes on from its last checkpoint" in text


def _left_alone(rank: int, world: int) -> dict[str, str]:
    """What rank 0 is told when the other takes no part in what stages do together."""
    group = own_group(((0, 1),), 3.0, "left alone")
    assert group is not None
    calls: dict[str, Callable[[], object]] = {
        "broadcast of 12 bytes from rank 1": lambda: comm.broadcast(torch.zeros(3), 1, group),
        "broadcast from rank 1": lambda: comm.broadcast_any(None, 1, group, torch.device("cpu")),
        "gathering what each rank has": lambda: comm.gather_objects([rank], group),
        "all_reduce of 8 bytes": lambda: comm.reduce_over(torch.zeros(2), dist.ReduceOp.SUM, group),
    }
    found = {}
    for name, call in calls.items() if rank == 0 else ():
        with pytest.raises(CollectiveError) as raised:
            call()
        found[name] = str(raised.value)
    return found


@pytest.mark.ranks
def test_stages_say_what_they_did_together_and_who_is_missing() -> None:
    found = pool(2).run(_left_alone)[0]
    assert len(found) == 4
    for name, text in found.items():
        assert f"rank 0 of 2: {name} did not come to its end. Most likely rank 1 ended" in text
        assert "did not answer within 3 s" in text


@pytest.mark.ranks
def test_training_resumes_from_the_last_checkpoint(tmp_path: Path) -> None:
    """torchrun restarts train.py after a rank was killed; the losses are those of a run that nothing disturbed."""
    saved, model = program(2)
    saved.save(tmp_path)
    (tmp_path / "driver.py").write_text(_DRIVER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = environment(VICTIM=1, STRIKE="SIGKILL", TIMEOUT_S=60, STEPS=STEPS)
    run = subprocess.run(
        [*command, "--max-restarts", "1", str(tmp_path / "driver.py")],
        env=variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "struck").exists()
    printed = [
        (int(step), float(loss))
        for step, loss in re.findall(r"^step (\d+) loss ([\d.]+) norm .* samples/s, .* of peak$", run.stdout, re.M)
    ]
    assert [step for step, _ in printed] == [0, 1, 2, 2, 3, 4, 5]
    assert re.search(r"^goes on after step 1, from .*step_00000002$", run.stdout, re.M)
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(item["step"], round(item["loss"], 4)) for item in logged] == printed
    predicted_s = saved.plan.predicted.step_time_ns / 1e9
    assert all(item["predicted_s"] == pytest.approx(predicted_s, rel=1e-4) and item["mfu"] > 0 for item in logged)
    expected = single_device(tmp_path, model)
    for step, loss in printed:
        assert loss == pytest.approx(expected[step], abs=2e-4)


def single_device(folder: Path, model: torch.nn.Module, steps: int = STEPS) -> list[float]:
    """The losses of the model itself on the batches of train.py."""
    sys.path.insert(0, str(folder))
    try:
        import train
    finally:
        sys.path.remove(str(folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for batch, _ in zip(train.batches(), range(steps), strict=False):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
