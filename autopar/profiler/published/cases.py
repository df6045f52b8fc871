"""Rows of tables of operators' times as questions to the cost model: what was run, and how long it took.

A row's columns say what it is (`READERS`); rows of kinds that the model does not know are passed over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from autopar.cost.compute import node_time_ns
from autopar.cost.profile import Profile
from autopar.ir.graph import DTYPE_BYTES, Node, Ref, Tensor
from autopar.ir.placement import Shape
from autopar.ops.table import operator
from autopar.profiler.published.attention import COLUMNS as ATTENTION
from autopar.profiler.published.attention import FLASH2, kernel_of
from autopar.profiler.published.eager import floor_ns, row_ns
from autopar.profiler.published.products import DTYPES, SIZES, is_trusted
from autopar.profiler.published.rows import Row, shape_of
from autopar.profiler.published.tiles import FLASH2 as FLASH2_ROWS
from autopar.profiler.published.tiles import MASKED


class MeasuredCall(NamedTuple):
    """A measured operator: what it is, and what the cost model is asked."""

    family: str
    size: str
    key: tuple[int, ...]
    node: Node
    operands: tuple[Shape, ...]
    result: Shape
    gpu: str
    dtype: str
    software: str
    measured_ns: float
    wanted: tuple[bool, ...] = ()  # operands that a gradient is made of: all
    direction: int = 0
    kernel: str = ""
    op: str = ""  # as rows of eager calls name it
    is_alone: bool = True  # not of several kernels or of batches, which say nothing of how far single products are

    @property
    def floor_ns(self) -> float:
        """What its row says however short the kernel is."""
        return floor_ns(self.gpu, self.op, self.software) if self.op else 0.0

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """By name, of any shape."""
        return _tensors(self.node, self.dtype, self.wanted)

    @property
    def operators(self) -> str:
        """The family of its operator in a profile."""
        return operator(self.node.op).work.family

    @property
    def is_trusted(self) -> bool:
        """Whether its software's figures of that GPU can be."""
        return bool(self.kernel) or is_trusted({"gpu": self.gpu, "software": self.software, "dtype": self.dtype})

    def predicted_ns(self, profile: Profile) -> int:
        """What the row says where the kernel takes what the cost model predicts."""
        kernel = node_time_ns(self.node, self.operands, (self.result,), self.tensors, profile)[self.direction]
        return round(row_ns(kernel, self.floor_ns))


@cache
def _tensors(node: Node, dtype: str, wanted: tuple[bool, ...]) -> Mapping[str, Tensor]:
    flags = dict(zip(node.operands, wanted, strict=False))
    names = (*node.operands, *node.results)
    return {name: Tensor(name, (1,), dtype, flags.get(name, True)) for name in names}


# Rows -------------------------------------------------------------------

LINEAR = Node("y", "aten.linear.default", (Ref("x"), Ref("w")), (), ("y",))
MATMUL = Node("y", "aten.matmul.default", (Ref("x"), Ref("w")), (), ("y",))
GROUPED = Node("y", "aten._grouped_mm.default", (Ref("x"), Ref("w")), (), ("y",))
GRADIENTS = {"grad_input": (True, False), "grad_weight": (False, True)}


@cache
def _routed(experts: int) -> Node:
    operands = tuple(Ref(name) for name in ("x", "ids", "weights", "up", "down"))
    return Node("y", "autopar.routed_experts.default", (*operands, "silu", True, experts), (), ("y",))


def _attention_node(causal: bool) -> Node:
    operands = (Ref("q"), Ref("k"), Ref("v"))
    return Node("y", "aten.scaled_dot_product_attention.default", operands, (("is_causal", causal),), ("y",))


ATTENTION_NODES = {causal: _attention_node(causal) for causal in (False, True)}
MASKED_NODE = Node("y", "aten.scaled_dot_product_attention.default", tuple(map(Ref, "qkvm")), (), ("y",))
UNKNOWN_KERNELS = ("torch_efficient", "torch_math")  # that PyTorch runs where it has to, and no table knows
OWN_NAMES = {FLASH2_ROWS: FLASH2}  # of kernels in tables, by what they are called in rows


def _measured(row: Row) -> dict[str, Any]:
    dtype = DTYPES.get(row["dtype"], row["dtype"])
    named = {"gpu": row["gpu"], "dtype": dtype, "software": row.get("software") or ""}
    measured_ns = 1000 * float(row["time_us"])
    if not 0 < measured_ns < math.inf:
        raise ValueError(f"time_us: expected a positive number, found {row['time_us']!r}")
    return {**named, "measured_ns": measured_ns}


def _product(row: Row) -> MeasuredCall | None:
    m, n, k = shape = shape_of(row, SIZES)
    size = "m, n, k of 256 or more" if min(shape) >= 256 else "less"
    return MeasuredCall("products", size, shape, LINEAR, ((m, k), (n, k)), (m, n), op="linear", **_measured(row))


def _batched_product(row: Row) -> MeasuredCall:
    batch, m, n, k = shape = shape_of(row, ("batch", *SIZES))
    operands = ((batch, m, k), (batch, k, n))
    size = "m, n, k of 256 or more" if min(m, n, k) >= 256 else "less"
    told = _measured(row)
    return MeasuredCall(
        "products, batched", size, shape, MATMUL, operands, (batch, m, n), op="bmm", is_alone=False, **told
    )


def _module_product(row: Row) -> MeasuredCall | None:
    """Of a model's layers, in PyTorch."""
    if row["kind"] != "linear":
        return None
    m, n, k = shape = shape_of(row, ("rows", "n", "k"))
    return MeasuredCall(
        "products, modules", "", shape, LINEAR, ((m, k), (n, k)), (m, n), is_alone=False, **_measured(row)
    )


def _grouped_product(row: Row) -> MeasuredCall | None:
    groups, m, n, k = shape = shape_of(row, ("groups", "m_per_group", "n", "k"))
    if row["stage"] != "forward":
        return None
    operands = (groups * m, k), (groups, k, n)
    return MeasuredCall(
        "products, grouped", "", shape, GROUPED, operands, (groups * m, n), is_alone=False, **_measured(row)
    )


MOE = ("tokens", "hidden", "moe_ffn", "top_k", "experts", "tp", "ep")


def _routed_experts(row: Row) -> MeasuredCall:
    """A whole layer of gated experts, of which a GPU has its share."""
    tokens, hidden, ffn, top_k, experts, tp, ep = shape = shape_of(row, MOE)
    own, width = max(1, experts // ep), max(1, ffn // tp)
    choices = (tokens, top_k)
    operands = ((tokens, hidden), choices, choices, (own, hidden, 2 * width), (own, width, hidden))
    node = _routed(experts)
    return MeasuredCall("experts", "", shape, node, operands, (tokens, hidden), is_alone=False, **_measured(row))


def _trained_product(row: Row) -> MeasuredCall | None:
    """Of a layer's three: the gradients are those of a product of other sizes."""
    m, n, k = shape_of(row, SIZES)
    if row["batch"] != "1":
        return None
    family = f"products, {row['role'].replace('_', ' of the ')}"
    if row["role"] == "forward":
        return _product(row)._replace(family=family)  # type: ignore[union-attr] # never None
    rows, features, width = (m, k, n) if row["role"] == "grad_input" else (k, m, n)
    wanted = GRADIENTS[row["role"]]
    shapes = ((rows, width), (features, width)), (rows, features)
    return MeasuredCall(family, "", (m, n, k), LINEAR, *shapes, wanted=wanted, direction=1, **_measured(row))


def _attention(row: Row) -> MeasuredCall | None:
    shape = shape_of(row, ATTENTION)
    batch, queries, keys, heads, shared, width, _ = shape
    q, kv = (batch, heads, queries, width), (batch, shared, keys, width)
    size = "above 1 ms" if float(row["time_us"]) > 1000 else "20 µs to 1 ms" if float(row["time_us"]) > 20 else "less"
    if kernel_of(row) in UNKNOWN_KERNELS:
        return None
    node, operands, kind = _attended(row, (q, kv, kv))
    kernel = OWN_NAMES.get(kernel_of(row), kernel_of(row))
    return MeasuredCall(f"attention, {kind}", size, shape, node, operands, q, kernel=kernel, **_measured(row))


def _attended(row: Row, operands: tuple[Shape, ...]) -> tuple[Node, tuple[Shape, ...], str]:
    """The operator of a row of attention, its operands, and what hides keys from queries."""
    if row.get("kernel") == MASKED:
        query, key = operands[:2]
        return MASKED_NODE, (*operands, (query[0], 1, query[2], key[2])), "masked"
    return ATTENTION_NODES[row["causal"] == "1"], operands, "causal" if row["causal"] == "1" else "no mask"


def _trained_attention(row: Row) -> MeasuredCall | None:
    columns = ("batch", "seq", "heads", "kv_heads", "qk_head_dim", "v_head_dim", "causal")
    batch, length, heads, shared, width, values, _ = shape = shape_of(row, columns)
    q, k, v = ((batch, count, length, wide) for count, wide in ((heads, width), (shared, width), (shared, values)))
    kernel = row.get("kernel", "")
    if kernel in UNKNOWN_KERNELS:
        return None
    node, operands, _ = _attended(row, (q, k, v))
    told = {"direction": int(row["pass"] == "backward"), "kernel": OWN_NAMES.get(kernel, kernel), **_measured(row)}
    wanted = (True, True, True, False)[: len(operands)]
    family = f"attention, trained, {'masked, ' if kernel == MASKED else ''}{row['pass']}"
    return MeasuredCall(family, "", shape, node, operands, (*q[:3], values), wanted=wanted, **told)


#: operators that move bytes and compute little: (name in aten, number of operands)
MOVING = {
    **{op: (f"{op}.Tensor", 2) for op in ("add", "mul", "div")}, "pow": ("pow.Tensor_Tensor", 2),
    "add_scalar": ("add.Tensor", 1), "gelu": ("gelu.default", 1), "relu": ("relu.default", 1),
    "tanh": ("tanh.default", 1), "softmax": ("_softmax.default", 1), "layer_norm": ("layer_norm.default", 1),
    "rms_norm": ("rms_norm.default", 1), "embedding": ("embedding.default", 2),
    "silu": ("silu.default", 1), "dropout": ("native_dropout.default", 1), "clone": ("clone.default", 1),
    "sum": ("sum.dim_IntList", 1), "cross_entropy": ("cross_entropy_loss.default", 2),
}  # fmt: skip
LOOKUPS = {"embedding": (True, False), "cross_entropy": (True, False)}  # of which operands there are gradients
#: operators whose backward pass is a kernel of its own, and is measured
MOVED_BACK = frozenset(
    {
        "mul",
        "gelu",
        "relu",
        "tanh",
        "silu",
        "softmax",
        "layer_norm",
        "rms_norm",
        "dropout",
        "embedding",
        "cross_entropy",
    }
)
MOVING_NODES = {
    op: Node("y", f"aten.{name}", tuple(Ref(x) for x in "ab"[:count]), (), ("y",))
    for op, (name, count) in MOVING.items()
}
VOCABULARY = 32_000  # of an embedding, whose rows do not say it: only what is looked up is read


def _moving(row: Row) -> MeasuredCall | None:
    op, is_backward = row["op"], row["pass"] == "backward"
    if op not in MOVING or (is_backward and op not in MOVED_BACK):
        return None
    shape, count = shape_of(row, ("rows", "cols")), MOVING[op][1]
    size = "of 32 MiB or more" if shape[0] * shape[1] * DTYPE_BYTES[row["dtype"]] >= 1 << 25 else "less"
    operands: tuple[Shape, ...] = (shape,) * count
    result = {"sum": shape[:1], "cross_entropy": ()}.get(op, shape)
    if op in LOOKUPS:
        operands = (shape if op == "cross_entropy" else (VOCABULARY, shape[1]), shape[:1])
    family = f"memory-bound, {op}{', backward' if is_backward else ''}"
    told = {"op": op, "wanted": LOOKUPS.get(op, ()), "direction": int(is_backward), **_measured(row)}
    return MeasuredCall(family, size, shape, MOVING_NODES[op], operands, result, **told)


#: what a row's columns say it is
READERS: tuple[tuple[set[str], Callable[[Row], MeasuredCall | None]], ...] = (
    ({"role", "layout", *SIZES}, _trained_product),
    ({"pass", "qk_head_dim"}, _trained_attention),
    ({*ATTENTION, "kernel"}, _attention),
    ({"op", "rows", "cols"}, _moving),
    ({"module", "rows", "n", "k"}, _module_product),
    ({"groups", "m_per_group", "stage"}, _grouped_product),
    (set(MOE), _routed_experts),
    ({"batch", *SIZES}, _batched_product),
    (set(SIZES), _product),
)


def cases_of(rows: Iterable[Row], not_read: Counter[str] | None = None) -> Iterator[MeasuredCall]:
    """What the rows measured, as far as it is known here and in a dtype that the cost model has. not_read: takes why
    others are passed over, since no row ends the rest."""
    for row in rows:
        try:
            case, reason = _case_of(row), ""
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:  # whatever a file may say
            case, reason = None, f"{type(error).__name__}: {error}"
        if case is not None:
            yield case
        elif reason and not_read is not None:
            not_read[reason] += 1


def _case_of(row: Row) -> MeasuredCall | None:
    reader = next((reader for columns, reader in READERS if columns <= row.keys()), None)
    if reader is None or DTYPES.get(row["dtype"], row["dtype"]) not in DTYPE_BYTES:
        return None
    case = reader(row)
    if case is not None and min(math.prod(shape) for shape in case.operands) <= 0:
        raise ValueError("a size of 0")
    return case
