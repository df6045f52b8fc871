"""What the first part of a backward pass goes through, as `runtime.splitting` finds it in autograd's graph.

On the way is all that depends on what the stage has received. What is computed from parameters beside it waits for the
second part, unless several operators on the way read what comes of one parameter, such as a bias that all attention
layers share, or gradients come in beside the way: then all between these and the parameter is on the way, too. Where
nothing waits for gradients, as in a first stage, the second part makes them all.
"""

from __future__ import annotations

from autopar.ir.graph import Graph

SOURCE = "a source of gradients"


def tensors_on_the_way(graph: Graph) -> frozenset[str]:
    """The tensors of a stage's graph, without parameters, whose gradients the first part makes."""
    way = {name for name in graph.received if graph.tensors[name].differentiable}
    for node in graph.nodes:
        if not way.isdisjoint(node.operands):
            way.update(node.results)
    while way and (more := _shared(graph, way)):
        way |= more
    return frozenset(way)


def _shared(graph: Graph, way: set[str]) -> set[str]:
    """What comes of parameters beside the way, and leads to several operators on it, or to a source of gradients."""
    readers = _readers_on_the_way(graph, way)
    trained = (item.tensor for item in graph.stored if graph.tensors[item.tensor].differentiable)
    known = {name for name in trained if len(readers.get(name, ())) > 1 or SOURCE in readers.get(name, ())}
    found = set[str]()
    for node in graph.nodes:
        if not (known | found).isdisjoint(node.operands):
            found.update(name for name in node.results if name not in way and graph.tensors[name].differentiable)
    return found


def _readers_on_the_way(graph: Graph, way: set[str]) -> dict[str, set[str]]:
    """By tensor beside the way: the operators on it that read what comes of the tensor, two at most, and `SOURCE` where
    gradients come in there."""
    readers: dict[str, set[str]] = {name: {SOURCE} for name in graph.gradient_sources if name not in way}
    for node in reversed(graph.nodes):
        on_the_way = not way.isdisjoint(node.results)
        reached = {node.name} if on_the_way else set[str]().union(*(readers.get(name, ()) for name in node.results))
        for name in node.operands:
            if name not in way and len(readers.get(name, ())) < 2:
                readers.setdefault(name, set()).update(sorted(reached)[:2])
    return readers
