"""How far predictions of whole training steps were from measured ones."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.provenance import Provenance


@dataclass(frozen=True)
class WholeSteps:
    """Of `count` measured iterations on devices of this kind, or like it, whose models were left out of all fits.

    spread: standard deviation of log(measured / predicted) beside what operators' residuals explain: launches, clocks,
    networks, and what software does. resolution: by how much the predicted steps of two plans of one model must differ,
    so that the profile tells which is faster; what all plans have in common cancels.
    """

    count: int
    spread: float
    resolution: float
    provenance: Provenance
