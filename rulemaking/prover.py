"""Proofs of rules from the axioms by z3: the axioms, the sizes that a rule relies on, and that its sides differ."""

from __future__ import annotations

import time
from dataclasses import dataclass

import z3

from autopar.substitute.rules.terms import Apply, Rule, Variable
from rulemaking.axioms import axioms
from rulemaking.encoding import Encoder
from rulemaking.instances import operators

SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """Whether z3 refuted that the sides differ, how many axioms it was given, and how long it took."""

    proved: bool
    num_axioms: int
    seconds: float


def prove(rule: Rule, seconds: float = SECONDS) -> Outcome:
    """Tries to prove a rule for all sizes and values within a time limit, from axioms that speak of its operators."""
    start = time.perf_counter()
    encoder, relevant = Encoder(), relevant_axioms(rule)
    solver = z3.SimpleSolver()
    solver.set("auto_config", False)
    solver.set("mbqi", False)
    solver.set("arith.nl", False)
    solver.set("timeout", int(seconds * 1000))
    environment = encoder.environment(rule, lambda name, sort: z3.Const(f"{name}'", sort))
    solver.add(encoder.assumptions(rule, environment))
    sides = zip(rule.source, rule.target, strict=True)
    terms = [[encoder.term(term, rule.sorts, environment)[0] for term in side] for side in sides]
    solver.add(z3.Or([source != target for source, target in terms]))
    solver.add([formula for axiom in relevant for formula in encoder.axiom(axiom)])
    solver.add(list(encoder.shapes()))
    found = solver.check()
    return Outcome(found == z3.unsat, len(relevant), time.perf_counter() - start)


def relevant_axioms(rule: Rule) -> list[Rule]:
    """The axioms of operators that a rule uses, or that those are defined by."""
    known, before = operators(rule), 0
    while before != len(known):
        before = len(known)
        for axiom in axioms():
            source = axiom.source[0]
            if isinstance(source, Apply) and source.op in known & _DEFINED and _is_plain(source):
                known = known | operators(axiom)
        if known & {"first", "second"}:
            known = known | {"first", "second", "concat"}
    return [axiom for axiom in axioms() if operators(axiom) <= known]


_DEFINED = {"linear", "affine", "sub", "neg", "conv_affine", "batch_norm", "sum", "scale_along", "shift_along"}
"""Operators that axioms define by others."""


def _is_plain(source: Apply) -> bool:
    return all(isinstance(operand, Variable) for operand in source.operands)
