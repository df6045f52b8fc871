"""Random instances of rules, and both sides computed on them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from autopar.substitute.rules.expressions import Binding, value_of
from autopar.substitute.rules.terms import Apply, Rule, Size, Sort, Term, Variable
from rulemaking.algebra import operator_of
from rulemaking.drawing import TRIES, Drawing, all_subterms
from rulemaking.shapes import AXES, STACK
from rulemaking.values import Field, Integers, Values, pair


@dataclass(frozen=True)
class Instance:
    """One instance of a rule: values of its symbols and tensors for its variables."""

    binding: Binding
    arrays: Mapping[str, Any]

    def __str__(self) -> str:
        bound = {str(symbol): value for symbol, value in self.binding.items() if not str(symbol).startswith("?_")}
        return ", ".join(f"{symbol} = {value}" for symbol, value in bound.items())


def instances(rule: Rule, values: Values, seed: int = 0) -> Iterator[Instance]:
    """Random instances of a rule without end. Stops early where a whole round of tries finds none."""
    drawing = Drawing.of(rule)
    choose, numbers = random.Random(seed), np.random.default_rng(seed)
    casts = any(kind == "dtype" for kind in drawing.kinds.values()) or "cast[" in str(rule)
    while True:
        found = (drawing.binding(choose) for _ in range(TRIES))
        binding = next((binding for binding in found if binding is not None), None)
        if binding is None:
            return
        arrays = {name: values.array(tensor_lengths(name, sort, binding), numbers) for name, sort in rule.sorts.items()}
        if casts and isinstance(values, Integers):
            arrays = {name: _rounded(name, array * 9973, binding, values) for name, array in arrays.items()}
        yield Instance(binding, arrays)


def _rounded(name: str, array: Any, binding: Binding, values: Values) -> Any:
    dtype = binding.get(Size(name, "dtype"))
    return array if dtype is None else values.cast(dtype, array)


def tensor_lengths(name: str, sort: Sort, binding: Binding) -> tuple[int, ...]:
    """The lengths of all dims of a variable."""
    stack = binding[Size(name, STACK)] if sort == "matrix" else ()
    return (*stack, *(binding[Size(name, axis)] for axis in AXES[sort]))


def evaluate(term: Term, instance: Instance, values: Values, known: dict[Term, Any] | None = None) -> Any:
    """The value of a term on an instance; `known` keeps the values of terms seen before."""
    known = {} if known is None else known
    if isinstance(term, Variable):
        return instance.arrays[term.name]
    if term not in known:
        operands = [evaluate(operand, instance, values, known) for operand in term.operands]
        attributes = tuple(value_of(attribute, instance.binding) for attribute in term.attributes)
        known[term] = operator_of(term).compute(values, attributes, *operands)
    return known[term]


def exact_values(rule: Rule) -> Values:
    """Integers, or a finite field where a rule divides."""
    return Field() if operators(rule) & {"mean", "avg_pool"} else Integers()


def operators(rule: Rule) -> set[str]:
    """Names of the operators on both sides."""
    return {term.op for term in all_subterms(rule) if isinstance(term, Apply)}


def torch_can(instance: Instance, rule: Rule) -> bool:
    """Whether torch takes the attributes: its poolings pad by at most half a window."""
    pools = [t for t in all_subterms(rule) if isinstance(t, Apply) and t.op in ("max_pool", "avg_pool")]
    for pool in pools:
        size, _, padding = (pair(value_of(attribute, instance.binding)) for attribute in pool.attributes)
        if any(2 * pad > length for length, pad in zip(size, padding, strict=True)):
            return False
    return True


def counterexample(rule: Rule, num_instances: int, seed: int = 0, values: Values | None = None) -> str | None:
    """A random instance on which the sides of a rule differ, in words; None where all of `num_instances` agree.

    A rule that has no instance at all, or empty ones alone, is not vouched for: that is said too, the latter where
    many are asked for.
    """
    values = exact_values(rule) if values is None else values
    num_drawn = 0
    for instance in islice(instances(rule, values, seed), num_instances):
        found = difference(rule, instance, values)
        if found is not None:
            return found
        num_drawn += 1
    if num_drawn < num_instances:
        return f"only {num_drawn} of {num_instances} instances were found, where it can be seen to hold"
    return EMPTY if num_instances >= MANY and is_vacuous(rule) else None


MANY = 20
EMPTY = "every instance has an empty tensor where sizes meet the conditions"


def is_vacuous(rule: Rule) -> bool:
    """Whether the conditions of a rule leave nothing but empty tensors: none of some random bindings has all sizes."""
    drawing, choose = Drawing.of(rule), random.Random(0)
    found = (drawing.binding(choose) for _ in range(TRIES))
    return not any(binding is not None and _is_full(rule, binding) for binding in found)


def _is_full(rule: Rule, binding: Binding) -> bool:
    return not any(0 in tensor_lengths(name, sort, binding) for name, sort in rule.sorts.items())


def difference(rule: Rule, instance: Instance, values: Values) -> str | None:
    """Where the sides of a rule differ on an instance, in words; None where they agree."""
    known: dict[Term, Any] = {}
    for source, target in zip(rule.source, rule.target, strict=True):
        left, right = (evaluate(term, instance, values, known) for term in (source, target))
        if left.shape != right.shape:
            return f"{source} has shape {tuple(left.shape)}, {target} has {tuple(right.shape)}, where {instance}"
        if not (left == right).all():
            return f"{source} differs from {target} where {instance}"
    return None
