"""What ranks that split a sequence know of each other's attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from autopar.runtime.lowering import halves
from autopar.runtime.mesh import Axis


class Spread(NamedTuple):
    """What does not change from part to part. lengths: of all queries, and of all keys; group: query heads for each
    head of the keys; axis: None where this rank has all."""

    axis: Axis | None
    lengths: tuple[int, int]
    causal: bool
    scale: float
    group: int

    @property
    def ranks(self) -> int:
        """That split the sequence."""
        return 1 if self.axis is None else self.axis.size

    @property
    def rank(self) -> int:
        """This one, among them."""
        return 0 if self.axis is None else self.axis.index

    def away(self, x: Tensor) -> Tensor:
        """What this rank computes of queries, or what goes with them, out of what ranks have at home."""
        return halves.away(x, self.lengths[0], self.axis) if self.causal and self.axis else x

    def home(self, x: Tensor) -> Tensor:
        """The way back."""
        return halves.home(x, self.lengths[0], self.axis) if self.causal and self.axis else x

    def each_head(self, x: Tensor) -> Tensor:
        """A head for each query head."""
        return x if self.group == 1 else x.repeat_interleave(self.group, 1)

    def of_heads(self, grad: Tensor) -> Tensor:
        """The sum over the query heads that share a head."""
        if self.group == 1 or not grad.size(1):
            return grad
        return grad.view(grad.size(0), grad.size(1) // self.group, self.group, *grad.shape[2:]).sum(2)
