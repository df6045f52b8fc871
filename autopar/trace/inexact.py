"""One step of a traced model on the host as an inexact plan computes it, beside an exact one: how far its gradients are
off.

    activations   the operators that the plan keeps in 8 bits run so, by the runtime's own function
    sums          each copy's gradients are of its part of the batch, and meet by the runtime's own `CompressedSum`,
                  each copy in a thread of this process
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autopar.cost.memory import packed_in_eight_bits
from autopar.errors import AutoparError
from autopar.ir.graph import Graph, Node
from autopar.ir.inexact import MEASURED, GradientError, by_formula
from autopar.ir.plan import Plan
from autopar.ir.structure import batch_inputs
from autopar.ops import overload
from autopar.ops.eight_bits import Packed
from autopar.runtime.compressing import CompressedSum
from autopar.runtime.lowering.in_eight_bits import in_eight_bits, result_in_eight_bits
from autopar.runtime.mesh import Axis
from autopar.trace.eager import Subject, loss_of
from autopar.trace.guard import estimated_s, subject_of
from autopar.trace.interpreter import run_graph
from autopar.trace.originals import same_bits

AT_MOST_S = 20.0
"""What the steps may take by an estimate. Halved, more plans of large models state a formula's error."""
MOST_COPIES, MOST_ELEMENTS = 8, 1 << 28
"""Copies that meet in one process, and values of all their gradients. More copies are taken for so many: what rounding
leaves out of a sum depends on how many there are in topk and powersgd alone, and little."""


def is_inexact(plan: Plan) -> bool:
    """Whether gradients are not those of one device, by what `allow=("compression",)` allows."""
    keeps = any(placed.in_eight_bits for stage in plan.stages for placed in stage.nodes.values())
    return keeps or (plan.algorithm is not None and plan.algorithm.is_compressed)


def gradient_error(
    plan: Plan, graph: Graph, model: nn.Module, example_inputs: Any, loss_fn: Any, compute_dtype: torch.dtype | None
) -> GradientError:
    """How far the gradients of an inexact plan are off, in a measured step where one can be run. graph: the plan's, of
    the whole batch."""
    kept = frozenset(name for stage in plan.stages for name, placed in stage.nodes.items() if placed.in_eight_bits)
    shapes = [graph.tensors[item.tensor].shape for item in graph.parameters if item.requires_grad]
    formula = by_formula(plan.algorithm, bool(kept), shapes)
    if any(x.is_meta for x in (*model.parameters(), *model.buffers())) or 2 * estimated_s(graph) > AT_MOST_S:
        return formula
    try:
        subject = subject_of(model, graph, example_inputs, loss_fn, compute_dtype)
        relative = math.hypot(_of_activations(subject, kept), _of_sums(subject, plan))
    except (AutoparError, RuntimeError, LookupError, TypeError, ValueError):  # a batch that cannot be cut so, say
        return formula
    return GradientError(relative, MEASURED) if math.isfinite(relative) else formula


def _off(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """How far, as a share of the norm of what is exact."""
    wanted = torch.cat([x.flatten().double() for x in exact])
    return float((torch.cat([x.flatten().double() for x in found]) - wanted).norm() / wanted.norm())


# Activations ----------------------------------------


def _of_activations(subject: Subject, kept: frozenset[str]) -> float:
    if not kept:
        return 0.0
    state, inputs = subject.state, subject.inputs
    exact = _gradients(subject.graph, state, inputs, frozenset())
    return _off(_gradients(subject.graph, state, inputs, kept), exact)


def _gradients(
    graph: Graph, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], kept: frozenset[str]
) -> list[Tensor]:
    """Of the parameters, in a step in which these operators keep 8 bits; random numbers are those of each step."""
    trained = {item.name: state[item.name].detach().clone().requires_grad_() for item in graph.parameters
               if item.requires_grad}  # fmt: skip
    ops = {graph.node_by_name[name].op for name in kept}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        instead = dict.fromkeys(ops, _keeping(graph, kept))
        values = run_graph(graph, {**state, **trained}, inputs, keep_all=False, instead=instead)
        loss = values[graph.outputs[0]]
        found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        return _zero_where_none(trained.values(), found)


def _zero_where_none(parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> list[Tensor]:
    pairs = zip(parameters, gradients, strict=True)
    return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs]


def _keeping(graph: Graph, kept: frozenset[str]) -> Callable[..., Any]:
    """What runs in an operator's place: itself, in 8 bits where the plan says so."""

    def run(node: Node, *args: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            return overload(node.op)(*args, **kwargs)

        if node.name not in kept:
            return call()
        packed: Packed = packed_in_eight_bits(node, graph)
        if packed.result:
            return result_in_eight_bits(call)
        tensors = [x for x in args if isinstance(x, Tensor)]
        return in_eight_bits(call, *(tensors[place] for place in packed.operands))

    return run


# Copies that meet in one process ----------------------------------------


def _of_sums(subject: Subject, plan: Plan) -> float:
    """Of the model itself, on as many parts of the batch."""
    algorithm = plan.algorithm
    if algorithm is None or not algorithm.is_compressed:
        return 0.0
    size = next(axis.size for axis in plan.stages[0].axes if axis.name == algorithm.axis)
    copies = max(count for count in range(1, MOST_COPIES + 1) if size % count == 0)
    if copies == 1 or copies * sum(x.numel() for x in subject.target.parameters()) > MOST_ELEMENTS:
        return math.inf
    found = [_own_gradients(subject, copies, number) for number in range(copies)]
    exact = [torch.stack(parts).sum(0) for parts in zip(*found, strict=True)]
    return _off(_met(found, algorithm.name, algorithm.amount), exact)


def _own_gradients(subject: Subject, copies: int, number: int) -> list[Tensor]:
    """Of the model on a part of the batch; it is left as it is."""
    args, kwargs = tree_map(partial(_cut, subject, copies, number), (subject.args, subject.kwargs))
    trained = {name: x.detach().clone().requires_grad_() for name, x in subject.target.named_parameters()
               if x.requires_grad}  # fmt: skip
    buffers = {name: x.clone() for name, x in subject.target.named_buffers()}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        loss = loss_of(torch.func.functional_call(subject.target, {**trained, **buffers}, args, kwargs))
        return _zero_where_none(trained.values(), torch.autograd.grad(loss, [*trained.values()], allow_unused=True))


def _met(gradients: Sequence[list[Tensor]], kind: str, amount: float) -> list[Tensor]:
    """What the first copy has of the sum; all have the same."""
    together, size = _Together(len(gradients)), len(gradients)

    def meet(index: int) -> list[Tensor]:
        own = [x.detach().clone().contiguous() for x in gradients[index]]
        with torch.no_grad():
            CompressedSum(kind, amount, together).sum_(own, Axis("copies", size, index, None))
        return own

    with ThreadPoolExecutor(size) as threads:
        return next(iter(threads.map(meet, range(size))))


def _cut(subject: Subject, copies: int, number: int, value: Any) -> Any:
    """An argument, of which a copy has a part where the batch is along its first dim: known by what is in it, since
    the arguments are copies of the batch's tensors."""
    batch = batch_inputs(subject.graph)
    given = zip(subject.graph.inputs, subject.tensors, strict=True)
    is_batch = isinstance(value, Tensor) and any(name in batch and same_bits(x, value) for name, x in given)
    return value.tensor_split(copies)[number] if is_batch else value


class _Together:
    """The collectives of `runtime.comm` that sums ask for, between threads."""

    def __init__(self, size: int) -> None:
        self._barrier, self._told = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def _exchanged(self, own: Tensor, axis: Axis) -> list[Tensor]:
        self._told[axis.index] = own.clone()
        self._barrier.wait()
        found = [*self._told]
        self._barrier.wait()
        return found

    def all_reduce(self, buffer: Tensor, axis: Axis) -> None:
        buffer.copy_(torch.stack(self._exchanged(buffer, axis)).sum(0))

    def all_to_all(self, output: Tensor, buffer: Tensor, axis: Axis) -> None:
        output.copy_(torch.stack([told[axis.index] for told in self._exchanged(buffer, axis)]))

    def all_gather(self, output: Tensor, shard: Tensor, axis: Axis) -> None:
        output.copy_(torch.stack(self._exchanged(shard, axis)).view(output.shape))
