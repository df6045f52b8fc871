"""The script for Ray, run on a cluster of this host's processors: a worker a rank."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import autopar
from autopar.launching import ray_script, read_job
from models import mlp

ROOT = Path(__file__).parents[2]

# A cluster takes half a minute to start on an idle host, and minutes on a busy one.
pytestmark = [pytest.mark.ranks, pytest.mark.whole, pytest.mark.timeout(450)]


def _train_imports() -> str:
    """Why ray.train does not, or nothing."""
    try:
        import ray.train  # noqa: F401
    except ImportError as error:
        return f"ray.train is not installed: {error}"
    except Exception as error:  # it warns of its own imports, and warnings are errors here
        return "" if isinstance(error, Warning) else str(error)
    return ""


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder with a short name, as sockets need; whatever still runs there is ended and makes the test fail."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    yield folder
    left = [process for process in psutil.process_iter() if _is_of(process, folder)]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, "processes of the cluster were left"


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(str(folder) in word for word in process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.skipif(bool(_train_imports()), reason=_train_imports() or "installed")
def test_a_program_trains_on_a_ray_cluster(scratch: Path) -> None:
    """The first loss is the single device's on the batch that train.py draws."""
    config = mlp.Config()
    model, inputs = mlp.build(config), mlp.example_inputs(config)
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    plan = autopar.template_plan(model, mesh, inputs, dp=2, check=False)
    folder = autopar.parallelize(model, mesh, inputs, plan=plan, check=False).save(scratch / "out")
    script = scratch / "train_on_ray.py"
    script.write_text(ray_script(read_job(folder)))
    log = scratch / "log.jsonl"
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(scratch), "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "200",
    }  # fmt: skip
    command = [sys.executable, str(script), "--steps", "2", "--log-file", str(log)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    sys.path.insert(0, str(folder))
    try:
        batch = next(iter(runpy.run_path(str(folder / "train.py"))["batches"]()))
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("program", None)
    assert len(losses) == 2 and losses[0] == pytest.approx(model(**batch).item(), rel=1e-5)
