"""What takes memory besides the values themselves: optimizer state, and what autograd saves for backward.

What is saved of an operator, and what it takes for a while, is in its row of `ops.table`. A view is saved by keeping
its base alive: `storage_root` finds who owns the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from autopar.errors import PlanError
from autopar.ir.graph import DTYPE_BYTES, Graph, Node
from autopar.ir.placement import Placement, Shape
from autopar.ops.call import base_name
from autopar.ops.eight_bits import Packed, kept_in_eight_bits, packed_by
from autopar.ops.in_bits import kept_in_bits
from autopar.ops.layout import PRODUCTS, copied
from autopar.ops.saved import Saved, each_once
from autopar.ops.table import operator
from autopar.ops.workspace import RuntimeMemory, Sizes, Workspace

# Optimizer state ----------------------------------------


class Optimizer(NamedTuple):
    """State of an optimizer: whole copies of the parameter, whether a second moment is factored, and whether the state
    is float32 whatever the parameter is. is_elementwise: no element's update asks for others of its parameter, so that
    parameters may be stored together or in pieces.

    `temporaries`: tensors as large as a parameter that its update takes for a while, one parameter after the other
    (as torch does for DTensors): Adam's √v and √v / √(1 − β₂ᵗ). The last of them stays until the next parameter's.

    of_matrices: copies where the parameter is a matrix, if these are others. squares: how many square matrices it keeps
    for each dim of a matrix, as long as that. One that is not elementwise gathers a parameter that is stored in shards,
    with gradient and state, to step it (`runtime.optimizers`).
    """

    copies: int
    factored: bool = False
    temporaries: int = 0
    in_float32: bool = False
    is_elementwise: bool = True
    of_matrices: int | None = None
    squares: int = 0

    def copies_of(self, shape: Shape) -> int:
        """Tensors of its shape that are kept of a parameter."""
        return self.copies if self.of_matrices is None or len(shape) != 2 else self.of_matrices


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
    "muon": Optimizer(2, temporaries=4, is_elementwise=False, of_matrices=1),  # Adam's two of what is no matrix
    "shampoo": Optimizer(1, temporaries=2, is_elementwise=False, squares=2),  # momentum, statistics and their roots
    "sgd": Optimizer(0),
}

GATHERED_BYTES = 2**28
"""Bytes of whole tensors that stay for what a step does next: `runtime.optimizers.memory.RESIDENT_BYTES`."""


def optimizer_of(name: str | None) -> Optimizer:
    """The optimizer's row; None keeps no state. Raises PlanError for an unknown name."""
    if name is None or name == "none":
        return Optimizer(0)
    if name not in OPTIMIZERS:
        known = ", ".join(sorted(OPTIMIZERS))
        raise PlanError(f"expected an optimizer whose memory is known ({known}) or None, found {name!r}")
    return OPTIMIZERS[name]


def optimizer_state_bytes(name: str | None, shape: Shape, dtype: str = "float32", whole: Shape | None = None) -> int:
    """Bytes of optimizer state of a parameter slice, of the parameter's `whole` shape: torch keeps state in the
    parameter's own dtype, masters aside. Square matrices are cut into as many parts as the parameter."""
    kind = optimizer_of(name)
    elements = kind.copies_of(shape) * math.prod(shape)
    if kind.factored:
        elements += math.prod(shape[:-1]) + math.prod((*shape[:-2], shape[-1])) if len(shape) > 1 else math.prod(shape)
    if kind.squares and len(shape) > 1:
        full = whole or shape
        squares = kind.squares * sum(length * length for length in full)
        elements += -(-squares * math.prod(shape) // max(math.prod(full), 1))
    return elements * DTYPE_BYTES["float32" if kind.in_float32 else dtype]


def gathered_bytes(name: str | None, shape: Shape, whole: Shape, dtype: str = "float32") -> int:
    """Bytes of whole tensors that stand in for a parameter slice, its gradient and its state, while it is stepped."""
    kind = optimizer_of(name)
    if kind.is_elementwise or shape == whole:
        return 0
    return 2 * math.prod(whole) * DTYPE_BYTES[dtype] + optimizer_state_bytes(name, whole, dtype)


def optimizer_workspace_bytes(
    name: str | None, shape: Shape, dtype: str = "float32", whole: Shape | None = None
) -> tuple[int, int]:
    """Bytes that updating a parameter slice takes for a while, and those of them that stay until the next one's.

    Where it is gathered, what is gathered stays as well, up to GATHERED_BYTES of it.
    """
    gathered = gathered_bytes(name, shape, whole or shape, dtype)
    size = math.prod(whole or shape if gathered else shape) * DTYPE_BYTES[dtype]
    temporaries = optimizer_of(name).temporaries
    return temporaries * size + gathered, gathered or (size if temporaries else 0)


def most_workspace(workspaces: Iterable[tuple[int, int]], is_elementwise: bool) -> int:
    """The most bytes that updating parameters, one after the other, takes at a time."""
    most = before = 0
    for taken, kept in workspaces:
        most = max(most, before + taken)
        before = kept if is_elementwise else min(before + kept, max(GATHERED_BYTES, kept))
    return most


def optimizer_moved_bytes(name: str | None, shape: Shape, dtype: str = "float32", whole: Shape | None = None) -> int:
    """Bytes that one step reads and writes: gradient and parameter read, parameter written, state both."""
    if name is None or name == "none":
        return 0
    return 3 * math.prod(shape) * DTYPE_BYTES[dtype] + 2 * optimizer_state_bytes(name, shape, dtype, whole)


# What a view shares ----------------------------------------


def is_view(node: Node, graph: Graph) -> bool:
    """Whether the results share the memory of the first operand."""
    return operator(node.op).is_view and bool(node.operands) and node.name not in copied(graph).reshapes


def passes_gradient(node: Node, graph: Graph) -> tuple[bool, ...]:
    """Of each operand: whether its gradient is the result's, or a view of it, and takes no memory of its own."""
    passes = operator(node.op).passes
    return passes(node, graph) if passes is not None and node.results else (False,) * len(node.operands)


def viewed_gradients(node: Node, graph: Graph) -> tuple[int, ...]:
    """The positions of operands of more than two dims whose gradient a product makes as a matrix or a batch of them,
    and hands on as a view of that."""
    if base_name(node.op) not in PRODUCTS:
        return ()
    return tuple(place for place, name in enumerate(node.operands) if len(graph.tensors[name].shape) > 2)


def storage_root(tensor: str, graph: Graph) -> str:
    """The tensor that owns the memory: itself, or the base of a chain of views."""
    producer = graph.producers.get(tensor)
    while producer is not None and is_view(producer, graph):
        tensor = producer.operands[0]
        producer = graph.producers.get(tensor)
    return tensor


# What autograd saves ----------------------------------------


def saved_values(node: Node, graph: Graph, device_type: str = "cuda") -> tuple[Saved, ...]:
    """What the operator keeps for its backward pass: operands and results by name, each once, and extras.

    Empty when no operand is differentiable. A name may be that of a view; see `storage_root`. `device_type` counts
    where a CPU has no fused kernel.
    """
    if not any(graph.tensors[name].differentiable for name in node.operands):
        return ()
    if not any(graph.tensors[name].differentiable for name in node.results):  # a comparison, an argmax
        return ()
    row = operator(node.op)
    rule = row.saved_on_cpu if device_type == "cpu" and row.saved_on_cpu is not None else row.saved
    return each_once(rule(node, graph))


def kept_values(
    node: Node, graph: Graph, in_bits: bool, device_type: str = "cuda", in_eight_bits: bool = False
) -> tuple[Saved, ...]:
    """As `saved_values`; in_bits: as the plan's entry of the node says, a few bits of each element instead;
    in_eight_bits: or 8 bits of each activation."""
    saved, rule = saved_values(node, graph, device_type), operator(node.op).in_bits
    if in_eight_bits and saved:
        return kept_in_eight_bits(node, graph, saved, packed_in_eight_bits(node, graph))
    return tuple(kept_in_bits(rule, node, graph)) if in_bits and rule is not None and saved else saved


def packed_in_eight_bits(node: Node, graph: Graph) -> Packed:
    """What an operator may keep in 8 bits on any device; nothing, of most."""
    return packed_by(node, graph, saved_values(node, graph))


def workspace_bytes(op: str, sizes: Sizes) -> Workspace:
    """Bytes that an operator takes for a while in the forward and in the backward pass."""
    rule = operator(op).workspace
    return rule(sizes) if rule is not None and sizes.operands else (0, 0)


def lowered_memory(node: Node, sizes: Sizes, operands: tuple[Placement, ...]) -> RuntimeMemory | None:
    """What the runtime's function keeps and takes that runs in the operator's place with operands so placed; None where
    the operator itself runs."""
    rule = operator(node.op).lowered
    return rule(node, sizes, operands) if rule is not None else None
