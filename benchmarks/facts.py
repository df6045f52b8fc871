"""What makes the figures of a benchmark comparable: command, machine, date."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from autopar.cost.files import SCHEMA, profiles_folder
from autopar.profiler.host import cpu_model

_PLACES = ("--output", "--folder", "--result", "--profile", "--page")
"""Options that name files of the machine at hand."""


def facts(module: str) -> dict[str, str]:
    """Of the run of a module such as `benchmarks.soap.rate`, whose options are this process's.

    load: of the last minute, at the end; above the number of the run's own threads, others ran meanwhile.
    """
    load = os.getloadavg()[0]
    return {
        "command": " ".join([f"python -m {module}", *_told(sys.argv[1:])]),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, load {load:.1f}",
        "date": date.today().isoformat(),
    }


def profile_told(name: str) -> str:
    """The shipped file of a cost profile, by name or alias, and the begin of its hash: figures change with it."""
    for file in profiles_folder().iterdir():
        data = json.loads(file.read_text()) if file.name.endswith(".json") and file.name != SCHEMA else {}
        if name in (data.get("name"), *data.get("aliases", ())):
            return f"{file.name}, sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    raise KeyError(name)


def write_record(place: Path, told: Mapping[str, Any], found: Mapping[str, Any], text: str = "") -> None:
    """Writes PLACE.json with everything; where there is a text for people, PLACE.md with it below what was told.

    place: with or without that ending.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    name = place.name.removesuffix(".json")
    record = json.dumps({**told, **found}, indent=1, ensure_ascii=False)
    place.with_name(f"{name}.json").write_text(record + "\n", encoding="utf-8")
    if text:
        lines = [*(f"{key}: {value}  " for key, value in told.items()), "", text, ""]
        place.with_name(f"{name}.md").write_text("\n".join(lines), encoding="utf-8")


def _told(options: Sequence[str]) -> Iterator[str]:
    """The options but for places."""
    skips = False
    for option in options:
        if not skips and not option.startswith(_PLACES):
            yield option
        skips = option in _PLACES
