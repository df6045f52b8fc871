"""Rows of tables of measurements: CSV files, one measurement a row, with the columns that the makers here name.

A shape's *key* are its columns joined by commas; by it shapes are left out when a fit is checked against the others.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
Row = Mapping[str, str]
Shape = tuple[int, ...]
Taken = Callable[[Shape], bool]
"""Whether a shape's rows are fitted to."""

SALT = "autopar cross-validation"
MOST = 1 << 40  # of a size: products of several stay numbers of 64 bits where they are of tensors that there are


def read_rows(folder: Path, *patterns: str, gpu: str = "") -> list[Row]:
    """All rows of the files of a folder whose names match, by their names; of one GPU where it is named."""
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return [row for path in files for row in rows_of(path, gpu) if not gpu or row["gpu"] == gpu]


def rows_of(path: Path, naming: str = "") -> Iterator[Row]:
    """The rows of a CSV file, which may be gzipped. naming: only of lines with that text, which takes less long."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", newline="", encoding="utf-8-sig") as file:
        head = next(file, "")
        yield from csv.DictReader(line for line in (head, *file) if line is head or naming in line)


def gpus_in(folder: Path, *patterns: str) -> Counter[str]:
    """How many rows the files have of each GPU."""
    found: Counter[str] = Counter()
    for path in {path for pattern in patterns for path in folder.glob(pattern)}:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            columns = next(file, "").split(",")
            place = columns.index("gpu") if "gpu" in columns else 0
            found.update(line.split(",", place + 1)[place] for line in file)
    return found


def everything(shape: Shape) -> bool:
    """Takes all shapes."""
    return True


def four_fifths(shape: Shape) -> bool:
    """Leaves out a fifth of the shapes, the same ones always."""
    digest = hashlib.sha256(f"{SALT}|{','.join(map(str, shape))}".encode()).hexdigest()
    return int(digest[:8], 16) % 5 != 0


def shape_of(row: Row, columns: Iterable[str]) -> Shape:
    """Of these columns. Raises ValueError for what is no whole number or below zero, KeyError for a column that is not
    there."""
    return tuple(_count(row[column], column) for column in columns)


def _count(text: str, column: str) -> int:
    value = float(text)
    if not 0 <= value < MOST or value != int(value):
        raise ValueError(f"{column}: expected a whole number, found {text!r}")
    return int(value)


def grouped(rows: Iterable[Row], key: Callable[[Row], K]) -> dict[K, list[Row]]:
    """Rows by what they have in common."""
    found: dict[K, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found
