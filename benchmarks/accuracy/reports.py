"""Reports of predicted beside measured memory: where and how the rows came about, a summary, and each row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.facts import facts


def write_report(folder: Path, name: str, rows: Sequence[Any], summary: str, table: str) -> None:
    """Writes NAME.json and NAME.md. rows: dataclasses with an `error`, as a share."""
    told = facts(f"benchmarks.accuracy.{name}")
    items = [{**asdict(row), "error": round(row.error, 5)} for row in rows]
    (folder / f"{name}.json").write_text(json.dumps({**told, "rows": items}, indent=1) + "\n", encoding="utf-8")
    lines = [*(f"{key}: {value}  " for key, value in told.items()), "", summary, "", table, ""]
    (folder / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")
