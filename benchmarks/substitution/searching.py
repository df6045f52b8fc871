"""The search for a rewritten graph, as the benchmark calls it: the one place that knows how."""

from __future__ import annotations

from typing import NamedTuple

from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.substitute import load_rules, substituted
from autopar.trace import find_blocks


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


def search(graph: Graph, profile: Profile, mode: str, seconds: float) -> Found:
    """The graph that is fastest on one device of those the search finds; the same as `graph` when none is better.

    Predicted is the forward pass, and the backward pass where mode is "train".
    """
    blocks = find_blocks(graph)
    found = substituted(
        graph, blocks.paths, blocks.node_representative, load_rules(), profile, trains=mode == "train", seconds=seconds
    )
    applied = tuple(step.rule for step in found.best.steps)
    return Found(found.best.graph, applied, found.before_ns, found.best.cost_ns, found.seconds, found.stop)
