"""Rules as statements: `name: source => target where guards`, or `<=>` for a rule and its reverse.

A statement goes on where the next line is indented.
The first letter of a variable gives its sort, unless sorts are given. A line that says AXIS is stated of each axis of
matrices and of images, with x, y, z read as i, j, h for the latter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from autopar.errors import PlanError
from autopar.substitute.terms import Rule, Sort, Term, Variable, parse_term, subterms

SORT_OF_LETTER: Mapping[str, Sort] = {
    **dict.fromkeys("xyz", "matrix"),
    **dict.fromkeys("w", "weight"),
    **dict.fromkeys("bgmv", "vector"),
    **dict.fromkeys("ijh", "image"),
    **dict.fromkeys("k", "kernel"),
}
_INFERENCE = " [inference]"


def parse_rules(text: str, origin: str) -> tuple[Rule, ...]:
    """The rules of a text of statements; `origin` begins their evidence. Raises PlanError naming the statement."""
    lines = re.sub(r"\n +", " ", text).splitlines()
    stated = [line for line in lines if line and not line.startswith("#")]
    return tuple(rule for line in stated for single in _single_axes(line) for rule in parse_statement(single, origin))


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


def _single_axes(line: str) -> Iterator[str]:
    """A statement of AXIS as one of each axis; any other as it is."""
    if "AXIS" not in line:
        yield line
        return
    for axis in ("row", "col", "channel", "batch"):
        name, rest = line.split(":", 1)
        if axis in ("channel", "batch"):
            rest = re.sub(
                r"\b[xyz](?=\d?\b)", lambda letter: dict(zip("xyz", "ijh", strict=True))[letter.group()], rest
            )
        yield f"{name}-{axis}:{rest.replace('AXIS', axis)}"
