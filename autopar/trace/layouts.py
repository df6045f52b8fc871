"""Sparse tensors have neither slices nor placements: a model that holds or makes some is refused."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from autopar.errors import TraceError


def check_layouts(model: nn.Module, names: Iterable[str], inputs: Iterable[Tensor]) -> None:
    """Raises TraceError for a parameter, buffer or input that is sparse."""
    for pairs in (model.named_parameters(), model.named_buffers(), zip(names, inputs, strict=True)):
        for name, tensor in pairs:
            check_layout(tensor, name)


def check_layout(tensor: Tensor, where: str) -> None:
    """Raises TraceError where it is sparse."""
    if tensor.layout != torch.strided:
        raise TraceError(
            f"expected dense tensors, found {where} of layout {tensor.layout}; keep it dense (to_dense()), or its "
            "indices and values as two dense tensors, and write the product with index_select and index_add"
        )
