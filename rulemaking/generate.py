"""Generates the rule file: enumerates terms, keeps what is sound and follows from nothing shorter, proves it.

`python -m rulemaking.generate --operators 3 -o rules.json` writes the stated rules and what generation
adds to them, all verified, and prints how many candidates there were, how many were sound and kept, and the time.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from autopar.substitute.rules.terms import Rule
from rulemaking.axioms import axioms_digest
from rulemaking.checking import write_rules
from rulemaking.generation import Clock, follows, generated, on_all
from rulemaking.stated import STATED
from rulemaking.statement import parse_rules
from rulemaking.verify import INSTANCES, Verdict, verified


@dataclass(frozen=True)
class Report:
    """What generation and verification came to, as numbers: written beside the rule file's claims."""

    operators: int
    only: tuple[str, ...]
    terms: int
    candidates: int
    special_cases: int
    sound: int
    derivable_from_stated: int
    kept: int
    stated: int
    refuted: tuple[str, ...]
    shipped: int
    proved: int
    derivable_from_shipped: int
    seconds: dict[str, float]
    peak_mib: int

    @property
    def coverage(self) -> float:
        """The share of sound generated rules that are derivable from the shipped ones."""
        return self.derivable_from_shipped / self.sound if self.sound else 1.0

    def __str__(self) -> str:
        steps = ", ".join(f"{step} {seconds:.0f} s" for step, seconds in self.seconds.items())
        return (
            f"{self.terms} terms of up to {self.operators} operators: {self.candidates} candidates, of which "
            f"{self.special_cases} special cases; {self.sound} of the others sound, {self.derivable_from_stated} of "
            f"them derivable from {self.stated} stated rules; {self.kept} kept after pruning\n"
            f"{self.shipped} rules shipped, {self.proved} proved ({self.proved / self.shipped:.1%}); refuted: "
            f"{', '.join(self.refuted) or 'none'}\n"
            f"coverage: {self.derivable_from_shipped} of {self.sound} sound generated rules ({self.coverage:.1%}) are "
            f"derivable from the shipped ones\n{steps}; {self.peak_mib} MiB a process at most"
        )


def regenerated(
    num_operators: int, only: Sequence[str], num_instances: int, workers: int = 2
) -> tuple[list[Rule], Report]:
    """The rules to ship, verified: all that hold of the stated ones and of the generated ones that are kept."""
    stated = parse_rules(STATED, "stated by hand")
    generation = generated(num_operators, only, stated, workers)
    clock = Clock()
    verdicts = _verified([*stated, *generation.kept], num_instances, workers)
    clock.tick("verify")
    refuted = tuple(verdict.rule.name for verdict in verdicts if verdict.refuted)
    shipped = [verdict.rule for verdict in verdicts if not verdict.refuted]
    covered = on_all(partial(follows, rules=shipped), generation.new, workers, 16)
    clock.tick("coverage")
    report = Report(
        operators=num_operators,
        only=tuple(only),
        terms=generation.num_terms,
        candidates=generation.num_candidates,
        special_cases=generation.num_special,
        sound=len(generation.sound),
        derivable_from_stated=len(generation.sound) - len(generation.new),
        kept=len(generation.kept),
        stated=len(stated),
        refuted=refuted,
        shipped=len(shipped),
        proved=sum(rule.status == "proved" for rule in shipped),
        derivable_from_shipped=len(generation.sound) - len(generation.new) + sum(covered),
        seconds={**generation.seconds, **clock.seconds},
        peak_mib=_peak_mib(),
    )
    return shipped, report


def _peak_mib() -> int:
    """The most memory that this process, or one that it has started, has held so far."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) // 1024


def _verified(rules: Sequence[Rule], num_instances: int, workers: int) -> list[Verdict]:
    """The verdicts on rules, in their order, found by several processes."""
    parts = [rules[start::workers] for start in range(workers)]
    found = on_all(partial(_verified_part, num_instances=num_instances), parts, workers, 1)
    verdicts = {verdict.rule.name: verdict for part in found for verdict in part}
    return [verdicts[rule.name] for rule in rules]


def _verified_part(rules: Sequence[Rule], num_instances: int) -> list[Verdict]:
    return list(verified(rules, num_instances))


def main(arguments: Sequence[str] | None = None) -> int:
    """Generates, verifies and writes; 1 where a stated rule is refuted."""
    parser = argparse.ArgumentParser(prog="python -m rulemaking.generate", description=__doc__)
    parser.add_argument("--operators", type=int, default=3, help="most operators of a term")
    parser.add_argument("--only", default="", help="operators to enumerate, separated by commas; all where not given")
    parser.add_argument("--instances", type=int, default=INSTANCES, help="random instances a rule, when verifying")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("-o", "--output", help="where to write the rule file; nowhere where not given")
    parser.add_argument("--report", help="where to write the numbers, as JSON")
    options = parser.parse_args(arguments)
    only = tuple(options.only.split(",")) if options.only else ()
    rules, report = regenerated(options.operators, only, options.instances, options.workers)
    print(report)
    if options.output:
        Path(options.output).write_text(write_rules(rules, axioms_digest()), encoding="utf-8")
    if options.report:
        Path(options.report).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return 1 if report.refuted else 0


if __name__ == "__main__":
    sys.exit(main())
