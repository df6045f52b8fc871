"""What a user (or a template) pins: the types that tensors matching a pattern may have on a mesh axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.placement import Type, parse_type
from autopar.ir.schedule import SCHEDULES

What = Literal["stored", "used", "output", "tensor", "operands", "input"]
Context = Literal["gather", "ring", "heads"]
Recompute = Literal["none", "selective", "block", "full"]


@dataclass(frozen=True)
class Constraint:
    """Restricts placements by name, GSPMD-style: the rest of the plan is found around it.

    pattern: matched (fnmatch) against parameter names for "stored" and "used", against the module path, or the
    tensor's name, for "output" (all results of the operators in that module), against the name of one result in the
    graph for "tensor", and for "operands" of the operator that makes it, and against input names for "input".
    allow: types such as "S(0)", "R", "I", "P", or "S" for any dim. axis: the mesh axis by name; None means all.
    soft: prefer instead of require. zero: for "stored", the ZeRO behaviour of sharded storage (1, 2 or 3).
    min_dims: only tensors of at least that many dims. microbatches, stages: pin their
    numbers, whatever the pattern. schedule, chunks: pin those of plans of several stages, where a stage of `stages` is
    a submesh with so many chunks in turn.
    context: pins how attention in modules of these paths runs where its sequence is split: "gather", "ring" or "heads"
    (`template_plan`), in which case the search splits sequences however long they are, where that pays.
    recompute: pins what of the repeated blocks of these module paths is computed again: "none", "selective" (operators
    that are cheap for the memory that this frees), "block" (the attention) or "full". Then nothing of the other blocks
    is, unless further constraints say so.
    """

    pattern: str = "*"
    allow: tuple[str, ...] = ()
    what: What = "output"
    axis: str | None = None
    soft: bool = False
    zero: int | None = None
    min_dims: int = 0
    microbatches: int | None = None
    recompute: Recompute | None = None
    stages: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    context: Context | None = None

    def __post_init__(self) -> None:
        given: Any = self.pattern, self.allow
        if not isinstance(given[0], str) or isinstance(given[1], str):
            raise PlanError(
                f"expected a pattern as text, and what is allowed as a tuple of types such as ('S(0)', 'R'), found "
                f"{self.pattern!r} and {self.allow!r}"
            )
        for text in self.allow:
            if text != "S":
                parse_type(text)
        if self.what not in get_args(What):
            raise PlanError(f"expected what as one of {', '.join(get_args(What))}, found {self.what!r}")
        if self.zero not in (None, 0, 1, 2, 3):
            raise PlanError(f"expected a ZeRO stage from 0 to 3, found {self.zero!r}")
        if self.recompute not in (None, *get_args(Recompute)):
            raise PlanError(f'expected recompute as "none", "selective", "block" or "full", found {self.recompute!r}')
        if self.context not in (None, *get_args(Context)):
            raise PlanError(f'expected context as "gather", "ring" or "heads", found {self.context!r}')
        if self.microbatches is not None and self.microbatches < 1:
            raise PlanError(f"expected at least one microbatch, found {self.microbatches}")
        if self.stages is not None and self.stages < 1:
            raise PlanError(f"expected at least one stage, found {self.stages}")
        if self.schedule not in (None, *SCHEDULES):
            raise PlanError(f"expected schedule as one of {', '.join(SCHEDULES)}, found {self.schedule!r}")
        if self.chunks is not None and self.chunks < 1:
            raise PlanError(f"expected at least one chunk, found {self.chunks}")

    def matches(self, *names: str) -> bool:
        return any(fnmatchcase(name, self.pattern) for name in names)

    def permits(self, type_: Type) -> bool:
        return not self.allow or any(text in (str(type_), type_.kind) for text in self.allow)


def pinned(rules: Iterable[Constraint], what: str) -> Any:
    """The number of "microbatches", "stages" or "chunks", or the "schedule", that rules pin; None where none does.
    Raises PlanError where they pin several."""
    found = {getattr(rule, what) for rule in rules} - {None}
    if len(found) > 1:
        name = f"the {what}" if what == "schedule" else f"the number of {what}"
        raise PlanError(f"expected constraints to agree on {name}, found {sorted(found)}")
    return next(iter(found), None)


def may_run(rules: Iterable[Constraint], schedule: str, chunks: int = 1) -> bool:
    """Whether rules allow the schedule for several submeshes with so many chunks each."""
    rules = list(rules)
    return pinned(rules, "schedule") in (None, schedule) and pinned(rules, "chunks") in (None, chunks)


class ConstraintIndex:
    """Constraints by what they speak of: those of one name are found by it, as there may be one for each tensor."""

    def __init__(self, rules: Iterable[Constraint]) -> None:
        self.patterns: dict[str, list[tuple[int, Constraint]]] = defaultdict(list)
        self.named: dict[tuple[str, str], list[tuple[int, Constraint]]] = defaultdict(list)
        for entry in enumerate(rules):
            rule = entry[1]
            is_pattern = any(sign in rule.pattern for sign in "*?[")
            (self.patterns[rule.what] if is_pattern else self.named[rule.what, rule.pattern]).append(entry)

    def matching(self, what: str, names: Iterable[str]) -> list[Constraint]:
        """Those that match any of the names, in the order in which they were given."""
        found = [entry for entry in self.patterns.get(what, ()) if entry[1].matches(*names)]
        found += [entry for name in dict.fromkeys(names) for entry in self.named.get((what, name), ())]
        return [rule for _, rule in sorted(found, key=lambda entry: entry[0])]


def require_matches(constraints: Iterable[Constraint], graph: Graph) -> None:
    """Raises PlanError for a constraint on placements that is about nothing in the graph, naming what is most alike.

    Those that only prefer may be about nothing. Blocks to recompute are looked for where they are known.
    """
    for rule in constraints:
        if (rule.allow or rule.zero is not None) and not rule.soft and rule.pattern != "*":
            names = _names(rule.what, graph)
            if not any(map(rule.matches, names)):
                alike = get_close_matches(rule.pattern, names, n=3) or sorted(names)[:3]
                raise PlanError(
                    f"expected a constraint on {_SUBJECT[rule.what]}, found none that {rule.pattern!r} matches; there "
                    f"is {', '.join(alike) or 'none at all'}"
                )


_SUBJECT = {
    "stored": "a parameter or buffer by its name",
    "used": "a parameter by its name",
    "output": "an operator by its module path or its result",
    "tensor": "an operator's result by its name",
    "operands": "an operator by its result's name",
    "input": "an input by its name",
}


def _names(what: What, graph: Graph) -> set[str]:
    if what == "input":
        return {*graph.inputs}
    if what in ("stored", "used"):
        return {item.name for item in graph.stored if what == "stored" or item.kind == "parameter"}
    results = {name for node in graph.nodes for name in node.results}
    return (
        results
        if what in ("tensor", "operands")
        else results | {n for node in graph.nodes for n in (node.name, node.scope.module)}
    )
