"""Which blocks are computed again in the backward pass, so that a plan meets its memory limit at least cost.

Of each repeated block nothing, operators by their price ("selective", and more), the attention ("block"), or everything
but what enters it ("full"). A search over all blocks' choices is not needed: equal blocks save and cost the same, so
what counts is how many of them.

    level      what is computed again of each block
    ladder     from level to level, a block more at each rung: less memory, more time
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cost import Profile
from autopar.cost.compute import node_time_ns
from autopar.errors import PlanError
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph, Node, found_once, is_inside
from autopar.zero.selective import selective, selective_levels

KINDS = ("none", "selective", "block", "full")
KINDS_TEXT = '"none", "selective", "block" or "full"'
Modules = tuple[str, ...]
"""What to compute again, as in `Plan.recompute`: modules, and operators by themselves."""
Groups = tuple[Modules, ...]
"""What to compute again in each block, in the order in which the blocks run."""


@dataclass(frozen=True)
class Recomputable:
    """What may be computed again of a graph's blocks: all of each, its attention alone, or what is cheap for what it
    frees (nothing where there is none)."""

    full: Groups
    attention: Groups
    graph: Graph = field(repr=False, compare=False)

    @cached_property
    def operators(self) -> Groups:
        """Those that are cheap, found when somebody asks."""
        return _cheap(self.graph, joined(self.full))

    def of_kind(self, kind: str) -> Groups:
        """What a word of `KINDS` says."""
        if kind == "selective":
            return self.operators
        return {"none": (), "block": self.attention, "full": self.full}[kind]


def recomputable(graph: Graph, block_paths: Sequence[str]) -> Recomputable:
    """The blocks that run, the innermost modules that compute attention in them, and their cheap operators."""
    return Recomputable(*_blocks(graph, block_paths), graph)


@found_once
def _cheap(graph: Graph, blocks: Modules) -> Groups:
    return tuple(operators for operators in selective(graph, blocks) if operators)


@found_once
def _blocks(graph: Graph, block_paths: Sequence[str]) -> tuple[Groups, Groups]:
    """The blocks that run, and the modules that compute attention in them."""
    paths = set(block_paths)
    inside: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for path, _ in node.scope.path:
            if path in paths:
                inside.setdefault(path, []).append(node)
    attention = (tuple(dict.fromkeys(_attending_modules(graph, nodes))) for nodes in inside.values())
    return tuple((path,) for path in inside), tuple(modules for modules in attention if modules)


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


# By price ----------------------------------------


def priced_levels(graph: Graph, paths: Sequence[str], profile: Profile) -> dict[str, Groups]:
    """What a search computes again of each block, by name, the least first: nothing, operators that are cheap for what
    they free by what each takes on a device, and all; what there is none of is left out."""

    def forward_ns(node: Node) -> int:
        operands, results = (tuple(graph.tensors[n].shape for n in names) for names in (node.operands, node.results))
        return node_time_ns(node, operands, results, graph.tensors, profile)[0]

    full = recomputable(graph, paths).full
    levels = selective_levels(graph, joined(full), forward_ns, profile.device_type)
    return {"none": tuple(() for _ in full), **levels, **({"full": full} if full else {})}


def ladders(levels: Mapping[str, Groups], attention: Groups) -> list[list[Modules]]:
    """From nothing to all: by every level, which is best where prices hold, and straight to one of them."""
    none, full = levels["none"], [*levels.values()][-1]
    inside = [tuple(module for module in joined(attention) if is_inside(module, group)) for group in full]
    ways: list[list[Groups]] = [[*levels.values()], *([none, level] for level in [*levels.values()][2:])]
    ways += [[none, tuple(inside), full]] if any(inside) else []
    return [_ladder(way) for way in ways]


def _ladder(levels: Sequence[Groups]) -> list[Modules]:
    rungs = [joined(levels[0])]
    for less, more in itertools.pairwise(levels):
        rungs += [joined((*more[:count], *less[count:])) for count in range(1, len(more) + 1)]
    return rungs
