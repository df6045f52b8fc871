"""Fitting positive constants to measured times: minimises relative errors, and needs numpy alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


DAMPING = 0.3  # of a step (Levenberg): the step time has kinks where host, device and links take turns to be slowest
PRIOR = 0.03  # how much a factor of e away from its expected value counts: as much as an error of 3% in one row
OUTLIER = 0.10  # relative errors beyond this count by their size instead of its square (Huber)


def gauss_newton_step(errors: Array, slopes: Array, distance: Array) -> Array:
    """By how much to change the constants' logarithms; damped, so that several steps are needed.

    errors (rows) and slopes (rows, constants): logarithms of predicted over measured, and their derivatives;
    distance (constants): of the logarithms from those that are expected.
    """
    step = np.zeros(slopes.shape[1])
    for _ in range(20):  # the weights depend on the step
        weights = np.minimum(1.0, OUTLIER / np.maximum(np.abs(errors + slopes @ step), 1e-12))
        matrix = slopes.T @ (weights[:, None] * slopes) + (PRIOR**2 + DAMPING) * np.eye(len(step))
        step = -np.linalg.solve(matrix, slopes.T @ (weights * errors) + PRIOR**2 * distance)
    limited: Array = np.clip(step, -0.7, 0.7)
    return limited
