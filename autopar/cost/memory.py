"""What takes memory besides the values themselves: optimizer state, and what autograd saves for backward.

`SAVED` has a row an operator, keyed by the ATen name without namespace and overload, after torch's
derivatives.yaml. A view is saved by keeping its base alive: `storage_root` finds who owns the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, cast

from autopar.cost.compute import argument
from autopar.cost.layout import RESHAPES, copied_factors, copied_reshapes, copied_rows
from autopar.cost.work import base_name
from autopar.errors import PlanError
from autopar.ir.graph import DTYPE_BYTES, Graph, Node
from autopar.ir.placement import Shape

# Optimizer state ----------------------------------------


class Optimizer(NamedTuple):
    """State of an optimizer: whole copies of the parameter, whether a second moment is factored, and whether the state
    is float32 whatever the parameter is. is_elementwise: no element's update asks for others of its parameter, so that
    parameters may be stored together or in pieces.

    `temporaries`: tensors as large as a parameter that its update takes for a while, one parameter after the other
    (as torch does for DTensors): Adam's √v and √v / √(1 − β₂ᵗ). The last of them stays until the next parameter's.
    """

    copies: int
    factored: bool = False
    temporaries: int = 0
    in_float32: bool = False
    is_elementwise: bool = True


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(2, temporaries=2),
    "adam": Optimizer(2, temporaries=2),
    "adamw_master": Optimizer(3, in_float32=True),  # of 16-bit parameters: both moments and a float32 master copy
    "lamb": Optimizer(2, temporaries=2, is_elementwise=False),
    "lion": Optimizer(1, temporaries=1),
    "lars": Optimizer(1, temporaries=1, is_elementwise=False),
    "sgd_momentum": Optimizer(1),
    "adagrad": Optimizer(1, temporaries=1),
    "rmsprop": Optimizer(1, temporaries=1),
    "adafactor": Optimizer(0, factored=True, temporaries=2, is_elementwise=False),
    "sgd": Optimizer(0),
}


def optimizer_of(name: str | None) -> Optimizer:
    """The optimizer's row; None keeps no state. Raises PlanError for an unknown name."""
    if name is None or name == "none":
        return Optimizer(0)
    if name not in OPTIMIZERS:
        known = ", ".join(sorted(OPTIMIZERS))
        raise PlanError(f"expected an optimizer whose memory is known ({known}) or None, found {name!r}")
    return OPTIMIZERS[name]


def optimizer_state_bytes(name: str | None, shape: Shape, dtype: str = "float32") -> int:
    """Bytes of optimizer state of a parameter slice: torch keeps state in the parameter's own dtype, masters aside."""
    kind = optimizer_of(name)
    elements = kind.copies * math.prod(shape)
    if kind.factored:
        elements += math.prod(shape[:-1]) + math.prod((*shape[:-2], shape[-1])) if len(shape) > 1 else math.prod(shape)
    return elements * DTYPE_BYTES["float32" if kind.in_float32 else dtype]


def optimizer_workspace_bytes(name: str | None, shape: Shape, dtype: str = "float32") -> tuple[int, int]:
    """Bytes that updating a parameter slice takes for a while, and those of them that stay until the next one's."""
    size, temporaries = math.prod(shape) * DTYPE_BYTES[dtype], optimizer_of(name).temporaries
    return temporaries * size, size if temporaries else 0


def optimizer_moved_bytes(name: str | None, shape: Shape, dtype: str = "float32") -> int:
    """Bytes that one step reads and writes: gradient and parameter read, parameter written, state both."""
    if name is None or name == "none":
        return 0
    return 3 * math.prod(shape) * DTYPE_BYTES[dtype] + 2 * optimizer_state_bytes(name, shape, dtype)


# What a view shares ----------------------------------------

_VIEW_NAMES = """
    view reshape _unsafe_view flatten unflatten permute transpose t mT expand expand_as unsqueeze squeeze
    alias detach view_as movedim swapaxes broadcast_to numpy_T real imag
    slice select narrow split split_with_sizes
    chunk unbind diagonal unfold as_strided identity
"""
VIEWS = frozenset(_VIEW_NAMES.split())


def is_view(node: Node, graph: Graph) -> bool:
    """Whether the results share the memory of the first operand."""
    return base_name(node.op) in VIEWS and bool(node.operands) and node.name not in copied_reshapes(graph)


_PASSING_NAMES = """
    permute transpose t mT unsqueeze squeeze alias detach movedim swapaxes identity
    clone contiguous add sub cat stack sum
"""
_PASSING = RESHAPES | frozenset(_PASSING_NAMES.split())


def passes_gradient(node: Node, graph: Graph) -> tuple[bool, ...]:
    """Of each operand: whether its gradient is the result's, or a view of it, and takes no memory of its own."""
    if base_name(node.op) not in _PASSING or not node.results:
        return (False,) * len(node.operands)
    shape, name = graph.tensors[node.results[0]].shape, base_name(node.op)
    if name in ("add", "sub"):
        own = [graph.tensors[operand].shape == shape for operand in node.operands]
        return (own[0], *(same and name == "add" for same in own[1:]))
    return (True,) * len(node.operands)


def storage_root(tensor: str, graph: Graph) -> str:
    """The tensor that owns the memory: itself, or the base of a chain of views."""
    producer = graph.producers.get(tensor)
    while producer is not None and is_view(producer, graph):
        tensor = producer.operands[0]
        producer = graph.producers.get(tensor)
    return tensor


# What autograd saves ----------------------------------------


class Extra(NamedTuple):
    """A saved value that is no tensor of the graph: one element an index of some dims of tensor `like`.

    is_number: a plain number that torch has made a tensor of. Hooks on saved tensors are not called for it
    (torch/csrc/autograd/saved_variable.cpp), so that it stays where everything else is computed again.
    """

    like: str
    dims: tuple[int, ...]
    itemsize: int
    is_number: bool = False

    def num_bytes(self, shape: Shape) -> int:
        """Its bytes when `like` has the given (local) shape."""
        return math.prod(shape[dim] for dim in self.dims) * self.itemsize


Saved = str | Extra
SaveRule = Callable[[Node, Graph], list[Saved]]


def saved_values(node: Node, graph: Graph, device_type: str = "cuda") -> tuple[Saved, ...]:
    """What the operator keeps for its backward pass: operands and results by name, each once, and extras.

    Empty when no operand is differentiable. A name may be that of a view; see `storage_root`. `device_type` counts
    where a CPU has no fused kernel.
    """
    if not any(graph.tensors[name].differentiable for name in node.operands):
        return ()
    if not any(graph.tensors[name].differentiable for name in node.results):  # a comparison, an argmax
        return ()
    name = base_name(node.op)
    rule = SAVED.get(name, _everything)
    if device_type == "cpu":
        rule = SAVED_ON_CPU.get(name, rule)
    return tuple(dict.fromkeys(rule(node, graph)))


def _differentiable(name: str, graph: Graph) -> bool:
    return graph.tensors[name].differentiable


def _floating(name: str, graph: Graph) -> bool:
    return graph.tensors[name].dtype.startswith(("float", "bfloat", "complex"))


def _everything(node: Node, graph: Graph) -> list[Saved]:
    return [*node.operands, *node.results]


def _nothing(node: Node, graph: Graph) -> list[Saved]:
    return []


def _input(node: Node, graph: Graph) -> list[Saved]:
    return [node.operands[0]]


def _output(node: Node, graph: Graph) -> list[Saved]:
    return list(node.results[:1])


def _others(node: Node, graph: Graph) -> list[Saved]:
    """Each factor of a product is kept for the gradient of the other."""
    names = node.operands
    pairs = [(a, b) for i, a in enumerate(names) for j, b in enumerate(names) if i != j]
    return [kept for kept, wanted in pairs if _differentiable(wanted, graph)]


def _factors(node: Node, graph: Graph) -> list[Saved]:
    """Of einsum: the same, as its copy where it is copied."""
    kept = _others(node, graph)
    for position in copied_factors(graph).get(node.name, ()):
        name = node.operands[position]
        if name in kept:
            tensor = graph.tensors[name]
            kept[kept.index(name)] = Extra(name, tuple(range(len(tensor.shape))), tensor.itemsize)
    return kept


def _matrices(node: Node, graph: Graph) -> list[Saved]:
    """Of linear and convolution: input and weight, each for the gradient of the other; never the bias.

    An input that is copied for the product is kept as that copy.
    """
    left, right = node.operands[:2]
    tensor, kept_left = graph.tensors[left], cast("Saved", left)
    if node.name in copied_rows(graph):
        kept_left = Extra(left, tuple(range(len(tensor.shape))), tensor.itemsize)
    pairs = ((kept_left, right), (right, left))
    return [kept for kept, wanted in pairs if _differentiable(wanted, graph)]


def _added_matrices(node: Node, graph: Graph) -> list[Saved]:
    _, left, right = node.operands[:3]
    pairs = ((left, right), (right, left))
    return [kept for kept, wanted in pairs if _differentiable(wanted, graph)]


def _quotient(node: Node, graph: Graph) -> list[Saved]:
    if len(node.operands) < 2:
        return []
    left, right = node.operands
    return [left, right] if _differentiable(right, graph) else [right]


def _with_number(rule: SaveRule) -> SaveRule:
    """The rule, and a plain number as second factor: torch makes a tensor of it, on the CPU, in the number's own dtype
    (float64, int64 or bool), which the gradient of the first factor keeps. Scalar overloads keep no tensor."""

    def kept(node: Node, graph: Graph) -> list[Saved]:
        number = node.args[1] if node.op.endswith(".Tensor") and len(node.args) > 1 else None
        if not isinstance(number, (bool, int, float)):
            return rule(node, graph)
        return [*rule(node, graph), Extra(node.operands[0], (), 1 if isinstance(number, bool) else 8, is_number=True)]

    return kept


def _indices(node: Node, graph: Graph) -> list[Saved]:
    """Integer and boolean operands: what was looked up, or where."""
    return [name for name in node.operands if not _floating(name, graph)]


def _power(node: Node, graph: Graph) -> list[Saved]:
    return [*node.operands, *(node.results if len(node.operands) > 1 else ())]


def _input_and_output(node: Node, graph: Graph) -> list[Saved]:
    return [node.operands[0], *node.results[:1]]


def _dropout(node: Node, graph: Graph) -> list[Saved]:
    """The mask: a result of native_dropout; one byte an element else."""
    if argument(node, 2, "train", True) is False or argument(node, 1, "p", 0.5) == 0:
        return []
    mask = node.outputs[1] if len(node.outputs) > 1 else None
    shape = graph.tensors[node.operands[0]].shape
    return [mask if mask else Extra(node.operands[0], tuple(range(len(shape))), 1)]


def _row_normalization(node: Node, graph: Graph) -> list[Saved]:
    """Input, weight, and a mean and a reciprocal deviation for each normalised row (RMS norm: one)."""
    tensor = graph.tensors[node.operands[0]]
    normalised = len(argument(node, 1, "normalized_shape", tensor.shape[-1:]))
    rows = tuple(range(len(tensor.shape) - normalised))
    statistics = 1 if base_name(node.op) == "rms_norm" else 2
    return [node.operands[0], *node.operands[1:2], Extra(tensor.name, rows, 4 * statistics)]


def _composed_rms_norm(node: Node, graph: Graph) -> list[Saved]:
    """As products and powers, one after the other: the normalised input is kept, too."""
    dims = tuple(range(len(graph.tensors[node.operands[0]].shape)))
    tensor = graph.tensors[node.operands[0]]
    return [*_row_normalization(node, graph), Extra(tensor.name, dims, tensor.itemsize)]


def _batch_normalization(node: Node, graph: Graph) -> list[Saved]:
    """Input, weight, and the statistics of each channel, which are results when the operator names them."""
    return [*node.operands[:2], Extra(node.operands[0], (1,), 8)]


def _attention(node: Node, graph: Graph) -> list[Saved]:
    """Operands, the output, and the log-sum-exp of each query's scores in float32 (FlashAttention).

    A boolean mask is made one of numbers to add, which is kept instead.
    GPUs draw a dropout mask inside the kernel. On a CPU, attention with dropout runs unfused and keeps the scores:
    that is not counted.
    """
    query = graph.tensors[node.operands[0]]
    rows = tuple(range(len(query.shape) - 1))
    kept: list[Saved] = [*node.operands, *node.results[:1], Extra(query.name, rows, 4)]
    for name in node.operands[3:]:
        mask = graph.tensors[name]
        if mask.dtype == "bool":
            kept[kept.index(name)] = Extra(name, tuple(range(len(mask.shape))), query.itemsize)
    return kept


def _attention_on_cpu(node: Node, graph: Graph) -> list[Saved]:
    """Where the mask gets a gradient, products and a softmax instead of one kernel: the weights stay, not the mask.

    Scaled copies stay of query and key, and of the result the copy with heads joined: as many bytes as else.
    """
    kept = _attention(node, graph)
    query, key = (graph.tensors[name] for name in node.operands[:2])
    for name in (name for name in node.operands[3:] if _differentiable(name, graph) and name in kept):
        weights = Extra(query.name, tuple(range(len(query.shape) - 1)), key.shape[-2] * query.itemsize)
        kept[kept.index(name)] = weights
    return kept


def _cross_entropy(node: Node, graph: Graph) -> list[Saved]:
    """Log-probabilities, as large as the logits, the targets, and how many of them count."""
    logits = graph.tensors[node.operands[0]]
    dims = tuple(range(len(logits.shape)))
    return [Extra(logits.name, dims, logits.itemsize), Extra(logits.name, (), logits.itemsize), *_indices(node, graph)]


def _routed_experts(node: Node, graph: Graph) -> list[Saved]:
    """Operands, and for each choice of a token its row, the hidden values before and after activation, its result."""
    x, ids, _, up, down = (graph.tensors[name] for name in node.operands)
    a_choice = x.shape[1] + up.shape[2] + 2 * down.shape[1] + down.shape[2]
    return [*node.operands, Extra(x.name, (0,), ids.shape[1] * a_choice * x.itemsize)]


def _pooled(node: Node, graph: Graph) -> list[Saved]:
    """The input and the position of each maximum."""
    result = graph.tensors[node.results[0]]
    if len(node.results) > 1:
        return [node.operands[0], node.results[1]]
    return [node.operands[0], Extra(result.name, tuple(range(len(result.shape))), 8)]


def _rows(names: str, rule: SaveRule) -> dict[str, SaveRule]:
    return dict.fromkeys(names.split(), rule)


SAVED: dict[str, SaveRule] = {
    **dict.fromkeys(VIEWS, _nothing),
    **_rows("add sub rsub neg sum mean cat stack clone contiguous _to_copy to repeat roll flip pad", _nothing),
    **_rows("constant_pad_nd cumsum copy slice_scatter select_scatter tril triu lift_fresh_copy overwritten", _nothing),
    **_rows("zeros ones full zeros_like ones_like full_like empty_like new_zeros new_ones", _nothing),
    **_rows("avg_pool2d adaptive_avg_pool2d", _input),
    **_rows("linear matmul mm bmm mv dot conv1d conv2d conv3d convolution", _matrices),
    **_rows("conv_transpose1d conv_transpose2d conv_transpose3d", _matrices),
    **_rows("addmm baddbmm addmv", _added_matrices),
    **_rows("mul", _others),
    **_rows("einsum", _factors),
    **_rows("routed_experts", _routed_experts),
    **_rows("grouped_mm_fallback", _matrices),
    **_rows("div", _quotient),
    **_rows("gelu silu mish softplus elu hardswish log log1p log2 sin cos tan erf abs clamp", _input),
    **_rows("clamp_min clamp_max sinh cosh asin acos atan leaky_relu var std var_mean log_sigmoid", _input),
    **_rows("relu tanh sigmoid exp exp2 expm1 softmax _softmax log_softmax _log_softmax", _output),
    **_rows("sqrt rsqrt reciprocal", _output),
    **_rows("logsumexp amax amin max min norm linalg_vector_norm prod", _input_and_output),
    **_rows("pow", _power),
    **_rows(
        "embedding _embedding_bag index index_select gather masked_fill where scatter scatter_add index_add", _indices
    ),
    **_rows("index_put index_copy take_along_dim repeat_interleave nll_loss", _indices),
    **_rows("dropout native_dropout", _dropout),
    **_rows("layer_norm native_layer_norm rms_norm", _row_normalization),
    **_rows("batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit", _batch_normalization),
    **_rows("native_batch_norm _batch_norm_with_update_functional", _batch_normalization),
    **_rows("scaled_dot_product_attention _scaled_dot_product_flash_attention", _attention),
    **_rows("_scaled_dot_product_efficient_attention", _attention),
    **_rows("_scaled_dot_product_flash_attention_for_cpu", _attention),
    **_rows("cross_entropy_loss", _cross_entropy),
    **_rows("max_pool2d max_pool2d_with_indices adaptive_max_pool2d", _pooled),
}

SAVED_ON_CPU: dict[str, SaveRule] = {
    "scaled_dot_product_attention": _attention_on_cpu,
    "rms_norm": _composed_rms_norm,
    "mul": _with_number(_others),
    "div": _with_number(_quotient),
}
