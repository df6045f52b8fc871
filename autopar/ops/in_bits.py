"""Operators that may keep for their backward pass some bits of each element, and no tensor as large as their operand or
result: the runtime's functions of `runtime.lowering.in_bits`, what these keep, take for a while, and move.

Gradients are equal bit for bit, so that whether an operator does is a matter of memory and time alone. It pays where
nothing else keeps the tensor: a convolution after a ReLU keeps its input anyway, a pooling need not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from autopar.ir.graph import Graph, Node
from autopar.ops.call import Call, argument
from autopar.ops.local import LocalCall
from autopar.ops.saved import Extra
from autopar.ops.workspace import INDEX_BYTES, Sizes, Workspace
from autopar.runtime.lowering.in_bits import bits_of_window

MOST_NUMBERED = 1 << 8
"""Elements of a window that a byte numbers."""

Passes = tuple[tuple[int, ...], tuple[int, ...]]
"""What each kernel more moves, in bytes, forward and backward."""


class InBits(NamedTuple):
    """bits: of each element of the first result, None of a call that cannot do with few. workspace, moved: of the
    runtime's function, the latter beyond what the operator itself moves. call: its text."""

    bits: Callable[[Node, Graph], int | None]
    workspace: Callable[[Node, Sizes], Workspace]
    moved: Callable[[Node, Sizes], Passes]
    call: Callable[[LocalCall], str]


def kept_in_bits(rule: InBits, node: Node, graph: Graph) -> list[Extra]:
    """What is kept of the call, as in `ops.saved`."""
    bits, result = rule.bits(node, graph), node.results[0]
    assert bits is not None, f"{node.name} cannot be kept in bits"
    return [Extra(result, tuple(range(len(graph.tensors[result].shape))), 0, bits=bits)]


def _elements(sizes: Sizes) -> int:
    """Of the first result, as many as fill bytes."""
    return -(-math.prod(sizes.results[0]) // 8) * 8


def _packing(elements: int) -> tuple[int, ...]:
    """Halves are added up, then what is left is copied."""
    return (3 * elements // 2, 3 * elements // 4, 3 * elements // 8, elements // 4)


def _unpacking(elements: int) -> tuple[int, ...]:
    return (9 * elements // 8, 2 * elements)


# Where an element lies ----------------------------------------


def _a_bit(node: Node, graph: Graph) -> int | None:
    return 1 if "float" in graph.tensors[node.operands[0]].dtype else None


def _a_byte_each(node: Node, sizes: Sizes) -> Workspace:
    """Before they are packed, and when they are unpacked."""
    return _elements(sizes), _elements(sizes)


def _compared(node: Node, sizes: Sizes) -> Passes:
    """Backward, bytes are made numbers of the gradient's dtype, in the memory of what the kernel makes of them."""
    elements = _elements(sizes)
    forward = (sizes.result + elements, 2 * elements, *_packing(elements))
    return forward, (*_unpacking(elements), elements + sizes.result)


def _relu_call(local: LocalCall) -> str:
    return f"rt.relu_in_bits({local.names[0]})"


def _leaky_call(local: LocalCall) -> str:
    return f"rt.leaky_relu_in_bits({local.names[0]}, {local.call.arguments['negative_slope']!r})"


def _bit_between_numbers(node: Node, graph: Graph) -> int | None:
    """Not where a bound is a tensor, which may have a gradient of its own."""
    return _a_bit(node, graph) if len(node.operands) == 1 else None


def _compared_twice(node: Node, sizes: Sizes) -> Passes:
    forward, backward = _compared(node, sizes)
    elements = _elements(sizes)
    return (sizes.result + elements, 3 * elements, *forward), backward


def _number(value: float | None) -> str:
    """As text of a program; bounds may be infinite."""
    return f'float("{value}")' if value is not None and not math.isfinite(value) else repr(value)


def _hardtanh_call(local: LocalCall) -> str:
    bounds = local.call.arguments
    return f"rt.hardtanh_in_bits({local.names[0]}, {_number(bounds['min_val'])}, {_number(bounds['max_val'])})"


def _relu6_call(local: LocalCall) -> str:
    return f"rt.hardtanh_in_bits({local.names[0]}, 0, 6)"


def _clamp_call(local: LocalCall) -> str:
    bounds = local.call.arguments
    return f"rt.clamp_in_bits({local.names[0]}, {_number(bounds.get('min'))}, {_number(bounds.get('max'))})"


def _threshold_call(local: LocalCall) -> str:
    told = local.call.arguments
    return f"rt.threshold_in_bits({local.names[0]}, {_number(told['threshold'])}, {_number(told['value'])})"


RELU6 = InBits(_a_bit, _a_byte_each, _compared_twice, _relu6_call)
HARDTANH = InBits(_a_bit, _a_byte_each, _compared_twice, _hardtanh_call)
CLAMP = InBits(_bit_between_numbers, _a_byte_each, _compared_twice, _clamp_call)
THRESHOLD = InBits(_a_bit, _a_byte_each, _compared, _threshold_call)
RELU = InBits(_a_bit, _a_byte_each, _compared, _relu_call)
LEAKY_RELU = InBits(_a_bit, _a_byte_each, _compared, _leaky_call)


# Dropout ----------------------------------------


def _bit_of_mask(node: Node, graph: Graph) -> int | None:
    """Not where something reads the mask."""
    mask = node.outputs[1] if len(node.outputs) > 1 else None
    is_read = mask is not None and (graph.consumers[mask] or mask in graph.outputs)
    is_drawn = argument(node, 2, "train", True) is not False and argument(node, 1, "p", 0.5) > 0
    return 1 if is_drawn and not is_read else None


def _dropout_workspace(node: Node, sizes: Sizes) -> Workspace:
    """The mask is packed, then its factor made, which is made of the unpacked one again."""
    mask = 0 if len(sizes.results) > 1 else _elements(sizes)
    return mask + max(sizes.result, _elements(sizes)), _elements(sizes) + sizes.result


def _dropout_passes(node: Node, sizes: Sizes) -> Passes:
    elements = _elements(sizes)
    return (2 * elements, *_packing(elements)), _unpacking(elements)


def dropout_call(text: str | None) -> str:
    """Of the text of a dropout that keeps a mask."""
    assert text is not None and text.startswith("rt.native_dropout("), f"no dropout of the runtime's: {text}"
    return text.replace("rt.native_dropout(", "rt.native_dropout_in_bits(", 1)


def dropout_in_bits(call: Callable[[LocalCall], str | None]) -> InBits:
    """call: the text of one that keeps a mask."""
    return InBits(_bit_of_mask, _dropout_workspace, _dropout_passes, lambda local: dropout_call(call(local)))


# Pooling ----------------------------------------


def _bits_of_index(node: Node, graph: Graph) -> int | None:
    """Not where something reads torch's indices."""
    if any(graph.consumers[name] or name in graph.outputs for name in node.results[1:]):
        return None
    kernel = Call(graph, node).arguments["kernel_size"]
    elements = math.prod(kernel) if len(kernel) > 1 else kernel[0] ** 2
    return bits_of_window(elements) if elements <= MOST_NUMBERED else None


def _pool_workspace(node: Node, sizes: Sizes) -> Workspace:
    """Indices, from which those of each window's first element are subtracted, and a byte each. Backward, numbers of
    four bytes beside indices; GPUs ask for the input, too, of which the kernel reads nothing."""
    elements, (rows, columns) = _elements(sizes), sizes.results[0][-2:]
    first, image = INDEX_BYTES * rows * columns, math.prod(sizes.operands[0][-2:])
    forward = INDEX_BYTES * elements + 2 * first + elements + image
    backward = elements + (INDEX_BYTES + 4) * elements + 2 * first
    return forward, backward + (0 if sizes.device_type == "cpu" else sizes.operand(0))


def _pool_passes(node: Node, sizes: Sizes) -> Passes:
    elements = _elements(sizes)
    index = INDEX_BYTES * elements
    forward = (2 * index, index + 2 * elements, *_packing(elements))
    return forward, (*_unpacking(elements), 5 * elements, index + 12 * elements, 2 * index)


def pool_in_bits(call: Callable[[LocalCall], str]) -> InBits:
    """call: the text of the runtime's function."""
    return InBits(_bits_of_index, _pool_workspace, _pool_passes, call)
