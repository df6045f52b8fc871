"""docs/rules.md: how operators may be sharded, and how graphs may be rewritten."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from autopar.ops import notation, proofs
from autopar.ops.notation import AxisRule, einsum_rules
from autopar.ops.patterns import Entry
from autopar.ops.table import LINEAR_SUMS, RULES
from docs.markdown import docstring, page, summary, table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "substitution" / "results.json"
MOST_SHOWN = 40

SHARDING = """
On one mesh axis, an operator may run under certain types of its operands without any communication; its results have
the types that the rule says. (Types are explained in the [README](../README.md#how-to-read-a-plan).) Its backward pass
is right then, too: the type of each gradient is fixed by the type of the tensor, and the transposed operator runs
locally on these. So a rule speaks of the forward pass alone.

A rule is looked for in this order: yours (`autopar.register_rule`), the table below, torch's tag for pointwise
operators, torch's own registry of sharding strategies. What comes from torch is used only for operators of which
torch's sample inputs prove it, values and gradients. An operator without a rule runs replicated, and the plan says so
and why.
"""

SUBSTITUTIONS = """
With `search="thorough"`, a model's graph is rewritten into equal ones, in the manner of TASO. Rules are data
([rules.json](../autopar/substitute/rules/rules.json)): two terms that are equal for all tensors of fitting shapes, and
guards, which say when. Each rule is *proved* from stated axioms (`python -m rulemaking.verify --axioms`
prints them), or *tested* on 1,000 random instances, values and gradients; plans use those that are proved. When the
file is loaded, each rule is held against its digest: one that was changed is refused.
"""


def rules() -> str:
    known = json.loads(files("autopar.substitute.rules").joinpath("rules.json").read_text(encoding="utf-8"))["rules"]
    proved = json.loads(proofs.PATH.read_text(encoding="utf-8"))["proved"]
    return page(
        "Rules",
        SHARDING,
        "## The notation",
        docstring(notation),
        "What it means for `aten.linear.default`, `... k, n k, n -> ... n`, on operands of three, two and one dims\n"
        "(all `R` and all `I` are always possible):",
        table(("input", "weight", "bias", "result"), _linear()),
        "## The table",
        f"{len(RULES)} operators, named without `aten.` and `.default`. Where a text cannot say it, because dims are\n"
        "given as arguments, a function does, and is described. *Linear*: it also runs on summands.",
        table(("rule", "also on summands", "operators"), _table_rows()),
        "## From torch",
        f"{len(proved)} overloads are proved on torch's sample inputs, of which "
        f"{sum(name not in RULES for name in proved)} are not in the table above. Proofs and what failed are in "
        "[proofs.json](../autopar/ops/proofs.json); `python -m tests.ops.sweep` makes them anew.",
        "## Substitutions",
        SUBSTITUTIONS,
        table(("rules", "proved", "tested", "in all"), _counts(known)),
        "### Guards",
        f"{sum(bool(rule['guards']) for rule in known)} rules have guards; the most frequent:",
        table(("guard", "rules"), _guards(known)),
        "### The rules that are used most",
        "By how often they were applied to the graphs of `python -m benchmarks.substitution.run`.",
        table(("rule", "applied", "status", "before", "after"), _used(known)),
        "### Other rules that people stated",
        f"The first {MOST_SHOWN} of {len(_stated(known))} in their order, without those that are another one reversed.",
        table(("rule", "status", "before", "after", "guards"), _others(known)),
    )


def _linear() -> Iterator[tuple[str, ...]]:
    shapes = [(4, 8, 16), (32, 16), (32,)]
    entry = LINEAR_SUMS
    for rule in einsum_rules(entry.text, shapes, [(4, 8, 32)], entry.partial, entry.additive):
        yield tuple(f"`{type_}`" for type_ in (*rule.operands, *rule.results))
    for dim in range(2):  # as factors
        yield f"`S({dim})`", "`I`", "`I`", f"`S({dim})`"


def _table_rows() -> Iterator[tuple[str, str, str]]:
    """A row for each distinct rule, in the table's order of operators that have it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, rule in RULES.items():
        text = f"`{rule.text}`" if isinstance(rule, Entry) else _described(rule)
        partial = f"`{rule.partial}`" if isinstance(rule, Entry) and rule.partial else ""
        rows.setdefault((text, partial), []).append(f"`{name.removeprefix('aten.').removesuffix('.default')}`")
    for (text, partial), names in sorted(rows.items(), key=lambda row: (not row[0][0].startswith("`"), row[1])):
        yield text, partial, ", ".join(names)


def _described(function: Callable[..., list[AxisRule]]) -> str:
    """A function's docstring, or that of the function that made it."""
    if function.__doc__:
        return summary(function)
    maker = getattr(function, "__qualname__", "").split(".")[0]
    made_by = getattr(function, "__globals__", {}).get(maker)
    assert made_by is None or made_by.__doc__, f"{maker} needs a docstring: docs/rules.md shows it"
    return summary(made_by) if made_by is not None else "by its arguments"


def _stated(known: list[Any]) -> list[Any]:
    return [rule for rule in known if rule["evidence"].startswith("stated")]


def _counts(known: list[Any]) -> Iterator[tuple[object, ...]]:
    for label, chosen in (
        ("stated by people", _stated(known)),
        ("generated", [rule for rule in known if not rule["evidence"].startswith("stated")]),
        ("all", known),
    ):
        counts = Counter(rule["status"] for rule in chosen)
        yield label, counts["proved"], counts["tested"], len(chosen)


def _guards(known: list[Any]) -> Iterator[tuple[object, ...]]:
    for guard, count in Counter(guard for rule in known for guard in rule["guards"]).most_common(10):
        yield f"`{guard}`", count


def _terms(terms: list[str]) -> str:
    return ", ".join(f"`{term}`" for term in terms)


def _applied() -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]:
        counts.update(row["applied"])
    return counts


def _used(known: list[Any]) -> Iterator[tuple[object, ...]]:
    by_name = {rule["name"]: rule for rule in known}
    for name, count in _applied().most_common():
        rule = by_name[name]
        yield f"`{name}`", count, rule["status"], _terms(rule["source"]), _terms(rule["target"])


def _others(known: list[Any]) -> Iterator[tuple[object, ...]]:
    used = _applied()
    rest = [r for r in _stated(known) if r["name"] not in used and not r["name"].endswith("-reversed")]
    for rule in rest[:MOST_SHOWN]:
        guards = _terms(rule["guards"])
        yield f"`{rule['name']}`", rule["status"], _terms(rule["source"]), _terms(rule["target"]), guards


__all__ = ["rules"]
