"""Writes rule files, and checks whole ones: schema, terms, sorts and sizes, digests, each rule on random instances.

A file that was changed by hand is refused, even where its digests were made anew. No plan needs that: it takes seconds,
and is done of the shipped file where rules are made and tested.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema

from autopar.errors import PlanError
from autopar.substitute.rules.rulefile import REMEDY, plain, rule_digest, rules_of
from autopar.substitute.rules.terms import Rule
from rulemaking.instances import counterexample

VERSION = 1
INSTANCES = 1


@lru_cache(maxsize=1)
def schema() -> Any:
    """The JSON Schema of rule files (`rules.schema.json`)."""
    return json.loads(Path(__file__).with_name("rules.schema.json").read_text(encoding="utf-8"))


def read_rules(text: str) -> tuple[Rule, ...]:
    """The rules of a rule file's text.

    Raises PlanError naming the first rule that does not fit the schema, cannot be read, is ill formed, is not what its
    digest says, or is false on a random instance.
    """
    rules = rules_of(_parsed(text))
    twice = [name for name, count in Counter(rule.name for rule in rules).items() if count > 1]
    if twice:
        raise PlanError(f"the rule file names {twice[0]} twice; {REMEDY}")
    for rule in {_claim(rule): rule for rule in rules}.values():
        check_rule(rule, INSTANCES)
    return rules


def write_rules(rules: Iterable[Rule], axioms: str) -> str:
    """The text of a rule file, one line a rule; `axioms` is the digest of the axioms that proofs started from."""
    entries = [{**plain(rule), "digest": rule_digest(rule, axioms)} for rule in rules]
    lines = ",\n".join(f"    {json.dumps(entry, ensure_ascii=False)}" for entry in entries)
    head = f'  "autopar_rules": {VERSION},\n  "axioms": {json.dumps(axioms)},\n  "rules": [\n'
    return f"{{\n{head}{lines}\n  ]\n}}\n"


def _claim(rule: Rule) -> object:
    """What a rule says is equal: the same as its reverse says."""
    return frozenset((rule.source, rule.target)), tuple(rule.sorts.items()), rule.guards


def check_rule(rule: Rule, num_instances: int, seed: int = 0) -> None:
    """Raises PlanError where a rule is ill formed, or false on one of some random instances."""
    try:
        found = counterexample(rule, num_instances, seed)
    except PlanError as error:
        raise PlanError(f"the rule {rule.name} is ill formed: {error}; {REMEDY}") from None
    if found is not None:
        raise PlanError(f"the rule {rule.name}: expected {rule}, found that {found}; {REMEDY}")


def _parsed(text: str) -> Any:
    try:
        data = json.loads(text)
        jsonschema.Draft202012Validator(schema()).validate(data)
    except json.JSONDecodeError as error:
        raise PlanError(f"the rule file is not JSON: {error}; {REMEDY}") from None
    except jsonschema.ValidationError as error:
        where = "/".join(map(str, error.absolute_path)) or "its top level"
        raise PlanError(f"the rule file does not fit its schema at {where}: {error.message}; {REMEDY}") from None
    return data
