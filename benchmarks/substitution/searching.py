"""The search for a rewritten graph, as the benchmark calls it: the one place that knows how."""

from __future__ import annotations

from typing import NamedTuple

from autopar.cost import Profile
from autopar.ir.graph import Graph


class Found(NamedTuple):
    """What a search gave: the graph, the names of the rules in the order of their use, predicted ns before and after,
    seconds, and why it stopped."""

    graph: Graph
    applied: tuple[str, ...]
    before_ns: int
    after_ns: int
    seconds: float
    stop: str

    @property
    def gain(self) -> float:
        """How many times faster the graph found is predicted to be."""
        return self.before_ns / self.after_ns


def search(graph: Graph, profile: Profile, seconds: float) -> Found:
    """The best graph that the search finds for a device within some seconds; the same as `graph` when none is better.

    Predicted is the forward pass, and, where something is differentiable, the backward pass.
    """
    from autopar.substitute import substituted

    found = substituted(graph, profile, seconds)
    applied = tuple(str(rule) for rule in found.applied)
    return Found(found.graph, applied, found.before_ns, found.after_ns, found.seconds, found.stop)
