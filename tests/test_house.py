"""Rules of the house that no other tool checks."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar import runtime
from autopar.runtime import surface

ROOT = Path(__file__).parents[1]
PLANNING_ONLY = {"jsonschema", "ortools", "pytoulbar2", "rich"}


def sources(*folders: str) -> list[Path]:
    """The Python files below folders of the repository; none for a folder that does not exist."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    """The full name of each module that a file imports, at its top or inside a function. None is relative:
    ruff refuses those."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def foreign_imports(folder: str, *allowed: str) -> list[str]:
    """Imports below `folder` of anything but the standard library and the packages `allowed`."""
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(folder)
        for module in imported_modules(path)
        if module.split(".")[0] not in sys.stdlib_module_names
        if not any(f"{module}.".startswith(f"{package}.") for package in allowed)
    ]


def test_models_import_torch_only() -> None:
    assert foreign_imports("models", "torch", "models") == []


def test_runtime_imports_torch_only() -> None:
    """And what reads Hugging Face's files, where they are read."""
    assert foreign_imports("autopar/runtime", "torch", "safetensors", "autopar.runtime") == []


def circle_of_files(root: Path, *packages: str) -> list[str]:
    """Modules below `root` of which each imports the next and the last is the first, if there are such.

    An import inside a function, or for types alone, counts like any other.
    """
    names = {path: path.relative_to(root).with_suffix("").parts for p in packages for path in (root / p).rglob("*.py")}
    modules = {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in names.items()}
    arrows: dict[str, set[str]] = {}
    for module, path in modules.items():
        told = (name if name in modules else name.rpartition(".")[0] for name in imported_modules(path))
        arrows[module] = {name for name in told if name in modules and name != module}
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Contracts of rooms do not see circles inside one."""
    assert circle_of_files(ROOT, "autopar", "rulemaking") == []


@pytest.mark.parametrize(
    "back",
    [
        "from room import first",
        "from room.first import Name",
        "def late():\n    import room.first",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from room.first import Name",
    ],
)
def test_a_planted_circle_of_files_is_found(tmp_path: Path, back: str) -> None:
    (tmp_path / "room").mkdir()
    for name, text in {"__init__": "", "first": "from room.second import x", "second": "import room.third"}.items():
        (tmp_path / "room" / f"{name}.py").write_text(text)
    third = tmp_path / "room" / "third.py"
    third.write_text("import os")
    assert circle_of_files(tmp_path, "room") == []
    third.write_text(back)
    assert set(circle_of_files(tmp_path, "room")) == {"room.first", "room.second", "room.third"}


# Class names that stand twice: once in the runtime, whose name an emitted program is written with (`rt.Piece`), and
# once in the room given here, for what a plan, or the emitter, calls the same thing. The runtime imports torch only, so
# that neither can take the other's class.
ALSO_IN = {"Algorithm": "ir", "Axis": "ir", "Fields": "ir", "Piece": "ir", "Received": "emit", "Servers": "ir",
           "Stage": "ir"}  # fmt: skip


def classes_by_name(root: Path, package: str) -> dict[str, set[str]]:
    """For each class name below a package of `root`, whatever the class stands in, the places where it is defined.
    A leading underscore makes no other name: who reads `_Search` and `Search` takes the one for the other."""
    places: dict[str, set[str]] = {}
    for path in sorted((root / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                place = f"{path.relative_to(root).as_posix()}:{node.lineno}"
                places.setdefault(node.name.lstrip("_"), set()).add(place)
    return places


def doubles(root: Path, package: str) -> dict[str, set[str]]:
    """The class names below a package that more than one class has."""
    return {name: places for name, places in classes_by_name(root, package).items() if len(places) > 1}


def test_each_class_name_stands_once() -> None:
    """Besides those of what emitted programs name, which stand once in the runtime and once in another room."""
    found = doubles(ROOT, "autopar")
    rooms = {name: sorted(place.split("/")[1] for place in found.pop(name, ())) for name in ALSO_IN}
    assert found == {}
    assert rooms == {name: [room, "runtime"] for name, room in ALSO_IN.items()}
    assert [name for name in ALSO_IN if name not in runtime.__all__] == []


def test_no_file_of_the_runtime_stands_in_the_place_of_what_programs_name() -> None:
    """`from autopar.runtime import build` would find the file, where that was imported first."""
    files = {path.stem for path in (ROOT / "autopar" / "runtime").iterdir()}
    named = {name for name in vars(surface) if not name.startswith("_")}
    assert {"build", "redistribute"} <= named and files.isdisjoint(named)


@pytest.mark.parametrize(
    "other",
    [
        "class Part: ...",
        "class _Part: ...",
        "class Whole:\n    class Part: ...",
        "def make():\n    class Part: ...",
        "from typing import NamedTuple\nclass Part(NamedTuple): ...",
    ],
)
def test_a_planted_double_of_a_class_name_is_found(tmp_path: Path, other: str) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "first.py").write_text("class Part: ...")
    (tmp_path / "room" / "second.py").write_text("Part = 3")
    assert doubles(tmp_path, "room") == {}
    (tmp_path / "room" / "second.py").write_text(other)
    assert set(doubles(tmp_path, "room")) == {"Part"}


@pytest.mark.skipif(not sources("autopar/runtime"), reason="there is no runtime yet")
def test_importing_the_runtime_loads_nothing_that_only_planning_needs() -> None:
    """A training cluster has torch, perhaps an older one, and none of the solvers."""
    command = "import autopar.runtime.surface, sys; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", command], cwd=ROOT, text=True).split()
    rooms = {name for name in loaded if name.startswith("autopar.") and not name.startswith("autopar.runtime")}
    assert rooms | (PLANNING_ONLY & set(loaded)) == {"autopar.views"}  # names of views, nothing more


def test_planning_loads_nothing_that_makes_or_proves_rules() -> None:
    """Plans read rules; what made them lies outside, and takes z3 and a second to load."""
    command = "import autopar.pipeline, sys; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", command], cwd=ROOT, text=True).split()
    assert {name for name in loaded if name.split(".")[0] in ("rulemaking", "z3")} == set()
    assert "autopar.substitute.rules.rulefile" in loaded


def test_every_module_says_what_it_is_for() -> None:
    paths = sources("autopar", "rulemaking", "models", "tests", "examples")
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    silent = [path for path, text in texts.items() if text and not ast.get_docstring(ast.parse(text))]
    assert silent == []


def test_every_golden_file_is_read_by_a_test() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in sources("tests"))
    golden_files = [path.name for path in (ROOT / "tests" / "golden").glob("*")]
    assert [name for name in golden_files if f'"{name}"' not in tests] == []


def test_every_dependency_has_one_pinned_version() -> None:
    """Continuous integration runs what a developer runs."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    names = [pin.split("==")[0] for pin in pins]
    assert all(pin.count("==") == 1 for pin in pins)
    assert len(set(names)) == len(names)


def test_golden_files_cannot_be_refreshed_in_continuous_integration() -> None:
    command = [sys.executable, "-m", "pytest", "--refresh-golden", "--collect-only", "-q", __file__]
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env={**os.environ, "CI": "true"})
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "CI only compares" in run.stderr
