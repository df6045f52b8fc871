"""The README's way from a model file to a trained step works as it is written, and a plan prints as it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar import cli
from models import gpt
from tests.test_house import ROOT

SECTION = "From your own model file to a trained step"


def blocks(language: str, title: str = SECTION) -> list[str]:
    """A section's blocks of code in a language."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.mark.ranks
def test_the_new_users_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (source,), (commands,) = blocks("python"), blocks("sh")
    (tmp_path / source.splitlines()[0].removeprefix("# ")).write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    printed = {}
    for line in commands.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "autopar":
            assert cli.main(arguments) == 0, line
        else:
            assert program == "torchrun"
            launch = [sys.executable, "-m", "torch.distributed.run", *arguments]
            subprocess.run(launch, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        printed[line.split()[1]] = capfd.readouterr().out
    assert "parameter layers.0.up.weight: stored [" in printed["explain"]
    assert re.search(r"layers\.0\.up\.weight +\[.*\] → \[R\]$", printed["plan"], re.MULTILINE)
    assert re.search(r"layers\.\*\.up\.weight +\[.*\] → \[S\(0\)\]  ×3$", printed["plan"], re.MULTILINE)
    assert "layers.0.up.weight: " in printed["diff"]
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+) ", printed["--nproc-per-node"], re.MULTILINE)]
    assert len(losses) == 10 and losses[-1] < losses[0]


def test_a_plan_prints_as_the_readme_shows_it() -> None:
    (source, *_), (printed, explained) = (blocks(language, "How to read a plan") for language in ("python", "text"))
    *lines, last = source.splitlines()
    assert last.startswith("print(")
    known = {"autopar": autopar, "gpt": gpt}
    exec("\n".join(lines), known)
    plan = eval(last.removeprefix("print(").removesuffix(")"), known)
    assert without_seconds(str(plan)) == without_seconds(printed.rstrip("\n"))
    assert str(plan.explain("layers.0.mlp.up.weight")).endswith(explained.rstrip("\n"))


def without_seconds(text: str) -> str:
    """What is printed but how long the search took."""
    return re.sub(r", [\d.]+ s$", "", text, flags=re.MULTILINE)
