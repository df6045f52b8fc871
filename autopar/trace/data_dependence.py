"""The one error that users meet most: a shape or a branch that a tensor's values decide."""

from __future__ import annotations

from autopar.errors import TraceError


def data_dependence(where: str, reason: str) -> TraceError:
    """where: the user's file, line and text. reason: what torch said of it."""
    return TraceError(
        f"expected shapes and control flow that do not depend on tensor values, found one that does at\n"
        f"  {where}\nReplace a data-dependent `if` by torch.where, a boolean index y[mask] by a product with "
        f"the mask or torch.where, and what is read or written at a place that a tensor holds, x[i] or x[i : i + n], "
        f"by x.index_select(0, j) or x.index_copy_(0, j, rows) with j = i.view(1) or i + torch.arange(n), so that "
        f"every shape is known. ({reason})"
    )
