"""Writes the pages that are made from the sources: python -m docs.generate

A test compares them, so that they are never behind what they describe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.cost_model import cost_model
from docs.house import house
from docs.plan_format import plan_format
from docs.rules import rules
from docs.trainer import trainer

FOLDER = Path(__file__).parent
PAGES: Mapping[str, Callable[[], str]] = {
    "plan_format.md": plan_format,
    "cost_model.md": cost_model,
    "rules.md": rules,
    "house.md": house,
    "trainer.md": trainer,
}


def main() -> None:
    for name, text in PAGES.items():
        (FOLDER / name).write_text(text(), encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
