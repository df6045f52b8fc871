"""Sharding rules in an einsum-like notation, and what they mean on one mesh axis.

    "b s k, n k, n -> b s n"

Each operand and result is a list of dims. A lower-case letter may be sharded: every operand that has it is `S`
along it, every operand without it is `R`, and each result is `S` along it, or `P` where the letter was summed
away. An UPPER-case letter is never sharded. "..." stands for the same leading dims everywhere. A dim of size 1
that broadcasts counts as not having the letter. "b | n" style partial rules are written beside: `partial` lists,
as a word of R and P an operand ("PR"), the operand types under which the operator is linear, so that it may run
on summands; `additive` operands are added once, so they are `P` where a letter is summed away.

Every operator may also run with all operands `R` (result `R`) or all `I` (result `I`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from autopar.errors import RuleError
from autopar.ir.placement import I, P, R, S, Type


class AxisRule(NamedTuple):
    """The types on one mesh axis under which an operator runs without communication."""

    operands: tuple[Type, ...]
    results: tuple[Type, ...]


@dataclass(frozen=True)
class Pattern:
    """A parsed rule text: the letters of each operand and result."""

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]


@cache
def parse(text: str) -> Pattern:
    """Reads "b m k, k n -> b m n". Raises RuleError for anything else."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f'expected a rule such as "b m k, k n -> b m n", found {text!r}')
    sides = [tuple(tuple(part.split()) for part in side.split(",")) for side in (left, right)]
    for letter in (letter for side in sides for part in side for letter in part):
        if letter != "..." and not letter.isidentifier():
            raise RuleError(f"expected dims as letters or ..., found {letter!r} in rule {text!r}")
    return Pattern(*sides)


def check_shapes(
    text: str, operand_shapes: Sequence[tuple[int, ...]], result_shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raises RuleError unless a rule text has each operand and result, with their dims, and a letter is one length.

    A dim of length 1 broadcasts, so it agrees with every length.
    """
    pattern = parse(text)
    sides = (("operand", pattern.operands, operand_shapes), ("result", pattern.results, result_shapes))
    lengths: dict[str, tuple[int, str]] = {}
    for what, parts, shapes in sides:
        if len(parts) != len(shapes):
            raise RuleError(f"expected {len(shapes)} {what}s in the rule {text!r}, found {len(parts)}")
        for position, (letters, shape) in enumerate(zip(parts, shapes, strict=True)):
            where = f"{what} {position} of shape {list(shape)}"
            for letter, length in zip(_expand(letters, shape, where), shape, strict=True):
                known, other = lengths.setdefault(letter, (length, where))
                if length != known and 1 not in (length, known):
                    raise RuleError(
                        f"expected one length for {letter!r} in the rule {text!r}, found {known} in {other} "
                        f"and {length} in {where}"
                    )


def _expand(letters: tuple[str, ...], shape: tuple[int, ...], where: str) -> tuple[str, ...]:
    """Letters for each dim of a shape; "..." takes the dims that are left over, aligned to the right."""
    if "..." not in letters:
        if len(letters) != len(shape):
            raise RuleError(f"expected {len(letters)} dims for {' '.join(letters)!r}, found shape {shape} in {where}")
        return letters
    position = letters.index("...")
    count = len(shape) - len(letters) + 1
    if count < 0:
        raise RuleError(f"expected at least {len(letters) - 1} dims, found shape {shape} in {where}")
    return (*letters[:position], *(f"batch{count - i}" for i in range(count)), *letters[position + 1 :])


def every(num_operands: int, num_results: int) -> list[AxisRule]:
    """The two rules that every operator has."""
    return [AxisRule((type_,) * num_operands, (type_,) * num_results) for type_ in (R, I)]


def einsum_rules(
    text: str,
    operand_shapes: Sequence[tuple[int, ...]],
    result_shapes: Sequence[tuple[int, ...]],
    partial: str = "",
    additive: tuple[int, ...] = (),
) -> list[AxisRule]:
    """The rules that a text stands for, given the shapes of the operands that are present.

    `partial`: blank-separated words of R and P, one letter an operand. Raises RuleError when shapes do not fit.
    """
    pattern = parse(text)
    operands = [_expand(p, shape, text) for p, shape in zip(pattern.operands, operand_shapes, strict=False)]
    results = [_expand(p, shape, text) for p, shape in zip(pattern.results, result_shapes, strict=False)]
    rules = []
    letters = sorted({letter for dims in (*operands, *results) for letter in dims if letter == letter.lower()})
    for letter in letters:
        operand_types = [_shard(dims, shape, letter) for dims, shape in zip(operands, operand_shapes, strict=True)]
        if all(type_ is None for type_ in operand_types):
            continue  # nothing to split: a dim of size 1 everywhere, or one that the operator makes
        missing = _missing_types(operand_types, results, letter, additive)
        rules.append(
            AxisRule(
                tuple(type_ or missing[position] for position, type_ in enumerate(operand_types)),
                tuple(_shard(dims, shape, letter) or P for dims, shape in zip(results, result_shapes, strict=True)),
            )
        )
    for word in partial.split():
        types = tuple(P if kind == "P" else R for kind in word)[: len(operand_shapes)]
        if P in types:
            rules.append(AxisRule(types, (P,) * len(result_shapes)))
    return list(dict.fromkeys(rules))


def _shard(dims: tuple[str, ...], shape: tuple[int, ...], letter: str) -> Type | None:
    return S(dims.index(letter)) if letter in dims and shape[dims.index(letter)] > 1 else None


def _missing_types(
    types: list[Type | None], results: list[tuple[str, ...]], letter: str, additive: tuple[int, ...]
) -> list[Type]:
    summed = any(letter not in dims for dims in results)
    return [P if summed and position in additive else R for position in range(len(types))]
