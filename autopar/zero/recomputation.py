"""Which blocks are computed again in the backward pass, so that a plan meets its memory limit at least cost.

Of each repeated block nothing, operators that are cheap for what they free ("selective"), the attention ("block"), or
everything but what enters it ("full"). A search over all
blocks' choices is not needed: equal blocks save and cost the same, so what counts is how many of them.

    all blocks alike, placements found for that → as few of the first blocks as fit, with these placements → the fastest
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import InfeasibleError, PlanError
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph, Node, found_once, is_inside
from autopar.ir.plan import Plan
from autopar.zero.selective import selective

KINDS = ("none", "selective", "block", "full")
KINDS_TEXT = '"none", "selective", "block" or "full"'
Modules = tuple[str, ...]
"""What to compute again, as in `Plan.recompute`: modules, and operators by themselves."""
Groups = tuple[Modules, ...]
"""What to compute again in each block, in the order in which the blocks run."""


@dataclass(frozen=True)
class Recomputable:
    """What may be computed again: all of each block, its attention alone, or what is cheap for what it frees (nothing
    where there is none)."""

    full: Groups
    attention: Groups
    operators: Groups

    def of_kind(self, kind: str) -> Groups:
        """What a word of `KINDS` says."""
        return {"none": (), "selective": self.operators, "block": self.attention, "full": self.full}[kind]


@found_once
def recomputable(graph: Graph, block_paths: Sequence[str]) -> Recomputable:
    """The blocks that run, the innermost modules that compute attention in them, and their cheap operators."""
    paths = set(block_paths)
    inside: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for path, _ in node.scope.path:
            if path in paths:
                inside.setdefault(path, []).append(node)
    attention = (tuple(dict.fromkeys(_attending_modules(graph, nodes))) for nodes in inside.values())
    return Recomputable(
        tuple((path,) for path in inside),
        tuple(modules for modules in attention if modules),
        tuple(operators for operators in selective(graph, [*inside]) if operators),
    )


def _attending_modules(graph: Graph, nodes: Sequence[Node]) -> list[str]:
    """Those that compute attention, in one operator or in several (as with dropout of its weights)."""
    weighing = {node.scope.module for node in nodes if "softmax" in node.op}
    mixing = {node.scope.module for node in nodes if _multiplies_activations(graph, node)}
    return [n.scope.module for n in nodes if "attention" in n.op or n.scope.module in weighing & mixing]


def _multiplies_activations(graph: Graph, node: Node) -> bool:
    is_product = any(name in node.op for name in (".matmul.", ".bmm.", ".baddbmm.", ".einsum."))
    return is_product and graph.stored_by_tensor.keys().isdisjoint(node.operands)


def joined(groups: Sequence[Modules]) -> Modules:
    """The modules of several blocks."""
    return tuple(module for group in groups for module in group)


def pinned_modules(options: Recomputable, constraints: Sequence[Constraint]) -> Modules | None:
    """What the constraints say is computed again; None where they leave that open.

    Raises PlanError where they disagree, match no block, or ask for attention that a block does not have.
    """
    rules = [rule for rule in constraints if rule.recompute is not None]
    found: list[Modules] = []
    for block in joined(options.full):
        kinds = {rule.recompute for rule in rules if rule.matches(block)}
        if len(kinds) > 1:
            found_kinds = ", ".join(sorted(repr(kind) for kind in kinds))
            raise PlanError(f"expected constraints to agree on what is recomputed of {block}, found {found_kinds}")
        found += [_of_block(options, block, kind) for kind in kinds if kind is not None]
    for rule in rules:
        if not any(map(rule.matches, joined(options.full))):
            raise PlanError(f"expected repeated blocks to recompute, found none whose path matches {rule.pattern!r}")
    return joined(found) if rules else None


_CALLED = {"selective": "cheap operators", "block": "attention"}


def _of_block(options: Recomputable, block: str, kind: str) -> Modules:
    groups = options.of_kind(kind)
    found = tuple(name for name in joined(groups) if f"{name}.".startswith(f"{block}."))
    if kind != "none" and not found:
        raise PlanError(f'expected {_CALLED[kind]} to recompute in {block}, found none; pin "full" or "none"')
    return found


def fit_with_recomputation(
    options: Recomputable, fit: Callable[[Modules], Plan], rescore: Callable[[Plan, Modules], Plan]
) -> Plan:
    """The fastest plan within its `memory_limit` that computes blocks again, and as few of them as that takes.

    fit(modules): the best plan that fits with these computed again. rescore(plan, modules): the plan with other modules
    computed again, its placements as they are, predicted anew. Raises InfeasibleError where none fits even if all
    blocks are computed again.
    """
    found = [plan for groups in (options.full, options.attention) if groups for plan in _of_kind(groups, fit, rescore)]
    found += list(_of_both(options, found, rescore))
    if not found:
        raise InfeasibleError("found no plan that fits with its blocks computed again")
    return min(found, key=lambda plan: (plan.predicted.step_time_ns, len(plan.recompute)))


def _of_kind(groups: Groups, fit: Callable[[Modules], Plan], rescore: Callable[[Plan, Modules], Plan]) -> list[Plan]:
    """All blocks alike, and the fewest that fit."""
    try:
        plan = fit(joined(groups))
    except InfeasibleError:
        return []
    return [plan, *_fewest(plan, [joined(groups[:count]) for count in range(len(groups))], rescore)]


def _of_both(options: Recomputable, found: Sequence[Plan], rescore: Callable[[Plan, Modules], Plan]) -> Iterator[Plan]:
    """The fewest blocks of which everything is computed again, where of the others the attention is."""
    whole = joined(options.full)
    for plan in found:
        if plan.recompute == whole and options.attention:
            kept = [
                (*joined(options.full[:count]), *_outside(joined(options.attention), joined(options.full[:count])))
                for count in range(len(options.full))
            ]
            yield from _fewest(plan, kept, rescore)


def _outside(modules: Modules, blocks: Modules) -> Modules:
    return tuple(m for m in modules if not is_inside(m, blocks))


def _fewest(plan: Plan, choices: Sequence[Modules], rescore: Callable[[Plan, Modules], Plan]) -> list[Plan]:
    """The plan with the first choice that fits, if any does; of each choice, the next keeps less. By bisection."""
    best: list[Plan] = []
    low, high = 0, len(choices)
    while low < high:
        middle = (low + high) // 2
        tried = rescore(plan, choices[middle])
        if tried.predicted.peak_bytes <= tried.memory_limit:
            best, high = [tried], middle
        else:
            low = middle + 1
    return best
