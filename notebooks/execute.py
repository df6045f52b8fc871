"""Runs the notebooks and writes what they show: python notebooks/execute.py [NAME ...]

The text of a notebook (`1_first_plan.py`) is what people change; the `.ipynb` beside it is made from it here. It needs
what `pip install -e '.[notebooks]'` installs.
"""

from __future__ import annotations

import sys
from copy import copy
from pathlib import Path
from typing import Any

import jupytext
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

FOLDER = Path(__file__).parent
TIMEOUT_SECONDS = 300


def texts() -> list[Path]:
    """The notebooks, in the order in which they are to be read."""
    return sorted(FOLDER.glob("[0-9]_*.py"))


def executed(path: Path) -> Any:
    """A notebook from its text with what its cells show. Raises CellExecutionError with the cell that fails."""
    return executed_in_turn([path])[0]


def executed_in_turn(paths: list[Path]) -> list[Any]:
    """The same of several, in one process, which imports torch once: each finds no names but its own, in its folder."""
    notebooks = [jupytext.read(path) for path in paths]
    whole = copy(notebooks[0])
    whole.cells = []
    for notebook in notebooks:
        for number, cell in enumerate(notebook.cells):
            cell.id = f"cell-{number}"  # drawn at random otherwise, and new each time
        whole.cells += [new_code_cell(f"%reset -f\n%cd {FOLDER}"), *notebook.cells]
    NotebookClient(whole, timeout=TIMEOUT_SECONDS, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell in whole.cells:
        cell.metadata.pop("execution", None)  # when each cell ran
    return notebooks


def main(names: list[str]) -> None:
    for path in texts():
        if not names or path.stem in names:
            jupytext.write(executed(path), path.with_suffix(".ipynb"))
            print(f"{path.with_suffix('.ipynb')}: {path.with_suffix('.ipynb').stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
