"""Parameters and buffers that a model has by several names."""

from __future__ import annotations

from torch import nn


def tied_names(model: nn.Module) -> dict[str, str]:
    """For each parameter or buffer reachable by several names, the later names -> the first one."""
    first: dict[int, str] = {}
    tied = {}
    for iterator in (model.named_parameters, model.named_buffers):
        for name, value in iterator(remove_duplicate=False):
            kept = first.setdefault(id(value), name)
            if kept != name:
                tied[name] = kept
    return tied
