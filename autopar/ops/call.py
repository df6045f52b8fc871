"""One operator call seen through its schema: arguments by name, operands by position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.ir.graph import Atom, Graph, Node, Ref, Tensor, map_references, references


@cache
def overload(name: str) -> torch._ops.OpOverload:
    """The torch operator of a dotted name such as "aten.linear.default"."""
    parts = name.split(".", 2)
    try:
        found = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, IndexError) as error:
        raise RuleError(
            f"expected an operator such as 'aten.linear.default' (namespace, name, overload), found {name!r}; "
            "import the module that defines it first"
        ) from error
    assert isinstance(found, torch._ops.OpOverload)
    return found


def base_name(op: str) -> str:
    """The operator without namespace and overload: aten.linear.default → linear."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def argument(node: Node, position: int, name: str, default: Any) -> Any:
    """An argument of an operator call, given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return dict(node.kwargs).get(name, default)


@dataclass(frozen=True, eq=False)
class Call:
    """A node in its graph, as rules see it."""

    graph: Graph
    node: Node

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Every argument by its schema name, defaults filled in; lists are tuples, as in a node."""
        schema = overload(self.node.op)._schema
        bound = {a.name: _frozen(a.default_value) for a in schema.arguments if a.has_default_value()}
        bound.update({a.name: value for a, value in zip(schema.arguments, self.node.args, strict=False)})
        bound.update(dict(self.node.kwargs))
        return bound

    @cached_property
    def positions(self) -> dict[str, tuple[int, ...]]:
        """For each tensor argument by name, the operand positions it covers (several for a list of tensors)."""
        found: dict[str, tuple[int, ...]] = {}
        count = 0
        schema = overload(self.node.op)._schema
        named = [(a.name, value) for a, value in zip(schema.arguments, self.node.args, strict=False)]
        for name, value in [*named, *self.node.kwargs]:
            used = len(references(value))
            if used:
                found[name] = tuple(range(count, count + used))
                count += used
        return found

    def tensor(self, position: int) -> Tensor:
        return self.graph.tensors[self.node.operands[position]]

    def shape(self, position: int) -> tuple[int, ...]:
        return self.tensor(position).shape

    @property
    def operand_shapes(self) -> list[tuple[int, ...]]:
        return [self.shape(position) for position in range(len(self.node.operands))]

    @property
    def result_shapes(self) -> list[tuple[int, ...]]:
        return [self.graph.made_shape(name) for name in self.node.results]

    def has_tensor(self, name: str) -> bool:
        return isinstance(self.arguments.get(name), Ref)

    def dim(self, name: str, rank: int) -> int:
        value = self.arguments[name]
        return int(value) % rank if rank else 0

    def result_positions(self) -> list[int]:
        """The schema positions of the results that are named."""
        return [position for position, name in enumerate(self.node.outputs) if name is not None]


def call_of(graph: Graph, node: Node) -> Call:
    """The call of one of the graph's nodes, made once: what is found out about it stays."""
    known: Call | None = graph.found.get(("call", node.name))
    if known is None or known.node is not node:
        known = graph.found["call", node.name] = Call(graph, node)
    return known


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def run(node: Node, value_of: Callable[[str], Any], device: str) -> list[Any]:
    """The results of torch's operator on a node's arguments, with the value of each tensor, on a device."""
    args, kwargs = real(map_references((node.args, dict(node.kwargs)), value_of), device)
    made: Any = overload(node.op)(*args, **kwargs)
    return list(made) if isinstance(made, (tuple, list)) else [made]


def real(value: Any, device: str) -> Any:
    """An argument structure with torch's own objects in the place of `Atom`s, lists for tuples, on a device."""
    if isinstance(value, Atom):
        return torch.device(device) if value.kind == "device" else getattr(torch, value.name)
    if isinstance(value, dict):
        return {key: real(item, device) for key, item in value.items()}
    return [real(item, device) for item in value] if isinstance(value, (list, tuple)) else value
