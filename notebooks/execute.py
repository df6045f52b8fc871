"""Runs the notebooks and writes what they show: python notebooks/execute.py [NAME ...]

The text of a notebook (`1_first_plan.py`) is what people change; the `.ipynb` beside it is made from it here. It needs
what `pip install -e '.[notebooks]'` installs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jupytext
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
TIMEOUT_SECONDS = 300


def texts() -> list[Path]:
    """The notebooks, in the order in which they are to be read."""
    return sorted(FOLDER.glob("[0-9]_*.py"))


def executed(path: Path) -> Any:
    """A notebook from its text with what its cells show. Raises CellExecutionError with the cell that fails."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # drawn at random otherwise, and new each time
    NotebookClient(notebook, timeout=TIMEOUT_SECONDS, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when each cell ran
    return notebook


def main(names: list[str]) -> None:
    for path in texts():
        if not names or path.stem in names:
            jupytext.write(executed(path), path.with_suffix(".ipynb"))
            print(f"{path.with_suffix('.ipynb')}: {path.with_suffix('.ipynb').stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
