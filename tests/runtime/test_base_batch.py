"""train.py takes another learning rate where a step has another batch than the rate was found for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from models import mlp


@pytest.mark.ranks
def test_the_script_scales_its_rate_to_the_plans_batch(tmp_path: Path) -> None:
    config = mlp.Config(batch_size=16)
    program = autopar.parallelize(
        mlp.build(config), autopar.Mesh("cpu", devices_per_node=1), mlp.example_inputs(config), search="fast"
    )
    program.save(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    options = ["--steps", "2", "--lr", "0.01", "--base-batch", "4", "--log-file", str(tmp_path / "log")]
    run = subprocess.run(
        [*command, str(tmp_path / "train.py"), *options], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0.02" in run.stdout and "16 / 4" in run.stdout, run.stdout
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert logged[-1]["lr"] == pytest.approx(0.02)
