"""The table of operators: one named entry each, in the notation of `notation.py`.

Entries are either a rule text with its partial words and additive operands, or a function of the call for what a
text cannot say (dims given by arguments). Sources: Megatron-LM and GSPMD for the splits that matter, each proved
by the property test that shards, runs locally, combines and compares.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from autopar.ir.placement import P, R, S
from autopar.ir.structure import RANDOM
from autopar.ops import in_bits, kinds, proofs, saved, views, work, workspace
from autopar.ops.async_linears import ASYNC_LINEARS
from autopar.ops.attention import ATTENTION
from autopar.ops.caches import CACHES
from autopar.ops.call import Call, base_name, overload
from autopar.ops.context import CONTEXT
from autopar.ops.dropout import RANDOMNESS
from autopar.ops.embedding import EMBEDDINGS
from autopar.ops.experts import EXPERTS
from autopar.ops.factors import (
    LINEAR,
    factor_rules,
    factors_error,
    factors_memory,
    local_linear,
    num_gathered,
    sent_for_factors,
)
from autopar.ops.functions import FUNCTIONS
from autopar.ops.indexing import INDEXING
from autopar.ops.kept import KEPT
from autopar.ops.long_tail import LONG_TAIL
from autopar.ops.losses import LOSSES
from autopar.ops.notation import AxisRule, einsum_rules
from autopar.ops.operator import Operator
from autopar.ops.patterns import (
    Entry,
    RuleFunction,
    along_dim,
    cumsum,
    linear_leading_dims,
    linear_reduction,
    reduction,
)
from autopar.ops.statistics import STATISTICS, mean_over_ranks
from autopar.ops.window_attention import WINDOWED
from autopar.ops.windows import IMAGES
from autopar.ops.writes import OVERWRITTEN, overwritten_call


def pointwise(call: Call) -> list[AxisRule]:
    """Every dim splits; dims that broadcast from 1 are missing in that operand. Linear ones pass summands."""
    count, linear = len(call.node.operands), operator(call.node.op).linear
    partial = linear if isinstance(linear, str) else linear(call)
    words = " ".join(word for word in partial.split() if len(word) == count)
    text = ", ".join(["..."] * count) + " -> " + ", ".join(["..."] * len(call.node.results))
    return einsum_rules(text, call.operand_shapes, call.result_shapes, words)


def pointwise_loss(call: Call) -> list[AxisRule]:
    """A loss of each element; of what is reduced to a number nothing splits."""
    return pointwise(call) if call.arguments["reduction"] == 0 else []


LINEAR_SUMS = Entry("... k, n k, n -> ... n", "PRP RPP", additive=(2,))


def linear(call: Call) -> list[AxisRule]:
    """`... k, n k, n -> ... n`, also on summands; or rows whose weight's gradient meets as factors."""
    return [*LINEAR_SUMS(call), *factor_rules(call)]


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


def identity(call: Call) -> list[AxisRule]:
    """Any dim; linear."""
    types = [P, *(S(dim) for dim in range(len(call.shape(0))))]
    return [AxisRule((type_,), (type_,)) for type_ in types]


def one_hot(call: Call) -> list[AxisRule]:
    """Any dim of the numbers; the new one is whole."""
    if call.arguments["num_classes"] == -1:
        return []  # counts the classes that it sees
    return [AxisRule((S(dim),), (S(dim),)) for dim in range(len(call.shape(0)))]


def unbind(call: Call) -> list[AxisRule]:
    """Dims that are not selected stay split; linear."""
    return [AxisRule(rule.operands, rule.results * len(call.node.results)) for rule in views.select(call)]


def _named(names: str, kind: Operator) -> dict[str, Operator]:
    """Rows of names without overloads: torch's tags and registry have their rules."""
    return dict.fromkeys(names.split(), kind)


OPERATORS: dict[str, Operator] = {
    **ASYNC_LINEARS,
    **ATTENTION,
    **CONTEXT,
    **WINDOWED,
    **EMBEDDINGS,
    **EXPERTS,
    **FUNCTIONS,
    **IMAGES,
    **INDEXING,
    **LONG_TAIL,
    **LOSSES,
    **RANDOMNESS,
    **STATISTICS,
    # contractions
    LINEAR: kinds.LINEAR.by(
        linear, inside=sent_for_factors, sends_for=1, gathered=num_gathered, local=local_linear,
        limits=(factors_error,), lowered=factors_memory,
    ),
    "aten.mm.default": kinds.PRODUCT.by(Entry("m k, k n -> m n", "PR RP")),
    "aten.bmm.default": kinds.PRODUCT.by(Entry("b m k, b k n -> b m n", "PR RP")),
    "aten.baddbmm.default": kinds.PLUS_PRODUCT.by(plus_product("b m k, b k n -> b m n")),
    "aten.matmul.default": kinds.PRODUCT.by(matmul),
    "aten.addmm.default": kinds.PLUS_PRODUCT.by(plus_product("m k, k n -> m n")),
    "aten.addmv.default": kinds.PLUS_PRODUCT.by(plus_product("m k, k -> m")),
    "aten.addbmm.default": Operator(plus_product("b m k, b k n -> m n")),
    "aten.addr.default": Operator(plus_product("m, n -> m n")),
    "aten.dot.default": kinds.PRODUCT.by(Entry("k, k -> ", "PR RP")),
    "aten.mv.default": kinds.PRODUCT.by(Entry("m k, k -> m", "PR RP")),
    # along dims
    "aten.lstm.input": kinds.RECURRENT.by(recurrent, saved_on_cpu=saved.long_short_on_cpu),
    **{f"aten.{kind}.input": kinds.RECURRENT.by(recurrent) for kind in ("gru", "rnn_tanh", "rnn_relu")},
    "aten.softmax.int": kinds.SOFTMAX.by(along_dim),
    "aten._softmax.default": kinds.SOFTMAX.by(along_dim),
    "aten._safe_softmax.default": Operator(along_dim),
    "aten.log_softmax.int": kinds.SOFTMAX.by(along_dim),
    "aten._log_softmax.default": kinds.SOFTMAX.by(along_dim),
    "aten.cumsum.default": kinds.CUMSUM.by(cumsum),
    "aten.topk.default": kinds.REDUCTION.by(along_dim),
    "aten.sort.default": kinds.REDUCTION.by(along_dim),
    "aten.argsort.default": Operator(along_dim),
    "aten.one_hot.default": Operator(one_hot, work=work.CREATION),
    "aten.sum.default": kinds.SUM_OF_DIMS.by(linear_reduction),
    "aten.sum.dim_IntList": kinds.SUM_OF_DIMS.by(linear_reduction),
    "aten.mean.default": kinds.MEAN.by(linear_reduction, local=mean_over_ranks),
    "aten.mean.dim": kinds.MEAN.by(linear_reduction, local=mean_over_ranks),
    "aten.amax.default": kinds.EXTREME.by(reduction),
    "aten.amin.default": kinds.EXTREME.by(reduction),
    "aten.argmax.default": kinds.REDUCTION.by(reduction),
    "aten.argmin.default": kinds.REDUCTION.by(reduction),
    "aten.var.correction": kinds.VARIANCE.by(reduction),
    "aten.max.dim": kinds.REDUCTION.by(reduction),
    "aten.min.dim": kinds.REDUCTION.by(reduction),
    "aten.any.dim": kinds.REDUCTION.by(reduction),
    "aten.all.dim": kinds.REDUCTION.by(reduction),
    "aten.logsumexp.default": kinds.SOFTMAX.by(reduction, saved=saved.operand_and_result),
    **_named("norm", kinds.EXTREME),
    **_named("nll_loss", Operator(work=work.NLL, saved=saved.indices)),
    **_named("nll_loss_forward", Operator(work=work.NLL)),
    # rearrangements
    "aten.alias.default": kinds.SAME_ELEMENTS.by(identity),
    "aten.view.default": kinds.RESHAPE,
    "aten._unsafe_view.default": kinds.RESHAPE,
    "aten.reshape.default": replace(kinds.RESHAPE, size="shape"),
    "aten.transpose.int": kinds.SAME_ELEMENTS.by(views.transpose),
    "aten.t.default": kinds.SAME_ELEMENTS.by(views.matrix_transpose),
    "aten.permute.default": kinds.SAME_ELEMENTS.by(views.permute),
    "aten.unsqueeze.default": kinds.SAME_ELEMENTS.by(views.unsqueeze),
    "aten.squeeze.default": kinds.SQUEEZE,
    "aten.squeeze.dim": kinds.SQUEEZE,
    "aten.squeeze.dims": kinds.SQUEEZE,
    "aten.expand.default": kinds.VIEW.by(views.expand, size="size"),
    "aten.slice.Tensor": kinds.SLICE.by(views.slice_),
    "aten.select.int": kinds.SLICE.by(views.select),
    "aten.split.Tensor": kinds.SLICE.by(views.split),
    "aten.split_with_sizes.default": kinds.SLICE.by(views.split),
    "aten.unbind.int": kinds.SLICE.by(unbind),
    "aten.cat.default": kinds.JOIN.by(views.cat),
    "aten.stack.default": kinds.WHOLE_COPY.by(views.stack),
    "aten.pad.default": kinds.COPY.by(views.pad, saved=saved.padded),
    "aten.constant_pad_nd.default": kinds.COPY.by(views.pad),
    "aten.flip.default": kinds.COPY.by(views.roll_or_flip),
    "aten.roll.default": kinds.COPY.by(views.roll_or_flip),
    "aten.diagonal.default": kinds.SLICE.by(views.diagonal),
    "aten.unfold.default": kinds.SLICE.by(views.unfold),
    "aten.tril.default": kinds.COPY.by(linear_leading_dims(2)),
    "aten.triu.default": kinds.COPY.by(linear_leading_dims(2)),
    "aten.detach.default": kinds.SAME_ELEMENTS.by(linear="P"),
    **_named("flatten unflatten view_as movedim swapaxes mT identity", kinds.SAME_ELEMENTS),
    **_named("expand_as broadcast_to numpy_T real imag", kinds.VIEW),
    **_named("expand_copy", Operator(size="size")),
    **_named("narrow chunk as_strided", kinds.SLICE),
    **_named("lift_fresh_copy", kinds.NO_WORK),
    **_named("_assert_tensor_metadata sym_size", Operator(work=work.VIEW)),
    "aten.clone.default": kinds.WHOLE_COPY.by(linear="P"),
    "aten.contiguous.default": kinds.WHOLE_COPY.by(linear="P"),
    "aten._to_copy.default": kinds.COPY.by(linear="P"),
    "aten.to.dtype": kinds.COPY.by(linear="P"),
    **_named("copy", kinds.COPY),
    **_named("reflection_pad2d replication_pad2d", Operator(work=work.COPY, saved=saved.operand)),
    "aten.masked_fill.Scalar": kinds.MASKED_COPY.by(linear=lambda call: "PR" if call.arguments["value"] == 0 else ""),
    **_named("repeat_interleave", kinds.MASKED_COPY),
    # tensors of its own
    **_named("zeros ones full new_zeros new_ones", kinds.FILLED),
    **_named("empty new_full new_empty", kinds.CREATION.by(size="size")),
    **_named("arange linspace eye scalar_tensor", kinds.CREATION),
    **_named("tril_indices triu_indices", Operator(creates=True)),
    **_named("zeros_like ones_like full_like empty_like", kinds.LIKE),
    # point by point
    OVERWRITTEN: kinds.NO_WORK.by(local=overwritten_call, linear="PP"),
    **CACHES,
    "aten.add.Tensor": kinds.TERMS.by(passes=saved.gradients_of_sum, linear="PP"),
    "aten.sub.Tensor": kinds.TERMS.by(passes=saved.gradient_of_minuend, linear="PP"),
    **_named("rsub", kinds.TERMS),
    **_named("add_ sub_ __add__ __sub__", Operator(work=work.SUM)),
    "aten.mul.Tensor": kinds.FACTORS.by(linear="P PR RP"),
    "aten.mul.Scalar": kinds.FACTORS.by(linear="P"),
    "aten.div.Tensor": kinds.QUOTIENT.by(linear="P PR"),
    "aten.div.Scalar": kinds.QUOTIENT.by(linear="P"),
    "aten.where.self": Operator(saved=saved.indices, workspace=workspace.product, linear="RPP"),
    "aten.neg.default": Operator(saved=saved.nothing, linear="P"),
    "aten.positive.default": Operator(linear="P"),
    "aten.lerp.Scalar": Operator(linear="PP"),
    "aten.lerp.Tensor": Operator(linear="PPR"),
    "aten.addcmul.default": Operator(linear="PPR PRP"),
    "aten.addcdiv.default": Operator(linear="PPR"),
    "aten.binary_cross_entropy.default": Operator(pointwise_loss, saved=saved.operands),
    **_named("relu", Operator(saved=saved.result, in_bits=in_bits.RELU)),
    **_named("leaky_relu", kinds.OF_INPUT.by(in_bits=in_bits.LEAKY_RELU)),
    **_named("clamp clip", kinds.CLAMP.by(workspace=workspace.compared(2))),
    **_named("clamp_min clamp_max", kinds.CLAMP.by(workspace=workspace.compared(1))),
    **_named("relu6", kinds.OF_INPUT.by(in_bits=in_bits.RELU6)),
    **_named("hardsigmoid", kinds.OF_INPUT),
    **_named("hardtanh", kinds.OF_INPUT.by(in_bits=in_bits.HARDTANH)),
    **_named("threshold", kinds.OF_INPUT.by(in_bits=in_bits.THRESHOLD)),
    **_named("abs", kinds.OF_INPUT.by(workspace=workspace.backward(1))),
    **_named("gelu", kinds.OF_INPUT.by(work=work.GELU)),
    **_named("gelu_tanh", Operator(work=work.GELU_TANH)),
    **_named("silu", kinds.OF_INPUT.by(work=work.SILU)),
    **_named("tanh sigmoid exp exp2 expm1 tan", kinds.CURVE_OF_RESULT),
    **_named("log log2 erf sinh cosh asin acos atan", kinds.CURVE_OF_INPUT),
    **_named("softplus mish elu hardswish", kinds.CURVE_OF_INPUT),
    **_named("log_sigmoid", kinds.CURVE_OF_INPUT.by(saved_on_cpu=saved.operand_and_copy)),
    **_named("sin cos log1p", kinds.CURVE_OF_INPUT.by(workspace=workspace.backward(1))),
    **_named("sqrt reciprocal", kinds.CURVE_OF_RESULT.by(workspace=workspace.backward(1))),
    **_named("rsqrt", kinds.CURVE_OF_RESULT.by(workspace=workspace.backward(2))),
    **_named("pow", kinds.CURVE.by(saved=saved.power, workspace=workspace.backward(2))),
    **_named("selu atan2", kinds.CURVE),
}  # fmt: skip
"""By overload ("aten.linear.default"), or by name ("tanh") where nothing but torch's sources has a rule."""

RULES: dict[str, RuleFunction] = {op: row.rule for op, row in OPERATORS.items() if row.rule is not None}
#: operators that call a function of the runtime where their placements ask for it
LOWERED = frozenset(op for op, row in OPERATORS.items() if row.local is not None)
_BY_NAME = {base_name(op): row.of_other_overloads() for op, row in OPERATORS.items() if "." in op}
_BY_NAME |= {name: row for name, row in OPERATORS.items() if "." not in name}


@cache
def operator(op: str) -> Operator:
    """The row of an operator: its own, what holds of its other overloads, or that of any pointwise operator."""
    name = base_name(op)
    row = OPERATORS.get(op) or _BY_NAME.get(name, kinds.POINTWISE)
    return replace(row, saved=KEPT[name]) if row.saved is saved.everything and name in KEPT else row


_LIKE = ("ones_like", "zeros_like", "full_like", "empty_like")
#: pointwise for our purpose, though torch does not tag them so
_POINTWISE = {"aten.clone.default", "aten._to_copy.default", "aten.detach.default", "aten.masked_fill.Scalar",
              "aten.contiguous.default", "aten.to.dtype", "aten.__and__.Tensor", "aten.__or__.Tensor",
              "aten.__and__.Scalar", "aten.__or__.Scalar", "aten.__xor__.Scalar", "aten.__lshift__.Tensor",
              "aten.__rshift__.Tensor", "aten.bitwise_left_shift.Tensor_Scalar",
              "aten.bitwise_right_shift.Tensor_Scalar",
              "aten.polar.default", "aten.complex.default", "aten.masked_fill.Tensor", "aten.hardswish.default",
              "aten.log_sigmoid.default", "aten.floor_divide.default"}  # fmt: skip


def find(op: str) -> RuleFunction | None:
    """The table's entry of an operator: by name, or as a pointwise operator by torch's own tag."""
    if op in RULES:
        return RULES[op]
    name = op.split(".")[1]
    tagged = torch.Tag.pointwise in overload(op).tags and name not in RANDOM
    tagged = tagged and not (op.startswith("aten.") and proofs.objection(op))
    return pointwise if tagged or op in _POINTWISE or name in _LIKE else None
