"""What a device may use of its host: stated by each shipped GPU with its source, simulated where a rank is a CPU's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost.host_memory import HostMemory
from autopar.cost.profile import Profile, profile_from_json, profile_to_json
from autopar.errors import ProfileError
from autopar.profiler import load_profile, profile_names, template_profile
from autopar.profiler.published.host import with_host_memory

GPUS = [name for name in profile_names() if name != "cpu"]


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_states_its_host_and_link(name: str) -> None:
    """Links are slower than the device's own memory, hosts about as large as the device (half a Grace has 240 GB beside
    a GB300's 279) or larger, and each says where it is from."""
    profile = load_profile(name)
    host = profile.beside
    assert host is not None and not host.is_simulated and host.update_bandwidth
    assert 1e9 < max(host.down_bandwidth, host.up_bandwidth) < profile.facts.memory_bandwidth
    assert host.capacity_bytes > 0.75 * profile.facts.capacity_bytes
    assert host.provenance.kind in ("datasheet", "measured") and "assumed" in host.provenance.source
    assert profile_from_json(json.loads(json.dumps(profile_to_json(profile))), name).beside == host


def test_the_host_of_a_cpu_rank_is_simulated_and_as_large_as_the_rank() -> None:
    """Sharing cores leaves a rank, and its host tier, less memory."""
    profile = template_profile()
    host = profile.beside
    assert host is not None and host.is_simulated and host.update_bandwidth is None
    assert host.capacity_bytes == profile.facts.capacity_bytes
    assert "simulated link" in host.provenance.source
    assert "host_memory" not in profile_to_json(profile)


def test_copies_take_their_start_and_their_bytes() -> None:
    """Each direction by its own bandwidth."""
    host = HostMemory(1, 1e9, 2e9, 500, load_profile("h100").facts.provenance)
    assert (host.down_ns(1_000_000), host.up_ns(1_000_000)) == (1_000_500, 500_500)


def test_a_profile_may_say_its_own_link_or_that_nothing_is_known() -> None:
    """A CPU's file may state another simulated link; a GPU's without one has none."""
    stated = HostMemory(10**9, 5e8, 4e8, 0, load_profile("h100").facts.provenance, is_simulated=True)
    cpu = _again(replace(template_profile(), host_memory=stated, _shared={}))
    assert cpu.beside == stated
    assert _again(replace(load_profile("h100"), host_memory=None, _shared={})).beside is None


def test_a_malformed_block_is_refused_with_its_place() -> None:
    """A link of no bandwidth."""
    data = json.loads(json.dumps(profile_to_json(load_profile("h100"))))
    data["host_memory"]["up_bandwidth"] = 0
    with pytest.raises(ProfileError, match="/host_memory/up_bandwidth"):
        profile_from_json(data, "h100")


def test_measured_copies_become_the_link_and_each_gpu_has_its_part_of_the_host(tmp_path: Path) -> None:
    """Eight GPUs share the memory and its bandwidth, and have a link each."""
    base = load_profile("h100")
    assert with_host_memory(tmp_path, base, "2026-01-01") is base
    found = {
        "torch": "2.13", "copies": {"to_device": 5e10, "from_device": 4e10},
        "host": {"memory_bytes": 8 * 10**12, "gpus": 8, "copy_us": 7.5, "update": 3.2e11},
    }  # fmt: skip
    (tmp_path / "device.json").write_text(json.dumps(found))
    host = with_host_memory(tmp_path, base, "2026-01-01").beside
    assert host is not None and host.provenance.kind == "measured"
    assert (host.capacity_bytes, host.down_bandwidth, host.up_bandwidth) == (10**12, 4e10, 5e10)
    assert (host.copy_ns, host.update_bandwidth) == (7_500, 4e10)


def _again(profile: Profile) -> Profile:
    return profile_from_json(json.loads(json.dumps(profile_to_json(profile))), profile.name)
