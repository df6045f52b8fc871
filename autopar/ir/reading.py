"""Reads files of data that somebody sent: what they hold is of the kinds that a schema names, or is refused.

Beyond JSON Schema: 2.0 is no integer, numbers are finite and fit 64 bits, a key stands once in an object, text can be
encoded, and nothing is nested deeper than any of our files is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 32
_LARGEST = 2**63 - 1


class MalformedError(ValueError):
    """Says where (as a JSON pointer), what was expected, and what was found."""

    def __init__(self, where: Iterable[Any], expected: str, found: str) -> None:
        super().__init__(f"at {pointer(where)}: expected {expected}, found {found}")


@dataclass(frozen=True)
class _Odd:
    """Stands in parsed data where something is that no reader takes."""

    expected: str
    found: str


def pointer(path: Iterable[Any]) -> str:
    """ "/stages/0/axes", as RFC 6901 has it."""
    parts = [str(part).replace("~", "~0").replace("/", "~1") for part in path]
    return "".join(f"/{short(part, 60)}" for part in parts) or "the top level"


def short(text: str, most: int = 160) -> str:
    """The beginning and the end of a long text, in characters that can be printed."""
    text = text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 3 :]}"
    return text if text.isprintable() else ascii(text)[1:-1]


def parsed(text: str) -> Any:
    """The text's data, checked. Raises MalformedError."""
    try:
        data = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_constant, parse_int=_integer, parse_float=_number
        )
    except RecursionError:
        raise MalformedError((), f"lists and objects within at most {MAX_DEPTH} others", "far more") from None
    except ValueError as error:
        raise MalformedError((), "JSON", f"text that is none: {short(str(error))}") from None
    check(data)
    return data


def check(data: Any) -> None:
    """That data consists of what JSON has, in sane sizes. Raises MalformedError."""
    pending: list[tuple[Any, tuple[Any, ...]]] = [(data, ())]
    while pending:
        value, path = pending.pop()
        problem = _problem(value)
        if problem is not None:
            raise MalformedError(path, problem.expected, problem.found)
        if len(path) >= MAX_DEPTH:
            raise MalformedError(path[:4], f"lists and objects within at most {MAX_DEPTH} others", "more")
        if isinstance(value, (dict, list)):
            pending += [(inner, (*path, key)) for key, inner in _inside(value)]


def _inside(value: dict[Any, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    """Items by key or number; keys are checked like other text."""
    if isinstance(value, list):
        yield from enumerate(value)
        return
    for key, inner in value.items():
        yield key, _problem(key) or inner


def _problem(value: Any) -> _Odd | None:
    if isinstance(value, _Odd):
        return value
    if isinstance(value, str):
        is_text = value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
        return None if is_text else _Odd("text", f"half of a character in {short(value)!r}")
    if isinstance(value, float) and not math.isfinite(value):
        return _Odd("a number", str(value))
    if isinstance(value, int) and abs(value) > _LARGEST:
        return _Odd("a number of at most 64 bits", f"one of {value.bit_length():,} bits")
    is_known = value is None or isinstance(value, (bool, int, float, dict, list))
    return None if is_known else _Odd("what JSON has", type(value).__name__)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        found |= {key: _Odd("the field once", "it twice") for key, _ in pairs if key in seen or seen.add(key)}  # type: ignore[func-returns-value]
    return found


def _constant(text: str) -> _Odd:
    return _Odd("a number", text)


def _integer(text: str) -> int | _Odd:
    return int(text) if len(text) <= 20 else _Odd("a number of at most 64 bits", f"one of {len(text):,} digits")


def _number(text: str) -> float | _Odd:
    value = float(text)
    return value if math.isfinite(value) else _Odd("a number of at most 64 bits", short(text, 40))


def validator(schema: Any) -> Any:
    """A validator for which 2.0 is no integer and true is no number."""
    import jsonschema  # only where a file is read: it takes a tenth of a second

    base = jsonschema.Draft202012Validator
    kinds = base.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    kinds = kinds.redefine("number", lambda _, value: type(value) in (int, float))
    return jsonschema.validators.extend(base, type_checker=kinds)(schema)


def validate(data: Any, against: Any) -> None:
    """Raises MalformedError for the most telling thing that a schema (its `validator`) has against the data."""
    from jsonschema.exceptions import best_match

    error = best_match(against.iter_errors(data))
    if error is not None:
        about = error.schema.get("description") if isinstance(error.schema, dict) else None
        found = "" if error.validator in ("required", "additionalProperties") else short(repr(error.instance))
        raise MalformedError(
            error.absolute_path, _expected(error) + (f" ({about})" if about else ""), found or short(error.message)
        )


def _expected(error: Any) -> str:
    value = error.validator_value
    kinds = {"integer": "an integer", "number": "a number", "string": "text", "object": "an object",
             "array": "a list", "boolean": "true or false", "null": "null"}  # fmt: skip
    match error.validator:
        case "type":
            return " or ".join(kinds[kind] for kind in ([value] if isinstance(value, str) else value))
        case "minimum":
            return f"at least {value:,.15g}"
        case "maximum":
            return f"at most {value:,.15g}"
        case "exclusiveMinimum":
            return f"more than {value:,.15g}"
        case "enum":
            return f"one of {', '.join(map(str, value))}"
        case "const":
            return str(value)
        case "pattern":
            return "text of the form"
        case "minItems" | "maxItems":
            return f"{'at least' if error.validator == 'minItems' else 'at most'} {value} items"
    return "what the format says"
