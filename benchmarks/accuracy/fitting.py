"""Fitting positive constants to measured times: minimises relative errors, and needs numpy alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


FACTOR = 3.0  # constants are searched within this factor of their start


def fit_positive(loss: Callable[[Array], float], start: Array, rounds: int = 6, evaluations: int = 600) -> Array:
    """The constants that minimise `loss`, searched by their logarithms around `start`; deterministic.

    Nelder and Mead's simplex (The Computer Journal 7, 1965), begun anew `rounds` times with a smaller simplex, as it
    may collapse before it is there.
    """
    first, point = np.log(start), np.log(start)

    def bounded(logs: Array) -> Array:
        constants: Array = np.exp(np.clip(logs, first - np.log(FACTOR), first + np.log(FACTOR)))
        return constants

    for number in range(rounds):
        point = _simplex_search(lambda logs: loss(bounded(logs)), point, 0.4 / (number + 1), evaluations)
    return bounded(point)


def _simplex_search(loss: Callable[[Array], float], start: Array, size: float, evaluations: int) -> Array:
    corners = [start, *(start + size * direction for direction in np.eye(len(start)))]
    values = [loss(corner) for corner in corners]
    for _ in range(evaluations):
        order = np.argsort(values, kind="stable")
        corners, values = [corners[n] for n in order], [values[n] for n in order]
        centre, worst = np.mean(corners[:-1], axis=0), corners[-1]
        tried = [_valued(loss, centre + (centre - worst))]
        if tried[0][1] < values[0]:
            tried.append(_valued(loss, centre + 2 * (centre - worst)))
        elif tried[0][1] >= values[-2]:
            tried.append(_valued(loss, centre + (worst - centre) / 2))
        point, value = min(tried, key=lambda pair: pair[1])
        if value < values[-1]:
            corners[-1], values[-1] = point, value
        else:
            corners = [corners[0], *(corners[0] + (corner - corners[0]) / 2 for corner in corners[1:])]
            values = [values[0], *(loss(corner) for corner in corners[1:])]
    return corners[int(np.argmin(values))]


def _valued(loss: Callable[[Array], float], point: Array) -> tuple[Array, float]:
    return point, loss(point)


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
