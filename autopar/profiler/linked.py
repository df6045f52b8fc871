"""Puts measured collectives into a profile: those of the same device, over links of one level, each as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.cost.profile import ACROSS, INSIDE, CollectivePoints, Profile, Provenance
from autopar.errors import ProfileError
from autopar.profiler.fit import non_decreasing
from autopar.profiler.measure_links import REVISION


def with_measured_links(profile: Profile, found: Mapping[str, Any], date: str) -> Profile:
    """The profile with the collectives that `measure_links` found in place of its own for the same groups.

    Groups of several ranks in each of several nodes stay modelled, from the links of both levels. Raises ProfileError
    for points of another device or revision, or that are none.
    """
    host, collectives = _checked(found)
    _check_device(profile, host)
    source = (
        f"{host['device']}, {host['backend']}, {host['ranks']} ranks, {host['local']} a node, torch {host['torch']}"
    )
    provenance = Provenance("measured", source, date)
    measured = {}
    for item in collectives:
        if 1 in (item["nodes"], item["inside"]):
            points = _points(item, provenance)
            measured[points.collective, points.level, points.ranks] = points
    return replace(profile, collectives={**profile.collectives, **measured}, _shared={})


def read_links(path: Path) -> dict[str, Any]:
    """The points in a file. Raises ProfileError when it holds none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        _checked(found)
    except (ValueError, AttributeError, KeyError) as error:
        raise ProfileError(f"expected points of `autopar profile --collectives` in {path}, found {error}") from error
    return found


def _points(item: Mapping[str, Any], provenance: Provenance) -> CollectivePoints:
    times = non_decreasing([duration for _, duration in item["points"]])
    points = tuple((size, round(time)) for (size, _), time in zip(item["points"], times, strict=True))
    level = INSIDE if item["nodes"] == 1 else ACROSS
    return CollectivePoints(item["collective"], level, item["nodes"] * item["inside"], points, provenance)


def _checked(found: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    host, collectives = found.get("host", {}), found.get("collectives", [])
    if not collectives or "backend" not in host:
        raise ProfileError(
            "expected points of collectives as `autopar profile --collectives` writes them, found "
            f"{', '.join(sorted(found)) or 'nothing'}"
        )
    if host["revision"] != REVISION:
        raise ProfileError(f"expected points of revision {REVISION}, found {host['revision']}; measure them anew")
    return host, collectives


def _check_device(profile: Profile, host: Mapping[str, Any]) -> None:
    """Other devices have other links. A CPU's model must be in the profile's title, or a name of the profile's in that
    of a GPU."""
    device = str(host["device"]).lower()
    names = [name.partition("-")[0].lower() for name in (profile.name, *profile.aliases)]
    is_same = device in profile.title.lower() or any(name in device for name in names)
    if host["device_type"] != profile.device_type or not is_same:
        raise ProfileError(
            f"expected points of {profile.title!r} ({profile.device_type}), found those of {host['device']!r} "
            f"({host['device_type']}): points of different devices do not mix; name the profile of that device"
        )
