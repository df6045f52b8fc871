"""Axioms checked completely at small sizes: all sizes up to a bound, all values at once.

Every size, stack, stride, padding, dilation and group count up to the bound is taken; elements and constants are
unknowns of polynomials, so that equality holds for all numbers. What orders or rounds numbers is instead computed on
all combinations of a few integers (relu, max), or on every float of 16 bits and edges of wider ones (cast).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, product
from typing import Any

import numpy as np
import torch

from autopar.substitute.rules.expressions import Symbol, Undefined, guard_holds
from autopar.substitute.rules.terms import Rule, Size
from rulemaking.drawing import DTYPES, Contradiction, Drawing
from rulemaking.instances import Instance, difference, operators, tensor_lengths
from rulemaking.polynomials import Polynomial, Polynomials, unknown
from rulemaking.values import Integers, Values, torch_dtype

LIMIT = 5000
"""Most sizes that one equation is computed at: the largest bound that keeps to it is taken."""

_MOST_SIZES = 50_000

_ORDERED = {"relu", "max", "max_pool"}
_MOST_ELEMENTS = 6


def bindings(drawing: Drawing, bound: int) -> Iterator[dict[Symbol, Any]]:
    """Every binding of a rule's symbols with sizes from 1 to a bound, zero included for paddings alone."""
    yield from _extended(drawing, {}, list(drawing.kinds.items()), bound)


def _extended(
    drawing: Drawing, binding: dict[Symbol, Any], left: list[tuple[Symbol, str]], bound: int
) -> Iterator[dict[Symbol, Any]]:
    binding = dict(binding)
    try:
        drawing.propagate(binding)
        missing = [(symbol, kind) for symbol, kind in left if symbol not in binding]
        if not missing:
            if drawing.holds(binding):
                yield binding
            return
    except (Contradiction, Undefined):
        return
    symbol, kind = missing[0]
    for value in _choices(drawing, symbol, kind, bound):
        yield from _extended(drawing, {**binding, symbol: value}, missing[1:], bound)


def _choices(drawing: Drawing, symbol: Symbol, kind: str, bound: int) -> list[Any]:
    match kind:
        case "stack":
            return [(), (2,)]
        case "number":
            ordered = any(guard.relation != "==" for guard in drawing.guards)
            return [-2, -1, 0, 1, 2] if ordered else [unknown(str(symbol))]
        case "function":
            return ["f"]
        case "dtype":
            return list(DTYPES)
        case "padding":
            return [0, 1]
        case "size" if str(symbol).startswith("?_"):
            return list(range(bound + 1))
        case _:
            return list(range(1, bound + 1))


def disagreement(axiom: Rule, limit: int = LIMIT) -> str | None:
    """Where the sides of an axiom differ, in words; None where they agree at every size up to the bound."""
    names = operators(axiom)
    if "cast" in names and axiom.guards:
        return _first(difference(axiom, instance, Floats()) for instance in _all_floats(axiom))
    return _first(_disagreement_at(axiom, binding) for binding in sizes_of(axiom, limit))


def _first(found: Iterable[str | None]) -> str | None:
    return next((difference for difference in found if difference is not None), None)


def _disagreement_at(axiom: Rule, binding: Mapping[Symbol, Any]) -> str | None:
    """Polynomials are compared first; where they differ and the axiom orders numbers, a few integers decide."""
    lengths = {name: tensor_lengths(name, sort, binding) for name, sort in axiom.sorts.items()}
    polynomials = Polynomials()
    arrays = {name: polynomials.array(shape, None) for name, shape in lengths.items()}
    found = difference(axiom, Instance(binding, arrays), polynomials)
    if found is None or not operators(axiom) & _ORDERED:
        return found
    return _first(difference(axiom, instance, Integers()) for instance in _few_integers(binding, lengths))


def sizes_of(axiom: Rule, limit: int = LIMIT) -> list[dict[Symbol, Any]]:
    """All bindings up to the largest bound, 3 or 2, that has at most `limit`; else that many, evenly spread, of 2's."""
    drawing = Drawing.of(axiom)
    found = list(islice(bindings(drawing, 3), limit + 1))
    if len(found) > limit:
        found = list(islice(bindings(drawing, 2), _MOST_SIZES))
    return found[:: -(-len(found) // limit)] if found else []


def _few_integers(binding: Mapping[Symbol, Any], lengths: Mapping[str, tuple[int, ...]]) -> Iterator[Instance]:
    """All combinations of -2, 0 and 1 as elements and constants, of tensors with few elements."""
    counts = {name: math.prod(shape) for name, shape in lengths.items()}
    numbers = [symbol for symbol, value in binding.items() if isinstance(value, Polynomial)]
    total = sum(counts.values()) + len(numbers)
    for drawn in product((-2, 0, 1), repeat=total) if total <= _MOST_ELEMENTS else ():
        elements = iter(drawn)
        constants = {symbol: next(elements) for symbol in numbers}
        arrays = {
            name: np.array(list(islice(elements, counts[name])), np.int64).reshape(shape)
            for name, shape in lengths.items()
        }
        yield Instance({**binding, **constants}, arrays)


class Floats(Values):
    """Tensors of torch in the dtypes that they say, for casts alone."""

    def cast(self, dtype: Any, x: Any) -> Any:
        return _without_nan(x.to(torch_dtype(dtype)))


def _all_floats(axiom: Rule) -> Iterator[Instance]:
    """Every float of 16 bits, and those of more bits that end in zeros or are drawn, for all dtypes that fit."""
    drawing = Drawing.of(axiom)
    for dtypes in product(DTYPES, repeat=3):
        names = [symbol for symbol, kind in drawing.kinds.items() if kind == "dtype"]
        binding: dict[Symbol, Any] = dict(zip(names, dtypes, strict=False))
        for name in axiom.sorts:
            held = Size(name, "dtype")
            binding.setdefault(held, dtypes[-1])
            if all(guard_holds(guard, binding) for guard in drawing.guards):
                yield Instance(binding, {name: floats(torch_dtype(binding[held]))})


def floats(dtype: torch.dtype) -> torch.Tensor:
    """All floats of a dtype of 16 bits; as many of a wider one, drawn over all its bits."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int64)
    width = dtype.itemsize * 8
    if width > 16:
        generator = torch.Generator().manual_seed(0)
        spread = torch.randint(-(2**31), 2**31, bits.shape, generator=generator)
        bits = torch.cat([bits << (width - 16), spread << (width - 32) if width > 32 else spread])
    integer = {16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    return _without_nan(bits.to(integer).view(dtype))


def _without_nan(x: torch.Tensor) -> torch.Tensor:
    """Floats with a number for what is none, which differs even from itself."""
    return torch.where(x.isnan(), 7.5, x)
