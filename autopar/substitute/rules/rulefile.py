"""The rule file: rules as data, checked when written and again when read.

Reading checks the schema, each term, sorts and sizes, the digest of each rule, and computes both sides of each rule on
random instances once more: a file that was changed by hand is refused, even where its digests were made anew. That
takes seconds, so the shipped text, once it has passed, is remembered by its hash and read without that next time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import jsonschema

from autopar.cost.host import cache_folder
from autopar.errors import PlanError
from autopar.substitute.rules.instances import counterexample
from autopar.substitute.rules.terms import Rule, parse_term

VERSION = 1
INSTANCES_ON_LOAD = 1
_REMEDY = "restore the file, or write it anew with python -m autopar.substitute.rules.generate"


@lru_cache(maxsize=1)
def schema() -> Any:
    """The JSON Schema of rule files (`autopar/substitute/rules/rules.schema.json`)."""
    return json.loads(files("autopar.substitute.rules").joinpath("rules.schema.json").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def load_rules() -> tuple[Rule, ...]:
    """The rules that autopar ships. Raises PlanError where the file was changed."""
    text = files("autopar.substitute.rules").joinpath("rules.json").read_text(encoding="utf-8")
    passed = cache_folder() / f"rules-{hashlib.sha256(text.encode()).hexdigest()[:32]}.passed"
    if os.path.exists(passed):  # Path.exists raises where a folder may not be looked into
        return _rules(json.loads(text))
    rules = read_rules(text)
    with contextlib.suppress(OSError):  # where nothing can be kept, they are checked each time
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()
    return rules


def read_rules(text: str) -> tuple[Rule, ...]:
    """The rules of a rule file's text.

    Raises PlanError naming the first rule that does not fit the schema, cannot be read, is ill formed, is not what its
    digest says, or is false on a random instance.
    """
    rules = _rules(_parsed(text))
    twice = [name for name, count in Counter(rule.name for rule in rules).items() if count > 1]
    if twice:
        raise PlanError(f"the rule file names {twice[0]} twice; {_REMEDY}")
    for rule in {_claim(rule): rule for rule in rules}.values():
        check_rule(rule, INSTANCES_ON_LOAD)
    return rules


def _rules(data: Any) -> tuple[Rule, ...]:
    return tuple(_rule(entry, data["axioms"]) for entry in data["rules"])


def _claim(rule: Rule) -> object:
    """What a rule says is equal: the same as its reverse says."""
    return frozenset((rule.source, rule.target)), tuple(rule.sorts.items()), rule.guards


def write_rules(rules: Iterable[Rule], axioms: str) -> str:
    """The text of a rule file, one line a rule; `axioms` is the digest of the axioms that proofs started from."""
    entries = [{**_plain(rule), "digest": rule_digest(rule, axioms)} for rule in rules]
    lines = ",\n".join(f"    {json.dumps(entry, ensure_ascii=False)}" for entry in entries)
    head = f'  "autopar_rules": {VERSION},\n  "axioms": {json.dumps(axioms)},\n  "rules": [\n'
    return f"{{\n{head}{lines}\n  ]\n}}\n"


def rule_digest(rule: Rule, axioms: str) -> str:
    """A digest of all that a rule says, and of the axioms that it was proved from."""
    text = json.dumps([axioms, _plain(rule)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_rule(rule: Rule, num_instances: int, seed: int = 0) -> None:
    """Raises PlanError where a rule is ill formed, or false on one of some random instances."""
    try:
        found = counterexample(rule, num_instances, seed)
    except PlanError as error:
        raise PlanError(f"the rule {rule.name} is ill formed: {error}; {_REMEDY}") from None
    if found is not None:
        raise PlanError(f"the rule {rule.name}: expected {rule}, found that {found}; {_REMEDY}")


def _parsed(text: str) -> Any:
    try:
        data = json.loads(text)
        jsonschema.Draft202012Validator(schema()).validate(data)
    except json.JSONDecodeError as error:
        raise PlanError(f"the rule file is not JSON: {error}; {_REMEDY}") from None
    except jsonschema.ValidationError as error:
        where = "/".join(map(str, error.absolute_path)) or "its top level"
        raise PlanError(f"the rule file does not fit its schema at {where}: {error.message}; {_REMEDY}") from None
    return data


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
        raise PlanError(f"the rule {entry['name']} cannot be read: {error}; {_REMEDY}") from None
    digest = rule_digest(rule, axioms)
    if digest != entry["digest"]:
        found = f"expected digest {entry['digest']}, found {digest}"
        raise PlanError(f"the rule {rule.name} was changed: {found}; {_REMEDY}")
    return rule


def _terms(texts: Sequence[str]) -> tuple[Any, ...]:
    return tuple(parse_term(text) for text in texts)


def _plain(rule: Rule) -> dict[str, Any]:
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
