"""The rule file: shipped rules load, and a file that was changed is refused with the rule and the remedy."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from autopar.errors import PlanError
from autopar.substitute.rules.rulefile import load_rules, rule_digest
from rulemaking.axioms import axioms_digest
from rulemaking.checking import read_rules, write_rules
from rulemaking.statement import parse_rules

MERGE = """
merge: linear(x, w1), linear(x, w2)
  => first[col, w1.row](linear(x, concat[row](w1, w2))), second[col, w1.row](linear(x, concat[row](w1, w2)))
fold: scale[?a](scale[?b](x)) => scale[?c](x) where ?c == ?a * ?b
"""


def changed(edit: Any) -> str:
    """The text of a small rule file after an edit of its data."""
    data = json.loads(write_rules(parse_rules(MERGE, "stated"), "none"))
    edit(data)
    return json.dumps(data)


def test_shipped_rules_load_and_are_written_as_they_are() -> None:
    text = files("autopar.substitute.rules").joinpath("rules.json").read_text(encoding="utf-8")
    rules = load_rules()
    assert write_rules(rules, json.loads(text)["axioms"]) == text
    assert read_rules(text) == rules  # planning trusts the digests; the rest is checked here
    assert len({rule.name for rule in rules}) == len(rules) > 50


def test_shipped_rules_are_proved_from_the_axioms_as_they_are() -> None:
    text = files("autopar.substitute.rules").joinpath("rules.json").read_text(encoding="utf-8")
    assert json.loads(text)["axioms"] == axioms_digest()
    rules = load_rules()
    assert sum(rule.status == "proved" for rule in rules) >= 0.9 * len(rules)
    assert all(("z3" in rule.evidence) == (rule.status == "proved") for rule in rules)
    assert all("random instances" in rule.evidence for rule in rules)


def test_written_rules_are_read_again() -> None:
    rules = parse_rules(MERGE, "stated")
    assert read_rules(write_rules(rules, "none")) == rules


def swap_weights(data: Any) -> None:
    data["rules"][0]["target"].reverse()


def claim_proof(data: Any) -> None:
    data["rules"][1]["status"] = "proved"


def other_axioms(data: Any) -> None:
    data["axioms"] = "others"


@pytest.mark.parametrize("edit", [swap_weights, claim_proof, other_axioms])
def test_a_changed_rule_is_refused_by_its_digest(edit: Any) -> None:
    with pytest.raises(PlanError, match=r"the rule (merge|fold) was changed: expected digest .*, found .*restore"):
        read_rules(changed(edit))


def test_a_false_rule_is_refused_even_where_its_digest_fits() -> None:
    text = "mixed: linear(x, w1), linear(x, w2) => linear(x, w2), linear(x, w1)"
    with pytest.raises(PlanError, match=r"the rule mixed: expected .* differs from"):
        read_rules(write_rules(parse_rules(text, "stated"), "none"))


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("sorts: linear(x, y) => x", "takes a matrix or vector and a weight, found a matrix and a matrix"),
        ("unknown: frobnicate(x) => x", "no operator 'frobnicate'"),
        ("outputs: x => x, x", "expected as many outputs on both sides, found 1 and 2"),
    ],
)
def test_an_ill_formed_rule_is_refused(statement: str, reason: str) -> None:
    with pytest.raises(PlanError, match=f"the rule \\w+ is ill formed: .*{reason}"):
        read_rules(write_rules(parse_rules(statement, "stated"), "none"))


def test_what_is_not_a_rule_file_is_refused_with_the_place() -> None:
    with pytest.raises(PlanError, match=r"does not fit its schema at rules/0/status: 'believed'"):
        read_rules(changed(lambda data: data["rules"][0].update(status="believed")))
    with pytest.raises(PlanError, match="is not JSON"):
        read_rules("rules")


def test_a_term_that_cannot_be_read_is_refused() -> None:
    def cut(data: Any) -> None:
        rule = parse_rules(MERGE, "stated")[0]
        data["rules"][0].update(source=["linear(x", "linear(x, w2)"], digest=rule_digest(rule, "none"))

    with pytest.raises(PlanError, match="the rule merge cannot be read: expected"):
        read_rules(changed(cut))
