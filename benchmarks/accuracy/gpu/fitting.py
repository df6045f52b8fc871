"""The constants of softwares and devices that whole iterations are fitted by.

| constant | meaning |
|---|---|
| clock | of a device: its `sustained_clock` |
| operator_ns, gradient_ns, collective_ns, pass_ns | of a software: launches, see `autopar.cost.profile.Host` |
| step_ns | of a software: what it does once a step while the device waits |
| a family of operators | of a software: its slowdown |

What one expects beforehand is the prior of the fit, which a constant leaves as far as the rows ask for it. No constant
is of a row, a model or a source.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autopar.cost import Profile
from autopar.cost.profile import Host, Provenance
from benchmarks.accuracy.fitting import Array, gauss_newton_step
from benchmarks.accuracy.gpu.softwares import Software

HOST = {"operator_ns": 10e3, "gradient_ns": 5e3, "collective_ns": 20e3, "pass_ns": 200e3}
STEP_NS = 50e6
FAMILIES = {"optimizer": 1.5, "cross_entropy": 1.0, "pointwise": 1.0, "normalization": 1.0}
PRIORS = {**HOST, "step_ns": STEP_NS, **FAMILIES}
CLOCK = 0.9
STEP = 0.02  # of a constant's logarithm, for derivatives


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
            value = known[owner].slowdowns.get(name, prior)
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
    if values is None:
        return software
    host = Host(**{name: round(values[name]) for name in HOST}, provenance=provenance)
    slowdowns = {name: float(f"{values[name]:.4g}") for name in FAMILIES}
    source = software.provenance.source.partition("; fitted: ")[0]
    told = replace(provenance, source=f"{source}; fitted: {provenance.source}")
    return replace(software, host=host, step_ns=round(values["step_ns"]), slowdowns=slowdowns, provenance=told)


def stepped(logs: Array, errors: Array, slopes: Array, constants: Sequence[Constant]) -> Array:
    """The constants after one damped step, within a factor of ten of what one expects."""
    prior = np.log([constant.prior for constant in constants])
    moved: Array = logs + gauss_newton_step(errors, slopes, logs - prior)
    limited: Array = np.clip(moved, prior - np.log(10), prior + np.log(10))
    return limited
