"""Rules as statements: `name: source => target where guards`, or `<=>` for a rule and its reverse.

A statement goes on where the next line is indented.
The first letter of a variable gives its sort. A statement with a placeholder stands for one of each of its words: AXIS
for the axes of matrices and of images, with x, y, z read as i, j, h for the latter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from autopar.errors import PlanError
from autopar.substitute.rules.terms import Rule, Sort, Term, Variable, parse_term, subterms

SORT_OF_LETTER: Mapping[str, Sort] = {
    **dict.fromkeys("xyz", "matrix"),
    **dict.fromkeys("w", "weight"),
    **dict.fromkeys("bgmv", "vector"),
    **dict.fromkeys("ijh", "image"),
    **dict.fromkeys("k", "kernel"),
}
LETTERS = {"channel": "ijh", "batch": "ijh", "out": "k", "in": "k", "bias": "b", "image": "ijh", "kernel": "k"}
"""What x, y and z become where a placeholder stands for an axis or a sort that is not a matrix's."""

AXIS_NAMES = {"bias": "col"}
"""The axis that a placeholder's word means where it is not its name."""

PLACEHOLDERS: Mapping[str, Sequence[str]] = {
    "EVERY_AXIS": ("row", "col", "channel", "batch", "out", "in", "bias"),
    "CUT_AXIS": ("row", "col", "channel", "out", "bias"),
    "IMAGE_AXIS": ("channel", "batch"),
    "AXIS": ("row", "col", "channel"),
    "BINARY": ("add", "mul"),
    "PART": ("first", "second"),
    "POOL": ("max_pool", "avg_pool"),
    "PARAMETER": ("out", "in", "bias"),
    "OTHER": ("image", "kernel", "bias"),
}


def parse_rules(text: str, origin: str, placeholders: Mapping[str, Sequence[str]] = PLACEHOLDERS) -> tuple[Rule, ...]:
    """The rules of a text of statements; `origin` begins their evidence. Raises PlanError naming the statement."""
    lines = re.sub(r"\n +", " ", text).splitlines()
    stated = [line for line in lines if line and not line.startswith("#")]
    singles = (single for line in stated for single in _expanded(line, placeholders))
    return tuple(rule for single in singles for rule in parse_statement(single, origin))


def parse_statement(line: str, origin: str = "") -> Iterator[Rule]:
    """The rule of a statement, and its reverse where it says `<=>`."""
    found = re.fullmatch(
        r"(?P<name>[\w-]+): (?P<source>.+?) (?P<sign><?=>) (?P<target>.+?)(?: where (?P<guards>.+))?", line
    )
    if found is None:
        raise PlanError(f"expected 'name: source => target where guards', found {line!r}")
    inference = found["name"].endswith("-inference")
    sides = parse_terms(found["source"]), parse_terms(found["target"])
    guards = tuple(found["guards"].split(", ")) if found["guards"] else ()
    sorts = sorts_of(*sides[0], *sides[1])
    yield Rule(found["name"], *sides, sorts, guards, evidence=origin, inference=inference)
    if found["sign"] == "<=>":
        yield Rule(f"{found['name']}-reversed", *sides[::-1], sorts, guards, evidence=origin, inference=inference)


def parse_terms(text: str) -> tuple[Term, ...]:
    """Terms separated by commas."""
    parts, depth, start = [], 0, 0
    for position, sign in enumerate(text):
        depth += (sign in "([") - (sign in ")]")
        if sign == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return tuple(parse_term(part.strip()) for part in [*parts, text[start:]])


def sorts_of(*terms: Term) -> dict[str, Sort]:
    """The sort of every variable of some terms by its first letter."""
    names = {part.name for term in terms for part in subterms(term) if isinstance(part, Variable)}
    return {name: SORT_OF_LETTER[name[0]] for name in sorted(names)}


def _expanded(line: str, placeholders: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A statement once for each word that its placeholders stand for, each with the word at the end of its name."""
    found = next((word for word in placeholders if word in line), None)
    if found is None:
        yield line
        return
    for word in placeholders[found]:
        name, rest = line.split(":", 1)
        label = word.split("[")[0]
        name = name.replace(found, label) if found in name else f"{name}-{label}"
        yield from _expanded(
            f"{name}:{_relettered(rest, word).replace(found, AXIS_NAMES.get(word, word))}", placeholders
        )


def _relettered(text: str, word: str) -> str:
    """A statement with x, y and z as variables of the sort that an axis or sort has."""
    names = _names(LETTERS.get(word, "xyz"))
    return re.sub(r"\b[xyz](?=\d?\b)", lambda letter: dict(zip("xyz", names, strict=True))[letter[0]], text)


def _names(letters: str) -> list[str]:
    """Names of three variables: the letters, or one letter before x, y and z."""
    return list(letters) if len(letters) == 3 else [f"{letters}{letter}" for letter in "xyz"]
