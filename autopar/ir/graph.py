"""The forward graph of a model: plain frozen data, one node an operator, tensors by name.

A node's arguments hold `Ref`s where tensors go and plain values elsewhere. Multi-output operators name each of
their outputs (None for one that nothing reads). Each node keeps the module it ran in and its source line.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from autopar.ir.placement import Placement

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip

#: the operator of a node that passes its operand on: the one place where several consumers' conversions meet
IDENTITY = "aten.alias.default"


#: the argument that says how tokens are expected to choose experts
EXPECTED = "routing"
#: the argument that says how they exchange tokens by load
BY_LOAD = "exchange"
#: the argument that says what travels, by load, where experts are sliced
SLICES = "slices"
#: writes rows of a cache, a buffer that is kept from step to step, in place (`ops.caches`)
WRITE_ROWS = "autopar.write_rows.default"
#: the argument that says how many experts, those with most rows of the moment, every rank computes
REPLICAS = "replicas"


class Ref(NamedTuple):
    """The use of a tensor as an argument."""

    tensor: str


class Fields(NamedTuple):
    """The fields of a dataclass that is an argument of forward."""

    items: tuple[tuple[str, Any], ...]


class Atom(NamedTuple):
    """A torch constant that has no JSON form: a dtype, device, layout or memory format, by its name."""

    kind: Literal["dtype", "device", "layout", "memory_format"]
    name: str


@dataclass(frozen=True)
class Tensor:
    """A value in the graph. `differentiable`: a gradient flows through it to some parameter or input."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    differentiable: bool = False

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Stored:
    """A parameter, buffer or lifted constant: its tensor's name in the graph and its name in the model."""

    tensor: str
    name: str
    kind: Literal["parameter", "buffer", "constant"]
    requires_grad: bool = False
    persistent: bool = True


@dataclass(frozen=True)
class Piece:
    """A slice of one of the model's parameters: `length` elements along `dim` from `start` on.

    length: None for all of it. transposed: of a matrix, after slicing.
    """

    name: str
    dim: int = 0
    start: int = 0
    length: int | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Packing:
    """How a stored parameter is made of the model's: its pieces, one after the other along `dim`."""

    dim: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Scope:
    """The module call that a node ran in: dotted path ("" is the root) and class name, outermost first."""

    path: tuple[tuple[str, str], ...]

    @property
    def module(self) -> str:
        return self.path[-1][0] if self.path else ""

    def outermost(self, modules: Container[str]) -> str | None:
        """The outermost of these modules that the node ran in, if any."""
        return next((path for path, _ in self.path if path in modules), None)


def is_inside(module: str, others: Iterable[str]) -> bool:
    """Whether a module, by its dotted path, is one of others or a part of one."""
    return any(f"{module}.".startswith(f"{other}.") for other in others)


def common_scope(scopes: list[Scope]) -> Scope:
    """The innermost module call that holds all of the scopes."""
    shared = []
    for level in zip(*(scope.path for scope in scopes), strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return Scope(tuple(shared))


@dataclass(frozen=True)
class Node:
    """One operator call. `op` is the ATen overload's name, such as "aten.linear.default"."""

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[str | None, ...]
    scope: Scope = Scope(())
    source: str = ""

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The tensors it reads, in argument order, repeated where used twice."""
        return tuple(references((self.args, dict(self.kwargs)) if self.kwargs else self.args))

    @property
    def told(self) -> tuple[tuple[str, Any], ...]:
        """The named arguments but for what is expected of values, on which nothing depends that is computed."""
        return tuple(item for item in self.kwargs if item[0] != EXPECTED)

    @cached_property
    def results(self) -> tuple[str, ...]:
        return tuple(name for name in self.outputs if name is not None)


@dataclass(frozen=True)
class Graph:
    """A model's forward computation on one global batch. Nodes are in execution order."""

    inputs: tuple[str, ...]
    stored: tuple[Stored, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    loss: str | None = None
    tied: Mapping[str, str] = field(default_factory=dict)  # alias name in the model -> the name that is kept
    #: name in the model of a buffer, or parameter, that forward updates -> its new tensor
    mutations: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # constants' torch.Tensors
    #: what the loss stores, as far as it is small: a program begins with it where a state has none of it
    starts: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    #: what forward (then the loss) is given, by name, where not all of it are tensors: dicts, lists, tuples, `Fields`,
    #: constants, and a `Ref` to each input by the name that it is given by
    arguments: tuple[tuple[str, Any], ...] = ()
    #: by name in the model: the torch.Tensors of buffers that no state_dict holds, as far as they are known
    unsaved: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    given_names: Mapping[str, str] = field(default_factory=dict)  # of inputs whose name in forward another tensor has
    model_name: str = "Model"
    #: dtype outside of the graph where it is another one: of what is stored (the master weights), of inputs as given
    kept_dtypes: Mapping[str, str] = field(default_factory=dict)
    #: of one stage's graph (`ir.stages`): inputs that earlier stages made, and outputs that later stages read
    received: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    answered: tuple[tuple[str, Placement], ...] = ()  # of what it sends, and as what: those whose gradient comes back
    ends: tuple[str, ...] | None = None  # those of its outputs that the model returns, if not all
    #: of one microbatch's graph: the shapes of what is made for the whole step and read in slices
    whole_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    training: bool = True  # the mode that the model was in: its dropout and batch norm are those of this mode
    inference: bool = False  # it is for the forward pass alone: parameters do not change between steps
    #: stored parameters that are made of slices of the model's, by `Stored.name` (`ir.packed`)
    packed: Mapping[str, Packing] = field(default_factory=dict)
    #: of the parameters that they are made of: name in the model, shape, dtype that is kept, and whether it is trained
    unpacked: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def returned(self) -> tuple[str, ...]:
        """What leaves the model: of one stage's graph, what the model returns of it."""
        return self.outputs if self.ends is None else self.ends

    @cached_property
    def stored_by_tensor(self) -> dict[str, Stored]:
        return {item.tensor: item for item in self.stored}

    @cached_property
    def parameter_by_name(self) -> dict[str, Stored]:
        """By name in the model."""
        return {item.name: item for item in self.parameters}

    @cached_property
    def kept_in_parts(self) -> dict[str, Stored]:
        """By name in the model: what may be sharded though forward updates it, since its new value ends as it is
        stored: parameters, and caches, whose rows are written in place. Other buffers are whole on every rank."""
        return self.parameter_by_name | {item.name: item for item in self.stored if self._is_cache(item)}

    def _is_cache(self, item: Stored) -> bool:
        node = self.producers.get(self.mutations.get(item.name, ""))
        return node is not None and node.op == WRITE_ROWS and node.operands[0] == item.tensor

    @cached_property
    def updates(self) -> dict[str, tuple[str, ...]]:
        """By tensor: the names in the model of buffers and parameters that become it."""
        found: dict[str, tuple[str, ...]] = {}
        for stored, value in self.mutations.items():
            found[value] = (*found.get(value, ()), stored)
        return found

    @cached_property
    def node_by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def producers(self) -> dict[str, Node]:
        return {tensor: node for node in self.nodes for tensor in node.results}

    @cached_property
    def consumers(self) -> dict[str, list[tuple[Node, int]]]:
        """For each tensor, the nodes that read it and at which operand position."""
        uses: dict[str, list[tuple[Node, int]]] = {name: [] for name in self.tensors}
        for node in self.nodes:
            for position, tensor in enumerate(node.operands):
                uses[tensor].append((node, position))
        return uses

    @cached_property
    def parameters(self) -> tuple[Stored, ...]:
        return tuple(item for item in self.stored if item.kind == "parameter")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything a plan depends on: operators, wiring, shapes, dtypes, names."""
        digest = hashlib.sha256()
        for item in self.stored:
            digest.update(repr((item.tensor, item.name, item.kind, item.requires_grad)).encode())
        for name in (*self.inputs, *(item.tensor for item in self.stored)):
            digest.update(repr(self.tensors[name]).encode())
        for node in self.nodes:
            digest.update(repr((node.op, node.args, node.told, node.outputs)).encode())
            digest.update(repr([self.tensors[name] for name in node.results]).encode())
        digest.update(repr((self.inputs, self.outputs, self.loss)).encode())
        if self.kept_dtypes:
            digest.update(repr(sorted(self.kept_dtypes.items())).encode())
        if self.packed:
            digest.update(repr((sorted(self.packed.items()), sorted(self.unpacked.items()))).encode())
        return digest.hexdigest()[:16]

    @cached_property
    def gradient_sources(self) -> tuple[str, ...]:
        """Where gradients come in: the loss, and of a stage's graph what later stages send the gradient of."""
        loss = () if self.loss is None else (self.loss,)
        return loss + tuple(dict.fromkeys(name for name, _ in self.answered))

    @cached_property
    def found(self) -> dict[tuple[str, str], Any]:
        """What was found out about the graph, by what it is and of what (a node): it need not be found out again."""
        return {}

    def kept(self, name: str) -> Tensor:
        """A stored tensor as it is kept between steps, or an input as it is given."""
        dtype = self.kept_dtypes.get(name)
        return self.tensors[name] if dtype is None else replace(self.tensors[name], dtype=dtype)

    def given_name(self, name: str) -> str:
        """An input as the model's forward calls it."""
        return self.given_names.get(name, name)

    def itemsizes(self, name: str) -> tuple[int, int]:
        """Bytes of an element of a tensor and of its gradient on its way home, which has the dtype it is kept in."""
        return self.tensors[name].itemsize, self.kept(name).itemsize

    def made_shape(self, name: str) -> tuple[int, ...]:
        """The shape that a tensor is made in, which a microbatch may read a slice of."""
        return self.whole_shapes.get(name, self.tensors[name].shape)


_Of = ParamSpec("_Of")
_Found = TypeVar("_Found")


def found_once(find: Callable[Concatenate[Graph, _Of], _Found]) -> Callable[Concatenate[Graph, _Of], _Found]:
    """A function that finds out about a graph but once what it returns; what else it is given, it is told apart by."""
    name = f"{find.__module__}.{find.__name__}"

    @wraps(find)
    def known(graph: Graph, /, *of: _Of.args, **named: _Of.kwargs) -> _Found:
        key = name, repr((of, named)) if of or named else ""
        if key not in graph.found:
            graph.found[key] = find(graph, *of, **named)
        found: _Found = graph.found[key]
        return found

    return known


def needed(nodes: Sequence[Node], wanted: set[str]) -> list[Node]:
    """Those of the nodes, in their order, by which what is wanted is made; what these read is wanted from then on."""
    found = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.results):
            wanted.update(node.operands)
            found.append(node)
    return found[::-1]


_PLAIN = frozenset({bool, int, float, str, type(None), Atom})
"""Of most of what an argument structure holds beside tensors: asked first, as graphs have many of these."""


def references(value: Any) -> list[str]:
    """The tensors named anywhere inside an argument structure, in order."""
    found: list[str] = []
    _add_references(value, found)
    return found


def _add_references(value: Any, found: list[str]) -> None:
    if type(value) in _PLAIN:
        return
    if isinstance(value, Ref):
        found.append(value.tensor)
    elif isinstance(value, (list, tuple)):
        for item in value:
            if type(item) not in _PLAIN:
                _add_references(item, found)
    elif isinstance(value, dict):
        _add_references(tuple(value.values()), found)


def map_references(value: Any, function: Callable[[str], Any]) -> Any:
    """The argument structure with `function(tensor name)` in place of each Ref."""
    if isinstance(value, Ref):
        return function(value.tensor)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return type(value)([item if type(item) in _PLAIN else map_references(item, function) for item in value])
    if isinstance(value, dict):
        return {key: map_references(item, function) for key, item in value.items()}
    return value


def reading(node: Node, names: Mapping[str, str]) -> Node:
    """The node with other tensors in the place of those that it reads, by name; itself where none is named."""
    if not any(name in names for name in node.operands):
        return node
    return reading_each(node, lambda name: names.get(name, name))


def reading_each(node: Node, new: Callable[[str], str]) -> Node:
    """The node that reads `new(name)` in the place of each tensor that it reads, in argument order."""
    args, kwargs = map_references((node.args, node.kwargs), lambda name: Ref(new(name)))
    return replace(node, args=args, kwargs=kwargs)


def with_nodes(
    graph: Graph, nodes: Sequence[Node], tensors: Mapping[str, Tensor], now: Callable[[str], str] = str
) -> Graph:
    """The graph of other nodes, with those of the tensors that there are then. now: the name that the tensor has which
    stands for one of the graph's, where that is returned or becomes what is stored."""
    kept = {name for node in nodes for name in node.results} | {*graph.inputs, *(item.tensor for item in graph.stored)}
    return replace(
        graph,
        nodes=tuple(nodes),
        tensors={name: tensor for name, tensor in tensors.items() if name in kept},
        outputs=tuple(map(now, graph.outputs)),
        mutations={stored: now(name) for stored, name in graph.mutations.items()},
        loss=None if graph.loss is None else now(graph.loss),
    )
