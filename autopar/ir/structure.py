"""What the emitter and the simulator must agree on: which tensors are constant, and which modules become blocks."""

from __future__ import annotations

from autopar.ir.graph import IDENTITY, Graph

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal_")


def constant_tensors(graph: Graph) -> set[str]:
    """Tensors that depend on no input, no parameter, no mutated buffer and no chance: the same at every step."""
    variable = set(graph.inputs) | {s.tensor for s in graph.stored if s.kind == "parameter"}
    variable |= {s.tensor for s in graph.stored if s.name in graph.mutations}
    for node in graph.nodes:
        random = any(word in node.op for word in _RANDOM)
        if random or any(name in variable for name in node.operands):
            variable.update(node.results)
    return set(graph.tensors) - variable


def block_paths(graph: Graph) -> set[str]:
    """Modules that have a module inside that runs something each step; each is emitted as a class of its own.

    A block's parameters are gathered and freed together. Other modules are written out where they are called.
    """
    constant = constant_tensors(graph)
    running = (node for node in graph.nodes if node.op != IDENTITY and not constant.issuperset(node.results))
    return {path for node in running for path, _ in node.scope.path[:-1] if path}
