"""docs/house.md: the rooms of the compiler, from its import contract and their own docstrings."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from docs.markdown import page, table

ROOT = Path(__file__).parents[1]

INTRODUCTION = """
`autopar/` has a room (a folder, or a file where one is enough) for each idea. Imports go one way: a room knows those of
lower floors, and none of its own floor. `lint-imports` holds that (the contract is in pyproject.toml, and a new room
takes its place there); a test holds that no files import each other in a circle, inside a room either.

What is data knows nothing of what is made of it. A plan prints, explains and draws itself all the same: it asks for a
view by name (`autopar.views`), and `autopar/__init__.py` says where each is.
"""

BESIDE = """
`rulemaking/` makes and proves the substitution rules that `substitute/` reads: `autopar` never imports it, and it is
not installed. `models/` knows nothing of the compiler, `cost_profiles/` is data, and `tests/` mirrors the rooms.
"""


def house() -> str:
    """The page: from the top floor down."""
    floors = [sorted(re.findall(r"\w+", layer)) for layer in _layers()]
    numbered = zip(range(len(floors), 0, -1), floors, strict=True)
    rows = [(number, *room) for number, names in numbered for room in _rooms(names)]
    return page("The house", INTRODUCTION, table(("floor", "room", "what it is for"), rows), "## Beside it", BESIDE)


def _layers() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return next(
        contract["layers"] for contract in settings["tool"]["importlinter"]["contracts"] if "containers" in contract
    )


def _rooms(names: list[str]) -> Iterator[tuple[str, str]]:
    """Each with the first paragraph of its docstring."""
    for name in names:
        folder = ROOT / "autopar" / name
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        yield f"`{name}/`" if folder.is_dir() else f"`{name}.py`", told.split("\n\n")[0].replace("\n", " ")


__all__ = ["house"]
