"""Curves that schedulers read: the published forms of a job's speed, fitted to a ladder's rungs, with their errors.

Optimus (EuroSys'18, eq. 2), a step with w workers that have a global batch of M samples, of synchronous training:

    T(w, M) = θ₀ · M / w + θ₁ + θ₂ · w       all θ ≥ 0

(its parameter servers are as many as workers here: gradients are summed by all of them, so that θ · w / p is a constant
and is in θ₁.) All batches together. A form is judged by its largest relative error, so fitting makes that least, by a
linear programme (Chebyshev's approximation); of equal ones any:

    minimise e    |T(w, M; θ) / t − 1| ≤ e for each rung that takes t, θ ≥ 0

Pollux (OSDI'21, section 3.2), a step on K devices in N nodes of which each has m samples:

    T(K, m) = (T_grad^γ + T_sync^γ)^(1/γ)    T_grad = α + β · m      1 ≤ γ ≤ 10
    T_sync  = 0 of one device;  α_l + β_l · (K − 2) inside a node;  α_n + β_n · (K − 2) across nodes

γ says how much of the sums is hidden behind the passes. For each γ of a grid the rest follows by rounds of such
programmes, each linear about the last, within a reach that shrinks where that leads no closer; γ of the least largest
error counts.

A goodput is a throughput times Pollux' statistical efficiency (eq. 5) of batch M, as the gradient's noise scale φ (in
samples) and the batch M₀ that a user would take say it:

    goodput(M) = throughput(M) · (φ + M₀) / (φ + M)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.errors import PlanError
from autopar.ladders.rungs import Ladder, Rung

Floats = npt.NDArray[np.float64]
_GAMMAS = tuple(np.round(np.concatenate([np.arange(1.0, 3.0, 0.25), np.arange(3.0, 10.5, 1.0)]), 2).tolist())
_LEAST_REACH, _LEAST_GAIN = 3e-3, 1e-2
"""How far about the last a fit is looked for at least, in shares of what a parameter can be, and of its error what it
must gain to go on. Halved, a fit takes twice as long, and is by less than a thousandth closer."""


class Observed(NamedTuple):
    """What is measured of a job, or simulated: devices, nodes, samples a step, seconds a step."""

    devices: int
    nodes: int
    batch: int
    seconds: float


@dataclass(frozen=True)
class FittedForm:
    """A form with its parameters by their published names. error: mean and largest of |fitted / given − 1|."""

    form: str
    kind: str
    parameters: Mapping[str, float]
    error: tuple[float, float]

    def seconds(self, devices: int, batch: int, nodes: int = 1) -> float:
        """Of a step."""
        return float(_FORMS[self.form](self.parameters, Observed(devices, nodes, batch, 0.0)))

    def samples_s(self, devices: int, batch: int, nodes: int = 1) -> float:
        """Throughput."""
        return batch / self.seconds(devices, batch, nodes)


def points_of(ladder: Ladder, kind: str) -> list[Observed]:
    """The rungs of a kind. Raises PlanError where there are fewer than three."""
    found = [_point(rung) for rung in ladder.fitting if rung.kind == kind]
    if len(found) < 3:
        raise PlanError(f"expected at least three rungs of {kind} that have a plan, for a curve, found {len(found)}")
    return found


def _point(rung: Rung) -> Observed:
    return Observed(rung.devices, rung.mesh.nodes, rung.global_batch, rung.step_ns / 1e9)


def fitted(points: Sequence[Observed], form: str, kind: str = "") -> FittedForm:
    """One of the forms ("optimus", "pollux") fitted to points. Raises PlanError for another name, without
    points, and for numbers that are none."""
    if form not in _FITS:
        raise PlanError(f"expected a form as one of {', '.join(_FITS)}, found {form!r}")
    if not points:
        raise PlanError(f"expected points to fit {form} to (devices, nodes, batch, seconds), found none")
    for point in points:
        if not all(0 < value < float("inf") for value in point):
            raise PlanError(f"expected points of numbers above 0, found {point}")
    parameters = _FITS[form](points)
    errors = [abs(_FORMS[form](parameters, point) / point.seconds - 1) for point in points]
    return FittedForm(form, kind, parameters, (float(np.mean(errors)), float(max(errors))))


# Optimus ----------------------------------------


def _optimus_seconds(theta: Mapping[str, float], at: Observed) -> float:
    return theta["theta0"] * at.batch / at.devices + theta["theta1"] + theta["theta2"] * at.devices


def _fit_optimus(points: Sequence[Observed]) -> dict[str, float]:
    rows = np.array([[p.batch / p.devices, 1.0, p.devices] for p in points]) / _seconds(points)[:, None]
    found = least_largest(rows)
    return {f"theta{number}": float(value) for number, value in enumerate(found)}


# Pollux ----------------------------------------

_LEAST_PART = 1e-3  # of a step, of what is linear about: slopes are finite
_NO_PART = 1e-9  # of a column's largest: less tells a solver nothing, and makes it stop
_ALPHAS = ("alpha_grad", "beta_grad", "alpha_local", "beta_local", "alpha_node", "beta_node")


def _pollux_seconds(own: Mapping[str, float], at: Observed) -> float:
    grad = own["alpha_grad"] + own["beta_grad"] * at.batch / at.devices
    where = "local" if at.nodes == 1 else "node"
    sync = own[f"alpha_{where}"] + own[f"beta_{where}"] * max(0, at.devices - 2) if at.devices > 1 else 0.0
    return float((grad ** own["gamma"] + sync ** own["gamma"]) ** (1 / own["gamma"]))


def _fit_pollux(points: Sequence[Observed]) -> dict[str, float]:
    _, gamma, own = min((_pollux_of(points, gamma) for gamma in _GAMMAS), key=lambda found: found[0])
    return {**dict(zip(_ALPHAS, map(float, own), strict=True)), "gamma": gamma}


def _pollux_of(points: Sequence[Observed], gamma: float) -> tuple[float, float, Floats]:
    """Of one γ: the largest error, γ, parameters. T is of degree one in these, so that T = Σ ∂T/∂p · p: each round is
    a linear programme, from a point on at which both parts count."""
    seconds = _seconds(points)
    grad_rows, sync_rows = (rows / seconds[:, None] for rows in _pollux_rows(points))

    def parts(own: Floats) -> tuple[Floats, Floats, Floats]:
        grad, sync = grad_rows @ own[:2], sync_rows @ own[2:]
        most = np.maximum(np.maximum(grad, sync), 1e-300)  # taken out of powers, which overflow
        return grad, sync, most * ((grad / most) ** gamma + (sync / most) ** gamma) ** (1 / gamma)

    def largest(own: Floats) -> float:
        return float(np.abs(parts(own)[2] - 1).max())

    most = np.hstack([grad_rows, sync_rows]).max(axis=0)
    scale = np.where(most > 0, 1 / np.maximum(most, 1e-300), 0.0)  # of what no rung depends on: 0
    own, reach = (least_largest(np.hstack([grad_rows, sync_rows])), 0.0) if gamma == 1 else (scale / 4, 1.0)
    while reach > _LEAST_REACH:
        grad, sync, whole = (np.maximum(part, _LEAST_PART) for part in parts(own))
        both = (grad_rows, grad), (sync_rows, sync)
        slopes = np.hstack([rows * ((part / whole) ** (gamma - 1))[:, None] for rows, part in both])
        near = least_largest(slopes, (own - reach * scale, own + reach * scale))
        own, reach = (near, reach) if largest(near) < largest(own) * (1 - _LEAST_GAIN) else (own, reach / 3)
    return largest(own), gamma, own


def _pollux_rows(points: Sequence[Observed]) -> tuple[Floats, Floats]:
    grad = np.array([[1.0, p.batch / p.devices] for p in points])
    sync = np.zeros((len(points), 4))
    for row, p in zip(sync, points, strict=True):
        if p.devices > 1:
            first = 0 if p.nodes == 1 else 2
            row[first : first + 2] = 1.0, max(0, p.devices - 2)
    return grad, sync


# Least largest error ----------------------------------------


def least_largest(rows: Floats, between: tuple[Floats, Floats] | None = None) -> Floats:
    """The x ≥ 0, between these where they are given, of least max |rows · x − 1|, exact: a linear programme."""
    from ortools.linear_solver import pywraplp  # lazy: a second to import

    programme = pywraplp.Solver.CreateSolver("GLOP")
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    lowest, highest = between or (np.zeros(rows.shape[1]), np.full(rows.shape[1], np.inf))
    ranges = zip(np.maximum(lowest, 0.0) * scale, highest * scale, strict=True)
    variables = [programme.NumVar(float(low), float(high), "") for low, high in ranges]
    error = programme.NumVar(0.0, programme.infinity(), "error")
    for row in (rows / scale).tolist():
        found = sum(part * variable for part, variable in zip(row, variables, strict=True) if part > _NO_PART)
        programme.Add(found <= 1 + error)
        programme.Add(found >= 1 - error)
    programme.Minimize(error)
    status = programme.Solve()
    assert status == pywraplp.Solver.OPTIMAL, (status, rows.tolist())
    solved: Floats = np.array([variable.solution_value() for variable in variables]) / scale
    return solved


def _seconds(points: Sequence[Observed]) -> Floats:
    return np.array([p.seconds for p in points])


_FORMS: dict[str, Callable[[Mapping[str, float], Observed], float]] = {
    "optimus": _optimus_seconds,
    "pollux": _pollux_seconds,
}
_FITS: dict[str, Callable[[Sequence[Observed]], dict[str, float]]] = {"optimus": _fit_optimus, "pollux": _fit_pollux}


# Goodput ----------------------------------------


def statistical_efficiency(batch: float, noise_scale: float, base_batch: float) -> float:
    """What a sample of a batch brings, of one in the base batch (Pollux, eq. 5). noise_scale: in samples."""
    return (noise_scale + base_batch) / (noise_scale + batch)


@dataclass(frozen=True)
class Goodput:
    """On some devices, the batch that trains fastest. curve: by batch, samples a second that count as one of the base
    batch; best_batch: of those that were planned; fitted_batch: of any in their range, by Pollux' form, whose error is
    `form.error`."""

    curve: Mapping[int, float]
    best_batch: int
    fitted_batch: int
    form: FittedForm


def goodput(ladder: Ladder, kind: str, devices: int, noise_scale: float, base_batch: int) -> Goodput:
    """The batch of most goodput on so many devices of a kind, where a user knows the gradient's noise scale.

    Raises PlanError where the ladder has none of them, or for numbers that are none.
    """
    for name, value in {"noise_scale": noise_scale, "base_batch": base_batch}.items():
        if isinstance(value, bool) or not 0 < value < float("inf"):
            raise PlanError(f"expected {name} as a number of samples above 0, found {value!r}")
    rungs = [rung for rung in ladder.fitting if rung.kind == kind and rung.devices == devices]
    if not rungs:
        raise PlanError(f"expected rungs of {devices} {kind} that have a plan, found none")
    form = fitted(points_of(ladder, kind), "pollux", kind)
    curve = {
        rung.global_batch: rung.samples_s * statistical_efficiency(rung.global_batch, noise_scale, base_batch)
        for rung in rungs
    }
    nodes, batches = rungs[0].mesh.nodes, range(min(curve), max(curve) + 1)

    def by_form(batch: int) -> Any:
        return form.samples_s(devices, batch, nodes) * statistical_efficiency(batch, noise_scale, base_batch)

    return Goodput(curve, max(curve, key=lambda batch: curve[batch]), max(batches, key=by_form), form)
