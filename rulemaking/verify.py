"""Verifies rules: proved from the axioms where z3 can, attacked with random instances, gradients compared.

`python -m rulemaking.verify` verifies the shipped rules anew, prints each with its status and time, and
fails where a rule is false or claims a proof that is not found. Planning needs none of this, and no z3.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing.connection import Connection

from autopar.substitute.rules.rulefile import load_rules
from autopar.substitute.rules.terms import Rule
from rulemaking.axioms import axioms
from rulemaking.exhaustive import disagreement
from rulemaking.gradients import gradient_difference
from rulemaking.instances import counterexample

INSTANCES = 1000
GRADIENT_INSTANCES = 10
SECONDS = 5.0


@dataclass(frozen=True)
class Verdict:
    """What became of one rule: refuted, in words, or the rule with its status and evidence."""

    rule: Rule
    refuted: str | None
    seconds: float


def verified(
    rules: Iterable[Rule], num_instances: int = INSTANCES, seconds: float = SECONDS, seed: int = 0
) -> Iterator[Verdict]:
    """The verdict on each rule: attacked first, as that is exact where it refutes, then proved where possible."""
    with Prover(seconds) as prover:
        for rule in rules:
            start = time.perf_counter()
            refuted = counterexample(rule, num_instances, seed) or gradient_difference(rule, GRADIENT_INSTANCES, seed)
            proof = None if refuted else prover.proof(rule)
            origin = rule.evidence.split("; ")[0]
            evidence = [origin, *([proof] if proof else []), f"{num_instances} random instances", "gradients"]
            status = replace(rule, status="proved" if proof else "tested", evidence="; ".join(evidence))
            yield Verdict(status, refuted, time.perf_counter() - start)


class Prover:
    """z3 in a process of its own, which is ended where it does not keep to its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.seconds), daemon=True)
        self.process.start()

    def proof(self, rule: Rule) -> str | None:
        """What proves a rule, in words; None where no proof was found in time."""
        self.connection.send(rule)
        if self.connection.poll(self.seconds * 2 + 5):
            num_axioms = self.connection.recv()
            return f"z3 {version('z3-solver')} from {num_axioms} axioms" if num_axioms else None
        self.process.kill()
        self._start()
        return None

    def __enter__(self) -> Prover:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()


def _serve(connection: Connection, seconds: float) -> None:
    """Answers each rule with the number of axioms of its proof, 0 where there is none."""
    from rulemaking.prover import prove

    while True:
        outcome = prove(connection.recv(), seconds)
        connection.send(outcome.num_axioms if outcome.proved else 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Verifies the shipped rules, or those whose names hold a word; 1 where one does not hold what it claims."""
    parser = argparse.ArgumentParser(prog="python -m rulemaking.verify", description=__doc__)
    parser.add_argument("--only", default="", help="rules whose names hold this word")
    parser.add_argument("--instances", type=int, default=INSTANCES, help="random instances a rule")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of a proof")
    parser.add_argument("--seed", type=int, default=0, help="of the random instances")
    parser.add_argument("--axioms", action="store_true", help="check the axioms at all small sizes instead")
    options = parser.parse_args(arguments)
    if options.axioms:
        return _check_axioms(options.only)
    chosen = [rule for rule in load_rules() if options.only in rule.name]
    start, failed, proved = time.perf_counter(), 0, 0
    for rule, verdict in zip(chosen, verified(chosen, options.instances, options.seconds, options.seed), strict=True):
        wrong = verdict.refuted or ("proof not found" if rule.status == "proved" != verdict.rule.status else None)
        failed, proved = failed + (wrong is not None), proved + (verdict.rule.status == "proved")
        status = f"FAILED: {wrong}" if wrong else verdict.rule.status
        print(f"{rule.name:48} {status} {verdict.seconds:.2f} s", flush=True)
    print(f"{len(chosen)} rules, {proved} proved, {failed} failed, {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


def _check_axioms(only: str) -> int:
    """Checks the axioms whose names hold a word; 1 where one is false."""
    start, failed = time.perf_counter(), 0
    chosen = [axiom for axiom in axioms() if only in axiom.name]
    for axiom in chosen:
        begun = time.perf_counter()
        found = disagreement(axiom)
        failed += found is not None
        print(f"{axiom.name:48} {found or 'holds'} {time.perf_counter() - begun:.2f} s", flush=True)
    print(f"{len(chosen)} axioms, {failed} false, {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
