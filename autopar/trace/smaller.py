"""Cuts a batch, so that a model can be run beside its graph in little time: fewer samples, shorter sequences.

    inputs of 8 × 1024 → of 2 × 8, traced again → the same operators in the same order? else of 2 × 1024, or as they are

What is found of the smaller graph then holds for the graph of the whole batch: they are one but for sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Graph
from autopar.trace.structure import filled, tensors_in

_SAMPLES = 2
_LENGTH = 8
"""Of sequences; others among the inputs get 12, 16, … so that different sizes stay different."""
_PIXELS = 64
"""Of the sides of images that are a multiple of 32."""

Sizes = Mapping[int, int]


def cut(example_inputs: Any, sizes: Sizes) -> Any:
    """The inputs with each dim of such a size cut to its first elements."""

    def part(x: Tensor) -> Tensor:
        return x[tuple(slice(sizes.get(length, length)) for length in x.shape)] if x.dim() else x

    return filled(example_inputs, iter([part(x) for x in tensors_in(example_inputs)]))


def smaller(graph: Graph, example_inputs: Any, trace: Callable[[Any], Graph]) -> tuple[Graph, Any, Sizes] | None:
    """The graph of a cut batch, that batch, and what of its sizes became what; None where none has such a graph."""
    for sizes in _sizes(list(tensors_in(example_inputs))):
        inputs = cut(example_inputs, sizes)
        try:
            found = trace(inputs)
        except Exception:  # it takes no such sizes
            continue
        if _form(found) == _form(graph):
            return found, inputs, sizes
    return None


def _sizes(tensors: list[Tensor]) -> Iterator[Sizes]:
    """What to cut to what: samples and lengths, or samples alone."""
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
