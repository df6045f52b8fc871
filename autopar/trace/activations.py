"""What lies between an expert's two products, as the text that `runtime.lowering.activations` runs.

    mul(silu(left), right)                     "silu", of halves
    slice and clamp both, multiply …           "c = clamp(a, None, 7.0); …", of even and odd columns

Elementwise operators of the rows alone: with anything else there is no such text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from autopar.ir.graph import Graph, Node, Ref
from autopar.ops.call import argument, overload

_NAMED = {"silu", "gelu", "relu", "sigmoid", "tanh", "mish", "softplus"}
_MOST_STATEMENTS = 32


class RoutingMismatch(Exception):
    """This is none."""


def require(condition: bool) -> None:
    """Raises RoutingMismatch unless it holds."""
    if not condition:
        raise RoutingMismatch


class Activation(NamedTuple):
    """A text; whether it is of two parts of the columns, and whether these are the even and the odd ones."""

    text: str
    gated: bool
    paired: bool


def activation_of(graph: Graph, rows: Ref, hidden: Ref, width: int) -> Activation:
    """How `hidden`, of so many columns, is made of `rows`. Raises RoutingMismatch where not elementwise."""
    writer = _ActivationWriter(graph, rows, width)
    last = writer.name(hidden)
    require(graph.tensors[hidden.tensor].shape == (graph.tensors[rows.tensor].shape[0], width))
    kinds = writer.kinds
    require(len(kinds) == 1)
    (kind,) = kinds
    text = writer.short(last, kind != "whole") or writer.text(last)
    return Activation(text, kind != "whole", kind == "paired")


class _ActivationWriter:
    """Names values in the order in which they are made. kinds: in which ways the columns of the rows are read."""

    def __init__(self, graph: Graph, rows: Ref, width: int) -> None:
        self.graph, self.rows, self.width = graph, rows, width
        self.kinds = set[str]()
        self.names = dict[str, str]()
        self.statements = list[tuple[str, Node, str]]()

    def text(self, last: str) -> str:
        """All statements; the last makes the result."""
        lines = [f"{name} = {call}" for name, _, call in self.statements]
        require(bool(lines) and self.statements[-1][0] == last)
        return "; ".join(lines)

    def short(self, last: str, gated: bool) -> str | None:
        """The name that stands for the statements, where it is one that is known."""
        expected = 2 if gated else 1
        if len(self.statements) != expected or self.statements[-1][0] != last:
            return None
        name, node, call = self.statements[0]
        known = "gelu_tanh" if call == "gelu(a, approximate='tanh')" else node.op.split(".")[1]
        is_known = known == "gelu_tanh" or (known in _NAMED and call == f"{known}(a)")
        return known if is_known and (not gated or self.statements[1][2] == f"mul({name}, b)") else None

    def name(self, value: Any) -> str:
        """Of a tensor that is made of the rows. Raises RoutingMismatch for any other."""
        require(isinstance(value, Ref) and len(self.statements) < _MOST_STATEMENTS)
        if value.tensor in self.names:
            return self.names[value.tensor]
        part = self._part(value)
        self.names[value.tensor] = part or self._called(value)
        return self.names[value.tensor]

    def _part(self, value: Ref) -> str | None:
        """ "a" or "b" where it is the rows or a part of them."""
        if value == self.rows:
            self.kinds.add("whole")
            return "a"
        node = self.graph.producers.get(value.tensor)
        if node is None or node.args[:1] != (self.rows,):
            return None
        found = _half(node, value, 2 * self.width) if self._is_twice() else None
        if found is None:
            return None
        self.kinds.add(found[0])
        return found[1]

    def _is_twice(self) -> bool:
        shape = self.graph.tensors[self.rows.tensor].shape
        return len(shape) == 2 and shape[1] == 2 * self.width

    def _called(self, value: Ref) -> str:
        node = self.graph.producers.get(value.tensor)
        require(node is not None)
        assert node is not None
        require(node.op.startswith("aten.") and node.outputs == (value.tensor,))
        tags = overload(node.op).tags
        require(torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags)
        shown = [self._shown(arg) for arg in node.args]
        shown += [f"{key}={self._shown(arg)}" for key, arg in node.kwargs]
        require(self.graph.tensors[value.tensor].dtype == self.graph.tensors[self.rows.tensor].dtype)
        name = f"v{len(self.statements)}" if len(self.statements) > 20 else chr(ord("c") + len(self.statements))
        self.statements.append((name, node, f"{node.op.split('.')[1]}({', '.join(shown)})"))
        return name

    def _shown(self, arg: Any) -> str:
        if isinstance(arg, Ref):
            return self.name(arg)
        require(arg is None or isinstance(arg, (bool, int, str)) or (isinstance(arg, float) and arg - arg == 0))
        return repr(arg)


def _half(node: Node, value: Ref, width: int) -> tuple[str, str] | None:
    """Whether a node takes halves or every other of so many columns, and which of them a value is."""
    if node.op == "aten.split.Tensor":
        is_half = argument(node, 1, "split_size", 0) == width // 2 and argument(node, 2, "dim", 0) in (-1, 1)
        return ("halves", "ab"[node.outputs.index(value.tensor)]) if is_half and len(node.outputs) == 2 else None
    if node.op != "aten.slice.Tensor" or argument(node, 1, "dim", 0) not in (-1, 1):
        return None
    taken = range(width)[
        argument(node, 2, "start", None) : argument(node, 3, "end", None) : argument(node, 4, "step", 1)
    ]
    ways = {
        ("halves", "a"): range(width // 2), ("halves", "b"): range(width // 2, width),
        ("paired", "a"): range(0, width, 2), ("paired", "b"): range(1, width, 2),
    }  # fmt: skip
    return next((way for way, columns in ways.items() if taken == columns), None)
