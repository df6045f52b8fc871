"""Reports of predicted beside measured memory: where and how the rows came about, a summary, and each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.facts import facts, write_record


def write_report(folder: Path, name: str, rows: Sequence[Any], summary: str, table: str) -> None:
    """Writes NAME.json and NAME.md. rows: dataclasses with an `error`, as a share."""
    items = [{**asdict(row), "error": round(row.error, 5)} for row in rows]
    write_record(folder / name, facts(f"benchmarks.accuracy.{name}"), {"rows": items}, f"{summary}\n\n{table}")
