"""Attention: batch dims and heads split, queries too where nothing is causal; grouped heads split by their groups."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.ir.placement import Axis, Placement, R, S
from autopar.ops import saved, work, workspace
from autopar.ops.call import Call, argument
from autopar.ops.local import LocalCall, tuple_of
from autopar.ops.notation import AxisRule
from autopar.ops.operator import Operator
from autopar.ops.patterns import Entry


def attention(call: Call) -> list[AxisRule]:
    """Batch dims and heads split; so do queries when nothing is causal. Keys do not: softmax needs them whole.

    With grouped heads (enable_gqa) the head dim is the query's and the key's own, split together; or the query's
    alone, where each rank then takes the keys and values of its groups.
    """
    query = call.shape(0)
    batch = "" if len(query) == 3 else "b "
    causal = bool(call.arguments["is_causal"])
    q = "Q" if causal else "q"
    text = f"{batch}h {q} D, {batch}h T D, {batch}h T V"
    if call.has_tensor("attn_mask"):
        mask = {4: f"{batch}h {q} T", 3: f"h {q} T", 2: f"{q} T"}[len(call.shape(3))]
        text += f", {mask}"
    if len(query) not in (3, 4) or float(call.arguments["dropout_p"]) > 0.0:
        return []
    return grouped_rules(call, f"{text} -> {batch}h {q} V")


def grouped_rules(call: Call, text: str) -> list[AxisRule]:
    """The rules of a text, in which heads of queries, keys and values are h; summands of values pass. Where heads are
    grouped, queries split with their keys, or alone."""
    rules = Entry(text, "RRP" + "R" * (len(call.node.operands) - 3))(call)
    rules = [rule for rule in rules if _heads_agree(call, rule)]
    alone = [rule for rule in rules if _splits_groups(call, rule)]  # of which queries may split further
    return [*rules, *(AxisRule((rule.operands[0], R, R, *rule.operands[3:]), rule.results) for rule in alone)]


def _heads_agree(call: Call, rule: AxisRule) -> bool:
    """All heads are split, or none are; a single head, which all queries share, is nothing to split."""
    head = len(call.shape(0)) - 3
    own = zip(rule.operands[:3], call.operand_shapes[:3], strict=True)
    split = [type_ == S(head) for type_, shape in own if shape[head] > 1]
    return all(split) or not any(split)


def _splits_groups(call: Call, rule: AxisRule) -> bool:
    head = len(call.shape(0)) - 3
    query, key, value = (shape[head] for shape in call.operand_shapes[:3])
    return rule.operands[0] == rule.operands[1] == S(head) and query > key == value


def heads_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
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


def _local(local: LocalCall) -> str | None:
    """On what `heads_on_rank` names, which are as many heads of keys as of queries. Grouped heads of one query, and
    under a mask of any where there is no gradient, are the runtime's own: heads are read once, by any kernel."""
    if _is_read_once(local.call):
        return _read_once(local)
    names, node = heads_on_rank(local), local.call.node
    kwargs = tuple((name, value) for name, value in node.kwargs if name != "enable_gqa")
    return local.plain(names, replace(node, args=node.args[:7], kwargs=kwargs)) if names else None


def _is_read_once(call: Call) -> bool:
    """Whether heads of queries share those of keys, in what `rt.grouped_attention` computes."""
    node, query, key = call.node, call.shape(0), call.shape(1)
    is_grouped = bool(dict(node.kwargs).get("enable_gqa")) and len(query) == 4 and query[1] > key[1]
    is_plain = not argument(node, 5, "is_causal", False) and float(argument(node, 4, "dropout_p", 0.0)) == 0.0
    has_gradient = any(call.graph.tensors[name].differentiable for name in node.operands)
    return is_grouped and is_plain and (query[2] == 1 or (call.has_tensor("attn_mask") and not has_gradient))


def _read_once(local: LocalCall) -> str:
    axes, heads = _alone(local), ""
    if axes:
        count, group = _groups(local)
        heads = f", heads=({count}, {group}, {tuple_of([axis.name for axis in axes])})"
    names = [*local.names[:3], local.variable("attn_mask")]
    return f"rt.grouped_attention({', '.join(names)}, scale={dict(local.call.arguments)['scale']!r}{heads})"


def _alone(local: LocalCall) -> list[Axis]:
    """The axes that split the heads of queries and not those of keys."""
    head = len(local.call.shape(0)) - 3
    query, key = local.placements[:2]
    return [axis for axis, q, k in zip(local.axes, query, key, strict=True) if q == S(head) != k]


def _groups(local: LocalCall) -> tuple[int, int]:
    """How many query heads there are on the ranks that split them alone, and how many share one of keys."""
    call, head = local.call, len(local.call.shape(0)) - 3
    together = math.prod(axis.size for axis, k in zip(local.axes, local.placements[1], strict=True) if k == S(head))
    return call.shape(0)[head] // together, call.shape(0)[head] // call.shape(1)[head]


def heads_on_rank(local: LocalCall) -> list[str] | None:
    """Where query heads are split further than those of keys and values: the operands with one key and one value head
    for each query head, which each rank takes out of the whole."""
    call, head = local.call, len(local.call.shape(0)) - 3
    axes = _alone(local)
    if not axes or call.shape(1)[head] == 1:
        return None
    count, group = _groups(local)
    where = f"{head}, {count}, {group}, {tuple_of([axis.name for axis in axes])}"
    return [local.names[0], *(f"rt.heads_of({name}, {where})" for name in local.names[1:3]), *local.names[3:]]


_FUSED = Operator(work=work.ATTENTION, saved=saved.attention)

ATTENTION: dict[str, Operator] = {
    "aten.scaled_dot_product_attention.default": _FUSED.by(
        attention,
        saved_on_cpu=saved.attention_on_cpu,
        limits=(heads_error,),
        local=_local,
        workspace=workspace.attention,
        lowered=workspace.grouped_attention,
    ),
    "_scaled_dot_product_flash_attention": _FUSED,
    "_scaled_dot_product_efficient_attention": _FUSED,
    "_scaled_dot_product_flash_attention_for_cpu": _FUSED,
}
