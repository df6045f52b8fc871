"""The values of a model's constants as Python text: they are in no state dict, so the program itself holds them."""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Stored

MAX_ELEMENTS = 4096


def constant_text(graph: Graph, stored: Stored) -> str:
    """The value as nested lists, exact. Raises TraceError for one that is too large, or that a meta model lost."""
    value = graph.starts.get(stored.tensor, graph.values.get(stored.tensor))
    shape = graph.tensors[stored.tensor].shape
    readers = graph.consumers[stored.tensor]
    where = next((node.source for node, _ in readers if node.source), "an unknown source line")
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise TraceError(
            f"expected the value of the constant tensor {list(shape)} that {where} reads, found none: it was made on "
            "the meta device; make it in forward by torch operators such as arange, or register it as a buffer"
        )
    if math.prod(shape) > MAX_ELEMENTS:
        raise TraceError(
            f"expected constant tensors of at most {MAX_ELEMENTS:,} elements, found {list(shape)} that {where} reads; "
            "register it as a buffer of its module (persistent=False keeps it out of the state dict)"
        )
    return literal_text(value.detach().cpu().tolist())


def unsaved_text(graph: Graph) -> str:
    """The known values of buffers that no state_dict holds, by name, exact."""
    wanted = {item.name for item in graph.stored if item.kind == "buffer" and not starts_empty(graph, item)}
    known = {name: value for name, value in graph.unsaved.items() if name in wanted}
    return ", ".join(f"{name!r}: {literal_text(value.detach().cpu().tolist())}" for name, value in known.items())


def starts_empty(graph: Graph, stored: Stored) -> bool:
    """Whether it is a cache, kept by no state_dict, that begins with zeros: those that the model has, or of a model on
    meta, where rows count from when they are written."""
    if stored.kind != "buffer" or stored.persistent or stored.name not in graph.kept_in_parts:
        return False
    value = graph.unsaved.get(stored.name)
    return value is None or not bool(value.any())


def literal_text(value: Any) -> str:
    """A plain value, exact; lists of such."""
    if isinstance(value, list):
        return f"[{', '.join(map(literal_text, value))}]"
    if isinstance(value, complex):
        return f"complex({literal_text(value.real)}, {literal_text(value.imag)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)
