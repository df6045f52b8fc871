"""Plain data as YAML, every string quoted, so that a name, a path or a number in quotes is read as what it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def yaml_text(data: Mapping[str, Any], heading: str = "") -> str:
    """Of mappings, lists, strings and integers, none of them empty. heading: lines of a comment before."""
    comment = [f"# {line}".rstrip() for line in heading.splitlines()]
    return "\n".join([*comment, *_lines(data)]) + "\n"


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{key}:", item)
    else:
        for item in value:
            yield from _entry("-", item)


def _scalar(item: str | int) -> str:
    """A JSON string is a YAML string, and so is an integer; but for letters that JSON writes as two halves."""
    return json.dumps(item, ensure_ascii=not (isinstance(item, str) and item.isprintable()))


def _entry(begin: str, item: Any) -> Iterator[str]:
    if isinstance(item, (str, int)):
        yield f"{begin} {_scalar(item)}"
        return
    assert isinstance(item, (Mapping, Sequence)) and item, "empty ones have another form"
    first, *rest = _lines(item)
    if begin == "-":
        yield f"- {first}"
        yield from (f"  {line}" for line in rest)
    else:
        yield begin
        yield from (f"  {line}" for line in (first, *rest))
