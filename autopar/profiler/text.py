"""Profiles as JSON text, written as the shipped ones are: pairs side by side, large numbers short."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from autopar.cost.profile import Profile, profile_to_json

WIDTH = 110


def profile_text(data: Any, indent: str = "") -> str:
    """JSON of `data`; lists of numbers on one line, lists of pairs filled to the line's width."""
    if isinstance(data, dict) and data:
        return _lines(
            "{",
            [f"{json.dumps(name)}: {profile_text(item, indent + '  ')}" for name, item in data.items()],
            "}",
            indent,
        )
    if isinstance(data, list) and data and not _is_row(data):
        if all(_is_row(item) for item in data):
            rows = ", ".join(_row(item).replace(" ", "\0") for item in data)
            filled = textwrap.wrap(rows, WIDTH - len(indent) - 2, break_long_words=False, break_on_hyphens=False)
            return "\n".join(["[", *(f"{indent}  {line}" for line in filled), f"{indent}]"]).replace("\0", " ")
        return _lines("[", [profile_text(item, indent + "  ") for item in data], "]", indent)
    if isinstance(data, list) and data and isinstance(data[0], str) and len(" ".join(data)) > WIDTH:
        return _lines("[", [_number(item) for item in data], "]", indent)
    return _row(data) if isinstance(data, list) else _number(data)


def shipped_text(profile: Profile) -> str:
    """The file of a profile, as those of cost_profiles/ are: links say only what they have."""
    data = json.loads(json.dumps(profile_to_json(profile)))
    data["links"] = [
        {name: value for name, value in link.items() if value not in (None, 0, [])} for link in data["links"]
    ]
    empty = [name for name in ("host", "runtime", "waits", "tables", "call", "interference") if not data.get(name)]
    return profile_text({name: value for name, value in data.items() if name not in empty}) + "\n"


def _lines(opening: str, items: list[str], closing: str, indent: str) -> str:
    return f"{opening}\n" + ",\n".join(f"{indent}  {item}" for item in items) + f"\n{indent}{closing}"


def _is_row(data: Any) -> bool:
    return isinstance(data, list) and not any(isinstance(item, list | dict) for item in data)


def _row(data: list[Any]) -> str:
    return "[" + ", ".join(map(_number, data)) + "]"


def _number(value: Any) -> str:
    if isinstance(value, float) and value >= 1e7 and float(f"{value:.6g}") == value:
        mantissa, exponent = f"{value:.5e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{exponent}"
    return json.dumps(value, ensure_ascii=False)
