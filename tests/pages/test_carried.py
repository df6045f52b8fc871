"""The page of what is carried and what is refused: each line has a test, and the test is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "carried.md"


def rows() -> list[str]:
    """The lines of its tables but for their heads."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.startswith("| what |")]


def test_each_line_names_a_test_that_is_there() -> None:
    found = rows()
    assert len(found) >= 40
    for line in found:
        named = re.search(r"`(tests/[\w/]+\.py)::(\w+)` \|$", line)
        assert named, f"expected a test at the end of: {line}"
        tree = ast.parse((ROOT / named[1]).read_text(encoding="utf-8"))
        tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert named[2] in tests, f"expected {named[2]} in {named[1]}"


def test_nothing_is_told_twice() -> None:
    told = [line.split("|")[1].strip() for line in rows()]
    assert len(set(told)) == len(told)
