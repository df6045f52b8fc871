"""Runs one operator on virtual ranks in one process and compares with the whole operator: values and gradients.

Each operand is dealt out by its placement (S: slices, R and I: copies, P: random integer summands), the local
operator runs on every rank, and the results are joined by their placement. The gradient of each result is then
dealt out by the *dual* placement, each rank runs its own backward, and the operands' gradients are joined by the
dual of the operands' placements. Slices must have the planned shape, and copies must be equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Atom, Graph, Node, Ref, map_references
from autopar.ir.graph import Tensor as Value
from autopar.ir.placement import Axis, P, Placement, R, Type, local_shape
from autopar.ops import overload
from autopar.ops.lowering import local_arguments
from autopar.ops.notation import AxisRule
from autopar.ops.table import LOWERED
from tests.ops.shards import Shards, combine, deal, make_axes


def gradient_type(type_: Type) -> Type:
    """The type of the gradient of a tensor of the given type (the table of `autopar.ir.placement`)."""
    return {"R": P, "P": R}.get(type_.kind, type_)


@dataclass(frozen=True)
class Case:
    """One node with values for its operands, its whole results, and the gradients of both."""

    graph: Graph
    node: Node
    operands: list[Tensor]
    results: list[Tensor]
    result_gradients: list[Tensor | None]
    operand_gradients: list[Tensor | None]
    exact: bool  # integers in, integers out

    def equal(self, left: Tensor, right: Tensor, scale: float = 1.0) -> bool:
        """`scale`: the largest number that was added up. What is not finite need only be so in both."""
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        if self.exact or not (left.is_floating_point() or left.is_complex()):
            return torch.equal(left, right)
        finite = left.isfinite()
        tolerance = _TOLERANCE.get(left.dtype, 1e-10)
        near = torch.isclose(left, right, rtol=tolerance, atol=tolerance * max(1.0, scale))
        return bool((near | ~finite).all()) and torch.equal(finite, right.isfinite())


#: relative, of an element or of the largest summand; double precision has 1e-10
_TOLERANCE = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Layout:
    """The placements that a case runs with: one rule on each axis."""

    rules: tuple[AxisRule, ...]
    sizes: tuple[int, ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        return make_axes(self.sizes)

    @property
    def operands(self) -> tuple[Placement, ...]:
        return tuple(zip(*(rule.operands for rule in self.rules), strict=True))

    @property
    def results(self) -> tuple[Placement, ...]:
        return tuple(zip(*(rule.results for rule in self.rules), strict=True))

    @property
    def coordinates(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self.sizes))


#: operators of which models read the first result only
ONE_RESULT = {"aten._embedding_bag.default"}


def make_case(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], exact: bool = True) -> Case:
    """The case of an operator call on real tensors; those that require a gradient get one."""
    operands: list[Tensor] = []

    def named(value: Any) -> Any:
        if isinstance(value, Tensor):
            operands.append(value)
            return Ref(f"x{len(operands) - 1}")
        if isinstance(value, (list, tuple)):
            return tuple(named(item) for item in value)
        return Atom("dtype", str(value).removeprefix("torch.")) if isinstance(value, torch.dtype) else value

    node_args, node_kwargs = named(args), tuple((key, named(value)) for key, value in kwargs.items())
    results = call(op, node_args, node_kwargs, operands)
    outputs = [f"y{i}" if i == 0 or op not in ONE_RESULT else None for i in range(len(results))]
    results = [result for result, name in zip(results, outputs, strict=True) if name is not None]
    node = Node("node", op, node_args, node_kwargs, tuple(outputs))
    tensors = {**describe("x", operands), **describe("y", results)}
    inputs = tuple(f"x{i}" for i in range(len(operands)))
    graph = Graph(inputs=inputs, stored=(), nodes=(node,), outputs=node.results, tensors=tensors)
    seeds = [torch.randint(-4, 5, r.shape).to(r.dtype) if r.requires_grad else None for r in results]
    gradients = backward(results, seeds, operands)
    return Case(graph, node, _detach(operands), _detach(results), seeds, gradients, exact)


def _detach(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors]


def describe(prefix: str, tensors: list[Tensor]) -> dict[str, Value]:
    values = [
        Value(f"{prefix}{i}", tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
        for i, t in enumerate(tensors)
    ]
    return {value.name: value for value in values}


def call(op: str, args: Any, kwargs: Any, operands: list[Tensor]) -> list[Tensor]:
    """Runs an operator with its operands filled in, in argument order; a list of its results."""
    remaining = iter(operands)
    filled = map_references((args, dict(kwargs)), lambda _: next(remaining))
    real_args, real_kwargs = _real(filled)
    results = overload(op)(*real_args, **real_kwargs)
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _real(value: Any) -> Any:
    if isinstance(value, Atom):
        return torch.device("cpu") if value.kind == "device" else getattr(torch, value.name)
    if isinstance(value, dict):
        return {key: _real(item) for key, item in value.items()}
    return [_real(item) for item in value] if isinstance(value, (list, tuple)) else value


def backward(results: list[Tensor], seeds: list[Tensor | None], operands: list[Tensor]) -> list[Tensor | None]:
    """The gradients of the operands that need one: zeros where none flows, None where none is needed."""
    flowing = [(r, s) for r, s in zip(results, seeds, strict=True) if s is not None and r.requires_grad]
    wanted = [operand for operand in operands if operand.requires_grad]
    found: Any = [None] * len(wanted)
    if flowing and wanted:
        outputs, output_seeds = zip(*flowing, strict=True)
        found = torch.autograd.grad(outputs, wanted, output_seeds, allow_unused=True)
    gradients = iter(torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True))
    return [next(gradients) if operand.requires_grad else None for operand in operands]


def check(case: Case, rules: tuple[AxisRule, ...], sizes: tuple[int, ...]) -> str | None:
    """Why the rules, one an axis, are wrong for the case; None when values and gradients agree."""
    from tests.ops.emitted import bytes_difference, run_emitted

    layout = Layout(rules, sizes)
    operands = [deal(value, types, sizes) for value, types in zip(case.operands, layout.operands, strict=True)]
    for shards, gradient in zip(operands, case.operand_gradients, strict=True):
        for shard in shards.values():
            shard.requires_grad_(gradient is not None)
    gradients: list[Shards] | None = None
    if case.node.op in LOWERED:
        results, gradients, sent = run_emitted(case, layout, operands)
        if error := bytes_difference(case, layout, sent):
            return error
    else:
        results = run_locally(case, layout, operands)
    if len(results) != len(case.results):
        return f"expected {len(case.results)} results, found {len(results)}"
    for i, (whole, shards) in enumerate(zip(case.results, results, strict=True)):
        if error := difference(case, whole, shards, layout.results[i], layout):
            return f"result {i}: {error}"
    gradients = gradients or run_backward(case, layout, operands, results)
    for i, (whole_gradient, shards) in enumerate(zip(case.operand_gradients, gradients, strict=True)):
        if whole_gradient is not None:
            dual = tuple(map(gradient_type, layout.operands[i]))
            if error := difference(case, whole_gradient, shards, dual, layout):
                return f"gradient of operand {i}: {error}"
    return None


def run_locally(case: Case, layout: Layout, operands: list[Shards]) -> list[Shards]:
    """Every rank runs the operator on its own shards, with the arguments that an emitted program would use."""
    results: list[Shards] = [{} for _ in case.results]
    for coordinate in layout.coordinates:
        shapes = tuple(
            local_shape(tuple(result.shape), types, layout.axes, coordinate)
            for result, types in zip(case.results, layout.results, strict=True)
        )
        args, kwargs = local_arguments(case.graph, case.node, shapes)
        made = call(case.node.op, args, kwargs, [shards[coordinate] for shards in operands])
        for shards, value in zip(results, made, strict=True):
            shards[coordinate] = value
    return results


def run_backward(case: Case, layout: Layout, operands: list[Shards], results: list[Shards]) -> list[Shards]:
    """The ranks' gradients of their operands. Ranks meet only where the operator itself communicates."""
    outputs: list[Tensor] = []
    seeds: list[Tensor | None] = []
    for whole, shards, types in zip(case.result_gradients, results, layout.results, strict=True):
        dual = tuple(map(gradient_type, types))
        dealt: dict[Any, Tensor] = {} if whole is None else deal(whole, dual, layout.sizes)
        outputs += shards.values()
        seeds += [dealt.get(coordinate) for coordinate in shards]
    leaves = [shard for shards in operands for shard in shards.values()]
    found = iter(backward(outputs, seeds, leaves))
    return [{coordinate: next(found) for coordinate in shards} for shards in operands]  # type: ignore[misc]


def _largest(value: Tensor) -> float:
    sizes = (value if value.is_complex() else value.double()).abs()
    return float(sizes.nan_to_num(0, 0, 0).amax()) if value.numel() else 0.0


def difference(case: Case, whole: Tensor, shards: Shards, placement: Placement, layout: Layout) -> str | None:
    for coordinate, shard in shards.items():
        planned = local_shape(tuple(whole.shape), placement, layout.axes, coordinate)
        if tuple(shard.shape) != planned:
            return f"expected local shape {planned} at {coordinate}, found {tuple(shard.shape)}"
    parts = {c: shard.detach() for c, shard in shards.items()}
    scale = max(_largest(part) for part in parts.values())
    joined = combine(parts, placement, lambda left, right: case.equal(left, right, scale))
    if joined is None:
        return "expected equal copies on the ranks, found different ones"
    if not case.equal(joined, whole, scale):
        return f"expected {whole.tolist()}, found {joined.tolist()}"
    return None
