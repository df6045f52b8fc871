"""Profiles: the shipped files are well formed, lookups help, curves and sharing behave."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autopar.cost import Profile
from autopar.cost.files import profiles_folder
from autopar.cost.profile import Provenance, Residual, profile_from_json, profile_to_json
from autopar.errors import MeshError, ProfileError
from autopar.ir.mesh import GPU_PROFILES, profile_of_device
from autopar.profiler import load_profile, profile_names, template_profile
from tests.oracles.frozen.cases import PROFILES

SHIPPED = ("a100", "a100-40gb", "b200", "b300", "gb200", "gb300", "gh200", "h100", "h200", "l4", "l40s", "v100")


def shipped_json(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((profiles_folder() / f"{name}.json").read_text())
    return data


def test_shipped_profiles_have_sources_for_every_block() -> None:
    assert profile_names() == (
        "a100-40gb", "a100-80gb", "b200", "b300", "cpu", "gb200", "gb300", "gh200", "h100-80gb", "h200", "l4", "l40s",
        "v100-16gb",
    )  # fmt: skip
    for name in SHIPPED:
        profile = load_profile(name)
        assert profile.usable_bytes < profile.facts.capacity_bytes
        assert all(
            source.split(":")[0] in ("datasheet", "assumed", "published", "fitted", "measured")
            for source in profile.provenance.values()
        )


def test_every_shipped_gpu_is_known_by_what_its_driver_calls_it() -> None:
    assert GPU_PROFILES == SHIPPED
    for name, profile in (
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"), ("Tesla V100-SXM2-16GB", "v100"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"), ("NVIDIA B300 SXM6 AC", "b300"), ("NVIDIA GB300", "gb300"),
    ):  # fmt: skip
        assert profile_of_device(name) == profile
    for name in ("NVIDIA L40", "NVIDIA GeForce RTX 4090", "Tesla P100-PCIE-16GB"):
        with pytest.raises(MeshError, match="expected a device with a cost profile"):
            profile_of_device(name)


def test_the_same_name_gives_the_same_object_and_aliases_work() -> None:
    assert load_profile("h100") is load_profile("h100")
    for name, full in (("a100", "a100-80gb"), ("v100", "v100-16gb"), ("h100", "h100-80gb")):
        assert load_profile(name).name == load_profile(full).name == full


def test_unknown_name_lists_the_known_and_the_remedy() -> None:
    with pytest.raises(
        ProfileError, match=r"expected a known cost profile \(a100, .*h100.*found 'b400'.*autopar profile"
    ):
        load_profile("b400")


def test_a_file_path_is_a_name(tmp_path: Path) -> None:
    data = {**shipped_json("h100"), "name": "mine"}
    (tmp_path / "mine.json").write_text(json.dumps(data))
    assert load_profile(str(tmp_path / "mine.json")).name == "mine"
    with pytest.raises(ProfileError, match=r"expected the JSON file of a cost profile at .*none\.json"):
        load_profile(str(tmp_path / "none.json"))


def test_what_is_shipped_is_of_the_format() -> None:
    """It is read without being checked, so that it is here."""
    for name in SHIPPED:
        assert profile_to_json(profile_from_json(shipped_json(name), name)) == profile_to_json(load_profile(name))


def test_round_trip_through_json() -> None:
    for name in SHIPPED:
        data = profile_to_json(load_profile(name))
        assert profile_to_json(profile_from_json(json.loads(json.dumps(data)), name)) == data


def test_waits_are_read_and_written_and_do_not_fall() -> None:
    source = {"kind": "measured", "source": "a host", "date": "2026-11-23"}
    waits = {"level": "intra_node", "ranks": 2, "points": [[1000, 0], [2000, 5]], "provenance": source}
    profile = profile_from_json({**shipped_json("cpu"), "waits": [waits]}, "mine")
    assert profile.waits["intra_node", 2].points == ((1000, 0), (2000, 5))
    assert profile.provenance["waits/intra_node/2"].startswith("measured: a host")
    assert "waits/2 ranks" in profile.sources((), ["intra_node"])
    assert "waits/2 ranks" not in profile.sources((), ["inter_node"])
    assert json.loads(json.dumps(profile_to_json(profile)))["waits"] == [waits]
    with pytest.raises(ProfileError, match="waits of 2: expected more work to take more time"):
        profile_from_json({**shipped_json("cpu"), "waits": [{**waits, "points": [[1000, 5], [2000, 0]]}]}, "mine")


def test_malformed_profiles_name_the_field() -> None:
    data = shipped_json("h100")
    data["facts"]["memory_bandwidth"] = -1
    with pytest.raises(
        ProfileError,
        match=r"mine is no cost profile: at /facts/memory_bandwidth: expected at least 100,000 .*not GB.*found -1",
    ):
        profile_from_json(data, "mine")


def test_an_older_format_is_told_with_the_remedy() -> None:
    with pytest.raises(
        ProfileError, match=r"mine: expected a cost profile of format 2, found format 1; measure it anew"
    ):
        profile_from_json({**shipped_json("h100"), "format": 1}, "mine")


def test_every_block_needs_its_source_and_date() -> None:
    for block in ("facts", "operators", "links", "collectives"):
        data = shipped_json("a100")
        item = data[block] if block == "facts" else data[block][0]
        del item["provenance"]["date"]
        with pytest.raises(ProfileError, match=f"at /{block}.*provenance: .*'date' is a required property"):
            profile_from_json(data, "mine")


def test_measured_collectives_are_shipped_with_their_source() -> None:
    """Of the V100, which has no switch, all-reduces of groups that are wired in their own way, too."""
    rings = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    for name in ("a100", "h100", "h200", "v100"):
        measured = load_profile(name).collectives
        assert {(kind, ranks) for kind, _, ranks in measured} >= {(kind, n) for kind in rings for n in (2, 4, 8)}
        assert all(item.provenance.kind == "published" for item in measured.values())
        assert all(item.points[-1][0] >= 1 << 29 for (kind, _, _), item in measured.items() if kind in rings)
        sums = {ranks for kind, _, ranks in measured if kind == "all_reduce"}
        assert sums == ({*range(2, 9)} if name == "v100" else {2, 4, 8})


def test_curves_may_not_take_less_time_for_more_work() -> None:
    data = shipped_json("h100")
    data["operators"][0]["forward"] = [[1e6, 0.001], [2e6, 0.9]]
    with pytest.raises(ProfileError, match="matmul: expected more work to take more time"):
        profile_from_json(data, "mine")


@pytest.mark.parametrize("name", SHIPPED)
def test_time_never_falls_with_work(name: str) -> None:
    for curve in load_profile(name).operators.values():
        times = [curve.forward.effective_work(2**power) for power in range(45)]
        assert all(earlier <= later for earlier, later in pairwise(times))
        assert curve.forward.effective_work(0) == 0


def with_cores(cores: int) -> Profile:
    data = shipped_json("cpu")
    data["facts"]["cores"] = cores
    return profile_from_json(data, "test")


def test_more_ranks_than_cores_compute_slower() -> None:
    profile = with_cores(2)
    assert profile.shared_by(2) is profile
    crowded = profile.shared_by(4)
    assert crowded is profile.shared_by(4)
    assert crowded.shared_by(4) is crowded, "sharing counts once"
    assert crowded.peak_flops("float32") == profile.peak_flops("float32") / 2
    assert crowded.facts.launch_ns[0] == 2 * profile.facts.launch_ns[0]


def test_devices_of_their_own_are_not_shared() -> None:
    assert load_profile("h100").shared_by(8) is load_profile("h100")
    assert template_profile().facts.cores is None


def test_a_profile_tells_the_sources_of_what_a_plan_uses() -> None:
    profile = load_profile("a100")
    found = profile.sources({"matmul", "unheard of"}, ["intra_node"])
    assert [*found] == [
        name
        for name in (
            "facts",
            "memory",
            "steps",
            "host",
            "operators/matmul",
            "operators/pointwise",
            "tables/NT bfloat16",
            "tables/NT float32",
            "links/intra_node",
            "interference/intra_node",
            *(f"collectives/{kind}" for kind in dict.fromkeys(kind for kind, _, _ in profile.collectives)),
        )
        if name != "host" or profile.host
    ]
    assert "nccl-tests" in found["collectives/all_reduce"]
    assert "links/inter_node" in profile.sources((), ["intra_node", "inter_node"])


def test_a_device_is_sold_with_several_networks() -> None:
    """The first link of a level counts; another one by its name at the end of the profile's."""
    data = json.loads(json.dumps(profile_to_json(load_profile("h100"))))
    near, far = data["links"][:2]
    slow = {**far, "bandwidth": 1e9, "network": "ethernet"}
    profile = profile_from_json({**data, "links": [near, far, slow]}, "two networks")
    other = profile.on("ethernet")
    assert other is not None and profile.on("token-ring") is None
    assert profile.link("inter_node").bandwidth == far["bandwidth"] and other.link("inter_node").bandwidth == 1e9
    assert other.name == f"{profile.name}-ethernet" and other.link("intra_node") == profile.link("intra_node")
    again = profile_from_json(json.loads(json.dumps(profile_to_json(profile))), "written")
    assert again.other_links == profile.other_links and again.links == profile.links
    with pytest.raises(ProfileError, match="one item for each level and network"):
        profile_from_json({**data, "links": [near, far, far]}, "twice")


def test_a_residual_is_of_the_class_that_a_call_is_in_and_of_its_dtype() -> None:
    source = Provenance("fitted", "rows left out", "2026-11-26")
    known = [
        Residual("matmul", kind, from_ns, 10, (-0.1, 0.0, middle), source)
        for kind, from_ns, middle in (("bfloat16", 0, 1.0), ("bfloat16", 20_000, 2.0), ("float32", 1_000_000, 3.0))
    ]
    made = replace(load_profile(PROFILES["h100"]), residuals=tuple(known))
    found = [
        made.residual("matmul", kind, ns)
        for kind, ns in (("bfloat16", 19_999), ("float16", 20_000), ("bfloat16", 10**8), ("float32", 5), ("int8", 5))
    ]
    assert [item and item.quantiles[2] for item in found] == [1.0, 2.0, 2.0, 3.0, 1.0]
    assert made.residual("softmax", "bfloat16", 5) is None
    again = profile_from_json(json.loads(json.dumps(profile_to_json(made))), "again")
    assert again.residuals == made.residuals
    with pytest.raises(ProfileError, match="twice"):
        profile_from_json(json.loads(json.dumps(profile_to_json(replace(made, residuals=(known[0],) * 2)))), "double")
