"""How positions cut what is made of them: samples' second dim of inputs, or where attention has its queries.

    followed    as rules of operators have it; a product of two activations reads its right side whole
    begun       at the first tensor that attention's queries come of by their positions, where they follow no input:
                after a class token, patches of an image, a view of flattened tokens that nothing tells apart
    read        parameters with a row a position, such as a table that is added, or a learned bias, are cut with them

Attention is an operator, or written out: a product of two activations, mostly a softmax, and another product. All these
are wishes: what a plan does not follow it gathers, or slices, and pays for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from autopar.ir.graph import Graph, Node, found_once
from autopar.ir.placement import P, R, S, Type
from autopar.ir.structure import constant_tensors, tensors_of_inputs
from autopar.ops import axis_rules
from autopar.ops.notation import AxisRule
from autopar.ops.table import operator

_LONGEST_WALK = 60
"""Operators between two products of an attention that is written out."""
_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")


class Attending(NamedTuple):
    """Attention, and how its queries and its result are where positions split it. weights: of what is written out, from
    the scores to what the values are weighed by; has_heads: their dims are (…, heads, queries, keys)."""

    query: str
    query_type: Type
    result: str
    result_type: Type
    weights: tuple[str, ...] = ()
    scores: Type = R
    has_heads: bool = True


def attention_nodes(graph: Graph) -> list[Node]:
    """The operators of a graph that attend."""
    return [node for node in graph.nodes if operator(node.op).work.family == "attention"]


@found_once
def attending(graph: Graph) -> tuple[Attending, ...]:
    """All attention that may be split by its queries, in the order in which it runs."""
    found = list[Attending]()
    for node in graph.nodes:
        one = _fused(graph, node) if operator(node.op).work.family == "attention" else _by_hand(graph, node)
        if one is not None:
            found.append(one)
    return tuple(found)


def _fused(graph: Graph, node: Node) -> Attending | None:
    rows = S(len(graph.tensors[node.results[0]].shape) - 2)
    for rule in axis_rules(graph, node):
        if rule.results[0] == rows == rule.operands[0]:
            return Attending(node.operands[0], rows, node.results[0], rows)
    return None


def _by_hand(graph: Graph, node: Node) -> Attending | None:
    """Of the product with the values: what its weights are a product of, row by row, with a softmax on the way, or
    with no other weights."""
    for position, rule in _own_rows(graph, node):
        has_softmax, is_near, walked = False, True, {node.results[0]: rule.results[0]}
        for name, type_ in _origins(graph, node.operands[position], rule.operands[position]):
            made, walked[name] = graph.producers.get(name), type_
            if made is None or len(walked) > _LONGEST_WALK:
                break
            has_softmax, is_near = has_softmax or "softmax" in made.op, is_near and not _has_weights(graph, made)
            scores = [(at, own) for at, own in _own_rows(graph, made) if own.results[0] == type_]
            if scores and (has_softmax or is_near):
                at, own = scores[0]
                has_heads = all(t == S(len(graph.tensors[n].shape) - 2) for n, t in walked.items())
                result, *weights = walked
                return Attending(
                    made.operands[at], own.operands[at], result, rule.results[0], tuple(weights), type_, has_heads
                )
    return None


def _has_weights(graph: Graph, node: Node) -> bool:
    return any(name in graph.stored_by_tensor and len(graph.tensors[name].shape) > 1 for name in node.operands)


def _own_rows(graph: Graph, node: Node) -> Iterator[tuple[int, AxisRule]]:
    """The rules of a product of two activations that split one of them alone, and which that is."""
    if node.op.split(".")[1] not in _PRODUCTS:
        return
    if not all(_is_activation(graph, name) for name in node.operands[-2:]):
        return
    for rule in axis_rules(graph, node):
        split = [at for at in range(len(node.operands)) if rule.operands[at].kind == "S"]
        if rule.results[0].kind == "S" and len(split) == 1 and rule.operands.count(R) == len(node.operands) - 1:
            yield split[0], rule


def _origins(graph: Graph, name: str, type_: Type) -> Iterator[tuple[str, Type]]:
    """What a tensor that is split comes of, and how that is split, back to where no rule says it."""
    while True:
        yield name, type_
        node = graph.producers.get(name)
        step = None if node is None else _origin(graph, node, node.results.index(name), type_)
        if step is None:
            return
        name, type_ = step


def _origin(graph: Graph, node: Node, result: int, type_: Type) -> tuple[str, Type] | None:
    """The operand that a split result comes of: an activation rather than another, no stored one."""
    for rule in axis_rules(graph, node):
        if rule.results[result] == type_:
            split = [
                (name, want)
                for name, want in zip(node.operands, rule.operands, strict=True)
                if want.kind == "S" and name not in graph.stored_by_tensor
            ]
            if split:
                return next((one for one in split if _is_activation(graph, one[0])), split[0])
    return None


def _is_activation(graph: Graph, name: str) -> bool:
    """Whether a tensor depends on inputs and on parameters, as masks do not."""
    fixed = name in graph.stored_by_tensor or name in constant_tensors(graph)
    return not fixed and name not in tensors_of_inputs(graph)


# Followed ----------------------------------------


def sequence_types(graph: Graph) -> dict[str, Type]:
    """How each tensor that has positions is cut when these are, sliced, or summands; parameters that are read by
    position, too."""
    followed = _Followed(graph)
    for one in attending(graph):
        if followed.types.get(one.result) != one.result_type:
            followed.begin(one)
    return followed.found()


class _Followed:
    """Types from inputs on, and from where else positions begin."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.begun = graph, dict[str, Type]()
        self.fused = {one.result: one for one in attending(graph) if not one.weights}
        self.scores = {one.weights[-1]: one for one in attending(graph) if one.weights}
        self.types, self.stored = self._forward()

    def found(self) -> dict[str, Type]:
        """Those of operators' results and of parameters."""
        made = {name: type_ for name, type_ in self.types.items() if name not in self.graph.inputs}
        return {name: type_ for name, type_ in (*made.items(), *self.stored.items()) if type_.kind in "SP"}

    def begin(self, one: Attending) -> None:
        """Positions begin as early as they can for this attention to follow them; at its queries at last."""
        ways = list(_origins(self.graph, one.query, one.query_type))
        before = dict(self.begun)
        for name, type_ in dict.fromkeys((ways[-1], ways[0])):
            self.begun = {**before, name: type_}
            self.types, self.stored = self._forward()
            if self.types.get(one.result) == one.result_type:
                return

    def _forward(self) -> tuple[dict[str, Type], dict[str, Type]]:
        graph, stored = self.graph, dict[str, Type]()
        types = {name: S(1) if len(graph.tensors[name].shape) > 1 else R for name in graph.inputs} | self.begun
        for node in graph.nodes:
            rule = self._rule(node, types)
            if rule is not None:
                types.update(zip(node.results, rule.results, strict=True))
                stored.update(_read_by_position(graph, node, rule))
            types.update((name, self.begun[name]) for name in node.results if name in self.begun)
        return types, stored

    def _rule(self, node: Node, types: Mapping[str, Type]) -> AxisRule | None:
        have = [types.get(name, R) for name in node.operands]
        fused = self.fused.get(node.results[0]) if node.results else None
        if fused is not None and have[0] == fused.query_type:
            return _queries_rule(self.graph, node, fused)
        by_hand = self.scores.get(node.results[0]) if node.results else None
        if by_hand is not None:
            rules = (rule for at, rule in _own_rows(self.graph, node) if have[at] == rule.operands[at])
            own = next((rule for rule in rules if rule.results[0] == by_hand.scores), None)
            if own is not None:
                return own
        return _cheapest(self.graph, node, have)


def _queries_rule(graph: Graph, node: Node, one: Attending) -> AxisRule:
    """Of attention whose queries are split: its keys come to them, whatever that takes."""
    rules = [rule for rule in axis_rules(graph, node) if rule.results[0] == one.result_type == rule.operands[0]]
    return rules[-1]


def _read_by_position(graph: Graph, node: Node, rule: AxisRule) -> Iterator[tuple[str, Type]]:
    for name, type_ in zip(node.operands, rule.operands, strict=True):
        item = graph.stored_by_tensor.get(name)
        if item is not None and item.kind == "parameter" and type_.kind == "S":
            yield name, type_


def _cheapest(graph: Graph, node: Node, have: list[Type]) -> AxisRule | None:
    """The rule for what operands are, with the fewest that are gathered, then sliced; the same for equal calls."""
    rules, stored = axis_rules(graph, node), tuple(name in graph.stored_by_tensor for name in node.operands)
    key, known = (id(rules), *have, stored), graph.found.setdefault(("rules of positions", ""), {})
    if key not in known:
        priced = [(price, rule) for rule in rules if (price := _price(graph, node, rule, have)) is not None]
        known[key] = min(priced, key=lambda one: one[0])[1] if priced else None
    found: AxisRule | None = known[key]
    return found


def _price(graph: Graph, node: Node, rule: AxisRule, have: list[Type]) -> tuple[int, int] | None:
    """How many operands are gathered and sliced for a rule; None where they are not."""
    gathered = sliced = 0
    for name, own, want in zip(node.operands, have, rule.operands, strict=True):
        if own == want:
            continue
        if own == R and want.kind == "S" and _may_be_cut(graph, name, rule):
            sliced += 1
        elif own.kind == "S" and want == R and _reads_whole(node, rule, have):
            gathered += 1
        else:
            return None
    return gathered, sliced


def _may_be_cut(graph: Graph, name: str, rule: AxisRule) -> bool:
    """What is computed may; what is stored, where the result is cut by its rows."""
    return name not in graph.stored_by_tensor or all(type_.kind == "S" for type_ in rule.results)


def _reads_whole(node: Node, rule: AxisRule, have: list[Type]) -> bool:
    """Whether a product keeps the rows of the first activation that has them, and reads the other side whole."""
    if node.op.split(".")[1] not in _PRODUCTS or any(type_ == P for type_ in (*rule.results, *have)):
        return False
    first = next(at for at, type_ in enumerate(have) if type_.kind == "S")
    return rule.operands[first] == have[first] and rule.results[0].kind == "S"
