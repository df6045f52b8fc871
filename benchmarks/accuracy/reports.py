"""Reports of predicted beside measured memory: where and how the rows came about, a summary, and each row."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from autopar.cost.host import cpu_model


def write_report(folder: Path, name: str, rows: Sequence[Any], summary: str, table: str) -> None:
    """Writes NAME.json and NAME.md. rows: dataclasses with an `error`, as a share."""
    facts = {
        "command": " ".join([f"python -m benchmarks.accuracy.{name}", *sys.argv[1:]]),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}",
        "date": date.today().isoformat(),
    }
    items = [{**asdict(row), "error": round(row.error, 5)} for row in rows]
    (folder / f"{name}.json").write_text(json.dumps({**facts, "rows": items}, indent=1) + "\n", encoding="utf-8")
    lines = [*(f"{key}: {value}  " for key, value in facts.items()), "", summary, "", table, ""]
    (folder / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")
