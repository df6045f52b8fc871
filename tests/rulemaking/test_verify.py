"""Axioms hold completely at small sizes; true rules are proved from them, false ones by nobody."""

from __future__ import annotations

import pytest

from autopar.substitute.rules.terms import Rule
from rulemaking.axioms import axioms
from rulemaking.exhaustive import disagreement, sizes_of
from rulemaking.gradients import gradient_difference
from rulemaking.instances import counterexample
from rulemaking.statement import parse_rules
from rulemaking.verify import Prover, main, verified

FALSE = """
grouped-merge: conv[?s, ?p, ?d, ?g](i, k1), conv[?s, ?p, ?d, ?g](i, k2)
  => first[channel, k1.out](conv[?s, ?p, ?d, ?g](i, concat[out](k1, k2))),
    second[channel, k1.out](conv[?s, ?p, ?d, ?g](i, concat[out](k1, k2)))
grouped-channels: conv[?s, ?p, ?d, ?g](concat[channel](i, j), concat[in](k1, k2))
  => add(conv[?s, ?p, ?d, ?g](i, k1), conv[?s, ?p, ?d, ?g](j, k2))
grouped-split: first[channel, ?n](conv[?s, ?p, ?d, ?g](i, k)) => conv[?s, ?p, ?d, ?g](i, first[out, ?n](k))
negative-scale: relu(scale[?c](x)) => scale[?c](relu(x))
swapped: concat[col](x, y) => concat[col](y, x)
halves-swapped: concat[col](second[col, ?n](x), first[col, ?n](x)) => x
bias-twice: add(affine(x, w1, b), affine(x, w2, b)) => affine(x, add(w1, w2), b)
heads-cut: split_heads[?h](concat[col](x, y)) => concat[col](split_heads[?h](x), split_heads[?h](y))
narrow-cast: cast[?d](cast[?e](x)) => cast[?d](x)
transposed: linear(x, w) => matmul(x, w)
"""

TRUE = """
merge-linears: linear(x, w1), linear(x, w2)
  => first[col, w1.row](linear(x, concat[row](w1, w2))), second[col, w1.row](linear(x, concat[row](w1, w2)))
reassociate: linear(linear(x, w1), w2) => linear(x, matmul(w2, w1))
merge-convs: conv[?s, ?p, ?d, ?g](i, k1), conv[?s, ?p, ?d, ?g](i, k2)
  => first[channel, k1.out](conv[?s, ?p, ?d, ?g](i, concat[out](k1, k2))),
    second[channel, k1.out](conv[?s, ?p, ?d, ?g](i, concat[out](k1, k2))) where ?g == 1
positive-scale: relu(scale[?c](x)) => scale[?c](relu(x)) where ?c >= 0
"""


@pytest.mark.parametrize("rule", parse_rules(FALSE, "false"), ids=lambda rule: rule.name)
def test_false_rules_are_refuted_by_random_instances(rule: Rule) -> None:
    assert "where" in str(counterexample(rule, 300))


def test_false_rules_are_not_proved() -> None:
    """A contradiction among the axioms would prove anything."""
    with Prover(seconds=0.3) as prover:
        assert [prover.proof(rule) for rule in parse_rules(FALSE, "false")] == [None] * 10


def test_true_rules_are_proved() -> None:
    verdicts = list(verified(parse_rules(TRUE, "stated"), num_instances=20))
    assert [(verdict.refuted, verdict.rule.status) for verdict in verdicts] == [(None, "proved")] * 4
    assert "z3" in verdicts[0].rule.evidence


SOME_AXIOMS = [axiom for axiom in axioms()[::6] if "conv" not in axiom.name]


@pytest.mark.parametrize("axiom", SOME_AXIOMS, ids=lambda axiom: axiom.name)
def test_axioms_hold_at_small_sizes_for_all_values(axiom: Rule) -> None:
    """Every sixth axiom at a few sizes; `verify --axioms` checks all at all of them."""
    assert len(sizes_of(axiom, 8)) > 0
    assert disagreement(axiom, 8) is None


@pytest.mark.parametrize("name", ["negative-scale", "swapped", "bias-twice", "transposed"])
def test_a_false_axiom_is_found_by_its_check(name: str) -> None:
    (rule,) = (rule for rule in parse_rules(FALSE, "false") if rule.name == name)
    assert "differs" in str(disagreement(rule, 200))


def test_gradients_that_differ_are_seen() -> None:
    """Equal values can have different gradients: what relu does at zero, say, or here a term that is never read."""
    (rule,) = parse_rules("wrong: scale[2](x) => scale[3](x)", "")
    assert "the gradients of x differ" in str(gradient_difference(rule, 1))


def test_the_command_prints_each_rule_with_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "transpose-twice", "--instances", "5"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("transpose-twice") and "proved" in printed and "1 rules, 1 proved, 0 failed" in printed
