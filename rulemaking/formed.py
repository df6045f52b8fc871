"""Terms and rules that are well formed: their shapes, and every condition on sizes that they need."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from autopar.errors import PlanError
from autopar.substitute.rules.expressions import Guard, parse_guard
from autopar.substitute.rules.terms import Rule, Sort, Term, Variable
from rulemaking.algebra import operator_of
from rulemaking.shapes import AXES, Conditions, Shape, variable_shape


def shape_of(term: Term, sorts: Mapping[str, Sort], conditions: Conditions) -> Shape:
    """The shape of a term; adds to `conditions` what its operators need. Raises PlanError where it is ill sorted."""
    if term in conditions.known:
        return conditions.known[term]
    conditions.known[term] = shape = _shape_of(term, sorts, conditions)
    return shape


def _shape_of(term: Term, sorts: Mapping[str, Sort], conditions: Conditions) -> Shape:
    if isinstance(term, Variable):
        if term.name not in sorts:
            raise PlanError(f"the variable {term.name} has no sort; give one of {', '.join(AXES)}")
        return variable_shape(term.name, sorts[term.name])
    operands = [shape_of(operand, sorts, conditions) for operand in term.operands]
    try:
        return operator_of(term).shape(conditions, term.attributes, *operands)
    except PlanError as error:
        raise PlanError(f"{term} is ill formed: {error}") from None


def rule_conditions(rule: Rule) -> Conditions:
    """All that equality needs of sizes: what both sides need to be well formed, and that their outputs agree in shape.

    Raises PlanError where an operator is unknown, sorts differ, or the sides have different numbers of outputs.
    """
    conditions = Conditions()
    if len(rule.source) != len(rule.target) or not rule.source:
        raise PlanError(f"expected as many outputs on both sides, found {len(rule.source)} and {len(rule.target)}")
    for side in zip(rule.source, rule.target, strict=True):
        shapes = [shape_of(term, rule.sorts, conditions) for term in side]
        for source, target in pairwise(shapes):
            conditions.same(source, target)
    return conditions


def rule_guards(rule: Rule) -> list[Guard]:
    """The guards of a rule, parsed. Raises PlanError where one cannot be read."""
    return [parse_guard(text) for text in rule.guards]
