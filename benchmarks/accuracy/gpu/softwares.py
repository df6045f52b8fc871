"""What belongs to the software that was measured, whatever the device: `softwares.json`, one entry each.

matches: a regular expression on a row's framework; the first entry that matches counts, the last one matches all.
model: what its models are made of, beside sizes (fields of `decoder.Config`). sums_early: gradients are summed over
ranks while the backward pass goes on. gathers_early: so are parameters of ZeRO-1 gathered while the forward pass goes
on; else before it. optimizer_slowdown: how many times as long as the device's curve says the optimizer takes, which
is that of one fused kernel. host: what launching costs, as in `autopar.cost.profile.Host`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autopar.cost.profile import Curve, Host, OperatorCurve, Profile, Provenance
from benchmarks.accuracy.profile_text import profile_text

TABLE = Path(__file__).with_name("softwares.json")


@dataclass(frozen=True)
class Software:
    """One entry."""

    name: str
    matches: str
    model: Mapping[str, Any]
    sums_early: bool
    gathers_early: bool
    optimizer_slowdown: float
    host: Host | None
    provenance: Provenance

    def on(self, profile: Profile) -> Profile:
        """The device's profile as this software uses it."""
        operators = dict(profile.operators)
        if self.optimizer_slowdown != 1.0 and "optimizer" in operators:
            operators["optimizer"] = _slower(operators["optimizer"], self.optimizer_slowdown)
        return replace(profile, host=self.host, operators=operators, _shared={})


def _slower(curve: OperatorCurve, times: float) -> OperatorCurve:
    knots = [
        Curve(tuple((work, share / times) for work, share in side.knots)) for side in (curve.forward, curve.backward)
    ]
    return replace(curve, forward=knots[0], backward=knots[1])


def read_softwares(path: Path = TABLE) -> tuple[Software, ...]:
    """In the order in which they are asked."""
    return tuple(_software(name, entry) for name, entry in json.loads(path.read_text(encoding="utf-8")).items())


def _software(name: str, entry: Mapping[str, Any]) -> Software:
    provenance = Provenance(**entry["provenance"])
    host = Host(**entry["host"], provenance=provenance) if entry["host"] else None
    return Software(name, **{**entry, "host": host, "provenance": provenance})


def write_softwares(softwares: tuple[Software, ...], path: Path = TABLE) -> None:
    """The inverse of `read_softwares`."""
    found = {}
    for software in softwares:
        entry = {key: value for key, value in asdict(software).items() if key != "name"}
        if entry["host"]:
            entry["host"] = {key: value for key, value in entry["host"].items() if key != "provenance"}
        found[software.name] = entry
    path.write_text(profile_text(found) + "\n", encoding="utf-8")


def software_of(framework: str, softwares: tuple[Software, ...]) -> Software:
    """The first whose expression is found in the framework's name."""
    return next(item for item in softwares if re.search(item.matches, framework, re.IGNORECASE))
