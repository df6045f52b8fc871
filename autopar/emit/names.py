"""Names and texts in emitted source: nothing that a model, a plan or a profile says reaches it but through here.

Variables are short and deterministic, so that equal blocks give equal text.
"""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Mapping

from autopar.ir.naming import RESERVED, is_plain
from autopar.ir.statements import Value


def escaped(text: str) -> str:
    """Text for a comment or a docstring: on one line, and without quotes, backslashes or what cannot be seen."""
    return "".join(c if c.isprintable() and c not in '\\"' else _escape(c) for c in text)


def _escape(character: str) -> str:
    return f"\\{character}" if character in '\\"' else character.encode("unicode_escape", "surrogatepass").decode()


def identifier(text: str, otherwise: str = "x") -> str:
    """The text as an identifier that Python reads as it is written, none of those that emitted code uses itself."""
    found = "".join(c if f"_{c}".isidentifier() else "_" for c in unicodedata.normalize("NFKC", text))
    found = unicodedata.normalize("NFKC", found) if found.strip("_") else otherwise
    found = found if found.isidentifier() else f"_{found}"
    return f"{found}_" if keyword.iskeyword(found) or found in RESERVED else found


def attribute(name: str) -> str:
    """What reads an attribute, after the expression of its module: numbers are items of a list."""
    if is_number(name):
        return f"[{name}]"
    return f".{name}" if is_plain(name) else f"[{name!r}]"


def is_number(name: str) -> bool:
    """Whether it is how Python writes a whole number."""
    return re.fullmatch(r"0|[1-9][0-9]*", name) is not None


def class_name(name: str) -> str:
    """A module's class as a class of the program, whatever `type` was told to call it."""
    found = identifier(name, "Block")
    found = (found.lstrip("_") or "Block") if found.startswith("__") else found
    return f"{found}_" if re.fullmatch(r"Program|Stage[0-9]+", found) else found


def keywords(items: Mapping[str, str]) -> str:
    """Arguments by name, also by names that Python does not take as such."""
    if all(map(is_plain, items)):
        return ", ".join(f"{name}={text}" for name, text in items.items())
    return f"**{{{', '.join(f'{name!r}: {text}' for name, text in items.items())}}}"


def operator_text(op: str) -> str:
    """The expression for an operator such as aten.add.Tensor."""
    namespace, *path = op.split(".")
    text = namespace if namespace == "aten" else "torch.ops"
    for part in path if namespace == "aten" else (namespace, *path):
        is_name = part.isidentifier() and not keyword.iskeyword(part)
        text = f"{text}.{part}" if is_name else f"getattr({text}, {part!r})"
    return text


class Names:
    """Hands out one name a value, from the operator or input that made it."""

    def __init__(self, taken: set[str]) -> None:
        self._taken = taken | RESERVED
        self._names: dict[Value, str] = {}

    def __getitem__(self, value: Value) -> str:
        return self._names[value]

    def __contains__(self, value: Value) -> bool:
        return value in self._names

    def make(self, value: Value, hint: str) -> str:
        """A new name for a value, `hint` with a number where that is taken."""
        stem = identifier(re.sub(r"\W", "_", re.sub(r"(_shared)?(_\d+)*$", "", hint)).strip("_"))
        name, count = stem, 1
        while name in self._taken:
            name, count = f"{stem}_{count}", count + 1
        self._taken.add(name)
        self._names[value] = name
        return name
