"""Names nodes, and what they make, after their operators: `linear`, `linear_1`; results of several are items.

The same graph gets the same names, however it was traced.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from autopar.ir.graph import Graph, Node, Stored, reading
from autopar.ir.structure import FUNCTION

_LIFTED = re.compile(r"(.*\.)?lifted_tensor_\d+(@\d+)?$")


def number(graph: Graph) -> Graph:
    """The graph with such names; inputs and what the model stores keep theirs."""
    fresh = _Fresh((*graph.inputs, *(item.tensor for item in graph.stored if not _is_lifted(item))))
    renamed = _constants(graph, fresh)
    names = []
    for node in graph.nodes:
        base = _base(node)
        names.append(fresh(base))
        is_one = len(node.outputs) == 1
        renamed.update({result: names[-1] if is_one else fresh("getitem") for result in node.results})

    def new(name: str) -> str:
        return renamed.get(name, name)

    tensors = {new(name): replace(tensor, name=new(name)) for name, tensor in graph.tensors.items()}
    return replace(
        graph,
        nodes=tuple(_renamed(node, name, renamed) for node, name in zip(graph.nodes, names, strict=True)),
        stored=tuple(_stored(item, new(item.tensor)) for item in graph.stored),
        outputs=tuple(map(new, graph.outputs)),
        loss=None if graph.loss is None else new(graph.loss),
        mutations={buffer: new(name) for buffer, name in graph.mutations.items()},
        tensors=tensors,
        values={new(name): value for name, value in graph.values.items()},
    )


def _base(node: Node) -> str:
    """What a node is named after."""
    if node.op == FUNCTION:
        return re.sub(r"\W", "_", str(node.args[0]).rpartition(":")[2].rpartition(".")[2]).lower()
    return node.op.split(".")[1]


class _Fresh:
    """Names that are not taken: "sum" is Python's, so the first is sum_1."""

    def __init__(self, taken: Iterable[str]) -> None:
        self.taken = set(taken)
        self.counts: Counter[str] = Counter()

    def exactly(self, name: str) -> str:
        """The name, with underscores behind it where it is taken."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def __call__(self, base: str) -> str:
        while True:
            count = self.counts[base]
            self.counts[base] += 1
            name = f"{base}_{count}" if count else base
            if name not in self.taken and not keyword.iskeyword(name) and not hasattr(builtins, name):
                self.taken.add(name)
                return name


def _is_lifted(item: Stored) -> bool:
    """Whether it is a constant that has no name in the model."""
    return item.kind == "constant" and _LIFTED.match(item.tensor) is not None


def _constants(graph: Graph, fresh: _Fresh) -> dict[str, str]:
    """Constants that have no name in the model are numbered by their first use."""
    lifted = {item.tensor for item in graph.stored if _is_lifted(item)}
    used = dict.fromkeys(name for node in graph.nodes for name in node.operands if name in lifted)
    modules = (name.rpartition("lifted_tensor_")[0] for name in used)
    named = (fresh.exactly(f"{module}lifted_tensor_{position}") for position, module in enumerate(modules))
    return dict(zip(used, named, strict=True))


def _stored(item: Stored, name: str) -> Stored:
    return item if name == item.tensor else replace(item, name=name, tensor=name)


def _renamed(node: Node, name: str, renamed: dict[str, str]) -> Node:
    outputs = tuple(None if output is None else renamed[output] for output in node.outputs)
    return replace(reading(node, renamed), name=name, outputs=outputs)
