"""What may be a name: of a mesh axis, which emitted code has as a variable, and of a cost profile; names to be read."""

from __future__ import annotations

import keyword
import re
import unicodedata

#: names that emitted code uses itself
RESERVED = frozenset({
    "self", "torch", "aten", "rt", "nn", "redistribute", "block", "number", "targets", "complex", "enumerate", "float",
    "getattr", "range", "setattr", "super",
})  # fmt: skip
_PROFILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*|[^\"]+\.json")


def is_plain(name: str) -> bool:
    """Whether Python reads the name, as an attribute in a class, as it is written: no keyword, no other spelling of
    another name, and none that classes make private."""
    is_name = name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")
    return is_name and unicodedata.normalize("NFKC", name) == name


def is_axis_name(name: object) -> bool:
    """Whether a mesh axis may be called so: an ASCII identifier of at most 64 characters that means nothing else."""
    return isinstance(name, str) and len(name) <= 64 and name.isascii() and is_plain(name) and name not in RESERVED


def is_profile_name(name: object) -> bool:
    """Whether a cost profile may be called so: a word such as h100, or the path of a JSON file."""
    return isinstance(name, str) and name.isprintable() and _PROFILE.fullmatch(name) is not None


def printable(text: str) -> str:
    """The text for a terminal: lines stay, and nothing in it is taken for a command."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
