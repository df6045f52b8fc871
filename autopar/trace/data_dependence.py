"""The one error that users meet most: a shape or a branch that a tensor's values decide."""

from __future__ import annotations

from autopar.errors import TraceError


def data_dependence(where: str, reason: str) -> TraceError:
    """where: the user's file, line and text. reason: what torch said of it."""
    return TraceError(
        f"expected shapes and control flow that do not depend on tensor values, found one that does at\n"
        f"  {where}\nReplace a data-dependent `if` by torch.where, and a boolean index y[mask] by a product with "
        f"the mask or torch.where, so that every shape is known. ({reason})"
    )
