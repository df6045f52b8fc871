"""A model is traced once for its plan and for the program of that plan: what tracing gives is what other tests are
about, and it takes as long as all the rest of a test that runs programs.

So is one that is built anew, as a test's cases do: models are the same where they, and their inputs, are written to the
same bytes. What cannot be written, such as an instance of a class inside of a function, is the same where it is one."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

if TYPE_CHECKING:
    from torch import Tensor, nn

    from autopar.ir.graph import Graph


class Known(NamedTuple):
    """A graph and what it was traced of: while its parts live, no other has an id of theirs."""

    identity: Any
    graph: Graph
    parts: list[Any]


MOST_KNOWN = 12
"""Of the last models: tests of a file mostly share a few."""
MOST_BYTES = 1 << 24
"""Of a model that is written to compare it with others."""


@contextmanager
def traced_once(known: list[Known] | None = None) -> Iterator[None]:
    """While inside, whoever plans the same model for the same inputs again gets the graph of the last time.

    known: keeps the last few from one time inside to the next.
    """
    from autopar import pipeline

    traced, known = pipeline.trace, [] if known is None else known

    def trace(model: nn.Module, inputs: Any, **choices: Any) -> Graph:
        parts, identity = _parts(model, inputs)
        if (written := _written(model, inputs)) is not None:
            parts, identity = [], [written, [type(module) for module in model.modules()], identity[-1]]
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


def _written(model: nn.Module, inputs: Any) -> bytes | None:
    """What stands for all that a model and its inputs are; none where they are large, or cannot be written."""
    if sum(one.nbytes for one in (*model.parameters(), *model.buffers()) if not one.is_meta) > MOST_BYTES:
        return None
    text = io.BytesIO()
    try:
        _Writer(text).dump((model, inputs))
    except Exception:  # whatever a part of a model says to that
        return None
    return hashlib.sha256(text.getvalue()).digest()


class _Writer(pickle.Pickler):
    """Writes tensors by what they are, and not by where they lie, of which it says who share their memory."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._memory: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        import torch

        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None):
            raise pickle.PicklingError("hooks are not written")
        memory = self._memory.setdefault(value.untyped_storage()._cdata, len(self._memory))
        said = type(value), tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, str(value.device)
        return _Writer, (memory, said, value.requires_grad, vars(value), _bytes_of(value))


def _bytes_of(tensor: Tensor) -> bytes:
    import torch

    return b"" if tensor.is_meta else tensor.detach().flatten().view(torch.uint8).numpy().tobytes()
