"""What autograd saves of an operator for its backward pass, after torch's derivatives.yaml.

Each rule gives operands and results by name, and extras that are no tensors of the graph; a row of the table
(`table.OPERATORS`) names one. Beside them, the rules of which gradients take no memory of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from autopar.ir.graph import Graph, Node, Ref, Tensor
from autopar.ir.placement import Shape
from autopar.ops.call import argument, base_name
from autopar.ops.layout import copied
from autopar.ops.work import sizes_of

FLOAT32_BYTES = 4


class Extra(NamedTuple):
    """A saved value that is no tensor of the graph: one element an index of some dims of tensor `like`.

    is_number: a plain number that torch has made a tensor of. Hooks on saved tensors are not called for it
    (torch/csrc/autograd/saved_variable.cpp), so that it stays where everything else is computed again. bits: of each
    element, where they are not bytes. range_bytes: beside, of so many elements each (`range_of`).
    """

    like: str
    dims: tuple[int, ...]
    itemsize: int
    is_number: bool = False
    bits: int = 0
    range_bytes: int = 0
    range_of: int = 1

    def num_bytes(self, shape: Shape) -> int:
        """Its bytes when `like` has the given (local) shape."""
        count = math.prod(shape[dim] for dim in self.dims)
        ranges = -(-count // self.range_of) * self.range_bytes
        return (-(-count * self.bits // 8) if self.bits else count * self.itemsize) + ranges


Saved = str | Extra
SaveRule = Callable[[Node, Graph], list[Saved]]


def each_once(kept: Iterable[Saved]) -> tuple[Saved, ...]:
    """Tensors of the graph once each; copies may be as large as others."""
    found = list[Saved]()
    for one in kept:
        if not isinstance(one, str) or one not in found:
            found.append(one)
    return tuple(found)


def whole_copy(tensor: Tensor, itemsize: int | None = None) -> Extra:
    """As large as a tensor, perhaps in elements of another size."""
    return Extra(tensor.name, tuple(range(len(tensor.shape))), itemsize or tensor.itemsize)


def _differentiable(name: str, graph: Graph) -> bool:
    return graph.tensors[name].differentiable


def everything(node: Node, graph: Graph) -> list[Saved]:
    """Results that nothing reads, too: each is taken to be as large as the largest tensor that is known."""
    known = [graph.tensors[name] for name in (*node.operands, *node.results)]
    largest = max(known, key=lambda tensor: tensor.num_bytes, default=None)
    unread = sum(name is None for name in node.outputs) if largest is not None else 0
    return [*node.operands, *node.results, *(whole_copy(largest) for _ in range(unread) if largest is not None)]


def nothing(node: Node, graph: Graph) -> list[Saved]:
    return []


def operand(node: Node, graph: Graph) -> list[Saved]:
    return [node.operands[0]]


def operands(node: Node, graph: Graph) -> list[Saved]:
    return list(node.operands)


def operand_and_copy(node: Node, graph: Graph) -> list[Saved]:
    return [node.operands[0], whole_copy(graph.tensors[node.operands[0]])]


def padded(node: Node, graph: Graph) -> list[Saved]:
    """The input, unless it is padded with a number or in a circle."""
    return operand(node, graph) if argument(node, 2, "mode", "constant") in ("reflect", "replicate") else []


def result(node: Node, graph: Graph) -> list[Saved]:
    return list(node.results[:1])


def factors(node: Node, graph: Graph) -> list[Saved]:
    """Each factor of a product is kept for the gradient of the other."""
    names = node.operands
    pairs = [(a, b) for i, a in enumerate(names) for j, b in enumerate(names) if i != j]
    return [kept for kept, wanted in pairs if _differentiable(wanted, graph)]


def einsum_factors(node: Node, graph: Graph) -> list[Saved]:
    """Of einsum: the same, as its copy where it is copied, and products of the first operands that it multiplies on."""
    return factors_and_copies(node, graph, copied(graph).factors.get(node.name, ()))


def factors_and_copies(node: Node, graph: Graph, copies: Collection[int]) -> list[Saved]:
    """Of a product or an einsum that copies the operands at these positions: each copy in place of its operand."""
    if base_name(node.op) != "einsum":
        wanted = ((0, node.operands[1]), (1, node.operands[0]))
        return [_factor(node, graph, place, copies) for place, other in wanted if _differentiable(other, graph)]
    kept = factors(node, graph)
    for name in (node.operands[position] for position in copies):
        if name in kept:
            kept[kept.index(name)] = whole_copy(graph.tensors[name])
    return [*kept, *_products_on_the_way(node, graph)]


def _factor(node: Node, graph: Graph, position: int, copies: Collection[int]) -> Saved:
    """What is kept of a factor. The copy of a stack of matrices that is broadcast is as long as the product's stack."""
    tensor, stack = graph.tensors[node.operands[position]], graph.tensors[node.results[0]].shape[:-2]
    if position not in copies:
        return tensor.name
    if min(len(graph.tensors[name].shape) for name in node.operands[:2]) < 3 or tensor.shape[:-2] == stack:
        return whole_copy(tensor)
    return Extra(node.results[0], tuple(range(len(stack))), math.prod(tensor.shape[-2:]) * tensor.itemsize)


def _products_on_the_way(node: Node, graph: Graph) -> list[Extra]:
    terms, _, out = str(node.args[0]).replace(" ", "").partition("->")
    letters, found = terms.split(","), list[Extra]()
    if "." in terms or len(letters) != len(node.operands):
        return []
    sizes = sizes_of(letters, [graph.tensors[name].shape for name in node.operands])
    for count in range(2, len(letters)):
        left = set("".join(letters[:count])) & set("".join([*letters[count:], out]))
        place = max(range(count), key=lambda position: len(left & set(letters[position])))
        own, like = letters[place], graph.tensors[node.operands[place]]
        others = math.prod(sizes[letter] for letter in left - set(own))
        dims = tuple(own.index(letter) for letter in sorted(left & set(own)))
        found.append(Extra(like.name, dims, others * like.itemsize))
    return found


def matrices(node: Node, graph: Graph) -> list[Saved]:
    """Of products of matrices, and of linear: both factors, each for the gradient of the other; never the bias.

    One that is copied for the product is kept as that copy, wherever else it is kept too.
    """
    return factors_and_copies(node, graph, copied(graph).factors.get(node.name, ()))


def windows(node: Node, graph: Graph) -> list[Saved]:
    """Of a convolution: input and weight both, whichever gets a gradient: torch has one formula for all three."""
    return list(node.operands[:2])


def added_matrices(node: Node, graph: Graph) -> list[Saved]:
    """Of a sum with a product: its factors."""
    return each_other(1, 2)(node, graph)


def quotient(node: Node, graph: Graph) -> list[Saved]:
    if len(node.operands) < 2:
        return []
    left, right = node.operands
    return [left, right] if _differentiable(right, graph) else [right]


def with_number(rule: SaveRule) -> SaveRule:
    """The rule, and a plain number as second factor: torch makes a tensor of it, on the CPU, in the number's own dtype
    (float64, int64 or bool), which the gradient of the first factor keeps. Scalar overloads keep no tensor."""

    def kept(node: Node, graph: Graph) -> list[Saved]:
        number = node.args[1] if node.op.endswith(".Tensor") and len(node.args) > 1 else None
        if not isinstance(number, (bool, int, float)):
            return rule(node, graph)
        return [*rule(node, graph), Extra(node.operands[0], (), 1 if isinstance(number, bool) else 8, is_number=True)]

    return kept


def indices(node: Node, graph: Graph) -> list[Saved]:
    """Integer and boolean operands: what was looked up, or where."""
    floating = ("float", "bfloat", "complex")
    return [name for name in node.operands if not graph.tensors[name].dtype.startswith(floating)]


def added_by_index(node: Node, graph: Graph) -> list[Saved]:
    """Indices, and what is added or set, for its shape alone."""
    return list(dict.fromkeys([*indices(node, graph), node.operands[2]]))


def where_trained(places: Iterable[int], rule: SaveRule) -> SaveRule:
    """The rule, where an operand at one of these places gets a gradient; else nothing is kept."""
    wanted = tuple(places)

    def kept(node: Node, graph: Graph) -> list[Saved]:
        found = (node.operands[place] for place in wanted if place < len(node.operands))
        return rule(node, graph) if any(_differentiable(name, graph) for name in found) else []

    return kept


def each_other(first: int, second: int) -> SaveRule:
    """Two operands, each for the gradient of the other."""

    def kept(node: Node, graph: Graph) -> list[Saved]:
        pairs = ((first, second), (second, first))
        return [node.operands[one] for one, other in pairs if _differentiable(node.operands[other], graph)]

    return kept


def power(node: Node, graph: Graph) -> list[Saved]:
    """The result, too, where the exponent is a tensor."""
    is_exponent = len(node.operands) > 1 or node.op.endswith(".Scalar")
    return [*node.operands, *(node.results if is_exponent else ())]


def operand_and_result(node: Node, graph: Graph) -> list[Saved]:
    return [node.operands[0], *node.results[:1]]


def dropout(node: Node, graph: Graph) -> list[Saved]:
    """The mask: a result of native_dropout; one byte an element else."""
    if argument(node, 2, "train", True) is False or argument(node, 1, "p", 0.5) == 0:
        return []
    mask = node.outputs[1] if len(node.outputs) > 1 else None
    return [mask or whole_copy(graph.tensors[node.operands[0]], 1)]


def row_normalization(node: Node, graph: Graph) -> list[Saved]:
    """Input, weight and bias, and a mean and a reciprocal deviation for each normalised row."""
    return _normalized_rows(node, graph, statistics=2)


def rms_normalization(node: Node, graph: Graph) -> list[Saved]:
    """The same without the mean."""
    return _normalized_rows(node, graph, statistics=1)


def _normalized_rows(node: Node, graph: Graph, statistics: int) -> list[Saved]:
    tensor = graph.tensors[node.operands[0]]
    normalised = len(argument(node, 1, "normalized_shape", tensor.shape[-1:]))
    rows = tuple(range(len(tensor.shape) - normalised))
    return [
        *node.operands,
        Extra(tensor.name, rows, max(FLOAT32_BYTES, tensor.itemsize) * statistics),
    ]


def composed_rms_norm(node: Node, graph: Graph) -> list[Saved]:
    """As products and powers, one after the other: the normalised input is kept, too. Of half precision both the input
    and the normalised one are kept in float32, and not the input itself."""
    tensor, (given, *others) = graph.tensors[node.operands[0]], rms_normalization(node, graph)
    if tensor.itemsize >= FLOAT32_BYTES:
        return [given, *others, whole_copy(tensor)]
    return [*others, whole_copy(tensor, 2 * FLOAT32_BYTES)]


def batch_normalization(node: Node, graph: Graph) -> list[Saved]:
    """All but the bias, and two statistics of each channel, which are results when the operator names them."""
    channels = Extra(node.operands[0], (1,), 2 * max(FLOAT32_BYTES, graph.tensors[node.operands[0]].itemsize))
    bias = argument(node, 2, "bias", None)
    return [*(name for name in node.operands if not isinstance(bias, Ref) or name != bias.tensor), channels]


def attention(node: Node, graph: Graph) -> list[Saved]:
    """Operands, the output, and the log-sum-exp of each query's scores in float32 (FlashAttention).

    A boolean mask is made one of numbers to add, which is kept instead.
    GPUs draw a dropout mask inside the kernel. On a CPU, attention with dropout runs unfused and keeps the scores:
    that is not counted.
    """
    query = graph.tensors[node.operands[0]]
    rows = tuple(range(len(query.shape) - 1))
    kept: list[Saved] = [*node.operands, *node.results[:1], Extra(query.name, rows, max(FLOAT32_BYTES, query.itemsize))]
    for name in node.operands[3:]:
        mask = graph.tensors[name]
        if mask.dtype == "bool":
            kept[kept.index(name)] = whole_copy(mask, query.itemsize)
    return kept


def attention_on_cpu(node: Node, graph: Graph) -> list[Saved]:
    """Where the mask gets a gradient, products and a softmax instead of one kernel: the weights stay, not the mask.

    Copies stay of query and key, scaled, and of value, whatever they are views of, and of the result the one with heads
    joined: as many bytes as else.
    """
    kept = attention(node, graph)
    query, key = (graph.tensors[name] for name in node.operands[:2])
    for name in (name for name in node.operands[3:] if _differentiable(name, graph) and name in kept):
        weights = Extra(query.name, tuple(range(len(query.shape) - 1)), key.shape[-2] * query.itemsize)
        kept[kept.index(name)] = weights
        kept[:3] = [whole_copy(graph.tensors[operand]) for operand in node.operands[:3]]
    has_gradient = any(_differentiable(name, graph) for name in node.operands[3:])
    if not _has_kernel(node, graph) or (has_gradient and key.shape[:-2] != query.shape[:-2]):
        kept.append(_by_hand(query, key, graph.tensors[node.operands[2]]))
    return kept


def _has_kernel(node: Node, graph: Graph) -> bool:
    """Whether CPUs have a fused kernel (aten/src/ATen/native/transformers/sdp_utils_cpp.cpp): for queries, keys and
    values with heads, equally wide, in one batch, with as many heads or in groups, and masks of all dims or two."""
    shapes = [graph.tensors[name].shape for name in node.operands]
    query, key, value = shapes[:3]
    if {len(query), len(key), len(value)} != {4} or not query[-1] == key[-1] == value[-1]:
        return False
    grouped = bool(dict(node.kwargs).get("enable_gqa")) or node.op.startswith("autopar.")
    has_heads = query[1] == key[1] == value[1] or grouped
    return has_heads and query[0] == key[0] == value[0] and all(len(mask) in (2, 4) for mask in shapes[3:])


def _by_hand(query: Tensor, key: Tensor, value: Tensor) -> Extra:
    """What attention keeps that no kernel of the CPU takes: weights, and copies of queries and keys, in float32 at
    least; of values, too, where they are broadcast."""
    each, longer = max(FLOAT32_BYTES, query.itemsize), -(-key.shape[-2] // max(1, query.shape[-2]))
    copies = query.shape[-1] + longer * key.shape[-1]
    copies += longer * value.shape[-1] if value.shape[:-2] != query.shape[:-2] else 0
    return Extra(query.name, tuple(range(len(query.shape) - 1)), (key.shape[-2] + copies) * each)


def context_attention(node: Node, graph: Graph) -> list[Saved]:
    """As attention; in a ring, a mask as it is, and two numbers of each query under it: the greatest of its scores, and
    what their exponentials are together."""
    if not dict(node.kwargs).get("ring"):
        return attention(node, graph)
    query = graph.tensors[node.operands[0]]
    each = 4 if len(node.operands) == 3 else 2 * max(4, query.itemsize)
    return [*node.operands, *node.results[:1], Extra(query.name, tuple(range(len(query.shape) - 1)), each)]


def window_attention(node: Node, graph: Graph) -> list[Saved]:
    """Operands, the result, and the log-sum-exp of each query's scores."""
    query = graph.tensors[node.operands[0]]
    rows = tuple(range(len(query.shape) - 1))
    return [*node.operands, *node.results[:1], Extra(query.name, rows, max(FLOAT32_BYTES, query.itemsize))]


def context_attention_on_cpu(node: Node, graph: Graph) -> list[Saved]:
    """The same, but where a mask outside of a ring gets a gradient."""
    is_ring = dict(node.kwargs).get("ring")
    return context_attention(node, graph) if is_ring else attention_on_cpu(node, graph)


def cross_entropy(node: Node, graph: Graph) -> list[Saved]:
    """Log-probabilities, as large as the logits, the targets, and how many of them count."""
    logits = graph.tensors[node.operands[0]]
    targets = dict.fromkeys([node.operands[1], *indices(node, graph)])  # numbers of classes, or their probabilities
    return [whole_copy(logits), Extra(logits.name, (), logits.itemsize), *targets]


def bags(node: Node, graph: Graph) -> list[Saved]:
    """Of bags of embeddings: indices and the bag of each, offsets and two numbers of each bag, weights of samples, and
    where each maximum was."""
    _, ids, *offsets = (graph.tensors[name] for name in node.operands[:3])
    numbers = [whole_copy(ids), *(whole_copy(one) for one in offsets for _ in range(2))]
    if argument(node, 4, "mode", 0) == 2:
        numbers.append(whole_copy(graph.tensors[node.results[0]], 8))
    return [*indices(node, graph), *numbers, *(node.operands[:1] + node.operands[3:] if len(node.operands) > 3 else ())]


def routed_experts(node: Node, graph: Graph) -> list[Saved]:
    """Operands, and for each choice of a token its row, the hidden values before and after activation, its result."""
    x, ids, _, up, down = (graph.tensors[name] for name in node.operands[:5])
    a_choice = x.shape[1] + math.prod(up.shape[2:]) + 2 * down.shape[1] + down.shape[2]
    return [*node.operands, Extra(x.name, (0,), ids.shape[1] * a_choice * x.itemsize)]


def recurrent(node: Node, graph: Graph) -> list[Saved]:
    """Beside all that comes and goes, gates and states of each position and layer."""
    made, layers = graph.tensors[node.results[0]], argument(node, 4, "num_layers", 1)
    return [*everything(node, graph), whole_copy(made, made.itemsize * layers * 8 * _wider(node, graph))]


def _wider(node: Node, graph: Graph) -> int:
    """How many times as wide the states inside are as those that come out: an LSTM may project them."""
    cell = graph.tensors[node.operands[2]].shape if ".lstm." in f".{base_name(node.op)}." else ()
    return -(-cell[-1] // graph.tensors[node.operands[1]].shape[-1]) if len(cell) == 3 else 1


def long_short_on_cpu(node: Node, graph: Graph) -> list[Saved]:
    """Of an LSTM in float32: oneDNN's workspace, which holds gates, and states as wide as the widest layer's input."""
    given, made = (graph.tensors[name] for name in (node.operands[0], node.results[0]))
    if made.itemsize != FLOAT32_BYTES:
        return recurrent(node, graph)
    layers, ways = argument(node, 4, "num_layers", 1), 1 + bool(argument(node, 7, "bidirectional", False))
    width = max(1, made.shape[-1] // ways)
    if _wider(node, graph) > 1:
        return recurrent(node, graph)
    each = 10 + 7 * -(-max(given.shape[-1], made.shape[-1]) // width)
    return [*everything(node, graph), whole_copy(made, made.itemsize * layers * each)]


def pooled(node: Node, graph: Graph) -> list[Saved]:
    """The input and the position of each maximum."""
    return [
        node.operands[0],
        node.results[1] if len(node.results) > 1 else whole_copy(graph.tensors[node.results[0]], 8),
    ]


# Gradients that pass ----------------------------------------

PassRule = Callable[[Node, Graph], tuple[bool, ...]]
"""Of each operand: whether its gradient is the result's, or a view of it, and takes no memory of its own."""


def all_gradients(node: Node, graph: Graph) -> tuple[bool, ...]:
    """Copies, sums and rearrangements."""
    return (True,) * len(node.operands)


def gradients_of_sum(node: Node, graph: Graph) -> tuple[bool, ...]:
    """Of an addition; what was broadcast has its gradient summed."""
    shape = graph.tensors[node.results[0]].shape
    return tuple(graph.tensors[operand].shape == shape for operand in node.operands)


def gradient_of_minuend(node: Node, graph: Graph) -> tuple[bool, ...]:
    """Of a subtraction: the other's is negated."""
    first, *others = gradients_of_sum(node, graph)
    return (first, *(False for _ in others))
