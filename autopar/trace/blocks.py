"""Finds repeated blocks: children of one container, or turns of a long loop, whose computations are equal up to names.

Two blocks are equal when, walking their nodes in order, operators, plain arguments, shapes and dtypes agree and
every operand is the same thing: the k-th tensor made inside, the same-named parameter, or the k-th tensor that
comes from outside. Whatever is then decided for one block's node serves its twins: `representative` maps each
node to the node of the first equal block, and each tensor likewise. Blocks of which constraints say different things
are not equal: one that pins `layers.3.mlp.up.weight` makes the fourth block a kind of its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph, Node, Stored, found_once, map_references
from autopar.trace.runs import find_runs, kind_of

_CHILD = re.compile(r"(.*?\.|)(\d+)$")


@dataclass(frozen=True)
class Blocks:
    """`paths`: for each distinct block that is a module, the module paths of its instances; node and tensor
    representatives."""

    paths: tuple[tuple[str, ...], ...]
    node_representative: Mapping[str, str]
    tensor_representative: Mapping[str, str]

    def representative_node(self, name: str) -> str:
        return self.node_representative.get(name, name)

    def representative_tensor(self, name: str) -> str:
        return self.tensor_representative.get(name, name)


@found_once
def find_blocks(graph: Graph, constraints: Sequence[Constraint] = ()) -> Blocks:
    """The repeated blocks of the graph, outermost containers first, then long runs between them; a node belongs to at
    most one block.

    constraints: blocks are equal only where these ask the same of their parts.
    """
    regions: dict[str | None, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        regions[_block_path(node)].append(node)
    between = regions.pop(None, [])
    groups: dict[Any, list[_Instance]] = defaultdict(list)
    for path, nodes in regions.items():
        assert path is not None
        key, instance = _instance(graph, path, nodes, _below(path), constraints)
        groups[path.rpartition(".")[0], key].append(instance)
    for run in find_runs(graph, between):
        for turn in run:
            key, instance = _instance(graph, "", turn, _read_alone(graph, turn), constraints)
            groups[run[0][0].name, key].append(instance)
    node_map: dict[str, str] = {}
    tensor_map: dict[str, str] = {}
    for first, *others in groups.values():
        for other in others:
            node_map.update(zip(other.nodes, first.nodes, strict=True))
            tensor_map.update(zip(other.tensors, first.tensors, strict=True))
    paths = (tuple(member.path for member in members) for members in groups.values())
    return Blocks(tuple(group for group in paths if group[0]), node_map, tensor_map)


class _Instance(NamedTuple):
    """A block's nodes and own tensors in their order; path: of its module, "" where it is a turn of a run."""

    path: str
    nodes: list[str]
    tensors: list[str]


Owned = Callable[[Stored], str | None]
"""The name inside its block of what a block alone stores; None for what is another's."""


def _instance(
    graph: Graph, path: str, nodes: list[Node], owned: Owned, constraints: Sequence[Constraint]
) -> tuple[Any, _Instance]:
    """A block, and what blocks have in common that are equal to it."""
    signature, tensors = _signature(graph, path, nodes, owned)
    asked = _asked(graph, nodes, tensors, constraints)
    return (signature, asked), _Instance(path, [node.name for node in nodes], tensors)


def _below(path: str) -> Owned:
    return lambda stored: stored.name.removeprefix(path) if stored.name.startswith(path + ".") else None


def _read_alone(graph: Graph, nodes: Sequence[Node]) -> Owned:
    """What these nodes alone read, and nothing updates."""
    inside, numbers = {node.name for node in nodes}, count()

    def owned(stored: Stored) -> str | None:
        readers = graph.consumers[stored.tensor]
        is_own = stored.name not in graph.mutations and all(user.name in inside for user, _ in readers)
        return f"own {next(numbers)} {stored.kind} {stored.requires_grad}" if is_own else None

    return owned


def _block_path(node: Node) -> str | None:
    """The outermost numbered module that the node ran in: "h.3" for h.3.attn.q."""
    for path, _ in node.scope.path:
        if _CHILD.match(path):
            return path
    return None


def _signature(graph: Graph, path: str, nodes: list[Node], owned: Owned) -> tuple[Any, list[str]]:
    """The block's computation with canonical names, and the tensors that stand for its canonical names."""
    names: dict[str, str] = {}
    own: list[str] = []  # made or owned by the block

    def canonical(tensor: str) -> str:
        if tensor not in names:
            stored = graph.stored_by_tensor.get(tensor)
            name = None if stored is None else owned(stored)
            if name is not None:
                names[tensor] = name
                own.append(tensor)
            else:
                names[tensor] = f"outside {len(names)}" if stored is None else f"outside {stored.name}"
        return names[tensor]

    rows = []
    for node in nodes:
        args = map_references((node.args, node.kwargs), canonical)
        operand_tensors = [kind_of(graph, tensor) for tensor in node.operands]
        for tensor in node.results:
            names[tensor] = f"inside {len(names)}"
            own.append(tensor)
        scopes = [
            (scope.removeprefix(path), kind) for scope, kind in node.scope.path if path and scope.startswith(path)
        ]
        results = [None if t is None else kind_of(graph, t) for t in node.outputs]
        rows.append(repr((node.op, args, operand_tensors, results, scopes)))
    used_outside = [names[t] for t in own if t in names and _leaves(graph, t, nodes)]
    used_outside += [f"{name} = {names[t]}" for t in own if t in names for name in _updated(graph, t, path)]
    return ("\n".join(rows), tuple(used_outside)), own


def _updated(graph: Graph, tensor: str, path: str) -> list[str]:
    """The parameters and buffers that become a tensor, those of the block itself by their names in it."""
    return [name.removeprefix(f"{path}.") for name in graph.updates.get(tensor, ())]


def _asked(
    graph: Graph, nodes: Sequence[Node], tensors: Sequence[str], constraints: Sequence[Constraint]
) -> tuple[frozenset[Constraint], ...]:
    """What constraints on placements say of each operator and tensor of a block, whatever their patterns."""
    rules = [(rule, replace(rule, pattern="*")) for rule in constraints if rule.allow or rule.zero is not None]
    if not rules:
        return ()
    stored = graph.stored_by_tensor
    names = [
        *((node.scope.module, node.name) for node in nodes),
        *((name, stored[name].name) if name in stored else (name,) for name in tensors),
    ]
    return tuple(frozenset(said for rule, said in rules if rule.matches(*own)) for own in names)


def _leaves(graph: Graph, tensor: str, nodes: list[Node]) -> bool:
    inside = {node.name for node in nodes}
    return tensor in graph.outputs or any(user.name not in inside for user, _ in graph.consumers[tensor])
