"""The notebooks run, without a GPU, and what is committed of them is what their texts say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

jupytext = pytest.importorskip("jupytext", reason="needs pip install -e '.[notebooks]'")

from notebooks.execute import executed, texts  # noqa: E402  (it imports jupytext)

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
    "2_reading_a_plan": "parameter layers.0.mlp.up.weight: stored",
    "3_how_the_cost_model_was_checked": "traffic exact to the byte, every collective: 84 of 84 pairs",
    "4_your_own_operator_and_cluster": "replicated: mylib.gated.default",
    "5_from_one_gpu_to_1024": " 1024 GPUs, planned in ",
}


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]


def pictures(notebook: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def test_all_notebooks_are_known() -> None:
    assert [path.stem for path in texts()] == [*PICTURES] == [*SAID]


@pytest.mark.sweep
@pytest.mark.parametrize("path", texts(), ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path) -> None:
    """From its text, as it is: each cell, its assertions included, its pictures, and a fact that it prints."""
    notebook = executed(path)
    assert pictures(notebook) == PICTURES[path.stem]
    printed = "".join(output.get("text", "") for output in outputs(notebook))
    assert SAID[path.stem] in printed


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
