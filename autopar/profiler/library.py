"""Finds cost profiles: shipped ones by name, any other by the path of its JSON file, `cpu` by measuring."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from autopar.cost.files import SCHEMA, profiles_folder
from autopar.cost.profile import Profile, profile_from_json, read_profile
from autopar.errors import MeshError, ProfileError
from autopar.ir.mesh import Mesh
from autopar.ir.servers import ServerHosts
from autopar.profiler.host import host_profile


@cache
def load_profile(name: str) -> Profile:
    """The profile of that name, alias or file path; the same object for the same name. A name with that of a network
    at its end, such as `h100-efa`, is the device on that network, where its profile knows it.

    `cpu` is measured on this host at first use and kept in the user's cache directory.
    Raises ProfileError for a name that is unknown or a file that is malformed.
    """
    if name == "cpu":
        return host_profile()
    if name.endswith(".json"):
        return read_profile(Path(name))
    shipped = _shipped()
    base, _, network = name.rpartition("-")
    if name not in shipped and base in shipped and (found := load_profile(base).on(network)):
        return found
    if name not in shipped:
        known = ", ".join(sorted({"cpu", *shipped}))
        raise ProfileError(
            f"expected a known cost profile ({known}), found {name!r}; to add one, measure the device with "
            "`autopar profile` or copy a file of cost_profiles/, and give the path of the JSON file as name"
        )
    return profile_from_json(shipped[name], f"cost profile {name!r}", is_ours=True)


def profiles_of(mesh: Mesh) -> dict[str, Profile]:
    """The profile of each kind of device of a mesh, by the name that the mesh has for it, with the mesh's servers.

    Raises ProfileError, and MeshError for servers of devices that these do not sum for.
    """
    found = {group.profile: load_profile(group.profile) for group in mesh.groups}
    if mesh.servers is None:
        return found
    other = next((profile for profile in found.values() if profile.device_type != "cpu"), None)
    if other is not None or len(found) > 1:
        raise MeshError(
            f"expected servers beside CPU ranks of one kind, whose gradients they can read, found {mesh}; leave the "
            "servers out"
        )
    hosts = ServerHosts(mesh.servers, mesh.nodes, mesh.num_devices)
    return {name: _with_servers(name, hosts) for name in found}


def profile_of(mesh: Mesh) -> Profile:
    """The profile of the devices of a mesh, where they are of one kind. Raises MeshError, ProfileError."""
    return profiles_of(mesh)[mesh.profile]


@cache
def _with_servers(name: str, hosts: ServerHosts) -> Profile:
    return replace(load_profile(name), servers=hosts, _shared={})


@cache
def template_profile() -> Profile:
    """The shipped `cpu` template, with assumed figures instead of this host's: the same plans everywhere."""
    return profile_from_json(_shipped()["cpu"], "cost profile 'cpu'", is_ours=True)


def profile_names() -> tuple[str, ...]:
    """The names of the shipped profiles, without aliases."""
    return tuple(sorted({data["name"] for data in _shipped().values()}))


@cache
def _shipped() -> dict[str, Any]:
    files = (item for item in profiles_folder().iterdir() if item.name.endswith(".json"))
    profiles = [json.loads(item.read_text()) for item in files if item.name != SCHEMA]
    return {name: data for data in profiles for name in (data["name"], *data.get("aliases", ()))}
