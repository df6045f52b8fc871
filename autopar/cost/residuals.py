"""How far predictions of a profile were from measurements that it was not fitted to, by family and size of operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.cost.provenance import Provenance

#: Lower bounds of the classes of sizes, in predicted nanoseconds of one call: kernels that mostly start and end, those
#: of one wave or a few, and those whose pace has settled.
CLASSES = (0, 20_000, 1_000_000)


@dataclass(frozen=True)
class Residual:
    """Of calls that are predicted to take `from_ns` or more, up to the next class of their family and kind: the 5th,
    50th and 95th percentile of log(measured / predicted), at `count` measurements that were left out of the fit.

    family: of operators as in `Profile.operators`, or a collective's name. kind: the operators' dtype, or the level of
    links that the collective crosses.
    """

    family: str
    kind: str
    from_ns: int
    count: int
    quantiles: tuple[float, float, float]
    provenance: Provenance


def residual_of(
    residuals: Iterable[Residual], family: str, kinds: Sequence[str], predicted_ns: float
) -> Residual | None:
    """That of a family's calls of so long, of the first of the kinds that has any, else of any kind; None for a family
    that was not checked. Where the call's class was not measured, the nearest smaller one counts, else the smallest."""
    own = [item for item in residuals if item.family == family]
    for kind in (*kinds, *sorted({item.kind for item in own})):
        of_kind = sorted((item for item in own if item.kind == kind), key=lambda item: item.from_ns)
        below = [item for item in of_kind if item.from_ns <= predicted_ns]
        if of_kind:
            return below[-1] if below else of_kind[0]
    return None


def size_class(predicted_ns: float) -> int:
    """The lower bound of the class that a call is in."""
    return max(bound for bound in CLASSES if bound <= predicted_ns)


def size_name(from_ns: int) -> str:
    """How a page calls a class."""
    return {0: "below 20 µs", 20_000: "20 µs to 1 ms", 1_000_000: "above 1 ms"}.get(from_ns, f"from {from_ns} ns")
