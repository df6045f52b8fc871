"""The rule file: rules as data, each with a digest of all that it says.

Reading for a plan holds each rule against its digest. What else there is to check of a file, also on random instances,
is checked where rules are made and tested (`rulemaking.checking.read_rules`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from autopar.errors import PlanError
from autopar.substitute.rules.terms import Rule, parse_term

REMEDY = "restore the file, or write it anew in a checkout with python -m rulemaking.generate"


@lru_cache(maxsize=1)
def load_rules() -> tuple[Rule, ...]:
    """The rules that autopar ships. Raises PlanError where the file was changed."""
    text = files("autopar.substitute.rules").joinpath("rules.json").read_text(encoding="utf-8")
    return rules_of(json.loads(text))


def rules_of(data: Any) -> tuple[Rule, ...]:
    """The rules of a rule file's data. Raises PlanError for one that cannot be read, or is not what its digest says."""
    return tuple(_rule(entry, data["axioms"]) for entry in data["rules"])


def rule_digest(rule: Rule, axioms: str) -> str:
    """A digest of all that a rule says, and of the axioms that it was proved from."""
    text = json.dumps([axioms, plain(rule)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rule(entry: dict[str, Any], axioms: str) -> Rule:
    try:
        rule = Rule(
            name=entry["name"],
            source=_terms(entry["source"]),
            target=_terms(entry["target"]),
            sorts=entry["sorts"],
            guards=tuple(entry["guards"]),
            status=entry["status"],
            evidence=entry["evidence"],
            inference=entry["inference"],
        )
    except PlanError as error:
        raise PlanError(f"the rule {entry['name']} cannot be read: {error}; {REMEDY}") from None
    digest = rule_digest(rule, axioms)
    if digest != entry["digest"]:
        found = f"expected digest {entry['digest']}, found {digest}"
        raise PlanError(f"the rule {rule.name} was changed: {found}; {REMEDY}")
    return rule


def _terms(texts: Sequence[str]) -> tuple[Any, ...]:
    return tuple(parse_term(text) for text in texts)


def plain(rule: Rule) -> dict[str, Any]:
    """A rule as JSON data, without its digest."""
    return {
        "name": rule.name,
        "source": [str(term) for term in rule.source],
        "target": [str(term) for term in rule.target],
        "sorts": dict(sorted(rule.sorts.items())),
        "guards": list(rule.guards),
        "status": rule.status,
        "evidence": rule.evidence,
        "inference": rule.inference,
    }
