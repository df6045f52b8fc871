"""Values on a grid from measured points: logarithms of nanoseconds a FLOP, or of how far a time is above a roofline.

`completed`  most vertices were measured: the others from low-rank approximations of the whole
`fitted`     points lie anywhere: the values whose interpolation meets them best and bends least
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Axes = Sequence[Sequence[float]]

#: of `completed`: directions kept of each unfolding, what each is shrunk by (in logarithms), rounds, and when to stop.
#: Chosen by errors at shapes left out: among 8, 12 and all directions, and shrinkages of 0.5, 1 and 2.
RANK, SHRINKAGE, ROUNDS, SETTLED = 12, 0.5, 60, 5e-4
#: of `fitted`: steps of the conjugate gradients, and the residual at which they end
STEPS, ENOUGH = 200, 1e-5


def completed(values: Array, axes: Axes) -> Array:
    """The array with its missing values (NaN) filled in; those that are there stay.

    Softened singular values of the unfolding along each axis in turn (Liu et al., "Tensor completion", 2013; the
    shrinkage of Mazumder et al., "Spectral regularization", 2010), from what the lines through a vertex have in
    common: a kernel that is chosen, or a tile that is begun, at one number of rows shows in all lines alike.
    """
    known = ~np.isnan(values)
    found = np.where(known, values, _along_lines(values, axes))
    for _ in range(ROUNDS):
        softened = np.mean([_softened(found, axis) for axis in range(found.ndim)], axis=0)
        following = np.where(known, values, softened)
        change = float(np.abs(following - found).max())
        found = following
        if change < SETTLED:
            break
    return found


def _along_lines(values: Array, axes: Axes) -> Array:
    """At missing values, the mean over axes of what the two neighbours along each say; of the nearest at an end."""
    guesses = []
    for axis, coordinates in enumerate(axes):
        at = np.log(coordinates)
        lines = np.moveaxis(values.copy(), axis, -1)
        flat = lines.reshape(-1, len(at))
        for line in flat:
            known = ~np.isnan(line)
            if known.any() and not known.all():
                line[~known] = np.interp(at[~known], at[known], line[known])
        guesses.append(np.moveaxis(flat.reshape(lines.shape), -1, axis))
    total = np.nansum(guesses, axis=0)
    count = np.sum(~np.isnan(guesses), axis=0)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nanmean(values)))


def _softened(values: Array, axis: int) -> Array:
    """Rows of one unfolding, less their means, with smaller singular values."""
    lines = np.moveaxis(values, axis, 0)
    rows = lines.reshape(len(lines), -1)
    mean = rows.mean(axis=1, keepdims=True)
    squares, directions = np.linalg.eigh((rows - mean) @ (rows - mean).T)
    lengths = np.sqrt(np.maximum(squares, 1e-12))
    shares = np.maximum(lengths - SHRINKAGE, 0.0) / lengths
    shares[: max(0, len(shares) - RANK)] = 0.0
    made = (directions * shares) @ (directions.T @ (rows - mean)) + mean
    return np.moveaxis(made.reshape(lines.shape), 0, axis)


def fitted(points: Array, values: Array, axes: Axes, bending: Sequence[float]) -> Array:
    """Values at the vertices whose interpolation (linear, in the logarithms of coordinates) meets those at points.

    points: (count, axes). bending: for each axis, what a change of slope costs beside an error of as much. Conjugate
    gradients on the normal equations; of an axis of two coordinates the difference costs instead.
    """
    corners, shares = weights(points, axes)
    shape = tuple(map(len, axes))
    count = math.prod(shape)
    mean = float(values.mean())

    def gathered(residuals: Array) -> Array:
        return np.asarray(np.bincount(corners.ravel(), (shares * residuals[:, None]).ravel(), count), np.float64)

    def normal(vertices: Array) -> Array:
        met = gathered((vertices[corners] * shares).sum(axis=1))
        return met + _bent(vertices.reshape(shape), axes, bending).ravel() + 1e-6 * vertices

    scale = np.asarray(np.bincount(corners.ravel(), (shares**2).ravel(), minlength=count) + 1.0, np.float64)
    return (_solved(normal, gathered(values - mean), scale) + mean).reshape(shape)


def _solved(normal: Callable[[Array], Array], wanted: Array, scale: Array) -> Array:
    """Conjugate gradients, preconditioned by a diagonal."""
    found = np.zeros_like(wanted)
    left = wanted.copy()
    scaled = left / scale
    direction, size = scaled, float(left @ scaled)
    for _ in range(STEPS):
        if np.abs(left).max() < ENOUGH:
            break
        image = normal(direction)
        step = size / float(direction @ image)
        found, left = found + step * direction, left - step * image
        scaled = left / scale
        size, before = float(left @ scaled), size
        direction = scaled + size / before * direction
    return found


def weights(points: Array, axes: Axes) -> tuple[npt.NDArray[np.int64], Array]:
    """For each point the vertices around it and their weights. Outside the grid, the nearest place on its border."""
    corners, shares = np.zeros((len(points), 1), np.int64), np.ones((len(points), 1))
    for number, axis in enumerate(axes):
        at = np.log(axis)
        place = np.clip(np.log(points[:, number]), at[0], at[-1])
        low = np.clip(np.searchsorted(at, place, side="right") - 1, 0, max(0, len(at) - 2))
        high = np.minimum(low + 1, len(at) - 1)
        share = (place - at[low]) / np.where(high > low, at[high] - at[low], 1.0)
        corners = np.concatenate([corners * len(at) + low[:, None], corners * len(at) + high[:, None]], axis=1)
        shares = np.concatenate([shares * (1 - share)[:, None], shares * share[:, None]], axis=1)
    return corners, shares


def _bent(values: Array, axes: Axes, bending: Sequence[float]) -> Array:
    """The gradient of half the squared changes of slope."""
    found = np.zeros_like(values)
    for axis, (coordinates, cost) in enumerate(zip(axes, bending, strict=True)):
        steps = np.diff(np.log(coordinates))
        if len(steps) == 0:
            continue
        lines = np.moveaxis(values, axis, 0)
        lengths = steps.reshape(-1, *[1] * (values.ndim - 1))
        slopes = np.diff(lines, axis=0) / lengths
        own = np.zeros_like(slopes)
        if len(steps) == 1:
            own += cost**2 * slopes
        else:
            change = np.diff(slopes, axis=0) * cost**2
            own[1:] += change
            own[:-1] -= change
        own /= lengths
        back = np.zeros_like(lines)
        back[1:] += own
        back[:-1] -= own
        found += np.moveaxis(back, 0, axis)
    return found
