"""The model's ends, what runs before its first block and after its last, as layers of their own.

Layers are blocks, of which the first and the last take the ends. With deep pipelines of few blocks a stage an end may
be a stage by itself, as the embedding and the head of Llama 3 were. What an end costs is what its layer does more than
an equal block between others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.interop import Layers, StageKind
from autopar.ir.graph import Graph


@dataclass(frozen=True)
class ModelEnds:
    """layers: with two more, the ends. first, last: layers between others that are equal to the first and the last."""

    layers: Layers
    first: int
    last: int

    def kind(self, kind: StageKind) -> StageKind:
        """What each of these layers costs, by what those cost of which the first and the last have the ends."""
        columns = {name: values for name, values in vars(kind).items() if isinstance(values, np.ndarray)}
        found: dict[str, Any] = {}
        for name, values in columns.items():
            first, last = values[self.first], values[self.last]
            before, after = max(0, values[0] - first), max(0, values[-1] - last)
            if name in ("workspace_bytes", "most_travelling_bytes"):  # of a stage the largest
                before, after = values[0], values[-1]
            elif name in ("receive_ns", "travel_ns"):  # of a stage that of its first layer
                before, after = 0, last
            found[name] = np.array([before, first, *values[1:-1], last, after])
        return replace(kind, **found)


def ends_of(
    graph: Graph, layers: Layers, path_of_layer: Sequence[str], groups: Sequence[Sequence[str]]
) -> ModelEnds | None:  # fmt: skip
    """None where there is nothing at an end, or no block to tell it from. groups: paths of equal blocks."""
    found = layers.with_ends(graph)
    inner = range(1, layers.count - 1)
    likes = [
        next((n for n in inner if path_of_layer[n] in group), None)
        for path in (path_of_layer[0], path_of_layer[-1])
        for group in groups if path in group
    ]  # fmt: skip
    if len(likes) != 2 or None in likes or not {0, found.count - 1} <= set(found.fixed.values()):
        return None
    return ModelEnds(found, likes[0] or 0, likes[1] or 0)
