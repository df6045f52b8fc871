"""The table of operators: one named entry each, in the notation of `notation.py`.

Entries are either a rule text with its partial words and additive operands, or a function of the call for what a
text cannot say (dims given by arguments). Sources: Megatron-LM and GSPMD for the splits that matter, each proved
by the property test that shards, runs locally, combines and compares.
"""

from __future__ import annotations

import torch

from autopar.ir.placement import I, P, R, S
from autopar.ir.structure import HOOK, RANDOM
from autopar.ops import bags, experts, functions, proofs, views, windows
from autopar.ops.call import Call, overload
from autopar.ops.indexing import INDEXING
from autopar.ops.long_tail import LONG_TAIL
from autopar.ops.notation import AxisRule, einsum_rules
from autopar.ops.patterns import (
    Entry,
    RuleFunction,
    along_dim,
    cumsum,
    linear_leading_dims,
    linear_reduction,
    passes_leading_dims,
    reduction,
)
from autopar.ops.writes import OVERWRITTEN


def pointwise(call: Call) -> list[AxisRule]:
    """Every dim splits; dims that broadcast from 1 are missing in that operand. Linear ones pass summands."""
    count = len(call.node.operands)
    text = ", ".join(["..."] * count) + " -> " + ", ".join(["..."] * len(call.node.results))
    return einsum_rules(text, call.operand_shapes, call.result_shapes, _linear_words(call))


_BOTH_SUMMANDS = {"aten.add.Tensor", "aten.sub.Tensor"}
_ONE_SUMMAND = {"aten.mul.Tensor"}
_SUMMANDS = {OVERWRITTEN: "PP", "aten.lerp.Scalar": "PP", "aten.lerp.Tensor": "PPR", "aten.addcmul.default": "PPR PRP",
             "aten.addcdiv.default": "PPR", "aten.where.self": "RPP"}  # fmt: skip
_FIRST_SUMMAND = {"aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar", "aten.neg.default", "aten.clone.default",
                  "aten.contiguous.default", "aten._to_copy.default", "aten.to.dtype", "aten.detach.default",
                  "aten.positive.default"}  # fmt: skip


def _linear_words(call: Call) -> str:
    """Under which operand types a pointwise operator is linear, by name (a sum, a product, a scaling)."""
    op, count = call.node.op, len(call.node.operands)
    if op in _BOTH_SUMMANDS:
        return "PP" if count == 2 else ""
    if op in _ONE_SUMMAND:
        return "PR RP" if count == 2 else "P"
    if op in _SUMMANDS:
        return _SUMMANDS[op]
    if op == "aten.masked_fill.Scalar":
        return "PR" if call.arguments["value"] == 0 else ""
    if op in _FIRST_SUMMAND and _all_floating(call):
        return "P" + "R" * (count - 1)
    return ""


def _all_floating(call: Call) -> bool:
    """What is summed and what comes of it; a count that it is divided by may be an integer."""
    names = (call.node.operands[0], *call.node.results)
    return all("float" in call.graph.tensors[name].dtype for name in names)


def matmul(call: Call) -> list[AxisRule]:
    """torch.matmul with broadcasting: "... m k, ... k n -> ... m n", vectors losing their dim."""
    left, right = (len(call.shape(position)) for position in (0, 1))
    first = "k" if left == 1 else "... m k"
    second = "k" if right == 1 else "... k n"
    result = " ".join(filter(None, ["...", "m" if left > 1 else "", "n" if right > 1 else ""]))
    if left == 1 and right == 1:
        result = ""
    return Entry(f"{first}, {second} -> {result}", "PR RP")(call)


def plus_product(product: str) -> RuleFunction:
    """bias + product ("m k, k n -> m n"); the bias broadcasts, and is added once: a summand where k is split."""
    result = product.partition("-> ")[2].split()

    def rules(call: Call) -> list[AxisRule]:
        bias = " ".join(result[len(result) - len(call.shape(0)) :])
        return Entry(f"{bias}, {product}", "PPR PRP", additive=(0,))(call)

    return rules


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
    rules = Entry(f"{text} -> {batch}h {q} V", "RRP" + "R" * (len(call.node.operands) - 3))(call)
    rules = [rule for rule in rules if _heads_agree(call, rule)]
    return [*rules, *(_queries_alone(call, rule) for rule in rules if _splits_groups(call, rule))]


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


def _queries_alone(call: Call, rule: AxisRule) -> AxisRule:
    return AxisRule((rule.operands[0], R, R, *rule.operands[3:]), rule.results)


def layer_norm(call: Call) -> list[AxisRule]:
    """All dims but those that are normalized."""
    width = len(call.arguments["normalized_shape"])
    own = " ".join(f"H{i}" for i in range(width))
    operands = ", ".join([f"... {own}"] + [own] * (len(call.node.operands) - 1))
    return Entry(f"{operands} -> ... {own}")(call)


def embedding(call: Call) -> list[AxisRule]:
    """Columns split as columns; split rows give summands (a masked lookup); ids split as they are."""
    rank = len(call.shape(1))
    rules = [AxisRule((S(1), R), (S(rank),)), AxisRule((P, R), (P,))]
    if call.arguments["scale_grad_by_freq"] or call.arguments["sparse"]:
        return rules  # the gradient of a row needs all ids
    return [*rules, AxisRule((S(0), R), (P,)), *(AxisRule((R, S(dim)), (S(dim),)) for dim in range(rank))]


def cross_entropy(call: Call) -> list[AxisRule]:
    """Split samples give summands of the mean over the global count; split classes are reduced inside, giving I.

    Weights of classes are whole.
    """
    logits = call.shape(0)
    weight = (R,) if call.has_tensor("weight") else ()
    if len(logits) < 2 or "float" in call.tensor(1).dtype or (weight and call.tensor(2).differentiable):
        return []
    spread = call.arguments["reduction"] == 0
    sample_dims = [0, *range(2, len(logits))]
    rules = []
    for position, dim in enumerate(sample_dims):
        rules.append(AxisRule((S(dim), S(position), *weight), (S(position) if spread else P,)))
    if not spread and not weight and len(logits) == 2 and float(call.arguments["label_smoothing"]) == 0.0:
        rules.append(AxisRule((S(1), R), (I,)))
    return rules


def dropout(call: Call) -> list[AxisRule]:
    """Any dim; ranks draw independent masks for their slices."""
    count = len(call.node.results)
    return [AxisRule((S(dim),), (S(dim),) * count) for dim in range(len(call.shape(0)))]


def batch_norm(call: Call) -> list[AxisRule]:
    """Channels split with their statistics; split samples and spatial dims reduce the statistics inside."""
    names = ["weight", "bias", "running_mean", "running_var"]
    others = [position for name in names for position in call.positions.get(name, ())]
    outputs, shape = call.result_positions(), call.shape(0)
    rules = []
    for dim in [dim for dim, size in enumerate(shape) if size > 1]:
        channel = S(0) if dim == 1 else R
        rules.append(AxisRule((S(dim),) + (channel,) * len(others), tuple(channel if p else S(dim) for p in outputs)))
    return rules


def group_norm(call: Call) -> list[AxisRule]:
    """Samples; channels by whole groups, with their weights; spatial dims reduce the statistics inside."""
    others, shape = len(call.node.operands) - 1, call.shape(0)
    rules = []
    for dim in [dim for dim, size in enumerate(shape) if size > 1]:
        rules.append(AxisRule((S(dim),) + (S(0) if dim == 1 else R,) * others, (S(dim),)))
    return rules


def recurrent(call: Call) -> list[AxisRule]:
    """LSTM, GRU and RNN: samples, with their initial and final states, when there is no dropout between layers.

    Units do not split: the gates lie fused in one dim of the weights, and a slice of it holds whole gates, not a
    part of each. (So it is with cells that cut their fused gates apart; gates in a dim of their own split by units.)
    """
    if len(call.shape(0)) != 3 or (call.arguments["dropout"] > 0.0 and call.arguments["train"]):
        return []
    sample = S(0 if call.arguments["batch_first"] else 1)
    states, weights = len(call.positions["hx"]), len(call.positions["params"])
    results = tuple(sample if position == 0 else S(1) for position in call.result_positions())
    return [AxisRule((sample,) + (S(1),) * states + (R,) * weights, results)]


def max_pool(call: Call) -> list[AxisRule]:
    """All dims before the image's; rows and columns exchange their borders."""
    return [*passes_leading_dims(len(windows.windows(call)))(call), *windows.spatial_rules(call)]


def avg_pool(call: Call) -> list[AxisRule]:
    """All dims before the image's, and linear; rows and columns exchange their borders."""
    return [*linear_leading_dims(len(windows.windows(call)))(call), *windows.spatial_rules(call)]


def adaptive_avg_pool(call: Call) -> list[AxisRule]:
    """A mean over all of the image is a local sum, as any mean; smaller windows need their dims whole."""
    size = call.arguments["output_size"]
    leading = len(call.shape(0)) - len(size)
    whole = [dim for dim in range(leading, len(call.shape(0))) if set(size) == {1} and call.shape(0)[dim] > 1]
    return [*linear_leading_dims(len(size))(call), *(AxisRule((S(dim),), (P,)) for dim in whole)]


def identity(call: Call) -> list[AxisRule]:
    """Any dim; linear."""
    types = [P, *(S(dim) for dim in range(len(call.shape(0))))]
    return [AxisRule((type_,), (type_,)) for type_ in types]


def one_hot(call: Call) -> list[AxisRule]:
    """Any dim of the numbers; the new one is whole."""
    if call.arguments["num_classes"] == -1:
        return []  # counts the classes that it sees
    return [AxisRule((S(dim),), (S(dim),)) for dim in range(len(call.shape(0)))]


def topk(call: Call) -> list[AxisRule]:
    """Every dim but the one that it runs along."""
    return along_dim(call)


_VIEW = dict.fromkeys(("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"), views.reshape)

TABLE: dict[str, RuleFunction] = {
    **INDEXING,
    **LONG_TAIL,
    # contractions
    "aten.linear.default": Entry("... k, n k, n -> ... n", "PRP RPP", additive=(2,)),
    "aten.mm.default": Entry("m k, k n -> m n", "PR RP"),
    "aten.bmm.default": Entry("b m k, b k n -> b m n", "PR RP"),
    "aten.baddbmm.default": plus_product("b m k, b k n -> b m n"),
    "aten.matmul.default": matmul,
    "aten.addmm.default": plus_product("m k, k n -> m n"),
    "aten.addmv.default": plus_product("m k, k -> m"),
    "aten.addbmm.default": plus_product("b m k, b k n -> m n"),
    "aten.addr.default": plus_product("m, n -> m n"),
    "aten.dot.default": Entry("k, k -> ", "PR RP"),
    "aten.mv.default": Entry("m k, k -> m", "PR RP"),
    "aten.conv1d.default": windows.convolution,
    "aten.conv2d.default": windows.convolution,
    "aten.conv3d.default": windows.convolution,
    "aten.convolution.default": windows.convolution,
    "aten.conv_transpose1d.default": windows.transposed_convolution,
    "aten.conv_transpose2d.input": windows.transposed_convolution,
    "aten.conv_transpose3d.input": windows.transposed_convolution,
    "aten.scaled_dot_product_attention.default": attention,
    experts.ROUTED_EXPERTS: experts.routed_experts,
    # normalisation, loss, lookup, randomness
    "aten.layer_norm.default": layer_norm,
    "aten.rms_norm.default": layer_norm,
    "aten.group_norm.default": group_norm,
    "aten._native_batch_norm_legit_functional.default": batch_norm,
    "aten._native_batch_norm_legit.no_stats": batch_norm,
    "aten._native_batch_norm_legit_no_training.default": batch_norm,
    **dict.fromkeys((f"aten.{kind}.input" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")), recurrent),
    "aten.cross_entropy_loss.default": cross_entropy,
    "aten.embedding.default": embedding,
    bags.EMBEDDING_BAG: bags.embedding_bag,
    "aten.native_dropout.default": dropout,
    "aten.softmax.int": along_dim,
    "aten._softmax.default": along_dim,
    "aten._safe_softmax.default": along_dim,
    "aten.log_softmax.int": along_dim,
    "aten._log_softmax.default": along_dim,
    "aten.cumsum.default": cumsum,
    "aten.topk.default": topk,
    "aten.sort.default": along_dim,
    "aten.argsort.default": along_dim,
    "aten.one_hot.default": one_hot,
    # reductions
    "aten.sum.default": linear_reduction,
    "aten.sum.dim_IntList": linear_reduction,
    "aten.mean.default": linear_reduction,
    "aten.mean.dim": linear_reduction,
    "aten.amax.default": reduction,
    "aten.amin.default": reduction,
    "aten.argmax.default": reduction,
    "aten.argmin.default": reduction,
    "aten.var.correction": reduction,
    "aten.max.dim": reduction,
    "aten.min.dim": reduction,
    "aten.any.dim": reduction,
    "aten.all.dim": reduction,
    "aten.logsumexp.default": reduction,
    # rearrangements
    "aten.alias.default": identity,
    **_VIEW,
    "aten.transpose.int": views.transpose,
    "aten.t.default": views.matrix_transpose,
    "aten.permute.default": views.permute,
    "aten.unsqueeze.default": views.unsqueeze,
    "aten.squeeze.default": views.squeeze,
    "aten.squeeze.dim": views.squeeze,
    "aten.squeeze.dims": views.squeeze,
    "aten.expand.default": views.expand,
    "aten.slice.Tensor": views.slice_,
    "aten.select.int": views.select,
    "aten.split.Tensor": views.split,
    "aten.split_with_sizes.default": views.split,
    "aten.unbind.int": lambda call: [
        AxisRule(rule.operands, rule.results * len(call.node.results)) for rule in views.select(call)
    ],
    "aten.cat.default": views.cat,
    "aten.stack.default": views.stack,
    "aten.pad.default": views.pad,
    "aten.constant_pad_nd.default": views.pad,
    "aten.flip.default": views.roll_or_flip,
    "aten.roll.default": views.roll_or_flip,
    HOOK: functions.gradient_hook,
    "aten.diagonal.default": views.diagonal,
    "aten.unfold.default": views.unfold,
    "aten.tril.default": linear_leading_dims(2),
    "aten.triu.default": linear_leading_dims(2),
    # pooling and interpolation
    **{f"aten.max_pool{n}d.default": max_pool for n in (1, 2, 3)},
    **{f"aten.avg_pool{n}d.default": avg_pool for n in (1, 2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": passes_leading_dims(n) for n in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{n}d.default": adaptive_avg_pool for n in (1, 2, 3)},
    **{f"aten.upsample_nearest{n}d.vec": windows.upsample_nearest for n in (1, 2, 3)},
    "aten.upsample_linear1d.vec": linear_leading_dims(1),
    "aten.upsample_bilinear2d.vec": linear_leading_dims(2),
    "aten.upsample_bicubic2d.vec": linear_leading_dims(2),
    "aten.upsample_trilinear3d.vec": linear_leading_dims(3),
}

_LIKE = ("ones_like", "zeros_like", "full_like", "empty_like")
#: pointwise for our purpose, though torch does not tag them so
_POINTWISE = {"aten.clone.default", "aten._to_copy.default", "aten.detach.default", "aten.masked_fill.Scalar",
              "aten.contiguous.default", "aten.to.dtype", "aten.__and__.Tensor", "aten.__or__.Tensor",
              "aten.polar.default", "aten.complex.default", "aten.masked_fill.Tensor", "aten.hardswish.default",
              "aten.log_sigmoid.default", "aten.floor_divide.default"}  # fmt: skip


def find(op: str) -> RuleFunction | None:
    """The table's entry of an operator: by name, or as a pointwise operator by torch's own tag."""
    if op in TABLE:
        return TABLE[op]
    name = op.split(".")[1]
    tagged = torch.Tag.pointwise in overload(op).tags and name not in RANDOM
    tagged = tagged and not (op.startswith("aten.") and proofs.objection(op))
    return pointwise if tagged or op in _POINTWISE or name in _LIKE else None
