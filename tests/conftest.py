"""What all tests share: golden texts, one thread a process, and the order: unit tests, sweeps, several processes."""

from __future__ import annotations

import atexit
import difflib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

GOLDEN_FOLDER = Path(__file__).parent / "golden"
RANKS_FIXTURE = "rank_pool"

# Read when torch starts its threads, which is after this file: several ranks share the machine's few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --refresh-golden and --substitutions."""
    parser.addoption("--refresh-golden", action="store_true", help="rewrite tests/golden/ with what tests print")
    parser.addoption("--substitutions", action="store_true", help="search plans over substituted graphs, too")


def pytest_configure(config: pytest.Config) -> None:
    """Refuses --refresh-golden where nobody would read the difference."""
    _take_the_shipped_profile_of_cpus()
    if config.getoption("--substitutions"):
        _search_over_substitutions()
    if config.getoption("--refresh-golden") and os.environ.get("CI"):
        raise pytest.UsageError("--refresh-golden is for people, who read what changed; CI only compares")


def _search_over_substitutions() -> None:
    """Whatever searches by default also looks for equal graphs, plans them, and takes the fastest."""
    from autopar import pipeline

    budgets = pipeline._BUDGETS
    budgets["default"] = replace(budgets["default"], substitutions=True)


def _take_the_shipped_profile_of_cpus() -> None:
    """`cpu` is the shipped profile here and in processes that tests start: no test waits for a measurement of this
    host, and none depends on how it came out."""
    from autopar.cost.files import profiles_folder
    from autopar.cost.host import cache_path

    os.environ["XDG_CACHE_HOME"] = folder = tempfile.mkdtemp(prefix="autopar-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    cache_path().parent.mkdir()
    cache_path().write_text((profiles_folder() / "cpu.json").read_text())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves sweeps behind the unit tests, and tests of several processes behind both: the simplest failure is seen
    first. Several workers (`-n 2`) take what shares a model or a file together: it is traced, planned and run once."""
    for item in items:
        if RANKS_FIXTURE in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
        if _part(item):
            item.add_marker(pytest.mark.xdist_group(_shared(item)))
    items.sort(key=_part)


def _shared(item: pytest.Item) -> str:
    """What the tests of a model, or else of a file, compute once."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return str(parameters.get("model_name", item.path.stem))


def _part(item: pytest.Item) -> int:
    """0 for a unit test, 1 for a sweep, 2 for several processes."""
    return 2 if item.get_closest_marker("ranks") else 1 if item.get_closest_marker("sweep") else 0


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("name.txt", text)` asserts that `text` is what tests/golden/name.txt holds, or, under
    --refresh-golden, makes it so. The name is written out in the test: test_house.py looks for it."""
    refresh: bool = request.config.getoption("--refresh-golden")

    def check(name: str, text: str) -> None:
        path = GOLDEN_FOLDER / name
        if refresh:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != expected:
            pytest.fail(f"tests/golden/{name} differs (--refresh-golden accepts):\n{difference(expected, text)}")

    return check


def difference(expected: str, found: str) -> str:
    """The unified diff from one text to another, or what a diff of lines would hide."""
    lines = difflib.unified_diff(expected.splitlines(), found.splitlines(), "golden", "found", lineterm="")
    return "\n".join(lines) or f"only in line ends: {expected[-20:]!r} became {found[-20:]!r}"
