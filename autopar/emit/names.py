"""Variable names inside one emitted class: short, deterministic, so that equal blocks give equal text."""

from __future__ import annotations

import keyword
import re
import unicodedata

from autopar.ir.statements import Value

_RESERVED = {"self", "torch", "aten", "rt", "nn", "redistribute", "block", "number", "float", "enumerate"}


class Names:
    """Hands out one name a value, from the operator or input that made it."""

    def __init__(self, taken: set[str]) -> None:
        self._taken = set(taken) | _RESERVED
        self._names: dict[Value, str] = {}

    def __getitem__(self, value: Value) -> str:
        return self._names[value]

    def __contains__(self, value: Value) -> bool:
        return value in self._names

    def make(self, value: Value, hint: str) -> str:
        """A new name for a value, `hint` with a number where that is taken."""
        plain = unicodedata.normalize("NFKC", re.sub(r"(_shared)?(_\d+)*$", "", hint))  # as Python reads source
        stem = re.sub(r"\W", "_", plain).strip("_") or "x"
        if keyword.iskeyword(stem) or stem[0].isdigit():
            stem = f"{stem}_"
        name, count = stem, 1
        while name in self._taken:
            name, count = f"{stem}_{count}", count + 1
        self._taken.add(name)
        self._names[value] = name
        return name

    def alias(self, value: Value, name: str) -> None:
        self._names[value] = name
