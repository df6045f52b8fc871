"""Writes a forward graph operator by operator, each in its module and with the source line whose text it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from autopar.ir.graph import Atom, Node, Ref, Scope, Stored, Tensor

Shape = tuple[int, ...]
INDICES = "int64"
RANK = ("device", Atom("device", "rank"))
"""What is made of no operand is made on the rank's device."""


class GraphWriter:
    """Stored tensors, nodes and tensors so far. file: whose lines are named, by a text that stands in one of them."""

    def __init__(self, root: str, file: str, inputs: Iterable[Tensor]) -> None:
        self.file = file
        self.stored: list[Stored] = []
        self.nodes: list[Node] = []
        self._tensors = {tensor.name: tensor for tensor in inputs}
        self._path: tuple[tuple[str, str], ...] = (("", root),)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name: what is stored, then the rest."""
        return {**{item.tensor: self._tensors[item.tensor] for item in self.stored}, **self._tensors}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> Shape:
        """Of a tensor."""
        return self._tensors[name].shape

    def parameter(self, name: str, shape: Shape, dtype: str) -> None:
        """One that is trained."""
        self.stored.append(Stored(name, name, "parameter", requires_grad=True))
        self._tensors[name] = Tensor(name, shape, dtype, differentiable=True)

    @contextmanager
    def module(self, name: str, kind: str) -> Iterator[None]:
        """What is called meanwhile is called in this module, by its path and class."""
        outer, self._path = self._path, (*self._path, (name, kind))
        yield
        self._path = outer

    def call(
        self, line: str, op: str, args: Iterable[Any], *shapes: Shape, dtypes: tuple[str, ...] = (),
        told: tuple[tuple[str, Any], ...] = (),
    ) -> tuple[str, ...]:  # fmt: skip
        """One operator; the names of its results, one a shape. args: tensors by name, and values. dtypes: of results,
        where not the first operand's. told: named arguments."""
        args = tuple(Ref(one) if isinstance(one, str) and one in self._tensors else one for one in args)
        read = [self._tensors[one.tensor] for one in args if isinstance(one, Ref)]
        names = tuple(f"{len(self.nodes)}.{place}" for place in range(len(shapes)))
        for name, shape, dtype in zip(names, shapes, dtypes or [read[0].dtype] * len(shapes), strict=True):
            differs = dtype != INDICES and any(one.differentiable for one in read)
            self._tensors[name] = Tensor(name, shape, dtype, differs)
        self.nodes.append(Node(names[0], op, args, told, names, Scope(self._path), source_line(self.file, line)))
        return names

    def one(
        self, line: str, op: str, args: Iterable[Any], shape: Shape, dtype: str = "",
        told: tuple[tuple[str, Any], ...] = (),
    ) -> str:  # fmt: skip
        """An operator of one result."""
        return self.call(line, op, args, shape, dtypes=(dtype,) if dtype else (), told=told)[0]

    def reshape(self, line: str, x: str, *shape: int) -> str:
        return self.one(line, "aten.reshape.default", (x, shape), shape)

    def transpose(self, line: str, x: str, first: int, second: int) -> str:
        shape = list(self.shape(x))
        shape[first], shape[second] = shape[second], shape[first]
        return self.one(line, "aten.transpose.int", (x, first, second), tuple(shape))

    def add(self, line: str, x: str, y: str) -> str:
        return self.one(line, "aten.add.Tensor", (x, y), self.shape(x))

    def cast(self, line: str, x: str, dtype: str) -> str:
        """Itself where it has that dtype."""
        if self._tensors[x].dtype == dtype:
            return x
        return self.one(line, "aten._to_copy.default", (x,), self.shape(x), dtype, (("dtype", Atom("dtype", dtype)),))


@cache
def source_line(file: str, text: str) -> str:
    """Where the one line stands of a file of this room that has this text, as `Node.source` says it."""
    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    (place,) = [number for number, line in enumerate(lines, 1) if text in line]
    return f"auditing/{file}:{place}"
