"""The rules of a node: the user's, the table's, or DTensor's registry's; else it is replicated and reported."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Literal

import torch

from autopar.errors import RuleError
from autopar.ir.graph import Graph, Node, Ref, map_references
from autopar.ir.placement import (
    Axis,
    I,
    P,
    Placement,
    R,
    S,
    Type,
    format_placement,
    lengths_along,
)
from autopar.ir.structure import FUNCTION, has_own_backward, is_random
from autopar.ops import proofs, registry
from autopar.ops.call import Call, call_of, overload
from autopar.ops.functions import function_name, rule_key
from autopar.ops.notation import AxisRule, check_shapes, every, parse
from autopar.ops.patterns import Entry
from autopar.ops.table import find, operator

Source = Literal["user", "table", "registry", "replicated"]
_USER: dict[str, Entry] = {}


def register_rule(
    op: str | type[torch.autograd.Function], rule: str, partial: str = "", additive: tuple[int, ...] = ()
) -> None:
    """Adds a rule for an operator: `register_rule("mylib.fused.default", "b s d, d h -> b s h", partial="PR RP")`.

    op: the overload's dotted name, or an autograd Function. rule, partial, additive: see `autopar.ops.notation`. It
    takes precedence over the built-in table. The emitted program calls `torch.ops.mylib.fused.default`: import what
    defines it before the program runs. The rule of a Function speaks of the tensors that its `apply` is given, and
    holds for its backward too, which then sees slices of gradients: `register_rule(Reverse, "... -> ...")` says that
    both work on each element by itself. Raises RuleError when the text is malformed, the operator unknown, or the
    Function one that no program can import; a rule that does not fit the shapes of a call is refused when a model
    that has the call is planned.
    """
    if not isinstance(rule, str) or not isinstance(partial, str) or not isinstance(op, (str, type)):
        raise RuleError(
            f"expected an operator's name or Function, and rules as text, found {op!r}, {rule!r}, {partial!r}"
        )
    pattern = parse(rule)
    if isinstance(op, str):
        _check_counts(op, rule)
    name = op if isinstance(op, str) else function_name(op)
    for word in partial.split():
        if set(word) - {"P", "R"} or len(word) != len(pattern.operands):
            raise RuleError(
                f"expected partial words of {len(pattern.operands)} letters P or R, one an operand, "
                f"found {word!r} for {name}"
            )
    for position in additive:
        if not 0 <= position < len(pattern.operands):
            raise RuleError(
                f"expected additive operands from 0 to {len(pattern.operands) - 1}, found {position} for {name}"
            )
    _USER[name] = Entry(rule, partial, additive)


def _check_counts(op: str, rule: str) -> None:
    pattern, schema = parse(rule), overload(op)._schema
    tensors = [a for a in schema.arguments if "Tensor" in str(a.type)]
    lists = any("List" in str(a.type) for a in tensors)
    for what, found, expected in (
        ("operands", pattern.operands, tensors),
        ("results", pattern.results, schema.returns),
    ):
        if len(found) > len(expected) and not lists:
            raise RuleError(
                f"expected at most {len(expected)} {what} in the rule for {op}, found {len(found)} in {rule!r}"
            )


def _user_rules(entry: Entry, call: Call) -> list[AxisRule]:
    """The rules of a user's entry, whose text is checked against this call's shapes."""
    node = call.node
    try:
        if is_random(node):
            raise RuleError("it draws random numbers, which would be others on each slice")
        check_shapes(entry.text, call.operand_shapes, call.result_shapes)
    except RuleError as error:
        raise RuleError(
            f"the rule registered for {rule_key(node)} does not fit node {node.name} at "
            f"{node.source or 'an unknown line'}: {error}; correct the text given to autopar.register_rule"
        ) from error
    return entry(call)


class NodeRules:
    """The rules of one node on one mesh axis, and where they come from."""

    def __init__(self, graph: Graph, node: Node) -> None:
        call = call_of(graph, node)
        key = rule_key(node)
        function = find(node.op) if key not in _USER else functools.partial(_user_rules, _USER[key])
        self.source: Source = "user" if key in _USER else "table"
        self.reason = ""
        found: list[AxisRule] = []
        if function is not None:
            found = function(call)
        elif node.op == FUNCTION:
            self.source, self.reason = "replicated", "an autograd Function, for which no rule is registered"
        elif is_random(node):
            self.source, self.reason = "replicated", "it draws random numbers"
        elif _creates(node):
            found = _new_tensors(call)
        elif node.operands:
            found, self.reason = registry.rules(call)
            self.source = "registry" if found else "replicated"
        own = [_without_gradient(call, rule) for rule in (*_every(node), *found)]
        self.rules = tuple(dict.fromkeys(rule for rule in own if _sensible(call, rule)))


def _every(node: Node) -> list[AxisRule]:
    """What an operator can do whatever it is. A backward of somebody's own need not hold for summands of gradients."""
    whole = every(len(node.operands), len(node.results))
    return [rule for rule in whole if I in rule.operands] if has_own_backward(node) else whole


def _creates(node: Node) -> bool:
    return operator(node.op).creates


def _new_tensors(call: Call) -> list[AxisRule]:
    """What an operator such as `new_zeros` is called on says only dtype and device: however it is split will do."""
    if len(call.node.operands) != 1 or not call.node.op.startswith("aten.new_"):
        return []  # linspace takes its ends from tensors
    types = [P, *(S(dim) for dim, size in enumerate(call.shape(0)) if size > 1)]
    return [AxisRule((type_,), (R,) * len(call.node.results)) for type_ in types]


def _without_gradient(call: Call, rule: AxisRule) -> AxisRule:
    """Where no gradient flows I and R are the same; R stands for both."""
    tensors = call.graph.tensors

    def plain(type_: Type, name: str) -> Type:
        return R if type_ == I and not tensors[name].differentiable else type_

    return AxisRule(
        tuple(map(plain, rule.operands, call.node.operands)), tuple(map(plain, rule.results, call.node.results))
    )


def _sensible(call: Call, rule: AxisRule) -> bool:
    """Summands of integers or masks are left out, but for counts: they would add up, but nothing gains from them."""
    tensors, counts = call.graph.tensors, call.node.op.startswith("aten.sum.")
    pairs = zip((*rule.operands, *rule.results), (*call.node.operands, *call.node.results), strict=True)
    return all(
        type_ != P or "float" in tensors[name].dtype or (counts and name in call.node.results and rule.operands[0] != P)
        for type_, name in pairs
    )


def _rules(graph: Graph, node: Node) -> NodeRules:
    known: NodeRules | None = graph.found.get(("rules", node.name))
    if known is None:
        alike = graph.found.setdefault(("rules", ""), {})  # by key of the call: layers are mostly equal
        key = call_key(graph, node)
        if key not in alike:
            alike[key] = NodeRules(graph, node)
        known = graph.found["rules", node.name] = alike[key]
    return known


def call_key(graph: Graph, node: Node) -> Hashable:
    """Equal for calls of a graph that have the same rules, limits and prices: names alone tell them apart."""
    known = graph.found.setdefault(("call keys", ""), {})  # by identity; the node is kept with its key
    if id(node) not in known:
        known[id(node)] = node, _call_key(graph, node)
    key: Hashable = known[id(node)][1]
    return key


def _call_key(graph: Graph, node: Node) -> Hashable:
    order = {name: f"tensor {number}" for number, name in enumerate(dict.fromkeys((*node.operands, *node.results)))}
    tensors = [graph.tensors[name] for name in order]
    return (
        node.op,
        repr(map_references((node.args, node.kwargs), lambda name: Ref(order[name]))),
        tuple([None if name is None else order[name] for name in node.outputs]),
        tuple([(x.shape, x.dtype, x.differentiable, x.name in graph.stored_by_tensor) for x in tensors]),
        node.operands if operator(node.op).asks_makers else (),
    )


def axis_rules(graph: Graph, node: Node) -> tuple[AxisRule, ...]:
    """Every combination of types on one mesh axis under which the node runs locally."""
    return _rules(graph, node).rules


def has_rules(op: torch._ops.OpOverload) -> bool:
    """Whether some source has rules for the operator, or it makes tensors of its own and needs none."""
    return str(op) in _USER or _has_own_rules(op)


@functools.cache  # every trace asks for all of aten's operators
def _has_own_rules(op: torch._ops.OpOverload) -> bool:
    name = str(op)
    return operator(name).creates or find(name) is not None or registry.knows(op)


def coverage(graph: Graph) -> dict[str, str]:
    """For each operator in the graph: "table", "user", "registry", or "replicated: why"."""
    if ("coverage", "") not in graph.found:
        found: dict[str, str] = {}
        for node in graph.nodes:
            rules = _rules(graph, node)
            if node.operands and not _creates(node):
                found[rule_key(node)] = rules.source if rules.source != "replicated" else f"replicated: {rules.reason}"
        graph.found["coverage", ""] = dict(sorted(found.items()))
    return {**graph.found["coverage", ""]}


def shape_error(graph: Graph, node: Node, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Why local shapes forbid these placements, or None: reshapes keep equal slices whole, heads split in groups."""
    call, row = call_of(graph, node), operator(node.op)
    for limit in row.limits:
        if error := limit(call, operands, axes):
            return error
    if row.cuts_samples_alone and operands and (error := _shares_error(operands[0], axes)):
        return error
    if row.needs_elements or node.op in proofs.NEED_ELEMENTS:
        return _empty_slice_error(call, operands, axes)
    return None


def _shares_error(operand: Placement, axes: tuple[Axis, ...]) -> str | None:
    """An axis with shares may cut samples alone of what is shared out evenly only, as windows are."""
    cut = [axis for type_, axis in zip(operand, axes, strict=True) if axis.shares and type_.kind == "S" and type_.dim]
    return (
        f"axis {cut[0].name}, which has shares, cuts more than the samples: {format_placement(operand)}"
        if cut
        else None
    )


def _empty_slice_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Some ranks of an uneven split may hold nothing along a dim that has something."""
    for shape, placement in zip(call.operand_shapes, operands, strict=True):
        if any(length and 0 in lengths_along(shape, placement, dim, axes) for dim, length in enumerate(shape)):
            return f"{list(shape)} split as {format_placement(placement)} leaves a rank without elements"
    return None


def admits(
    graph: Graph, node: Node, operands: tuple[Placement, ...], results: tuple[Placement, ...], axes: tuple[Axis, ...]
) -> str | None:
    """Why the node must not run with these placements, or None when every axis follows one of its rules."""
    known = set(axis_rules(graph, node))
    for position, axis in enumerate(axes):
        rule = AxisRule(tuple(p[position] for p in operands), tuple(p[position] for p in results))
        if rule not in known:
            left = ", ".join(map(str, rule.operands))
            return f"no rule of {node.op} runs {left} -> {', '.join(map(str, rule.results))} on axis {axis.name}"
    return shape_error(graph, node, operands, axes)
