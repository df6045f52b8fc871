"""What a plan computes again in the backward pass: whole modules, and operators by themselves.

`Plan.recompute` names a module by its path ("layers.3.attention"), and an operator as a call in the module that it is
in: "layers.3.mlp.gelu_3()" is node "gelu_3". Of such an operator no result is kept for the backward pass, nor is what
autograd saves of it; whoever needs something of it has it made again, of what its operands were. Results that are
brought to other placements are brought there again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from functools import lru_cache
from typing import NamedTuple

from autopar.ir.graph import IDENTITY, Graph, Node
from autopar.ir.redistribution import Step
from autopar.ir.structure import constant_tensors

_CALL = "()"


def operator_call(node: Node) -> str:
    """How a plan names an operator that is computed again."""
    module = node.scope.module
    return f"{module}.{node.name}{_CALL}" if module else f"{node.name}{_CALL}"


def is_operator_call(name: str) -> bool:
    """Whether an entry of `Plan.recompute` is an operator, and no module."""
    return name.endswith(_CALL)


def module_of_call(name: str) -> str:
    """The path of the module that such an operator is in."""
    return name.rpartition(".")[0]


def node_of_call(name: str) -> str:
    """The name of the operator's node."""
    return name.removesuffix(_CALL).rpartition(".")[2]


@lru_cache(maxsize=64)
def operators_again(recompute: tuple[str, ...]) -> frozenset[str]:
    """The names of the nodes that are computed again by themselves."""
    return frozenset(node_of_call(name) for name in recompute if is_operator_call(name))


def modules_again(recompute: Sequence[str]) -> tuple[str, ...]:
    """The paths of the modules that are computed again."""
    return tuple(name for name in recompute if not is_operator_call(name))


def again_text(recompute: Sequence[str]) -> str:
    """How much is computed again: "6 modules", "40 operators", or both."""
    modules = len(modules_again(recompute))
    counts = (("module", modules), ("operator", len(recompute) - modules))
    return " and ".join(f"{count} {what}{'s' if count > 1 else ''}" for what, count in counts if count)


def tensors_again(graph: Graph, recompute: tuple[str, ...]) -> frozenset[str]:
    """The results of operators that are computed again by themselves, under all of their names."""
    operators = operators_again(recompute)
    if not operators:
        return frozenset()
    key = "tensors again", _text(recompute)
    if key not in graph.found:
        found = set[str]()
        for node in graph.nodes:
            if node.name in operators or (node.op == IDENTITY and not found.isdisjoint(node.operands)):
                found.update(node.results)
        graph.found[key] = frozenset(found)
    known: frozenset[str] = graph.found[key]
    return known


@lru_cache(maxsize=64)
def _text(recompute: tuple[str, ...]) -> str:
    """One for all tuples of the same operators, of which there may be thousands."""
    return ",".join(sorted(operators_again(recompute)))


def makes_memory(steps: Sequence[Step]) -> bool:
    """Whether a tensor that is brought to another placement is in memory of its own there."""
    return any(
        "S" in (step.before.kind, step.after.kind) or step.after.kind == "P" or step.transfers[0].collective is not None
        for step in steps
    )


def refusal_again(graph: Graph, node: Node, blocks: Set[str]) -> str | None:
    """Why an operator cannot run again by itself, or None. blocks: the modules that are emitted as classes."""
    if node.op == IDENTITY:
        return "it is a name for what is there"
    if not constant_tensors(graph).isdisjoint(node.results):
        return "what it makes is computed once, and kept for all steps"
    if not any(graph.tensors[name].differentiable for name in node.operands):
        return "nothing that it reads has a gradient"
    block = node.scope.outermost(blocks)
    if block is None:
        return "it is in no block"
    ends = {*graph.outputs, *graph.mutations.values()}
    for name in _names_of(graph, node):
        if name in ends:
            return "what it makes leaves the program"
        outside = [reader for reader, _ in graph.consumers[name] if reader.scope.outermost(blocks) != block]
        if outside:
            return f"{outside[0].name} reads what it makes outside of {block}"
    return None


def _names_of(graph: Graph, node: Node) -> list[str]:
    """The results of an operator, and further names of them."""
    found = [*node.results]
    for name in found:
        found += [other for reader, _ in graph.consumers[name] if reader.op == IDENTITY for other in reader.results]
    return found


# Which pieces run again ----------------------------------------


class PieceStep(NamedTuple):
    """A step of a program, by memory that it reads, makes (of its own), and keeps for its backward pass.

    piece: the number of what runs again together, −1 for nothing; by_itself: whether that is operators, and no module;
    has_backward: whether its own backward pass reads anything that was saved.
    """

    piece: int
    by_itself: bool
    reads: Sequence[int]
    makes: Sequence[int]
    saves: Sequence[int]
    has_backward: bool


def pieces_needed(steps: Sequence[PieceStep]) -> list[tuple[int, ...]]:
    """For each step, the pieces that must have run again before its backward pass, in the order in which they do.

    These are its own, those of operators that made what it saves, and those that made what any of these reads.
    """
    owner = {memory: step.piece for step in steps if step.by_itself for memory in step.makes}
    before: dict[int, set[int]] = {}
    for step in steps:  # a piece reads of earlier ones
        if step.piece >= 0:
            _add_with(before, before.setdefault(step.piece, set()), _owners(owner, step.reads, step.piece))
    found = []
    for step in steps:
        needed = set[int]()
        if step.has_backward:
            own = {step.piece} if step.piece >= 0 else set[int]()
            _add_with(before, needed, {*own, *_owners(owner, step.saves)})
        found.append(tuple(sorted(needed)))
    return found


def _owners(owner: dict[int, int], memory: Iterable[int], but: int = -1) -> set[int]:
    return {owner[one] for one in memory if one in owner} - {but}


def _add_with(before: dict[int, set[int]], found: set[int], pieces: set[int]) -> None:
    """Adds pieces, with those that they need themselves."""
    for piece in pieces:
        found |= {piece, *before.get(piece, ())}
