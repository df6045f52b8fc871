"""What each operator does, in one table: its family, floating-point operations, and its gradient's traffic.

`OPERATORS` is keyed by the ATen name without namespace and overload. An operator outside the table is taken
to read its operands and write its results once (the `pointwise` family), like most of the long tail.
Shapes are of one rank's slices, so the work is one rank's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from autopar.ir.placement import Shape


class WorkKey(NamedTuple):
    """All that the cost of an operator depends on: the memo key of `compute`."""

    op: str
    operand_shapes: tuple[Shape, ...]
    result_shapes: tuple[Shape, ...]
    operand_itemsizes: tuple[int, ...]
    result_itemsizes: tuple[int, ...]
    differentiable: tuple[bool, ...]
    dtype: str
    detail: str = ""
    """An einsum's equation; "causal" for attention with such a mask; the number of experts of all; a pool's window."""

    @property
    def operand_bytes(self) -> list[int]:
        return _num_bytes(self.operand_shapes, self.operand_itemsizes)

    @property
    def result_bytes(self) -> int:
        return sum(_num_bytes(self.result_shapes, self.result_itemsizes))


def _num_bytes(shapes: tuple[Shape, ...], itemsizes: tuple[int, ...]) -> list[int]:
    return [math.prod(shape) * size for shape, size in zip(shapes, itemsizes, strict=True)]


class Work(NamedTuple):
    """FLOPs and bytes (read plus written) of one direction, and how many kernels it launches.

    summed: bytes that each of the kernels reads that only add up rows, such as a bias's gradient; not in `num_bytes`.
    """

    flops: int
    num_bytes: int
    kernels: int
    summed: tuple[int, ...] = ()

    @property
    def products(self) -> int:
        """The kernels among which the FLOPs are divided."""
        return max(1, self.kernels - len(self.summed))


NO_WORK = Work(0, 0, 0)

CountFlops = Callable[[WorkKey], int]
CountBytes = Callable[[WorkKey], int]
CountWork = Callable[[WorkKey], Work]


class Operator(NamedTuple):
    """A row of the table. `flops` is of the forward direction; `moved` and `backward` replace defaults."""

    family: str
    flops: CountFlops | None = None
    moved: CountBytes | None = None
    backward: CountWork | None = None


def base_name(op: str) -> str:
    """The operator without namespace and overload: aten.linear.default → linear."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def operator(op: str) -> Operator:
    """The row of an operator; the default row for one outside the table."""
    return OPERATORS.get(base_name(op), POINTWISE)


def forward_work(call: WorkKey) -> Work:
    """FLOPs and bytes of the forward direction."""
    row = operator(call.op)
    if row is VIEW:
        return NO_WORK
    return Work(forward_flops(call), (row.moved or _all_bytes)(call), 1)


def forward_flops(call: WorkKey) -> int:
    """Floating-point operations; one a result element where the table counts none."""
    row = operator(call.op)
    if row is VIEW or not call.result_shapes:
        return 0
    return row.flops(call) if row.flops else math.prod(call.result_shapes[0])


def backward_work(call: WorkKey) -> Work:
    """FLOPs and bytes of the gradients of the differentiable operands; none when there are none."""
    row = operator(call.op)
    if row is VIEW or not any(call.differentiable):
        return NO_WORK
    return (row.backward or _memory_gradient)(call)


def _all_bytes(call: WorkKey) -> int:
    return sum(call.operand_bytes) + call.result_bytes


def _differentiable_bytes(call: WorkKey) -> list[int]:
    return [size for size, wanted in zip(call.operand_bytes, call.differentiable, strict=True) if wanted]


# Matrix products --------------------------------------------------------


def _linear_flops(call: WorkKey) -> int:
    return 2 * math.prod(call.result_shapes[0]) * call.operand_shapes[0][-1]


def _addmm_flops(call: WorkKey) -> int:
    return 2 * math.prod(call.result_shapes[0]) * call.operand_shapes[1][-1]


def _convolution_flops(call: WorkKey) -> int:
    return 2 * math.prod(call.result_shapes[0]) * math.prod(call.operand_shapes[1][1:])


def _transposed_convolution_flops(call: WorkKey) -> int:
    return 2 * math.prod(call.operand_shapes[0]) * math.prod(call.operand_shapes[1][1:])


def _einsum_flops(call: WorkKey) -> int:
    """Every index combination once, two operations each: exact for up to two operands."""
    inputs = call.detail.replace(" ", "").split("->")[0].split(",")
    if len(inputs) != len(call.operand_shapes) or "." in call.detail:
        return 2 * math.prod(call.result_shapes[0]) * call.operand_shapes[0][-1]
    sizes = {
        label: size
        for labels, shape in zip(inputs, call.operand_shapes, strict=True)
        for label, size in zip(labels, shape, strict=True)
    }
    return 2 * math.prod(sizes.values())


def _matrix_gradient(call: WorkKey) -> Work:
    """One product like the forward's for each differentiable matrix; a bias is summed from the gradient."""
    wanted = [shape for shape, flag in zip(call.operand_shapes, call.differentiable, strict=True) if flag]
    matrices = sum(not _is_bias(call, shape) for shape in wanted)
    biases = len(wanted) - matrices
    summed = (call.result_bytes,) * biases
    return Work(matrices * forward_flops(call), matrices * _all_bytes(call), len(wanted), summed)


def _is_bias(call: WorkKey, shape: Shape) -> bool:
    return len(shape) == 1 and len(call.operand_shapes) > 2


def _attention_flops(call: WorkKey) -> int:
    """Scores and their product with the values; a causal mask leaves half of both to do."""
    query, key, value = call.operand_shapes[:3]
    products = 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return products // 2 if call.detail == "causal" else products


def _attention_gradient(call: WorkKey) -> Work:
    """Five products instead of two: the scores are computed again (FlashAttention-2, section 3.1)."""
    return Work(5 * forward_flops(call) // 2, 2 * _all_bytes(call), 1)


# Memory-bound operators -------------------------------------------------


def _memory_gradient(call: WorkKey) -> Work:
    """For each differentiable operand a gradient and a saved value are read, a gradient is written."""
    wanted = _differentiable_bytes(call)
    return Work(0, len(wanted) * call.result_bytes + 2 * sum(wanted), len(wanted))


def _sum_gradient(call: WorkKey) -> Work:
    """Of an addition: the gradient passes through; only an operand that was broadcast has it summed."""
    summed = [size for size in _differentiable_bytes(call) if size != call.result_bytes]
    return Work(0, len(summed) * call.result_bytes + sum(summed), len(summed))


def _normalization_gradient(call: WorkKey) -> Work:
    """Gradient and input are read for the statistics and again for the result; weight sums take no more.

    Where only the weight's gradient is asked for, both are read once.
    """
    activation = call.operand_bytes[0]
    return Work(0, (2 if call.differentiable[0] else 1) * activation + call.result_bytes, 1)


def _pool_flops(call: WorkKey) -> int:
    """One for each element of each window; of an adaptive pool, windows part the operand."""
    made = math.prod(call.result_shapes[0])
    return made * int(call.detail) if call.detail else max(made, math.prod(call.operand_shapes[0]))


def _max_pool_gradient(call: WorkKey) -> Work:
    """Each result's gradient is added where its largest element was, in zeros of the operand's size."""
    return Work(math.prod(call.result_shapes[0]), sum(_differentiable_bytes(call)) + call.result_bytes, 1)


def _avg_pool_gradient(call: WorkKey) -> Work:
    """Each result's gradient is added to all of its window."""
    return Work(_pool_flops(call), sum(_differentiable_bytes(call)) + call.result_bytes, 1)


def _reduction_gradient(call: WorkKey) -> Work:
    """The gradient is expanded to the operand."""
    return Work(0, sum(_differentiable_bytes(call)) + call.result_bytes, 1)


def _row_bytes(call: WorkKey) -> int:
    """Only the rows that are looked up are read, not the table."""
    return 2 * call.result_bytes


def _lookup_bytes(call: WorkKey) -> int:
    """As much is read as is written, and the indices."""
    return 2 * call.result_bytes + sum(call.operand_bytes[1:])


def _lookup_gradient(call: WorkKey) -> Work:
    """The table's gradient is cleared and the looked-up rows are added to it."""
    return Work(0, sum(_differentiable_bytes(call)) + 3 * call.result_bytes, 2)


def _slice_gradient(call: WorkKey) -> Work:
    """A slice's gradient is written into zeros of the operand's size."""
    return Work(0, 2 * call.result_bytes + sum(_differentiable_bytes(call)), 2)


def _cross_entropy_bytes(call: WorkKey) -> int:
    """Logits are read and log-probabilities written; the rest is a row's scalar."""
    return 2 * call.operand_bytes[0]


def _cross_entropy_gradient(call: WorkKey) -> Work:
    """A sparse gradient is written dense, and read with the log-probabilities to write the logits'."""
    return Work(0, 5 * call.operand_bytes[0], 2)


def _writes(call: WorkKey) -> int:
    return call.result_bytes


def _copy_gradient(call: WorkKey) -> Work:
    return Work(0, 2 * sum(_differentiable_bytes(call)), 1)


def _no_gradient(call: WorkKey) -> Work:
    return NO_WORK


def _experts_flops(call: WorkKey) -> int:
    """Each token's choices go through two products each; a slice of the experts gets its share of the choices."""
    ids, up, down = call.operand_shapes[1], call.operand_shapes[3], call.operand_shapes[4]
    share = up[0] / int(call.detail or up[0])
    return int(2 * math.prod(ids) * (up[1] * up[2] + down[1] * down[2]) * share)


def _experts_gradient(call: WorkKey) -> Work:
    """Two products for each of the forward's, group by group."""
    return Work(2 * forward_flops(call), 2 * _all_bytes(call), 4 * call.operand_shapes[3][0])


VIEW = Operator("view")
POINTWISE = Operator("pointwise")
_SUM = Operator("pointwise", backward=_sum_gradient)
_TRANSCENDENTAL = Operator("transcendental")
_GELU = Operator("gelu")
_GELU_TANH = Operator("gelu_tanh")
_SILU = Operator("silu")
_REDUCTION = Operator("reduction", backward=_reduction_gradient)
_NORMALIZATION = Operator("normalization", backward=_normalization_gradient)
_RMS_NORM = Operator("rms_norm", backward=_normalization_gradient)
_BATCH_NORM = Operator("batch_norm", backward=_normalization_gradient)
_BATCH_NORM_INFERENCE = Operator("batch_norm_inference", backward=_normalization_gradient)
_MAX_POOL = Operator("max_pool", _pool_flops, backward=_max_pool_gradient)
_AVG_POOL = Operator("avg_pool", _pool_flops, backward=_avg_pool_gradient)
_STRAIGHT_COPY = Operator("straight_copy", backward=_copy_gradient)
_COPY = Operator("copy", backward=_copy_gradient)
_CREATION = Operator("copy", moved=_writes, backward=_no_gradient)
_LINEAR = Operator("matmul", _linear_flops, backward=_matrix_gradient)
_ADDMM = Operator("matmul", _addmm_flops, backward=_matrix_gradient)
_CONVOLUTION = Operator("convolution", _convolution_flops, backward=_matrix_gradient)
_TRANSPOSED = Operator("convolution", _transposed_convolution_flops, backward=_matrix_gradient)
_EXPERTS = Operator("matmul", _experts_flops, backward=_experts_gradient)
_ATTENTION = Operator("attention", _attention_flops, backward=_attention_gradient)
_EINSUM = Operator("matmul", _einsum_flops, backward=_matrix_gradient)
_SOFTMAX = Operator("softmax")
_EMBEDDING = Operator("gather", moved=_row_bytes, backward=_lookup_gradient)
_LOOKUP = Operator("gather", moved=_lookup_bytes, backward=_lookup_gradient)
_SCATTER = Operator("gather")
_CROSS_ENTROPY = Operator("cross_entropy", moved=_cross_entropy_bytes, backward=_cross_entropy_gradient)
_NLL = Operator("gather", moved=_lookup_bytes, backward=_reduction_gradient)
_DROPOUT = Operator("dropout")
_SLICE = Operator("view", moved=lambda call: 0, flops=lambda call: 0, backward=_slice_gradient)


def _rows(names: str, row: Operator) -> dict[str, Operator]:
    return dict.fromkeys(names.split(), row)


OPERATORS: dict[str, Operator] = {
    **_rows("linear mm bmm matmul mv dot", _LINEAR),
    **_rows("addmm baddbmm addmv", _ADDMM),
    **_rows("einsum", _EINSUM),
    **_rows("routed_experts", _EXPERTS),
    **_rows("grouped_mm_fallback _grouped_mm", _LINEAR),
    **_rows("conv1d conv2d conv3d convolution _convolution", _CONVOLUTION),
    **_rows("conv_transpose1d conv_transpose2d conv_transpose3d", _TRANSPOSED),
    **_rows("scaled_dot_product_attention _scaled_dot_product_flash_attention", _ATTENTION),
    **_rows("_scaled_dot_product_efficient_attention", _ATTENTION),
    **_rows("_scaled_dot_product_flash_attention_for_cpu", _ATTENTION),
    **_rows("add sub rsub add_ sub_ __add__ __sub__", _SUM),
    **_rows("gelu", _GELU),
    **_rows("gelu_tanh", _GELU_TANH),
    **_rows("silu", _SILU),
    **_rows("tanh sigmoid exp exp2 expm1 log log1p log2 sin cos tan erf pow", _TRANSCENDENTAL),
    **_rows("softplus mish elu hardswish selu log_sigmoid atan2 asin acos atan sinh cosh", _TRANSCENDENTAL),
    **_rows("sqrt rsqrt reciprocal", _TRANSCENDENTAL),
    **_rows("layer_norm native_layer_norm group_norm native_group_norm", _NORMALIZATION),
    **_rows("rms_norm", _RMS_NORM),
    **_rows("batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit", _BATCH_NORM),
    **_rows("native_batch_norm instance_norm _batch_norm_with_update_functional", _BATCH_NORM),
    **_rows("_native_batch_norm_legit_no_training", _BATCH_NORM_INFERENCE),
    **_rows("softmax _softmax log_softmax _log_softmax logsumexp", _SOFTMAX),
    **_rows("sum mean amax amin max min var std prod norm linalg_vector_norm argmax argmin all", _REDUCTION),
    **_rows("any var_mean std_mean cumsum cumprod topk sort", _REDUCTION),
    **_rows("max_pool1d max_pool2d max_pool3d max_pool2d_with_indices adaptive_max_pool2d", _MAX_POOL),
    **_rows("avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool2d", _AVG_POOL),
    **_rows("embedding _embedding_bag", _EMBEDDING),
    **_rows("index index_select gather take_along_dim", _LOOKUP),
    **_rows("scatter scatter_add index_add index_put index_copy scatter_reduce", _SCATTER),
    **_rows("cross_entropy_loss", _CROSS_ENTROPY),
    **_rows("nll_loss nll_loss_forward", _NLL),
    **_rows("dropout native_dropout bernoulli rand rand_like randn randn_like", _DROPOUT),
    **_rows("cat", _STRAIGHT_COPY),
    **_rows("clone contiguous _to_copy to stack repeat repeat_interleave roll flip pad", _COPY),
    **_rows("constant_pad_nd copy slice_scatter select_scatter masked_fill tril triu", _COPY),
    **_rows("reflection_pad2d replication_pad2d", _COPY),
    **_rows("zeros ones full empty arange zeros_like ones_like full_like empty_like new_zeros", _CREATION),
    **_rows("new_ones new_full new_empty scalar_tensor eye linspace one_hot", _CREATION),
    **_rows("view reshape _unsafe_view flatten unflatten permute transpose t mT expand expand_as", VIEW),
    **_rows("unsqueeze squeeze alias detach view_as movedim swapaxes broadcast_to numpy_T real imag", VIEW),
    **_rows("lift_fresh_copy _assert_tensor_metadata sym_size identity overwritten", VIEW),
    **_rows("slice select narrow split split_with_sizes chunk unbind diagonal unfold as_strided", _SLICE),
}
