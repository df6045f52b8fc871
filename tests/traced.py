"""A model is traced once for its plan and for the program of that plan: what tracing gives is what other tests are
about, and it takes as long as all the rest of a test that runs programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

if TYPE_CHECKING:
    from torch import nn

    from autopar.ir.graph import Graph


class Known(NamedTuple):
    """A graph and what it was traced of: while its parts live, no other has an id of theirs."""

    identity: Any
    graph: Graph
    parts: list[Any]


MOST_KNOWN = 6
"""Of the last models: tests of a file mostly share one or two."""


@contextmanager
def traced_once(known: list[Known] | None = None) -> Iterator[None]:
    """While inside, whoever plans the same model for the same inputs again gets the graph of the last time.

    known: keeps the last few from one time inside to the next.
    """
    from autopar import pipeline

    traced, known = pipeline.trace, [] if known is None else known

    def trace(model: nn.Module, inputs: Any, **choices: Any) -> Graph:
        parts, identity = _parts(model, inputs)
        for one in known:
            if one.identity == (identity, choices):
                return one.graph
        graph = traced(model, inputs, **choices)
        known[:] = [*known, Known((identity, choices), graph, parts)][-MOST_KNOWN:]
        return graph

    with mock.patch.object(pipeline, "trace", trace):
        yield


def _parts(model: nn.Module, inputs: Any) -> tuple[list[Any], list[Any]]:
    """What a model and its inputs consist of, and what tells them from all others: who they are, what tracing asks."""
    from autopar.ops import lookup

    values = (
        inputs if isinstance(inputs, dict) else dict(enumerate(inputs)) if isinstance(inputs, tuple) else {0: inputs}
    )
    parts = [*model.modules(), *model.parameters(), *values.values()]
    said = [(module.training, type(module)) for module in model.modules()]
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    return parts, [[*map(id, parts)], said, wanted, [*values], {**lookup._USER}]
