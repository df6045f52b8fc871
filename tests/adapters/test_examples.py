"""The examples' scripts without their marked lines, in one process, and with them, under torchrun: the same run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("accelerate", reason="Hugging Face's Trainer needs accelerate")
pytest.importorskip("lightning", reason="the strategy is Lightning's")

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TRAINING = ["--use_cpu", "--max_steps", "4", "--per_device_train_batch_size", "8", "--report_to", "none",
            "--logging_steps", "1", "--disable_tqdm", "1", "--learning_rate", "1e-3"]  # fmt: skip

pytestmark = [pytest.mark.ranks, pytest.mark.whole, pytest.mark.timeout(600)]


def run(script: Path, arguments: list[str], ranks: int = 0) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, "-W", "ignore", *launcher, str(script), *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def without(name: str, changes: dict[str, str], folder: Path) -> Path:
    """The example's script as it was before its marked lines were changed."""
    text = (ROOT / "examples" / name).read_text()
    for line, before in changes.items():
        text, count = re.subn(line, before, text)
        assert count == 1, line
    assert "autopar" not in text.split('"""', 2)[2]
    (folder / name).write_text(text)
    return folder / name


def logged(folder: Path) -> list[dict[str, float]]:
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "train_loss")
    return [{name: entry[name] for name in names if name in entry} for entry in entries]


def test_a_script_for_the_trainer(tmp_path: Path) -> None:
    changes = {
        r"from autopar\.adapters\.transformers import Trainer.*\n": "from transformers import Trainer\n",
        r"        plan=template_of\(options\.plan\),.*\n": "",
    }
    plain = without("finetune_text.py", changes, tmp_path)
    run(plain, [*TRAINING, "--output_dir", str(tmp_path / "one")])
    arguments = [*TRAINING, "--output_dir", str(tmp_path / "ranks"), "--plan", "dp=2"]
    run(ROOT / "examples" / "finetune_text.py", arguments, ranks=2)
    found, expected = logged(tmp_path / "ranks"), logged(tmp_path / "one")
    assert len(found) == len(expected) == 6
    for own, other in zip(found, expected, strict=True):
        assert own == pytest.approx(other, rel=2e-5)
    weights = load_file(tmp_path / "one" / "model.safetensors")
    for name, weight in load_file(tmp_path / "ranks" / "model.safetensors").items():
        torch.testing.assert_close(weight, weights[name], rtol=2e-4, atol=2e-5, msg=name)


def test_a_script_for_lightning(tmp_path: Path) -> None:
    changes = {
        r"from autopar\.adapters\.lightning import PlannedStrategy.*\n": "",
        r"        strategy=PlannedStrategy\(plan\),.*\n": "",
    }
    plain = without("lightning_bytes.py", changes, tmp_path)
    one = run(plain, ["--output", str(tmp_path / "one")])
    ranks = run(
        ROOT / "examples" / "lightning_bytes.py", ["--output", str(tmp_path / "two"), "--plan", "dp=2"], ranks=2
    )
    pattern = r"\{'loss.*\}"
    found, expected = (json.loads(re.findall(pattern, text)[-1].replace("'", '"')) for text in (ranks, one))
    assert found == pytest.approx(expected, rel=1e-3) and len(found) == 3
