"""docs/changes.md shows changes as they are in the sources, and trials that still apply to them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "changes.md").read_text(encoding="utf-8")
TRIALS = ("schedule", "collective", "pass")


def diffs(page: str, fence: str) -> list[list[str]]:
    """The lines of each diff in the page that is fenced so."""
    found: list[list[str]] = []
    is_inside = False
    for line in page.splitlines():
        if line.startswith("```"):
            is_inside = line == f"```{fence}"
            found += [[]] if is_inside else []
        elif is_inside:
            found[-1].append(line)
    return found


def added_lines(page: str) -> Iterator[tuple[str, str]]:
    """The file and the text of each line that a diff of what is in the sources adds."""
    for diff in diffs(page, "diff"):
        file = ""
        for line in diff:
            if line.startswith("+++ b/"):
                file = line.removeprefix("+++ b/")
            elif line.startswith("+"):
                yield file, line[1:]


def test_what_a_change_adds_is_there() -> None:
    added = list(added_lines(PAGE))
    lines = {file: (ROOT / file).read_text(encoding="utf-8").splitlines() for file, _ in added}
    assert added and [line for line in added if line[1] not in lines[line[0]]] == []


def refusal(diff: list[str]) -> str:
    """Why git cannot apply the diff to the tree; nothing where it can."""
    if shutil.which("git") is None:
        pytest.skip("git, which applies diffs, is not installed")
    text = "\n".join([*diff, ""])
    done = subprocess.run(
        ["git", "apply", "--check", "-"], cwd=ROOT, input=text, capture_output=True, text=True, encoding="utf-8"
    )
    return done.stderr if done.returncode else ""


def test_every_trial_is_on_the_page() -> None:
    assert len(diffs(PAGE, "diff trial")) == len(TRIALS)


@pytest.mark.parametrize("number", range(len(TRIALS)), ids=TRIALS)
def test_a_trial_still_applies(number: int) -> None:
    assert refusal(diffs(PAGE, "diff trial")[number]) == ""


@pytest.mark.parametrize("number", range(len(TRIALS)), ids=TRIALS)
def test_a_trial_whose_surroundings_have_changed_is_refused(number: int) -> None:
    diff = diffs(PAGE, "diff trial")[number]
    first = next(place for place, line in enumerate(diff) if line.startswith(" ") and line.strip())
    assert "does not apply" in refusal([*diff[:first], f"{diff[first]}, as it was", *diff[first + 1 :]])
