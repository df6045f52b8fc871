"""What all tests share: golden texts, one thread a process, samples of products, and the order: unit tests, sweeps,
several processes."""

from __future__ import annotations

import atexit
import difflib
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tests.garbage import collect_seldom
from tests.sampling import left_out
from tests.traced import Known, traced_once

if TYPE_CHECKING:
    from autopar.driver import Candidate
    from autopar.ir.tried import Tried

GOLDEN_FOLDER = Path(__file__).parent / "golden"
UNIT = "not ranks and not sweep"
RANKS_FIXTURE = "rank_pool"
_TRACED: list[Known] = []
#: whose tests plan whole models, or run them, mostly on threads: those of one file share what they import and trace
ROOMS_OF_SWEEPS = {
    "accuracy", "auditing", "branches", "carried", "constructs", "equivalence", "models", "observed", "pipeline",
    "random_programs", "show", "simulate", "soap", "substitute",
}  # fmt: skip

# Read when torch starts its threads, which is after this file: several ranks share the machine's few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --refresh-golden, --substitutions and --whole."""
    parser.addoption("--refresh-golden", action="store_true", help="rewrite tests/golden/ with what tests print")
    parser.addoption("--substitutions", action="store_true", help="take substituted graphs wherever there are any")
    parser.addoption("--whole", action="store_true", help="run products of models and plans whole, not a sample")


def pytest_configure(config: pytest.Config) -> None:
    """Refuses --refresh-golden where nobody would read the difference."""
    collect_seldom()
    _take_the_shipped_profile_of_cpus()
    if config.getoption("--substitutions"):
        _take_substituted_graphs()
    if config.getoption("--refresh-golden") and os.environ.get("CI"):
        raise pytest.UsageError("--refresh-golden is for people, who read what changed; CI only compares")


def _take_substituted_graphs() -> None:
    """Whatever searches by default takes a graph that substitutions make, gain or not, where one was planned."""
    from autopar import driver
    from autopar.passes import rewrite

    chosen = driver.simplest

    def simplest(found: Sequence[Candidate]) -> Candidate:
        rewritten = [one for one in found if one.variant.steps]
        return min(rewritten, key=lambda one: one.step_ns, default=chosen(found))

    driver.simplest = rewrite.simplest = simplest


def _take_the_shipped_profile_of_cpus() -> None:
    """`cpu` is the shipped profile here and in processes that tests start: no test waits for a measurement of this
    host, and none depends on how it came out."""
    from autopar.cost.files import profiles_folder
    from autopar.profiler.host import cache_path

    os.environ["XDG_CACHE_HOME"] = folder = tempfile.mkdtemp(prefix="autopar-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    cache_path().parent.mkdir()
    cache_path().write_text((profiles_folder() / "cpu.json").read_text())


@pytest.fixture(autouse=True)
def _no_search_makes_ill_typed_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who plans gets the next best where the verifier refuses a plan: here, an ill-typed one is a fault."""
    driver = sys.modules.get("autopar.driver")
    if driver is None:
        return
    refused, ill_typed = driver.refused, sys.modules["autopar.errors"].PlacementError

    def told(candidate: Candidate, error: Exception) -> Tried:
        assert not isinstance(error, ill_typed), f"the search made a plan that is not well typed: {error}"
        return refused(candidate, error)

    monkeypatch.setattr(driver, "refused", told)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Rooms of sweeps are not read, with all that they import, where unit tests alone are asked for."""
    is_room = collection_path.parent == Path(__file__).parent and collection_path.name in ROOMS_OF_SWEEPS
    return True if is_room and config.getoption("markexpr") == UNIT else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Moves sweeps behind the unit tests, and tests of several processes behind both: the simplest failure is seen
    first. Several workers (`-n 2`) take what shares a model or a file together: it is traced, planned and run once.
    Products are sampled unless all are asked for, or some by name."""
    is_named = config.getoption("keyword") or any("::" in argument for argument in config.args)
    if not (config.getoption("--whole") or is_named):
        others = left_out(items)
        config.hook.pytest_deselected(items=[*others])
        items[:] = [item for item in items if item not in others]
    for item in items:
        if RANKS_FIXTURE in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
        elif item.path.parent.name in ROOMS_OF_SWEEPS:
            item.add_marker(pytest.mark.sweep)
        if _part(item) or _has_fixtures_of_its_file(item) or _remembers(getattr(item, "module", None)):
            _group(item, _shared(item), config.getoption("loadgroup", False))
    items.sort(key=_part)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported stays: no collection of the tests, of which some are asked for, looks at it again.
    Hypothesis does, when it begins, for who holds a generator of random numbers: it begins before."""
    import hypothesis  # noqa: F401

    gc.collect()
    gc.freeze()


def _group(item: pytest.Item, name: str, is_told: bool) -> None:
    """Workers tell xdist's scheduler groups in the names of tests. xdist 3.8 writes them where pytest 9.2 does not look
    any more, so that each test was a group of its own."""
    item.add_marker(pytest.mark.xdist_group(name))
    if is_told and hasattr(item, "_id"):
        from _pytest.nodeid import coerce_node_id

        item._id = coerce_node_id(f"{item.nodeid}@{name}")


def _shared(item: pytest.Item) -> str:
    """What the tests of a model, or else of a file, compute once."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return str(parameters.get("model_name", f"{item.path.parent.name}.{item.path.stem}"))


def _has_fixtures_of_its_file(item: pytest.Item) -> bool:
    """Whether some fixture, such as a plan or a browser, is made once for several tests."""
    known = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
    return any(own[-1].scope in ("module", "session") and own[-1].baseid.startswith("tests") for own in known)


@cache
def _remembers(module: ModuleType | None) -> bool:
    """Whether functions of a file keep what they give, such as a traced model, for all its tests."""
    name = getattr(module, "__name__", "")
    return any(hasattr(made, "cache_clear") and made.__module__ == name for made in vars(module or object).values())


def _part(item: pytest.Item) -> int:
    """0 for a unit test, 1 for a sweep, 2 for several processes."""
    return 2 if item.get_closest_marker("ranks") else 1 if item.get_closest_marker("sweep") else 0


@pytest.fixture(autouse=True)
def _traced_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where programs run, or whole models are planned, a model is traced once for its plans and their programs, in
    several tests too."""
    is_of_plans = any(map(request.node.get_closest_marker, ("ranks", "sweep")))
    with traced_once(_TRACED) if is_of_plans else nullcontext():
        yield


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
