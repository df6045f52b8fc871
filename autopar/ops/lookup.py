"""The rules of a node: the user's, the table's, or DTensor's registry's; else it is replicated and reported."""

from __future__ import annotations

import functools
import math
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
    num_shards,
)
from autopar.ir.structure import FUNCTION, OWN_BACKWARD, is_random
from autopar.ops import bags, proofs, registry, views, windows
from autopar.ops.call import Call, call_of, overload
from autopar.ops.functions import function_name, rule_key
from autopar.ops.notation import AxisRule, check_shapes, every, parse
from autopar.ops.patterns import Entry
from autopar.ops.table import TABLE, find

Source = Literal["user", "table", "registry", "replicated"]
_USER: dict[str, Entry] = {}
_CREATION = ("arange", "zeros", "ones", "full", "empty", "scalar_tensor", "eye", "tril_indices", "triu_indices",
             "linspace", "new_ones", "new_zeros", "new_full", "new_empty")  # fmt: skip


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
    """What an operator can do whatever it is. What a Function or hook does need not hold for summands of gradients."""
    whole = every(len(node.operands), len(node.results))
    return [rule for rule in whole if I in rule.operands] if node.op in OWN_BACKWARD else whole


def _creates(node: Node) -> bool:
    return node.op.split(".")[1] in _CREATION


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
    order = {name: f"tensor {number}" for number, name in enumerate(dict.fromkeys((*node.operands, *node.results)))}
    tensors = [graph.tensors[name] for name in order]
    return (
        node.op,
        repr(map_references((node.args, node.kwargs), lambda name: Ref(order[name]))),
        tuple([None if name is None else order[name] for name in node.outputs]),
        tuple([(x.shape, x.dtype, x.differentiable, x.name in graph.stored_by_tensor) for x in tensors]),
        node.operands if node.op == bags.EMBEDDING_BAG else (),  # its rules ask what made an operand
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
    return name.split(".")[1] in _CREATION or find(name) is not None or registry.knows(op)


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


def shape_error(
    graph: Graph, node: Node, operands: tuple[Placement, ...], results: tuple[Placement, ...], axes: tuple[Axis, ...]
) -> str | None:
    """Why local shapes forbid these placements, or None: reshapes keep equal slices whole, heads split in groups."""
    call = call_of(graph, node)
    if TABLE.get(node.op) is views.squeeze:
        return _squeeze_error(call, operands[0], axes)
    if TABLE.get(node.op) is views.reshape:
        before, after = call.shape(0), call.result_shapes[0]
        for type_ in operands[0]:
            if type_.kind == "S":
                shards = num_shards(operands[0], type_.dim, axes)
                limit = views.reshape_limit(before, after, type_.dim)
                if limit % shards and not _same_dim(before, after, type_.dim, results[0]):
                    return f"dim {type_.dim} of {list(before)} in {shards} slices does not reshape to {list(after)}"
    if error := _channel_error(call, operands[0], axes) or _shares_error(call, operands[0], axes) if operands else None:
        return error
    if node.op == bags.EMBEDDING_BAG and (error := bags.bags_error(call, operands, axes)):
        return error
    if ".upsample_nearest" in node.op and (error := windows.upsample_error(call, operands[0], axes)):
        return error
    if windows.has_windows(node.op) and (error := windows.window_error(call, operands[0], axes)):
        return error
    if node.op in proofs.NEED_ELEMENTS or any(word in node.op for word in _NEED_ELEMENTS):
        return _empty_slice_error(call, operands, axes)
    if node.op == "aten.scaled_dot_product_attention.default":
        return _heads_error(call, operands, axes)
    return None


def _heads_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Heads in groups split by whole groups; inside of that, the queries of a group may be split among ranks."""
    head = len(call.shape(0)) - 3
    heads = [shape[head] for shape in call.operand_shapes[:3]]
    if len(set(heads)) == 1:
        return None
    together = [position for position, type_ in enumerate(operands[1]) if type_ == S(head)]
    alone = [position for position, type_ in enumerate(operands[0]) if type_ == S(head) and position not in together]
    shards = math.prod(axes[position].size for position in together)
    if any(count % shards for count in heads if count > 1):
        return f"heads {heads} do not split in {shards}"
    if alone and together and alone[0] < together[-1]:
        return f"axis {axes[alone[0]].name} splits queries alone, outside of axis {axes[together[-1]].name}'s groups"
    return None


def _channel_error(call: Call, operand: Placement, axes: tuple[Axis, ...]) -> str | None:
    """Channels of grouped convolutions and of group norm split by whole groups."""
    if ".conv" in call.node.op:
        channel = len(call.shape(0)) - len(call.shape(1)) + 1
        return windows.groups_error(call, operand, axes, call.arguments["groups"], channel)
    if call.node.op == "aten.group_norm.default":
        return windows.groups_error(call, operand, axes, call.arguments["num_groups"], 1)
    return None


def _shares_error(call: Call, operand: Placement, axes: tuple[Axis, ...]) -> str | None:
    """Windows and groups of channels are shared out evenly only: an axis with shares may cut their samples alone."""
    cut = [axis for type_, axis in zip(operand, axes, strict=True) if axis.shares and type_.kind == "S" and type_.dim]
    if cut and (windows.has_windows(call.node.op) or any(word in call.node.op for word in _SHARED_EVENLY)):
        return f"axis {cut[0].name}, which has shares, cuts more than the samples: {format_placement(operand)}"
    return None


_SHARED_EVENLY = (".conv", "group_norm", "upsample", "pool")

#: torch's kernels for these refuse tensors without elements, forward or backward, or even crash on them
_NEED_ELEMENTS = (".conv", "batch_norm", "group_norm", "instance_norm", "pool", "upsample", "embedding",
                  "cross_entropy", "ctc_loss", "native_dropout", "routed_experts")  # fmt: skip


def _empty_slice_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Some ranks of an uneven split may hold nothing along a dim that has something."""
    for shape, placement in zip(call.operand_shapes, operands, strict=True):
        if any(length and 0 in lengths_along(shape, placement, dim, axes) for dim, length in enumerate(shape)):
            return f"{list(shape)} split as {format_placement(placement)} leaves a rank without elements"
    return None


def _squeeze_error(call: Call, operand: Placement, axes: tuple[Axis, ...]) -> str | None:
    for dim in views.squeezed_dims(call):
        length = call.shape(0)[dim]
        if length > 1 and 1 in lengths_along(call.shape(0), operand, dim, axes):
            return f"dim {dim} of {list(call.shape(0))} as {format_placement(operand)} would be squeezed away on a rank"
    return None


def _same_dim(before: tuple[int, ...], after: tuple[int, ...], dim: int, result: Placement) -> bool:
    """Whether the dim passes the reshape unchanged, so that uneven slices stay slices."""
    return any(
        left == (dim,) and len(right) == 1 and before[dim] == after[right[0]]
        for left, right in views.reshape_groups(before, after)
    )


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
    return shape_error(graph, node, operands, results, axes)
