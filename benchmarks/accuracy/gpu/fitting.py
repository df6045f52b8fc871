"""The constants of softwares and devices that whole iterations are fitted by.

| constant | meaning |
|---|---|
| clock | of a device: its `sustained_clock` |
| operator_ns, gradient_ns, collective_ns, pass_ns | of a software: launches, see `autopar.cost.profile.Host` |
| step_ns | of a software: what it does once a step while the device waits |
| a family of operators | of a software: its slowdown; of several joined by "+" the one that they have in common |

What one expects beforehand is the prior of the fit, which a constant leaves as far as the rows ask for it. No constant
is of a row, a model or a source.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np

from autopar.cost import Profile
from autopar.cost.profile import Host, Provenance
from benchmarks.accuracy.fitting import Array, gauss_newton_step
from benchmarks.accuracy.gpu.plans import profile_name
from benchmarks.accuracy.gpu.predictions import Planned, predict
from benchmarks.accuracy.gpu.rows import Row
from benchmarks.accuracy.gpu.softwares import Software, software_of

HOST = {"operator_ns": 40e3, "gradient_ns": 20e3, "collective_ns": 50e3, "pass_ns": 1e6}
STEP_NS = 50e6
FAMILIES = {
    "matmul": 1.0,
    "attention": 1.2,
    "optimizer": 1.5,
    "cross_entropy": 1.5,
    "pointwise": 1.2,
    "normalization": 1.2,
}
PRIORS = {**HOST, "step_ns": STEP_NS, **FAMILIES}
CLOCK = 0.9
STEP = 0.05  # of a constant's logarithm, for derivatives


class Constant(NamedTuple):
    """Whose it is (a software or a device), what it is, and what one expects."""

    owner: str
    name: str
    prior: float


def constants_of(softwares: Sequence[str], devices: Sequence[str]) -> list[Constant]:
    """All that rows of these softwares and devices depend on."""
    found = [Constant(device, "clock", CLOCK) for device in devices]
    for software in softwares:
        found += [Constant(software, name, prior) for name, prior in PRIORS.items()]
    return found


def named_constants(texts: Sequence[str], softwares: Sequence[str], devices: Sequence[str]) -> list[Constant]:
    """Constants by owner and name, such as "gb200.clock" or "nemo.matmul+attention", as far as rows depend on them.

    Raises ValueError for what is no such constant.
    """
    found = []
    for text in texts:
        owner, _, name = text.rpartition(".")
        known = [PRIORS.get(part, 0.0) for part in name.split("+")]
        if not owner or (name != "clock" and not all(known)) or (len(known) > 1 and {*name.split("+")} - {*FAMILIES}):
            raise ValueError(f"expected a constant such as gb200.clock or nemo.matmul+attention, found {text!r}")
        if owner in (devices if name == "clock" else softwares):
            found.append(Constant(owner, name, CLOCK if name == "clock" else known[0]))
    return found


def values_of(constants: Sequence[Constant], softwares: Sequence[Software], profiles: Mapping[str, Profile]) -> Array:
    """What they are now: logarithms."""
    known = {software.name: software for software in softwares}
    found = []
    for owner, name, prior in constants:
        if owner in profiles:
            value = profiles[owner].facts.sustained_clock
        elif name in HOST:
            host = known[owner].host
            value = getattr(host, name) if host else prior
        elif name == "step_ns":
            value = known[owner].step_ns or prior
        else:
            value = known[owner].slowdowns.get(name.partition("+")[0], prior)
        found.append(np.log(value))
    return np.array(found)


def with_values(
    constants: Sequence[Constant], logs: Array, softwares: Sequence[Software], profiles: Mapping[str, Profile],
    source: str,
) -> tuple[tuple[Software, ...], dict[str, Profile]]:  # fmt: skip
    """Softwares and profiles under these constants; source: what they were fitted to."""
    provenance = Provenance("fitted", source, datetime.date.today().isoformat())
    by_owner: dict[str, dict[str, float]] = {}
    for (owner, name, _), log in zip(constants, logs, strict=True):
        by_owner.setdefault(owner, {})[name] = float(np.exp(log))
    changed = {name: _clocked(profiles[name], values["clock"]) for name, values in by_owner.items() if name in profiles}
    return tuple(_changed(item, by_owner.get(item.name), provenance) for item in softwares), {**profiles, **changed}


def _clocked(profile: Profile, clock: float) -> Profile:
    return replace(profile, facts=replace(profile.facts, sustained_clock=round(clock, 4)), _shared={})


def _changed(software: Software, values: Mapping[str, float] | None, provenance: Provenance) -> Software:
    """The software under other values of some of its constants; what they do not say stays."""
    if values is None:
        return software
    launches = {name: round(values[name]) for name in HOST if name in values}
    before = asdict(software.host) if software.host else {name: round(prior) for name, prior in HOST.items()}
    host = Host(**{**before, **launches, "provenance": provenance}) if launches else software.host
    families = {one: value for name, value in values.items() for one in name.split("+") if one in FAMILIES}
    slowdowns = {**software.slowdowns, **{name: float(f"{value:.4g}") for name, value in families.items()}}
    source = software.provenance.source.partition("; fitted: ")[0]
    told = replace(provenance, source=f"{source}; fitted: {provenance.source}")
    step_ns = round(values.get("step_ns", software.step_ns))
    return replace(software, host=host, step_ns=step_ns, slowdowns=slowdowns, provenance=told)


def stepped(logs: Array, errors: Array, slopes: Array, constants: Sequence[Constant]) -> Array:
    """The constants after one damped step, within a factor of ten of what one expects."""
    prior = np.log([constant.prior for constant in constants])
    moved: Array = logs + gauss_newton_step(errors, slopes, logs - prior)
    limited: Array = np.clip(moved, prior - np.log(10), prior + np.log(10))
    return limited


# Steps ----------------------------------------


def fit(
    items: Sequence[Planned], softwares: tuple[Software, ...], profiles: Mapping[str, Profile], rounds: int,
    source: str, only: Sequence[str] = (),
) -> tuple[tuple[Software, ...], dict[str, Profile]]:  # fmt: skip
    """Softwares and profiles whose constants fit measured rows, from those given on. only: names of constants, where
    not all that the rows depend on are fitted (`named_constants`)."""
    constants = constants_for(items, softwares, only)
    logs = values_of(constants, softwares, profiles)
    for number in range(rounds):
        errors, slopes = jacobian(constants, logs, items, softwares, profiles)
        print(f"round {number + 1}: mean error before {np.mean(np.abs(np.expm1(errors))):.2%}", flush=True)
        logs = stepped(logs, errors, slopes, constants)
    for constant, log in zip(constants, logs, strict=True):
        print(f"{constant.owner}.{constant.name}: {np.exp(log):.4g}", flush=True)
    return with_values(constants, logs, softwares, profiles, source)


LEFT_OUT: Mapping[str, Callable[[Row], str]] = {"model": lambda row: row.model, "source": lambda row: row.source}
"""What rows are left out together by, in turn."""


def cross_validated(
    items: Sequence[Planned], softwares: tuple[Software, ...], profiles: Mapping[str, Profile],
    only: Sequence[str] = (), seconds: Mapping[str, float] | None = None,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Relative errors of measured rows by their ids, each under constants fitted without the rows of its model; and
    without those of its source.

    To first order: errors and derivatives are those at the given constants; a fit is one damped step from there. only:
    as in `fit`; the other constants stay, and rows that depend on none of these are left out. seconds: as they are
    predicted, by the rows' ids, where that is known.
    """
    constants = constants_for(items, softwares, only)
    logs = values_of(constants, softwares, profiles)
    items = [items[number] for number in sorted({n for one in constants for n in _own(one, items, softwares)})]
    known = None if seconds is None else np.log([seconds[one.row.id] / (one.row.measured_s or 1.0) for one in items])
    errors, slopes = jacobian(constants, logs, items, softwares, profiles, known)
    return {
        what: _left_out([key(item.row) for item in items], items, constants, logs, errors, slopes)
        for what, key in LEFT_OUT.items()
    }


def _left_out(
    keys: Sequence[str], items: Sequence[Planned], constants: Sequence[Constant], logs: Array, errors: Array,
    slopes: Array,
) -> dict[str, float]:  # fmt: skip
    """Errors by the rows' ids, each under constants fitted to rows of other keys."""
    names, found = np.array(keys), dict[str, float]()
    for name in sorted(set(keys)):
        others = names != name
        moved = stepped(logs, errors[others], slopes[others], constants) - logs
        own = np.expm1(errors[~others] + slopes[~others] @ moved)
        held = (item for item, is_other in zip(items, others, strict=True) if not is_other)
        found |= {item.row.id: float(value) for item, value in zip(held, own, strict=True)}
    return found


def constants_for(
    items: Sequence[Planned], softwares: tuple[Software, ...], only: Sequence[str] = ()
) -> list[Constant]:  # fmt: skip
    """What these rows depend on, or of that the constants of these names."""
    names = sorted({software_of(item.row.framework, softwares).name for item in items})
    devices = sorted({profile_name(item.row.gpu) for item in items})
    return named_constants(only, names, devices) if only else constants_of(names, devices)


def jacobian(
    constants: Sequence[Constant], logs: Array, items: Sequence[Planned], softwares: tuple[Software, ...],
    profiles: Mapping[str, Profile], errors: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Errors at these constants (rows), and their derivatives by the constants' logarithms (rows, constants)."""
    if errors is None:
        errors = log_errors(items, *with_values(constants, logs, softwares, profiles, ""))
    slopes = [_slope(constants, logs, place, items, errors, softwares, profiles) for place in range(len(constants))]
    return errors, np.stack(slopes, axis=1)


def log_errors(items: Sequence[Planned], softwares: tuple[Software, ...], profiles: Mapping[str, Profile]) -> Array:
    """Logarithm of predicted over measured."""
    times = [predict(item, softwares, profiles).seconds / (item.row.measured_s or 1.0) for item in items]
    return np.log(times)


def _slope(
    constants: Sequence[Constant], logs: Array, place: int, items: Sequence[Planned], errors: Array,
    softwares: tuple[Software, ...], profiles: Mapping[str, Profile],
) -> Array:  # fmt: skip
    """Of the errors by one constant's logarithm: of rows of other softwares and devices none."""
    moved = with_values(constants, logs + STEP * np.eye(len(logs))[place], softwares, profiles, "")
    own = _own(constants[place], items, softwares)
    found = np.zeros(len(items))
    found[own] = (log_errors([items[number] for number in own], *moved) - errors[own]) / STEP
    return found


def _own(constant: Constant, items: Sequence[Planned], softwares: tuple[Software, ...]) -> list[int]:
    """The rows, by number, of its device or software."""
    return [
        number for number, item in enumerate(items)
        if constant.owner in (profile_name(item.row.gpu), software_of(item.row.framework, softwares).name)
    ]  # fmt: skip
