"""Memory that an operator takes beside its operands and results, and gives back before it ends.

Each rule says of a call how many bytes in the forward and in the backward pass, beside what is saved and the gradients
that come in and go out; a row of the table (`table.OPERATORS`) names one where there are any. Measured operator by
operator from the record of torch's allocator (torch 2.13, CPU), and explained by how its gradient is computed: `pow`
multiplies three tensors one after the other. On GPUs, a library may take workspace of its own for convolutions and
matrix products; that is not known before it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from autopar.ir.graph import Node
from autopar.ir.placement import Placement, S, Shape
from autopar.ops.call import argument
from autopar.ops.work import has_documents
from autopar.runtime.lowering.parts import SCORES_AT_ONCE


class Sizes(NamedTuple):
    """Of one call: local shapes, bytes of an element of the results, which operands need gradients, the kind of device,
    and bytes of an element of each operand."""

    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    itemsize: int
    differentiable: tuple[bool, ...]
    device_type: str
    communicates: bool  # its own work, inside: statistics over shards, a cross-entropy over split classes
    axis_sizes: tuple[int, ...] = ()  # of the mesh
    operand_itemsizes: tuple[int, ...] = ()

    def operand(self, position: int) -> int:
        """Its bytes."""
        return math.prod(self.operands[position]) * self.itemsize

    @property
    def result(self) -> int:
        """The first result's bytes."""
        return math.prod(self.results[0]) * self.itemsize if self.results else 0


CHANNEL_BLOCK, IMAGE_CHANNELS = 16, 3  # of oneDNN's layouts, and channels that it reads as they are
WIDEST_OF_ONEDNN = 4  # bytes: it has no convolution of float64
INDEX_BYTES = 8  # torch numbers rows and classes in int64

Workspace = tuple[int, int]


WorkspaceRule = Callable[[Sizes], Workspace]


class RuntimeMemory(NamedTuple):
    """Of a function of the runtime that runs in the place of an operator: bytes that autograd keeps of it, instead of
    what it keeps of that (None: the same), and what it takes for a while. keeps: the operands that it keeps themselves,
    and after the last operand the results.
    """

    saved_bytes: int | None
    workspace: Workspace
    keeps: tuple[int, ...] = ()


LoweredRule = Callable[[Node, Sizes, tuple[Placement, ...]], RuntimeMemory | None]
"""Of a call, by its sizes and where its operands lie; None where the operator itself runs."""


def backward(copies: int) -> WorkspaceRule:
    """So many tensors as large as the first operand, in the backward pass."""
    return lambda sizes: (0, copies * sizes.operand(0))


def compared(bounds: int) -> WorkspaceRule:
    """Backward, whether each element was within each of so many bounds, in a byte."""
    return lambda sizes: (0, bounds * math.prod(sizes.operands[0]))


def scaled_mask(sizes: Sizes) -> Workspace:
    """The factor that dropout multiplies by, made of the mask again for the gradient."""
    return sizes.result, sizes.result


def product(sizes: Sizes) -> Workspace:
    """The gradient of an operand that was broadcast has the result's size, before it is summed."""
    pairs = zip(sizes.operands, sizes.differentiable, strict=True)
    return 0, sizes.result if any(wanted and shape != sizes.results[0] for shape, wanted in pairs) else 0


def quotient(sizes: Sizes) -> Workspace:
    if len(sizes.operands) < 2 or not sizes.differentiable[1]:
        return 0, 0
    return 0, 2 * sizes.result


def distances(sizes: Sizes) -> Workspace:
    """Of distances by a product: each side with its norms and a column of ones, and what it is joined of; backward, two
    tensors as large as the result, and as many of each side."""
    sides = [math.prod(shape) * sizes.itemsize for shape in sizes.operands]
    columns = [4 * math.prod(shape[:-1]) * sizes.itemsize for shape in sizes.operands]
    return 2 * sum(sides) + sum(columns), 2 * sizes.result + 2 * sum(sides)


def cross_entropy(sizes: Sizes) -> Workspace:
    """Two gradients as large as the logits: of the log-probabilities, then of the logits."""
    return 0, sizes.operand(0)


def split_cross_entropy(node: Node, sizes: Sizes, operands: tuple[Placement, ...]) -> RuntimeMemory | None:
    """`_SplitClasses` of the runtime: exponentials, and for each row two sums, its scale, whether it counts, whether
    its class is here and which column that is. Rows of numbers of the same kinds come and go beside them."""
    if S(1) not in operands[0]:
        return None
    rows, width = math.prod(sizes.operands[1]), max(4, sizes.itemsize)
    scores, is_widened = math.prod(sizes.operands[0]) * width, width != sizes.itemsize
    saved = scores + rows * (2 * width + INDEX_BYTES + sizes.itemsize + 2)
    forward = rows * (2 * INDEX_BYTES + 4 * width + sizes.itemsize)
    return RuntimeMemory(saved, (forward + scores * is_widened, 4 * width * rows + scores * is_widened))


def split_lookup(node: Node, sizes: Sizes, operands: tuple[Placement, ...]) -> RuntimeMemory | None:
    """Of rows of a table that others have: the numbers of those that are here, which these are, which are padding, and
    what is found before zeros take the place of the others."""
    if S(0) not in operands[0]:
        return None
    count, has_padding = math.prod(sizes.operands[1]), argument(node, 2, "padding_idx", -1) >= 0
    return RuntimeMemory(count * (INDEX_BYTES + 1 + has_padding), (count * INDEX_BYTES + sizes.result, sizes.result))


def attention(sizes: Sizes) -> Workspace:
    """CPUs compute scores of so many queries and up to 512 keys at a time, and backward their gradients, too, on each
    thread: one here (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp). Where nothing is saved for a gradient, a mask
    of truth values as one of numbers, and each query's sum of exponentials, are given back at once."""
    alone = (
        0 if any(sizes.differentiable) else _masked(sizes) + max(4, sizes.itemsize) * math.prod(sizes.operands[0][:-1])
    )
    if sizes.device_type != "cpu":
        return alone + _repeated_mask(sizes), 0
    forward, back = _scores(sizes)
    return forward + alone, back


def _masked(sizes: Sizes) -> int:
    """Of a mask of truth values, as it is added to scores."""
    if len(sizes.operands) < 4 or len(sizes.operand_itemsizes) < 4 or sizes.operand_itemsizes[3] > 1:
        return 0
    return math.prod(sizes.operands[3]) * sizes.itemsize


def _repeated_mask(sizes: Sizes) -> int:
    """Of a mask for the queries of a group as those of one head (`rt.grouped_attention`), and as it is added."""
    query, key = sizes.operands[:2]
    if len(query) != 4 or query[-2] == 1 or query[1] == key[1] or len(sizes.operands) < 4 or any(sizes.differentiable):
        return 0
    group = query[1] // key[1]
    return group * math.prod(sizes.operands[3]) * sizes.operand_itemsizes[3] + (group - 1) * _masked(sizes)


def _scores(sizes: Sizes) -> Workspace:
    query, width = sizes.operands[0], max(4, sizes.itemsize)
    every = width * math.prod(query[:-1]) * sizes.operands[1][-2]
    if sizes.operands[2][-1] != sizes.operands[1][-1]:  # by hand: all scores, and backward their gradients
        return 2 * every, 3 * every
    if any(sizes.differentiable[3:]):  # so too where the mask is trained, beside gradients of values and of the result
        return every, every + 3 * sizes.operand(2)
    queries = query[-2]
    if queries == 1 and len(query) == 4:  # as the heads of one group are computed (`rt.grouped_attention`)
        queries = max(1, query[1] // sizes.operands[1][1])
    rows = min(queries, next(count for least, count in ((768, 256), (192, 64), (0, 32)) if queries >= least))
    scores = rows * min(512, sizes.operands[1][-2])
    return width * (scores + rows * (2 + query[-1])), width * (2 * scores + rows)


def grouped_attention(node: Node, sizes: Sizes, operands: tuple[Placement, ...]) -> RuntimeMemory | None:
    """Where query heads are split further than those of keys: a head of keys and one of values for each query head of
    the rank, which stay in the place of the operands (`rt.heads_of`). Backward, gradients of these beside the
    operands' own."""
    head = len(sizes.operands[0]) - 3
    axes = range(len(operands[0]))
    if sizes.operands[1][head] == 1 or all((operands[0][n] == S(head)) == (operands[1][n] == S(head)) for n in axes):
        return None
    query, width = sizes.operands[0], max(4, sizes.itemsize)
    heads = sum(math.prod((*query[: head + 1], *sizes.operands[place][-2:])) * sizes.itemsize for place in (1, 2))
    rows, keys = math.prod(query[:-1]), sizes.operands[1][-2]
    saved, keeps, is_cpu = heads + 4 * rows, [0, len(sizes.operands)], sizes.device_type == "cpu"
    if is_cpu and sizes.operands[2][-1] != sizes.operands[1][-1]:  # by hand, as `saved.attention_on_cpu` says
        saved += rows * (keys + 2 * query[-1]) * width
    for place in range(3, len(sizes.operands)):
        if is_cpu and sizes.differentiable[place]:
            saved += rows * keys * sizes.itemsize
        elif sizes.operand_itemsizes[place] == 1:
            saved += sizes.operand(place)
        else:
            keeps.append(place)
    forward, backward = attention(sizes)
    return RuntimeMemory(saved, (forward, backward + heads), tuple(keeps))


def context_attention(node: Node, sizes: Sizes, operands: tuple[Placement, ...]) -> RuntimeMemory | None:
    """Where keys are split: those of all ranks, and their values, for each query head, once more while they arrive; two
    results that are merged in float32; queries and results on their way. Backward, all of their gradients, too."""
    seq, options = len(sizes.operands[0]) - 2, dict(node.kwargs)
    if options.get("ring") and (S(seq) in operands[1] or len(sizes.operands) > 3):
        return RuntimeMemory(None, _ring(sizes, seq))
    if S(seq) not in operands[1]:
        return None
    length, width = options["length"], max(4, sizes.itemsize)
    parts = [sizes.operand(position) * length // max(1, sizes.operands[position][seq]) for position in (1, 2)]
    group = sizes.operands[0][seq - 1] // max(1, sizes.operands[1][seq - 1])
    whole, result = sum(parts), math.prod(sizes.results[0]) * width
    each = whole * (group + (group > 1))
    kernel = attention(sizes)
    forward = each + max(parts) + 4 * result + 2 * sizes.operand(0) + kernel[0]
    backward = each + 2 * whole * group + max(parts) + 6 * max(sizes.operand(0), sizes.result) + kernel[1]
    return RuntimeMemory(None, (forward, backward))


def _ring(sizes: Sizes, seq: int) -> Workspace:
    """Keys and values that are sent away, two blocks on their way, a head of one for each query head; results and
    queries as above; under a mask scores of as many pairs as are made at once, four times. Backward, gradients of three
    blocks: made for each query head, added up, and on their way."""
    block, width = sizes.operand(1) + sizes.operand(2), max(4, sizes.itemsize)
    group = sizes.operands[0][seq - 1] // max(1, sizes.operands[1][seq - 1])
    heads = block * group * (group > 1)
    result, query = (math.prod(shape) * width for shape in (sizes.results[0], sizes.operands[0]))
    scores = 0
    if len(sizes.operands) > 3:
        row = math.prod(sizes.operands[0][:seq]) * sizes.operands[1][seq]
        scores = 4 * width * min(sizes.operands[0][seq] * row, max(row, SCORES_AT_ONCE))
        heads += 2 * block * group * width // sizes.itemsize
    kernel = attention(sizes)
    forward = 4 * block + heads + 4 * result + 2 * sizes.operand(0) + scores + kernel[0]
    return forward, 7 * block + heads + 2 * block * group + 6 * max(query, result) + scores + kernel[1]


def window_attention(node: Node, sizes: Sizes, operands: tuple[Placement, ...]) -> RuntimeMemory | None:
    """Keys and values that queries see, which come from others where positions are split, at once or block by block,
    for each query head; blocks of them and of queries beside each other, in the other order; results, as they are put
    together. By numbers of documents, scores of as many pairs as are made at once. Backward, gradients of all."""
    query, key = sizes.operands[:2]
    given, is_split = dict(node.kwargs), S(2) in operands[1]
    window, width, group = given["window"], max(4, sizes.itemsize), query[1] // max(1, key[1])
    fetches = is_split and not given.get("ring")
    seen = min(given["length"], key[2] + window - 1) if fetches else key[2]
    block = (sizes.operand(1) + sizes.operand(2)) * seen // max(1, key[2])
    heads, result, scores = block * group, math.prod(sizes.results[0]) * width, 0
    if has_documents(node):
        scores = 4 * width * _window_pairs(query, seen, window, fetches)
    at_once = [(*shape[:2], min(window, shape[2]), shape[3]) for shape in sizes.operands[:3]]
    kernel = attention(sizes._replace(operands=(*at_once, *sizes.operands[3:])))
    comes = (2 if fetches else 3) * block if is_split else 0
    forward = comes + 2 * heads + 4 * result + 2 * sizes.operand(0) + scores // 2 + kernel[0]
    backward = 2 * comes + 4 * heads + 6 * max(result, sizes.operand(0)) + scores + kernel[1]
    return RuntimeMemory(None, (forward, backward))


def _window_pairs(query: Shape, seen: int, window: int, fetches: bool) -> int:
    """Of queries and keys whose scores are made at once, with as many numbers as queries have."""
    pairs, before = query[2] * min(window, query[2]), min(query[2], window // 2)
    if fetches:  # queries, with what all of them see before the first
        pairs = max(pairs, before * (min(seen, window) - before))
    heads = math.prod(query[:2])
    return min(heads * pairs, max(heads * max(window, query[2]), SCORES_AT_ONCE)) + math.prod(query)


def rms_norm(sizes: Sizes) -> Workspace:
    """On CPUs its gradient is put together from those of products and powers; in float32, where the input is of half
    precision, and so is what it makes before that is cast."""
    if sizes.device_type != "cpu":
        return 0, 0
    wide = math.prod(sizes.operands[0]) * max(4, sizes.itemsize)
    return wide if sizes.itemsize < 4 else 0, 4 * wide


def batch_norm(sizes: Sizes) -> Workspace:
    """Of a CPU, and where statistics are summed over shards: a product, before it is summed."""
    return 0, sizes.operand(0) if sizes.communicates or sizes.device_type == "cpu" else 0


def convolution(sizes: Sizes) -> Workspace:
    """oneDNN computes in layouts of its own, into which and from which tensors are copied: channels in blocks, the last
    of which is filled up, but for images of at most three. It may take blocks of 8 where there are so few; here all are
    of 16, which is never less."""
    if sizes.device_type != "cpu" or is_plain_convolution(sizes):
        return 0, 0
    if sizes.itemsize > WIDEST_OF_ONEDNN:
        columns = _columns(sizes, sizes.operands[0], sizes.results[0])
        return columns, columns
    x, weight, result = sizes.operand(0), sizes.operand(1), sizes.result
    is_image = sizes.operands[0][_channel_of(sizes)] <= IMAGE_CHANNELS
    wide, wide_result = x if is_image else _filled(sizes.operands[0], sizes), _filled(sizes.results[0], sizes)
    rows, columns, *kernel = sizes.operands[1]
    blocks = _in_blocks(rows) * (columns if is_image else _in_blocks(columns))
    wide_weight = blocks * math.prod(kernel) * sizes.itemsize
    forward = max(wide + wide_weight + wide_result - result, wide_result)
    strided = math.prod(sizes.operands[0][2:]) != math.prod(sizes.results[0][2:])
    if sizes.differentiable[0]:
        wide = _filled(sizes.operands[0], sizes)
    copied = wide + wide_result + wide_weight - weight
    return forward, max(copied, weight, 2 * x - weight if strided else 0)


def transposed_convolution(sizes: Sizes) -> Workspace:
    """The same: the result in a layout of its own, twice where it is strided, and the weight; backward all three."""
    if sizes.device_type != "cpu":
        return 0, 0
    if sizes.itemsize > WIDEST_OF_ONEDNN:
        columns, has_volumes = _columns(sizes, sizes.results[0], sizes.operands[0]), len(sizes.operands[1]) == 5
        of_one = -(-columns // max(1, math.prod(sizes.operands[0][: _channel_of(sizes)])))
        return of_one if has_volumes else columns, of_one
    rows, count, *kernel = sizes.operands[1]
    weight = _in_blocks(rows) * _in_blocks(count) * math.prod(kernel) * sizes.itemsize
    result = _filled(sizes.results[0], sizes)
    return 2 * (result + weight), _filled(sizes.operands[0], sizes) + result + weight


def _columns(sizes: Sizes, image: Shape, windows: Shape) -> int:
    """Of a convolution that is a product of matrices: all windows of an image, whose elements come as often as they are
    in one. Torch unfolds all samples at once; those of a transposed one, backward or in three dims, each by itself."""
    channel = _channel_of(sizes)
    count = math.prod(image[: channel + 1]) * math.prod(sizes.operands[1][2:]) * math.prod(windows[channel + 1 :])
    return count * sizes.itemsize


def _channel_of(sizes: Sizes) -> int:
    return len(sizes.operands[0]) - len(sizes.operands[1]) + 1


def _filled(shape: Shape, sizes: Sizes) -> int:
    """Bytes with channels in whole blocks."""
    channel = _channel_of(sizes)
    return math.prod(shape[:channel]) * _in_blocks(shape[channel]) * math.prod(shape[channel + 1 :]) * sizes.itemsize


def _in_blocks(channels: int) -> int:
    return -(-channels // CHANNEL_BLOCK) * CHANNEL_BLOCK


def is_plain_convolution(sizes: Sizes) -> bool:
    """Whether torch multiplies matrices instead: kernels of one element whose result is at least as large."""
    weight = sizes.operands[1]
    return math.prod(weight[2:]) == 1 and sizes.operands[0][2:] == sizes.results[0][2:] and weight[0] >= weight[1]
