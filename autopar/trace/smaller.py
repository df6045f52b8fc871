"""Cuts a batch, so that a model can be run beside its graph in little time: fewer samples, shorter sequences.

    inputs of 8 × 1024 → of 2 × 8; the graph's own sizes follow: view(x, [8, 1024, 12, 64]) → view(x, [2, 8, 12, 64])

Which numbers of a graph are such sizes is a guess (`fitted`), which is right where the cut graph computes what the
model does. Where it does not, the model is traced again on the cut batch (`retraced`): what is found of that graph
holds for the graph of the whole batch if both have the same operators in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Graph, Node
from autopar.trace.structure import filled, tensors_in

_SAMPLES = 2
_LENGTH = 8
"""Of sequences; others among the inputs get 12, 16, … so that different sizes stay different."""
_PIXELS = 64
"""Of the sides of images that are a multiple of 32."""
_VIEWS = ("view", "_unsafe_view", "reshape")
_OF_SIZES = ("slice", "arange", "full", "zeros", "ones", "empty", "rand", "randn", "new_full", "new_zeros", "new_ones")
"""Other operators that are given sizes of what they make, and numbers that are none rarely."""

Sizes = Mapping[int, int]


def sizes_to_cut(example_inputs: Any) -> Iterator[Sizes]:
    """What to cut to what: samples and lengths, or samples alone."""
    tensors = list(tensors_in(example_inputs))
    samples = {x.shape[0] for x in tensors if x.dim()}
    lengths = {n for x in tensors for n in _lengths(x)} - samples
    sides = {n for x in tensors if x.is_floating_point() and x.dim() > 3 for n in x.shape[2:]} - samples - lengths
    few = {n: _SAMPLES for n in samples if n > _SAMPLES}
    short = {n: _LENGTH + 4 * place for place, n in enumerate(sorted(lengths))}
    short |= {n: _PIXELS for n in sides if n % 32 == 0}
    short = {n: to for n, to in short.items() if n > 2 * to}
    flat = {n * m: few[n] * short[m] for n in few for m in short if n * m in samples}
    if short:
        yield few | short | flat
    if few:
        yield few


def _lengths(x: Tensor) -> tuple[int, ...]:
    """Sizes of dims that may be steps of a sequence; a matrix of numbers has features there."""
    if x.is_floating_point():
        return x.shape[1:2] if x.dim() > 2 else ()
    return x.shape[1:]


def cut(example_inputs: Any, sizes: Sizes) -> Any:
    """The inputs with each dim of such a size cut to its first elements."""

    def part(x: Tensor) -> Tensor:
        return x[tuple(slice(sizes.get(length, length)) for length in x.shape)] if x.dim() else x

    return filled(example_inputs, iter([part(x) for x in tensors_in(example_inputs)]))


def cut_shapes(graph: Graph, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """About the shapes of a graph's tensors when its inputs are cut: maps of images in proportion."""
    ratio = min((to / n for n, to in sizes.items() if to == _PIXELS), default=1.0)

    def shape(whole: tuple[int, ...]) -> tuple[int, ...]:
        found = tuple(_fitted(whole, sizes))
        return (*found[:2], *(ceil(n * ratio) for n in whole[2:])) if len(whole) == 4 and ratio < 1 else found

    stored = graph.stored_by_tensor
    return {name: x.shape if name in stored else shape(x.shape) for name, x in graph.tensors.items()}


def fitted(graph: Graph, node: Node, args: Any, sizes: Sizes) -> Any:
    """The arguments of a call with the numbers in them that are sizes cut."""
    name = node.op.split(".")[1] if sizes else ""
    if name in _VIEWS or name == "expand":
        x, shape = args[0], graph.tensors[node.results[0]].shape
        if name in _VIEWS:
            return [x, _fitted_view(shape, x.numel(), sizes)]
        own = [1] * (len(shape) - x.dim()) + list(x.shape)
        return [x, [n if is_now == 1 else is_now for n, is_now in zip(_fitted(shape, sizes), own, strict=True)]]
    return [_fitted(value, sizes) for value in args] if name in _OF_SIZES else args


def _fitted(value: Any, sizes: Sizes) -> Any:
    """A number, or of a shape each; a second dim with the number of samples has that by chance."""
    if isinstance(value, (list, tuple)):
        found = [_fitted(item, sizes) for item in value]
        cuts = [place for place, item in enumerate(value) if item in sizes and sizes[item] == _SAMPLES]
        return [value[place] if place in cuts[1:] else item for place, item in enumerate(found)]
    if type(value) is not int:
        return value
    products = {n * m: sizes[n] * sizes[m] for n in sizes for m in sizes if n != m}
    return sizes.get(value, products.get(value, value))


def _fitted_view(shape: tuple[int, ...], count: int, sizes: Sizes) -> list[int]:
    """Such that there are so many elements, with as many sizes cut as can be; one dim may be several at once."""
    choices = [dict.fromkeys((_fitted(n, sizes), n)) for n in shape]
    found = [list(dims) for dims in product(*choices)]
    for dims in found:
        if prod(dims) == count:
            return dims
    for dims in found:
        for place in range(len(dims)):
            rest = prod(dims[:place]) * prod(dims[place + 1 :])
            if rest and count % rest == 0 and count // rest < dims[place]:
                return [*dims[:place], count // rest, *dims[place + 1 :]]
    return list(shape)


def retraced(graph: Graph, inputs: Any, trace: Callable[[Any], Graph]) -> Graph | None:
    """The graph of a cut batch, if it is that of the whole one but for sizes."""
    try:
        found = trace(inputs)
    except Exception:  # it takes no such sizes
        return None
    return found if _form(found) == _form(graph) else None


def _form(graph: Graph) -> Any:
    """A graph but for sizes."""
    nodes = [(node.name, node.op, node.operands, node.outputs, node.scope, node.source) for node in graph.nodes]
    dtypes = {name: (tensor.dtype, len(tensor.shape)) for name, tensor in graph.tensors.items()}
    return nodes, dtypes, graph.stored, graph.inputs, graph.outputs, graph.loss, dict(graph.mutations)


def real_inputs(example_inputs: Any) -> Any:
    """Those on the meta device as random numbers, zeros or True."""
    generator = torch.Generator().manual_seed(0)

    def real(x: Tensor) -> Tensor:
        if not x.is_meta:
            return x
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator).to(x.dtype)
        return torch.full(x.shape, x.dtype == torch.bool, dtype=x.dtype)

    return filled(example_inputs, iter([real(x) for x in tensors_in(example_inputs)]))
