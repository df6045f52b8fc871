"""What each kind of operator does: its family, floating-point operations, and the bytes that it moves, both ways.

A row of the table (`table.OPERATORS`) has one of these kinds. An operator outside the table is taken to read its
operands and write its results once (the `pointwise` family), like most of the long tail. Shapes are of one rank's
slices, so the work is one rank's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from autopar.ir.exchange_table import ExchangeTable
from autopar.ir.graph import BY_LOAD, EXPECTED, REPLICAS, Node
from autopar.ir.placement import Shape
from autopar.ir.routing import Routing
from autopar.ops.call import argument, base_name
from autopar.ops.loads import busiest
from autopar.runtime.lowering.band import seen_pairs


class WorkKey(NamedTuple):
    """All that the cost of an operator depends on: the memo key of `cost.compute`."""

    op: str
    operand_shapes: tuple[Shape, ...]
    result_shapes: tuple[Shape, ...]
    operand_itemsizes: tuple[int, ...]
    result_itemsizes: tuple[int, ...]
    differentiable: tuple[bool, ...]
    dtype: str
    detail: str = ""
    """What the kind's `detail` says of the arguments: an einsum's equation, a pool's window."""

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


class Product(NamedTuple):
    """`batch` products of (m, k) and (k, n)."""

    batch: int
    m: int
    n: int
    k: int
    is_transposed: bool = False  # the second operand is stored as (n, k)
    copied: tuple[int, int] = (0, 0)  # bytes of the operands that are copied to be multiplied
    left: int = 0  # the position of the first of them among the call's operands

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


class Several(NamedTuple):
    """Products of matrices that one call is, each (layout, m, n, k) as `cost.kernels` knows them; bytes copied besides,
    and those of gradients that are summed over rows."""

    products: tuple[tuple[str, int, int, int], ...]
    copied_bytes: int = 0
    summed_bytes: tuple[int, ...] = ()


CountFlops = Callable[[WorkKey], int]
CountBytes = Callable[[WorkKey], int]
CountWork = Callable[[WorkKey], Work]


class WorkKind(NamedTuple):
    """How the work of a kind of operator is counted. `family` names its curve in a cost profile.

    flops: of the forward pass; one a result element where None. moved: bytes of the forward pass; all operands and
    results where None. gradient: the work of the gradients of the differentiable operands; a read of the incoming
    gradient and a saved value and a write for each where None. detail: what the work depends on beside shapes.
    """

    family: str
    flops: CountFlops | None = None
    moved: CountBytes | None = None
    gradient: CountWork | None = None
    detail: Callable[[Node], str] | None = None
    product: Callable[[WorkKey], Product | None] | None = None
    """The product of matrices that a call is; None where it is none, or one that depends on values."""
    kernel: Callable[[Node], str] | None = None
    """The operator whose row has the call's work, where arguments choose between kernels."""
    pieces: Callable[[WorkKey], int] | None = None
    """The kernels of the forward pass; one where None."""
    several: Callable[[WorkKey, int], Several] | None = None
    """The products of a direction, where they are more than one and its gradients'."""
    multiplied: int | None = None
    """The operand whose dtype is that of the products, where what is made of them may have another."""

    def forward_flops(self, call: WorkKey) -> int:
        """Floating-point operations of the forward pass."""
        if self is VIEW or not call.result_shapes:
            return 0
        return self.flops(call) if self.flops else math.prod(call.result_shapes[0])

    def forward(self, call: WorkKey) -> Work:
        """FLOPs and bytes of the forward pass."""
        if self is VIEW:
            return NO_WORK
        return Work(self.forward_flops(call), (self.moved or _all_bytes)(call), self.pieces(call) if self.pieces else 1)

    def backward(self, call: WorkKey) -> Work:
        """FLOPs and bytes of the gradients of the differentiable operands; none when there are none."""
        if self is VIEW or not any(call.differentiable):
            return NO_WORK
        return (self.gradient or _memory_gradient)(call)


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
    return 2 * math.prod(sizes_of(inputs, call.operand_shapes).values())


def sizes_of(terms: Sequence[str], shapes: Sequence[Shape]) -> dict[str, int]:
    """The length of each label of an equation of einsum."""
    pairs = zip(terms, shapes, strict=True)
    return {label: size for labels, shape in pairs for label, size in zip(labels, shape, strict=True)}


def _linear_product(call: WorkKey) -> Product:
    x, (features, width) = call.operand_shapes[:2]
    return Product(1, math.prod(x[:-1]), features, width, is_transposed=True)


def _matmul_product(call: WorkKey) -> Product | None:
    return _product(*call.operand_shapes[:2])


def _addmm_product(call: WorkKey) -> Product | None:
    found = _product(*call.operand_shapes[1:3])
    return found and found._replace(left=1)


def _product(left: Shape, right: Shape) -> Product | None:
    if len(left) < 2 or len(right) < 2:
        return None
    if len(right) == 2:
        return Product(1, math.prod(left[:-1]), right[-1], right[-2])
    return Product(math.prod(right[:-2]), left[-2], right[-1], right[-2])


def _einsum_product(call: WorkKey) -> Product | None:
    """Labels in both operands and the result are batch dims; in both but not the result, summed."""
    equation = call.detail.replace(" ", "")
    inputs, _, result = equation.partition("->")
    names = inputs.split(",")
    if len(names) != 2 or "." in equation or list(map(len, names)) != list(map(len, call.operand_shapes)):
        return None
    sizes = sizes_of(names, call.operand_shapes)
    left, right = names
    groups = (
        [x for x in left if x in right and x in result],
        [x for x in left if x not in right],
        [x for x in right if x not in left],
        [x for x in left if x in right and x not in result],
    )
    batch, m, n, k = (math.prod(sizes[label] for label in group) for group in groups)
    copied = [
        0 if _lies_in_groups(labels, [groups[0], own, groups[3]], sizes) else num_bytes
        for labels, own, num_bytes in zip(names, groups[1:3], call.operand_bytes, strict=True)
    ]
    return Product(batch, m, n, k, copied=(copied[0], copied[1]))


def _lies_in_groups(labels: str, groups: Sequence[Sequence[str]], sizes: dict[str, int]) -> bool:
    """Whether each group's dims lie next to each other in a contiguous operand, in one order for both operands."""
    order = [label for label in labels if sizes[label] > 1]
    for group in groups:
        wide = [label for label in group if sizes[label] > 1]
        if wide and "".join(wide) not in "".join(order):
            return False
    return True


def _products(family: str, flops: CountFlops, **others: Any) -> WorkKind:
    """Backward one product like the forward's for each differentiable matrix; a bias is summed from the gradient."""

    def gradient(call: WorkKey) -> Work:
        wanted = [shape for shape, flag in zip(call.operand_shapes, call.differentiable, strict=True) if flag]
        matrices = sum(not _is_bias(call, shape) for shape in wanted)
        summed = (call.result_bytes,) * (len(wanted) - matrices)
        return Work(matrices * flops(call), matrices * _all_bytes(call), len(wanted), summed)

    return WorkKind(family, flops, gradient=gradient, **others)


def _is_bias(call: WorkKey, shape: Shape) -> bool:
    return len(shape) == 1 and len(call.operand_shapes) > 2


def _equation(node: Node) -> str:
    return str(node.args[0])


def _attention_flops(call: WorkKey) -> int:
    """Scores and their product with the values; a causal mask leaves half of both to do."""
    query, _, value = call.operand_shapes[:3]
    kind, length = attended(call)
    products = 2 * math.prod(query[:-1]) * length * (query[-1] + value[-1])
    return products // 2 if kind == "causal" else products


def attended(call: WorkKey) -> tuple[str, int]:
    """Of attention: whether it is "causal", "masked" by a tensor or "full", and how many keys there are, on all ranks
    together; over a window, in it: that is computed in triangles as long."""
    kind, _, length = call.detail.partition(" ")
    return kind or "full", int(length.partition(" ")[0] or call.operand_shapes[1][-2])


def _window_flops(call: WorkKey) -> int:
    """Of each query and what it sees; of those at the end, which see most, where ranks have a part of the sequence."""
    query, _, value = call.operand_shapes[:3]
    window, length = (int(number) for number in call.detail.split(" ")[1:3])
    seen = seen_pairs((max(0, length - query[-2]), length), (0, length), window)
    return 2 * math.prod(query[:-2]) * seen * (query[-1] + value[-1])


def _window_gradient(call: WorkKey) -> Work:
    """As of all attention."""
    return Work(5 * _window_flops(call) // 2, 2 * _all_bytes(call), 1)


def has_documents(node: Node) -> bool:
    """Whether attention over a window is told documents, after the sinks where it has such."""
    return len(node.operands) - (base_name(node.op) == "sink_attention") > 3


def _seen_window(node: Node) -> str:
    """How long triangles are, and the sequence; by numbers of documents, kernels read what is seen."""
    given = dict(node.kwargs)
    kind = "masked" if has_documents(node) else "causal"
    return f"{kind} {min(given['window'], given['length'])} {given['length']}"


def _attention_gradient(call: WorkKey) -> Work:
    """Five products instead of two: the scores are computed again (FlashAttention-2, section 3.1)."""
    return Work(5 * _attention_flops(call) // 2, 2 * _all_bytes(call), 1)


def _mask(node: Node) -> str:
    """Under a tensor all scores are computed, by kernels that read it."""
    if argument(node, 5, "is_causal", False):
        return "causal"
    return "" if argument(node, 3, "attn_mask", None) is None else "masked"


def _mask_over(node: Node) -> str:
    """With the number of keys of all ranks."""
    return f"{_mask(node) or 'full'} {dict(node.kwargs)['length']}"


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


def _window(node: Node) -> str:
    """Elements of a pool's window: one length may stand for that of every dim."""
    given = argument(node, 1, "kernel_size", 1)
    lengths = given if isinstance(given, tuple) else (given,)
    dims = int(base_name(node.op).partition("pool")[2][0])
    return str(math.prod(lengths) if len(lengths) == dims else int(lengths[0] ** dims))


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


def _cached_bytes(call: WorkKey) -> int:
    """What rows replace is gathered, chosen among for rows that stay as they are, and scattered: 2 + 3 + 2 passes over
    the rows (`rt.write_rows`)."""
    return 7 * call.operand_bytes[2] + call.operand_bytes[1] + call.operand_bytes[3]


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


def _gelu_kernel(node: Node) -> str:
    is_tanh = argument(node, 1, "approximate", "none") == "tanh"
    return "aten.gelu_tanh.default" if is_tanh else node.op


def _no_gradient(call: WorkKey) -> Work:
    return NO_WORK


def _nothing(call: WorkKey) -> int:
    return 0


def _experts_flops(call: WorkKey) -> int:
    """Each row goes through two products."""
    up, down = call.operand_shapes[3:5]
    return int(2 * routed_rows(call) * (math.prod(up[1:]) + math.prod(down[1:])))


def routed_rows(call: WorkKey) -> float:
    """Rows (a token's choice each) of the rank with the most of them, in the mean: the others wait for it."""
    (tokens, choices), held = call.operand_shapes[1], call.operand_shapes[3][0]
    num_experts, routing = routed(call.detail).num_experts, routed(call.detail).routing
    num_experts = num_experts or held
    ranks = -(-num_experts // max(1, held))
    return busiest(routing, tokens, choices, num_experts, ranks, routed(call.detail).replicas).mean


def computed_experts(call: WorkKey) -> int:
    """The experts that a rank has, and the replicas of others'."""
    held, detail = call.operand_shapes[3][0], routed(call.detail)
    return held + (detail.replicas if held < detail.num_experts else 0)


class RoutedDetail(NamedTuple):
    """What the cost of routed experts depends on beside shapes. num_experts: 0 where it is not said; chunks: in which
    their rows come, unless that depends on the load; how tokens choose them; replicas: of so many of them, where ranks
    share them."""

    num_experts: int
    chunks: int
    routing: Routing
    by_load: ExchangeTable | None
    replicas: int = 0


@lru_cache(maxsize=64)
def routed(detail: str) -> RoutedDetail:
    """What `_num_experts` says, read."""
    numbers, _, routing = detail.partition(" ")
    number, chunks, table, replicas = (*numbers.split("/"), "", "", "")[:4]
    by_load = ExchangeTable.parse(table) if table else None
    return RoutedDetail(int(number or 0), int(chunks or 1), Routing.parse(routing), by_load, int(replicas or 0))


def routed_chunks(call: WorkKey) -> int:
    """In how many chunks rows come, at the load that they are counted by."""
    detail = routed(call.detail)
    return detail.chunks if detail.by_load is None else detail.by_load.at(math.ceil(routed_rows(call))).chunks


def _experts_moved(call: WorkKey) -> int:
    """The experts' parameters are read for each chunk of rows, those of replicas once."""
    held = sum(call.operand_bytes[3:])
    replicas = computed_experts(call) - call.operand_shapes[3][0]
    return _all_bytes(call) + (routed_chunks(call) - 1) * held + replicas * held // max(1, call.operand_shapes[3][0])


def _experts_gradient(call: WorkKey) -> Work:
    """Two products for each of the forward's, group by group, chunk by chunk."""
    held = call.operand_shapes[3][0]
    products = 4 * (held * routed_chunks(call) + computed_experts(call) - held)
    return Work(2 * _experts_flops(call), 2 * _experts_moved(call), products)


def _num_experts(node: Node) -> str:
    given, chunks = dict(node.kwargs), int(dict(node.kwargs).get("chunks", 1))
    table = given.get(BY_LOAD, "")
    number = f"{int(argument(node, 7, 'num_experts', 0))}{f'/{chunks}' if chunks > 1 or table else ''}"
    number += f"/{table}" if table else ""
    replicas = int(given.get(REPLICAS, 0))
    number += f"{'/' * (3 - number.count('/'))}{replicas}" if replicas else ""
    return _with_routing(number, given.get(EXPECTED, ""))


@lru_cache(maxsize=64)
def _with_routing(numbers: str, routing: str) -> str:
    """The same object each time, for it may be long, and is a part of keys."""
    return f"{numbers} {routing}".strip()


VIEW = WorkKind("view")
SLICE = WorkKind("view", _nothing, _nothing, _slice_gradient)
POINTWISE = WorkKind("pointwise")
SUM = WorkKind("pointwise", gradient=_sum_gradient)
TRANSCENDENTAL = WorkKind("transcendental")
GELU = WorkKind("gelu", kernel=_gelu_kernel)
GELU_TANH = WorkKind("gelu_tanh")
SILU = WorkKind("silu")
REDUCTION = WorkKind("reduction", gradient=_reduction_gradient)
NORMALIZATION = WorkKind("normalization", gradient=_normalization_gradient)
RMS_NORM = WorkKind("rms_norm", gradient=_normalization_gradient)
BATCH_NORM = WorkKind("batch_norm", gradient=_normalization_gradient)
BATCH_NORM_INFERENCE = WorkKind("batch_norm_inference", gradient=_normalization_gradient)
MAX_POOL = WorkKind("max_pool", _pool_flops, gradient=_max_pool_gradient, detail=_window)
ADAPTIVE_MAX_POOL = MAX_POOL._replace(detail=None)
AVG_POOL = WorkKind("avg_pool", _pool_flops, gradient=_avg_pool_gradient, detail=_window)
ADAPTIVE_AVG_POOL = AVG_POOL._replace(detail=None)
STRAIGHT_COPY = WorkKind("straight_copy", gradient=_copy_gradient)
COPY = WorkKind("copy", gradient=_copy_gradient)
CREATION = WorkKind("copy", moved=_writes, gradient=_no_gradient)
LINEAR = _products("matmul", _linear_flops, product=_linear_product)
MATMUL = _products("matmul", _linear_flops, product=_matmul_product)
GROUPED = _products("matmul", _linear_flops)
ADDMM = _products("matmul", _addmm_flops, product=_addmm_product)
EINSUM = _products("matmul", _einsum_flops, product=_einsum_product, detail=_equation)
CONVOLUTION = _products("convolution", _convolution_flops)
TRANSPOSED_CONVOLUTION = _products("convolution", _transposed_convolution_flops)
EXPERTS = WorkKind(
    "matmul", _experts_flops, _experts_moved, gradient=_experts_gradient, detail=_num_experts, multiplied=3
)  # fmt: skip
ATTENTION = WorkKind("attention", _attention_flops, gradient=_attention_gradient, detail=_mask)
CONTEXT_ATTENTION = ATTENTION._replace(detail=_mask_over)
WINDOW_ATTENTION = WorkKind("attention", _window_flops, gradient=_window_gradient, detail=_seen_window)
SOFTMAX = WorkKind("softmax")
ROWS = WorkKind("gather", moved=_row_bytes, gradient=_lookup_gradient)
LOOKUP = WorkKind("gather", moved=_lookup_bytes, gradient=_lookup_gradient)
SCATTER = WorkKind("gather")
CACHED_ROWS = WorkKind("gather", moved=_cached_bytes, gradient=_no_gradient)
CROSS_ENTROPY = WorkKind("cross_entropy", moved=_cross_entropy_bytes, gradient=_cross_entropy_gradient)
NLL = WorkKind("gather", moved=_lookup_bytes, gradient=_reduction_gradient)
DROPOUT = WorkKind("dropout")
