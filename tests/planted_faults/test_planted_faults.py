"""Planted faults stay plantable, and some are planted for real; all of them: python -m tests.planted_faults.run"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

from tests.planted_faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_changes_one_place_into_what_still_is_python(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1 and fault.old != fault.new
    compile(text.replace(fault.old, fault.new), fault.file, "exec")


def test_there_are_faults_of_every_kind() -> None:
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    folders = {"/".join(fault.file.split("/")[:2]) for fault in FAULTS}
    assert folders == {
        f"autopar/{room}"
        for room in (
            "ops",
            "runtime",
            "emit",
            "ir",
            "trace",
            "substitute",
            "microbatch.py",
        )
    }


def test_the_suite_runs_a_test_that_each_fault_is_caught_by(request: pytest.FixtureRequest) -> None:
    """Of products the suite runs a sample: of what a fault selects, some must be in it. Where all tests are asked for:
    others do not know the sample."""
    chosen = request.config.option
    if chosen.keyword or chosen.markexpr or request.config.args != request.config.getini("testpaths"):
        pytest.skip("needs the whole suite's tests")
    by_file: dict[str, list[pytest.Item]] = {}
    for item in request.session.items:
        by_file.setdefault(str(item.path.relative_to(ROOT)), []).append(item)
    checks = {check.removeprefix("tests:") for fault in FAULTS for check in fault.checks if check.startswith("tests:")}
    assert len(checks) > 50
    assert [check for check in sorted(checks) if not _selected(check, by_file)] == []


def _selected(check: str, by_file: dict[str, list[pytest.Item]]) -> list[pytest.Item]:
    file, *option = shlex.split(check)
    if not option:
        return by_file[file]
    wanted = Expression.compile(option[1])
    return [item for item in by_file[file] if wanted.evaluate(KeywordMatcher.from_item(item))]


@pytest.mark.sweep
def test_planted_faults_are_caught() -> None:
    names = ["the gradient is gathered", "mean divides by the local length"]
    command = [sys.executable, "-m", "tests.planted_faults.run", "--only", *names]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env=environment)
    assert run.returncode == 0 and "2 faults planted, 2 caught, 0 missed" in run.stdout, run.stdout + run.stderr
