"""Terms of the substitution algebra, and rules between them: what the rule file holds, what is proved and matched.

A term is a variable or an operator applied to terms: `first[col, w1.row](linear(x, concat[row](w1, w2)))`. Every
matrix operator acts on the last two dims ("row" is -2, "col" is -1) and point by point over all dims before them, so
that what holds of matrices holds of any stack of them. Image operators act on dims "batch", "channel", height, width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from autopar.errors import PlanError

T = TypeVar("T")
Sort = Literal["matrix", "weight", "vector", "image", "kernel"]
"""What a variable may stand for: a stack of matrices, exactly one matrix, a row, images (NCHW), or a kernel (OIHW)."""


class Size(NamedTuple):
    """The length of a variable along an axis: `w1.row`."""

    variable: str
    axis: str

    def __str__(self) -> str:
        return f"{self.variable}.{self.axis}"


class Unknown(NamedTuple):
    """An attribute that may be anything, the same wherever its name stands: `?c`."""

    name: str

    def __str__(self) -> str:
        return f"?{self.name}"


Attribute: TypeAlias = str | int | float | Size | Unknown


@dataclass(frozen=True)
class Variable:
    """A tensor that the rule knows nothing of but its sort."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Apply:
    """An operator of the algebra with its attributes, applied to terms."""

    op: str
    attributes: tuple[Attribute, ...]
    operands: tuple[Term, ...]

    def __str__(self) -> str:
        attributes = f"[{', '.join(map(str, self.attributes))}]" if self.attributes else ""
        return f"{self.op}{attributes}({', '.join(map(str, self.operands))})"


Term: TypeAlias = Variable | Apply


@dataclass(frozen=True)
class Rule:
    """`source` may be replaced by `target`, output by output, where all guards hold.

    sorts: of every variable. guards: relations between sizes and attributes, "x.row == y.row" or "?g == 1", that
    equality needs beyond both sides being well formed. status: "proved" from the axioms for all shapes, or "tested" on
    random instances alone; evidence says by what. inference: equal only where parameters are not trained through it.
    """

    name: str
    source: tuple[Term, ...]
    target: tuple[Term, ...]
    sorts: Mapping[str, Sort] = field(default_factory=dict)
    guards: tuple[str, ...] = ()
    status: Literal["proved", "tested"] = "tested"
    evidence: str = ""
    inference: bool = False

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.source))} => {', '.join(map(str, self.target))}"


def variables(term: Term) -> Iterator[str]:
    """Names of the variables of a term, from the left, repeated where used twice."""
    if isinstance(term, Variable):
        yield term.name
    else:
        for operand in term.operands:
            yield from variables(operand)


def subterms(term: Term) -> Iterator[Term]:
    """Every term inside, operands before what reads them, the term itself last."""
    if isinstance(term, Apply):
        for operand in term.operands:
            yield from subterms(operand)
    yield term


_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>-?\d+(?:\.\d+)?)|(?P<sign>[\[\](),.?]))")


def parse_term(text: str) -> Term:
    """The term that a text states. Raises PlanError with the place where it cannot be read."""
    parser = _TermParser(text)
    term = parser.term()
    parser.end()
    return term


class _TermParser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def term(self) -> Term:
        name = self._take("name")
        attributes: tuple[Attribute, ...] = ()
        if self._next() == "[":
            attributes = tuple(self._list(self._attribute, "[", "]"))
        if self._next() == "(":
            return Apply(name, attributes, tuple(self._list(self.term, "(", ")")))
        if attributes:
            return Apply(name, attributes, ())
        return Variable(name)

    def _attribute(self) -> Attribute:
        if self._next() == "?":
            self._take("sign")
            return Unknown(self._take("name"))
        if self._peek("number") is not None:
            number = self._take("number")
            return float(number) if "." in number else int(number)
        name = self._take("name")
        if self._next() == ".":
            self._take("sign")
            return Size(name, self._take("name"))
        return name

    def _list(self, item: Callable[[], T], opening: str, closing: str) -> list[T]:
        self._sign(opening)
        found: list[T] = []
        while self._next() != closing:
            if found:
                self._sign(",")
            found.append(item())
        self._sign(closing)
        return found

    def _sign(self, expected: str) -> None:
        if self._next() != expected:
            raise self._error(f"{expected!r}")
        self._take("sign")

    def _next(self) -> str | None:
        return self._peek("sign")

    def _peek(self, kind: str) -> str | None:
        found = _TOKEN.match(self.text, self.position)
        return found.group(kind) if found else None

    def _take(self, kind: str) -> str:
        found = _TOKEN.match(self.text, self.position)
        if found is None or found.group(kind) is None:
            raise self._error(f"a {kind}")
        self.position = found.end()
        return found.group(kind)

    def end(self) -> None:
        if self.text[self.position :].strip():
            raise self._error("the end")

    def _error(self, expected: str) -> PlanError:
        found = self.text[self.position :].strip()[:20] or "the end"
        return PlanError(f"expected {expected} at position {self.position} of the term {self.text!r}, found {found!r}")
