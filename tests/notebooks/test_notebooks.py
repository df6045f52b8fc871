"""The notebooks run, without a GPU, and what is committed of them is what their texts say."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

jupytext = pytest.importorskip("jupytext", reason="needs pip install -e '.[notebooks]'")

from notebooks.execute import executed_in_turn, texts  # noqa: E402  (it imports jupytext)

PICTURES = {
    "1_first_plan": 2,
    "2_reading_a_plan": 5,
    "3_how_the_cost_model_was_checked": 5,
    "4_your_own_operator_and_cluster": 2,
    "5_from_one_gpu_to_1024": 4,
}
MOST_BYTES = 300_000
SAID = {
    "1_first_plan": "largest difference of 10 losses",
    "2_reading_a_plan": r"parameter layers\.0\.mlp\.up\.weight: stored",
    "3_how_the_cost_model_was_checked": r"traffic exact to the byte, every collective: (\d+) of \1 pairs",
    "4_your_own_operator_and_cluster": r"replicated: mylib\.gated\.default",
    "5_from_one_gpu_to_1024": " 1024 GPUs, planned in ",
}


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]


def pictures(notebook: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def test_all_notebooks_are_known() -> None:
    assert [path.stem for path in texts()] == [*PICTURES] == [*SAID]


@pytest.fixture(scope="module")
def shown(request: pytest.FixtureRequest) -> dict[Path, Any]:
    """The notebooks that are asked for, run in one process: most of their time was its start."""
    items = (item for item in request.session.items if getattr(item, "originalname", "") == "test_the_notebook_runs")
    paths = [item.callspec.params["path"] for item in items]  # type: ignore[attr-defined]
    return dict(zip(paths, executed_in_turn(paths), strict=True))


# The first launches ranks as the README's way does (tests/pages), the fifth plans a large model as tests/pipeline does:
# what these two call is looked up below.
@pytest.mark.sweep
@pytest.mark.sampled(only=("2_reading_a_plan", "3_how_the_cost_model_was_checked", "4_your_own_operator_and_cluster"))
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", texts(), ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path, shown: dict[Path, Any]) -> None:
    """From its text, as it is: each cell, its assertions included, its pictures, and a fact that it prints."""
    notebook = shown[path]
    assert pictures(notebook) == PICTURES[path.stem]
    printed = "".join(output.get("text", "") for output in outputs(notebook))
    assert re.search(SAID[path.stem], printed)


@pytest.mark.parametrize("path", texts(), ids=lambda path: path.stem)
def test_what_the_notebook_calls_is_there_and_takes_what_it_is_given(path: Path) -> None:
    """Of autopar and of the example models: names, and the arguments of calls."""
    known: dict[str, Any] = {}
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom) and _is_ours(node):
            exec(ast.unparse(node), known)
    calls = [node for node in nodes if isinstance(node, ast.Call) and _is_name_in(node.func, known)]
    for node in nodes:
        if _is_name_in(node, known):
            eval(ast.unparse(node), known)
    for call in calls:
        _bind(eval(ast.unparse(call.func), known), call)
    assert calls or not known


def _is_name_in(node: ast.AST, known: dict[str, Any]) -> bool:
    """Whether a name, or names behind dots, begin with a known one."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in known


def _is_ours(node: ast.Import | ast.ImportFrom) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return all(name.partition(".")[0] in ("autopar", "models", "benchmarks") for name in names)


def _bind(function: Any, call: ast.Call) -> None:
    """Raises TypeError where a function does not take the arguments of a call."""
    if any(isinstance(given, ast.Starred) for given in call.args) or any(word.arg is None for word in call.keywords):
        inspect.signature(function).bind_partial(**{word.arg: None for word in call.keywords if word.arg})
    else:
        inspect.signature(function).bind(*call.args, **{word.arg: None for word in call.keywords if word.arg})


def test_calls_that_would_fail_are_found() -> None:
    (wrong,) = [node for node in ast.walk(ast.parse("f(1, times=2)")) if isinstance(node, ast.Call)]
    _bind(lambda given, times: None, wrong)
    with pytest.raises(TypeError):
        _bind(lambda given: None, wrong)


@pytest.mark.parametrize("path", texts(), ids=lambda path: path.stem)
def test_what_is_committed_is_in_step_with_the_text(path: Path) -> None:
    shown = path.with_suffix(".ipynb")
    kept = json.loads(shown.read_text(encoding="utf-8"))
    mine = [("".join(cell["source"]), cell["cell_type"]) for cell in kept["cells"]]
    text = [(cell.source, cell.cell_type) for cell in jupytext.read(path).cells]
    assert mine == text, f"run python notebooks/execute.py {path.stem}"
    assert pictures(kept) == PICTURES[path.stem]
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs(kept))
    assert shown.stat().st_size < MOST_BYTES
