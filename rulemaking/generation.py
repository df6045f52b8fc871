"""Generation of rules: enumerate terms, test those of equal value at other sizes, prune what follows from the rest."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from autopar.substitute.rules.terms import Rule
from rulemaking.candidates import anonymous, candidates, generalised, operator_count, sound, special_cases
from rulemaking.egraph import Compiled, Limits, derivable
from rulemaking.enumeration import Enumeration
from rulemaking.instances import operators
from rulemaking.worlds import WORLDS, World

T = TypeVar("T")
U = TypeVar("U")
GENERATED = "generated-"
"""How the names of rules begin that were generated."""

LIMITS = Limits(rounds=4, nodes=800, seconds=0.5)
_HELPERS = {"matmul", "linear", "transpose", "add", "concat", "first", "second", "scale"}


@dataclass(frozen=True)
class Generation:
    """num_terms enumerated, num_candidates of equal value, of which num_special are special cases of others, the sound
    ones of the rest, those of them that do not follow from the stated rules, the ones kept as they follow from nothing
    before them either, and seconds of each step."""

    num_terms: int
    num_candidates: int
    num_special: int
    sound: tuple[Rule, ...]
    new: tuple[Rule, ...]
    kept: tuple[Rule, ...]
    seconds: dict[str, float]


def generated(num_operators: int, only: Sequence[str], stated: Sequence[Rule], workers: int = 2) -> Generation:
    """All sound rules between terms of at most so many operators, pruned by what follows from stated ones."""
    clock = Clock()
    found = on_all(partial(_enumerated, num_operators=num_operators, only=tuple(only)), WORLDS, workers, 1)
    every = list({anonymous(rule): rule for _, rules in found for rule in rules}.values())
    clock.tick("enumerate")
    kept, num_special = _sound(every, workers)
    kept.sort(key=lambda rule: (operator_count(rule), -len(rule.sorts), len(str(rule)), str(rule)))
    clock.tick("test")
    known = on_all(partial(follows, rules=stated), kept, workers, 16)
    clock.tick("derive from stated")
    new = tuple(rule for rule, follows in zip(kept, known, strict=True) if not follows)
    found_new = tuple(pruned(new, stated))
    clock.tick("prune")
    num_terms = sum(terms for terms, _ in found)
    return Generation(num_terms, len(every), num_special, tuple(kept), new, found_new, clock.seconds)


class Clock:
    """Seconds of each step, by its name."""

    def __init__(self) -> None:
        self.start, self.seconds = time.perf_counter(), dict[str, float]()

    def tick(self, name: str) -> None:
        """Ends a step."""
        now = time.perf_counter()
        self.seconds[name], self.start = now - self.start, now
        print(f"{name}: {self.seconds[name]:.0f} s", file=sys.stderr, flush=True)


def _sound(rules: Sequence[Rule], workers: int) -> tuple[list[Rule], int]:
    """The rules that random instances bear out, and how many were not looked at, as special cases of others."""
    found: list[Rule] = []
    special: set[str] = set()
    num_special = 0
    kinds: dict[tuple[int, int], list[Rule]] = defaultdict(list)
    for rule in rules:
        kinds[operator_count(rule), -len(rule.sorts)].append(rule)
    for _, some in sorted(kinds.items()):
        new = [r for r in some if anonymous(r) not in special and not any(text in special for text in generalised(r))]
        num_special += len(some) - len(new)
        held = [rule for rule in on_all(sound, new, workers, 16) if rule is not None]
        special.update(text for rule in held for text in special_cases(rule))
        found += held
    return found, num_special


def _enumerated(world: World, num_operators: int, only: Sequence[str]) -> tuple[int, list[Rule]]:
    enumeration = Enumeration(world)
    enumeration.run(num_operators, only)
    return enumeration.num_terms, list(candidates(enumeration, num_operators))


def on_all(function: Callable[[T], U], items: Sequence[T], workers: int, chunk: int) -> list[U]:
    """The results of a function on all items, in their order."""
    if workers == 1:
        return [function(item) for item in items]
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(function, items, chunksize=chunk))


def follows(rule: Rule, rules: Iterable[Rule], limits: Limits = LIMITS) -> bool:
    """Whether a rule is derivable from those of some rules that speak of its operators, and of a few that help."""
    known = operators(rule) | _HELPERS
    return derivable(rule, [_compiled(other) for other in rules if operators(other) <= known], limits)


def _compiled(rule: Rule) -> Compiled:
    key = (rule.name, str(rule))
    if key not in _COMPILED:
        _COMPILED[key] = Compiled.of(rule)
    return _COMPILED[key]


_COMPILED: dict[tuple[str, str], Compiled] = {}


def pruned(rules: Sequence[Rule], stated: Sequence[Rule]) -> list[Rule]:
    """The rules that follow neither from those before them nor from the stated ones."""
    kept: list[Rule] = []
    for rule in rules:
        if not follows(rule, [*stated, *kept]):
            kept.append(replace(rule, name=f"{GENERATED}{len(kept) + 1}", evidence="generated"))
    return kept
