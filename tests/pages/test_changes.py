"""docs/changes.md shows changes as they are in the sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def added_lines(page: str) -> Iterator[tuple[str, str]]:
    """The file and the text of each line that a diff in the page adds."""
    file, is_diff = "", False
    for line in page.splitlines():
        if line.startswith("```"):
            is_diff = line == "```diff"
        elif is_diff and line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/")
        elif is_diff and line.startswith("+"):
            yield file, line[1:]


def test_what_a_change_adds_is_there() -> None:
    added = list(added_lines((ROOT / "docs" / "changes.md").read_text(encoding="utf-8")))
    lines = {file: (ROOT / file).read_text(encoding="utf-8").splitlines() for file, _ in added}
    assert added and [line for line in added if line[1] not in lines[line[0]]] == []
