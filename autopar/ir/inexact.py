"""How far the gradients of a plan are from those of one device, where it was allowed to be inexact.

    relative    |g' - g| / |g| of all parameters' gradients together, in one step, before anything that is left out
                comes with a later one
    measured    a step of the model's own example batch on the host, with what the plan keeps and sends in fewer bits
    by formula  of normally distributed values, where that cannot be run: a model without real weights, or one that
                takes too long

Formulas, errors of independent roundings added as squares:

    int8          two roundings to 127 levels of the largest of 256 values                        INT8_ERROR
    topk(k)       what values beyond the largest k hold: √(1 - k - 2 t φ(t)), with P(|z| > t) = k
    powersgd(r)   what a projection on r directions leaves: √(1 - r / min(rows, columns)) of each matrix, the most
    8 bits        an activation's own rounding, and one of the gradient that meets it              √2 · EIGHT_BITS_ERROR
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

from autopar.ir.algorithm import INT8, INT8_ERROR, TOPK, Algorithm

EIGHT_BITS_ERROR = 0.0064
"""Of the norm of an activation: rounding to 255 steps of a block's range, which is 5.66 standard deviations of 256
normally distributed values in the mean: 5.66 / 255 / √12."""
MEASURED, BY_FORMULA = "measured", "by formula"


@dataclass(frozen=True)
class GradientError:
    """relative: to the norm of all gradients; how: MEASURED or BY_FORMULA."""

    relative: float
    how: str

    def __str__(self) -> str:
        said = "measured in a step of the example batch" if self.how == MEASURED else "for normally distributed values"
        return f"gradients {self.relative:.2%} off, {said}"


def by_formula(algorithm: Algorithm | None, in_eight_bits: bool, matrices: Iterable[tuple[int, ...]]) -> GradientError:
    """What is expected of sums in fewer bits, of activations in 8 bits, or both. matrices: shapes of the gradients."""
    parts = [math.sqrt(2) * EIGHT_BITS_ERROR] if in_eight_bits else []
    if algorithm is not None and algorithm.is_compressed:
        parts.append(_of_sums(algorithm, matrices))
    return GradientError(math.hypot(*parts), BY_FORMULA)


def _of_sums(algorithm: Algorithm, matrices: Iterable[tuple[int, ...]]) -> float:
    if algorithm.name == INT8:
        return INT8_ERROR
    if algorithm.name == TOPK:
        least = NormalDist().inv_cdf(1 - algorithm.amount / 2)
        return math.sqrt(max(0.0, 1 - algorithm.amount - 2 * least * NormalDist().pdf(least)))
    least_dims = [min(shape[0], math.prod(shape[1:])) for shape in matrices if len(shape) > 1]
    return max((math.sqrt(max(0.0, 1 - algorithm.amount / least)) for least in least_dims), default=0.0)
