"""Values of a configuration file, each with its line and place in the text: TOML, JSON and YAML, read as plain data."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from autopar.errors import PlanError


@dataclass(frozen=True)
class FileValue:
    """A value under its dotted key. span: first character and the one after the last, None where it is not one piece
    of the text."""

    key: str
    value: Any
    line: int = 0
    span: tuple[int, int] | None = None


def fault(name: str, error: Exception | str, kind: str) -> PlanError:
    """What is raised where a file is not of its form."""
    return PlanError(f"expected {name} as {kind}, found {' '.join(str(error).split())}; or name its --framework")


def line_of(text: str, position: int) -> int:
    """From 1 up."""
    return text.count("\n", 0, position) + 1


# TOML ----------------------------------------

_TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_PAIR = re.compile(r"\s*([A-Za-z0-9_.\"'-]+)\s*=\s*")
_SCALAR = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^#\[{\"'\s][^#\n]*?(?=\s*(?:#|$))")


def toml_values(text: str, name: str) -> dict[str, FileValue]:
    """Of a TOML file, by dotted key."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise fault(name, error, "TOML") from error
    places = dict(_toml_places(text))
    flat = dict(flattened(tree))
    return {key: FileValue(key, value, *places.get(key, (0, None))) for key, value in flat.items()}


def _toml_places(text: str) -> Iterator[tuple[str, tuple[int, tuple[int, int] | None]]]:
    """Line and span of each pair; a value of several lines, or an array, has no span."""
    table, start = "", 0
    for number, line in enumerate(text.split("\n"), 1):
        if header := _TABLE.match(line):
            table = header[1].replace('"', "") + "."
        elif pair := _PAIR.match(line):
            scalar = _SCALAR.match(line, pair.end())
            span = (start + scalar.start(), start + scalar.end()) if scalar else None
            yield table + pair[1].strip("\"'"), (number, span)
        start += len(line) + 1


def flattened(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested tables by dotted key; an array is one leaf, as is an empty table."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{path}.")
        else:
            yield path, value


# JSON ----------------------------------------

_BLANK = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[^,\]}\s]+")


def json_values(text: str, name: str) -> dict[str, FileValue]:
    """Of a JSON file, by dotted key. An array is one value."""
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise fault(name, error, "JSON") from error
    if not isinstance(tree, dict):
        raise fault(name, f"a {type(tree).__name__}", "a JSON object")
    return {item.key: item for item in _json_object(text, _BLANK.match(text).end(), "")[0]}  # type: ignore[union-attr]


def _json_object(text: str, at: int, prefix: str) -> tuple[list[FileValue], int]:
    """The leaves of the object that begins there, and where it ends. The text is known to be JSON."""
    found, at = list[FileValue](), _blank(text, at + 1)
    while text[at] != "}":
        key, at = scanstring(text, at + 1)
        at = _blank(text, _blank(text, at) + 1)
        if text[at] == "{" and text[_blank(text, at + 1)] != "}":
            inner, at = _json_object(text, at, f"{prefix}{key}.")
            found += inner
        else:
            value, end = json.JSONDecoder().raw_decode(text, at)
            found.append(FileValue(prefix + key, value, line_of(text, at), (at, end)))
            at = end
        at = _blank(text, at)
        at = _blank(text, at + 1) if text[at] == "," else at
    return found, at + 1


def _blank(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    return match.end() if match else at


# YAML ----------------------------------------


def yaml_values(text: str, name: str) -> dict[str, FileValue]:
    """Of a YAML file, by dotted key, as YAML's safe loader reads them: tags that make objects are refused."""
    try:
        import yaml
    except ImportError as error:
        raise PlanError(f"expected PyYAML to read {name}, found none; pip install 'autopar[audit]'") from error
    try:
        tree, root = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise fault(name, error, "YAML") from error
    if not isinstance(tree, dict):
        raise fault(name, f"a {type(tree).__name__}", "a YAML mapping")
    places = dict(_yaml_places(root, ""))
    return {key: FileValue(key, value, *places.get(key, (0, None))) for key, value in flattened(tree)}


def _yaml_places(node: Any, prefix: str) -> Iterator[tuple[str, tuple[int, tuple[int, int] | None]]]:
    for key, value in node.value:
        path, start, end = f"{prefix}{key.value}", value.start_mark, value.end_mark
        if value.id == "mapping" and value.value:
            yield from _yaml_places(value, f"{path}.")
        else:
            yield path, (key.start_mark.line + 1, (start.index, end.index) if value.id == "scalar" else None)


def scalar_text(value: Any, form: str) -> str:
    """A number, truth or text as it is written in a form: "toml", "json", "yaml" or "shell"."""
    if form == "shell":
        return str(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and form == "yaml":
        return (
            value
            if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", value) and value.lower() not in _WORDS
            else json.dumps(value)
        )
    return json.dumps(value)


_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
