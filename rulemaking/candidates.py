"""Candidate rules from terms of equal values: each once, whatever its variables are called, tested at uneven sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from autopar.errors import PlanError
from autopar.substitute.rules.terms import (
    Apply,
    Attribute,
    Rule,
    Size,
    Sort,
    Term,
    Unknown,
    Variable,
    subterms,
    variables,
)
from rulemaking.enumeration import Enumeration, unknowns_of
from rulemaking.formed import shape_of
from rulemaking.instances import counterexample, is_vacuous
from rulemaking.shapes import Conditions

INSTANCES = 6
GROUPED_INSTANCES = 60
"""Of convolutions: groups that divide all that they must are rare."""

_GUARDS = ("?g == 1", "?p == 0")


def candidates(enumeration: Enumeration, num_operators: int) -> Iterator[Rule]:
    """Every candidate of an enumeration, those that differ in names alone left out."""
    sorts: dict[str, Sort] = {name: sort for name, (sort, _) in enumeration.world.variables.items()}
    seen: set[str] = set()
    for source, target in _pairs(enumeration, num_operators):
        rule = _rule(source, target, sorts)
        if rule is not None:
            name = anonymous(rule)
            if name not in seen:
                seen.add(name)
                yield rule


def _pairs(enumeration: Enumeration, num_operators: int) -> Iterator[tuple[tuple[Term, ...], tuple[Term, ...]]]:
    for known, found in enumeration.pairs:
        if _in_order(found.term):
            yield (found.term,), (known.term,)
    for first, second, *halves in enumeration.halves(num_operators):
        if _in_order(halves[0]):
            whole = set(variables(halves[0]))
            if any(set(variables(term)) < whole for term in (first.term, second.term)):
                yield (first.term, second.term), tuple(halves)


def _rule(source: tuple[Term, ...], target: tuple[Term, ...], sorts: dict[str, Sort]) -> Rule | None:
    """The rule of two sides, its source the one that reads all that the other reads; None where neither does."""
    if not all(isinstance(term, Apply) for term in source):
        return None
    if len(source) == 1 and not _reads(source) >= _reads(target):
        source, target = target, source
    target = tuple(_with_sizes(term, source, sorts) for term in target)
    known = _reads(source)
    held = {name for term in source for name in variables(term)}
    if not known >= _reads(target) or not all(isinstance(term, Apply) for term in source) or not held >= _names(known):
        return None
    used = {name: sorts[name] for name in sorted(_names(known))}
    return Rule("candidate", source, target, used)


def _reads(terms: Sequence[Term]) -> set[str | Unknown]:
    """Names of the variables of terms, also of those whose sizes alone they read, and their unknowns."""
    names = {name for term in terms for name in variables(term)}
    inside = [part for term in terms for part in subterms(term) if isinstance(part, Apply)]
    sizes = {a.variable for part in inside for a in part.attributes if isinstance(a, Size)}
    return names | sizes | set().union(*(unknowns_of(term) for term in terms))


def _names(read: set[str | Unknown]) -> set[str]:
    return {name for name in read if isinstance(name, str)}


def _with_sizes(term: Term, source: Sequence[Term], sorts: dict[str, Sort]) -> Term:
    """A half of a tensor whose length is that of the source's first output, said as a size of it."""
    if not isinstance(term, Apply) or term.op not in ("first", "second") or len(source) == 1:
        return term
    try:
        length = shape_of(source[0], sorts, Conditions())[str(term.attributes[0])]
    except PlanError:
        return term
    size: Attribute = length if isinstance(length, Size | Unknown | int) else term.attributes[1]
    return Apply(term.op, (term.attributes[0], size), term.operands)


def _in_order(term: Term) -> bool:
    """Whether the variables of each sort come in the order of their names: any other term is one of these, renamed."""
    seen: dict[str, list[str]] = {}
    for name in dict.fromkeys(variables(term)):
        letter = "x" if name in "xyz" else "i" if name in "ijh" else name[0]
        seen.setdefault(letter, []).append(name)
    return all(_is_start(names) for names in seen.values())


def _is_start(names: list[str]) -> bool:
    starts = (list("xyz"), list("ijh"), ["w1", "w2"], ["k1", "k2"], ["b"])
    return any(names == start[: len(names)] for start in starts)


def anonymous(rule: Rule) -> str:
    """The text of a rule with its variables and unknowns numbered as they come."""
    numbers: dict[str, str] = {}

    def numbered(found: re.Match[str]) -> str:
        name = found.group()
        return numbers.setdefault(name, f"{rule.sorts.get(name, '?')}{len(numbers)}")

    names = "|".join(map(re.escape, rule.sorts))
    return re.sub(rf"\?\w+|\b(?:{names})\b", numbered, str(rule))


def special_cases(rule: Rule) -> Iterator[str]:
    """Anonymous texts of the rule with variables that coincide, or weights for its matrices: what it says anyway."""
    choices = [
        [name, *(other for other in (*rule.sorts, *_WEIGHTS) if _may_be(rule, name, other))] for name in rule.sorts
    ]
    for chosen in product(*choices):
        names = dict(zip(rule.sorts, chosen, strict=True))
        sorts = {name: rule.sorts.get(name, "weight") for name in set(chosen)}
        source, target = (tuple(_renamed(term, names) for term in side) for side in (rule.source, rule.target))
        yield anonymous(Rule(rule.name, source, target, sorts))


def generalised(rule: Rule) -> Iterator[str]:
    """Anonymous texts of rules that say more: a part of the source is any tensor of its sort instead, on both sides."""
    sides = (rule.source, rule.target)
    for part in {part for term in rule.source for part in subterms(term) if isinstance(part, Apply)}:
        sort = shape_of(part, rule.sorts, Conditions()).sort
        source, target = (tuple(_replaced(term, part) for term in side) for side in sides)
        if all(isinstance(term, Apply) for term in source):
            left = {name for term in (*source, *target) for name in variables(term)}
            sorts = {name: held for name, held in rule.sorts.items() if name in left}
            yield anonymous(Rule(rule.name, source, target, {**sorts, _ANY.name: sort}))


_ANY = Variable("anything")
_WEIGHTS = ("w1", "w2")


def _replaced(term: Term, part: Term) -> Term:
    if term == part:
        return _ANY
    if isinstance(term, Variable):
        return term
    return Apply(term.op, term.attributes, tuple(_replaced(operand, part) for operand in term.operands))


def _may_be(rule: Rule, name: str, other: str) -> bool:
    return other != name and (
        rule.sorts[name] == rule.sorts.get(other)
        or (rule.sorts[name] == "matrix" and rule.sorts.get(other, "weight") == "weight" and other in _WEIGHTS)
    )


def _renamed(term: Term, names: Mapping[str, str]) -> Term:
    if isinstance(term, Variable):
        return Variable(names[term.name])
    attributes = tuple(Size(names[a.variable], a.axis) if isinstance(a, Size) else a for a in term.attributes)
    return Apply(term.op, attributes, tuple(_renamed(operand, names) for operand in term.operands))


def sound(rule: Rule) -> Rule | None:
    """The rule, with a guard where it needs one, if random instances of uneven sizes bear it out; else None."""
    num_instances = GROUPED_INSTANCES if "?g" in str(rule) else INSTANCES
    for guards in ((), *((guard,) for guard in _GUARDS if guard.split(" ")[0] in str(rule))):
        guarded = replace(rule, guards=guards)
        try:
            if counterexample(guarded, num_instances) is None and not is_vacuous(guarded):
                return guarded
        except PlanError:
            return None
    return None


def operator_count(rule: Rule) -> int:
    """How many different operators a rule has on both sides."""
    sides = (rule.source, rule.target)
    applied = [{t for term in side for t in subterms(term) if isinstance(t, Apply)} for side in sides]
    return sum(map(len, applied))
