"""Points of collectives made from published tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost.collectives import make_group, modelled_ns
from autopar.cost.profile import Link, profile_from_json, profile_to_json
from autopar.ir.placement import Axis
from autopar.profiler import load_profile
from autopar.profiler.published.collectives import (
    collective_blocks,
    completed,
    extrapolated,
    filled,
    thinned,
    with_collectives,
)
from autopar.profiler.published.measurements import Measurement, read_measurements
from autopar.profiler.published.networks import fitted_network

HEAD = "gpu,link,op,gpus,nodes,dtype,message_bytes,time_us,software\n"
POWERS = [1 << n for n in range(9, 30)]


def alpha_beta(start_us: float, message_us: float, rate: float) -> Callable[[str, int, int], float]:
    """Microseconds of a ring with these constants; rate in bytes a microsecond."""

    def time_us(op: str, ranks: int, size: int) -> float:
        rounds = 2 if op == "all_reduce" else 1
        return start_us + rounds * (ranks - 1) * (message_us + size / ranks / rate)

    return time_us


def write(
    folder: Path, time_us: Callable[[str, int, int], float], software: str = "nccl-tests 2.27", left_out: int = 0
) -> None:
    """A table of one GPU, all collectives, 2, 4 and 8 ranks, all powers of two but one."""
    rows = [
        f"X,wire,{op},{ranks},1,float16,{size},{time_us(op, ranks, size):.3f},{software}\n"
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for ranks in (2, 4, 8)
        for size in POWERS
        if size != left_out
    ]
    path = folder / f"collectives_{software.replace(' ', '_')}.csv"
    path.write_text(HEAD + "".join(rows), encoding="utf-8")


def test_points_are_what_was_measured_and_the_size_left_out_lies_on_the_line(tmp_path: Path) -> None:
    time_us = alpha_beta(5, 1, 300_000)
    write(tmp_path, time_us, left_out=1 << 20)
    blocks = collective_blocks(tmp_path, "X")
    assert {(item["collective"], item["ranks"]) for item in blocks.collectives} == {
        (op, ranks) for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") for ranks in (2, 4, 8)
    }
    for item in blocks.collectives:
        points = dict(item["points"])
        assert set(points) == {*POWERS, 1 << 30}
        for size, time_ns in points.items():
            assert time_ns == pytest.approx(1000 * time_us(item["collective"], item["ranks"], size), rel=2e-3)


def test_a_link_of_one_protocol_is_found_again(tmp_path: Path) -> None:
    write(tmp_path, alpha_beta(5, 1, 300_000))
    (link,) = collective_blocks(tmp_path, "X").links
    assert link["bandwidth"] == pytest.approx(3e11, rel=0.05)
    assert link["alpha_ns"] == pytest.approx(1000, rel=0.05)
    assert link["start_ns"] == pytest.approx(5000, rel=0.05)


def test_the_side_of_a_jump_is_that_of_the_like_collective() -> None:
    """Both double at 1 MiB, and one lacks that size: a straight line would lie between."""
    jump = {size: (2.0 if size >= 1 << 20 else 1.0) * size for size in POWERS}
    lacking = {size: 1.5 * time for size, time in jump.items() if size != 1 << 20}
    assert filled(lacking, 1 << 20, [jump], is_line_told=False) == pytest.approx(1.5 * jump[1 << 20])
    assert filled(lacking, 1 << 20) < 1.3 * jump[1 << 20]


def test_the_best_source_serves_and_integers_do_not_where_floats_are_added(tmp_path: Path) -> None:
    write(tmp_path, alpha_beta(5, 1, 300_000))
    write(tmp_path, alpha_beta(90, 9, 100_000), software="torch.distributed wall clock")
    sums = HEAD + "".join(f"X,wire,all_reduce,2,1,int8,{size},1e6,nccl-tests\n" for size in POWERS)
    (tmp_path / "collectives_int8.csv").write_text(sums, encoding="utf-8")
    blocks = collective_blocks(tmp_path, "X")
    (points,) = (i["points"] for i in blocks.collectives if (i["collective"], i["ranks"]) == ("all_reduce", 2))
    assert dict(points)[512] == pytest.approx(7000, rel=0.01)


def test_more_bytes_never_take_less(tmp_path: Path) -> None:
    rows = [f"X,wire,all_gather,2,1,float16,{size},{10 + 5 * (n % 2)},nccl-tests\n" for n, size in enumerate(POWERS)]
    path = tmp_path / "collectives.csv"
    path.write_text(HEAD + "".join(rows), encoding="utf-8")
    curve = completed({("all_gather", 2): thinned(read_measurements(path))})["all_gather", 2]
    times = [time for _, time in sorted(curve.items())]
    assert times == sorted(times) and math.isclose(times[0], 10_000)


def test_another_gpu_has_no_blocks_and_a_table_that_lacks_columns_is_refused(tmp_path: Path) -> None:
    write(tmp_path, alpha_beta(5, 1, 300_000))
    assert collective_blocks(tmp_path, "Y") == ([], [])
    (tmp_path / "collectives_broken.csv").write_text("gpu,op\nX,send\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"collectives_broken.csv: expected the columns \['dtype'"):
        collective_blocks(tmp_path, "X")


def test_half_the_bandwidth_doubles_what_bytes_take(tmp_path: Path) -> None:
    write(tmp_path, alpha_beta(5, 1, 300_000))
    whole = collective_blocks(tmp_path, "X")
    half = extrapolated(whole, 2.0, "half the lanes")
    write(tmp_path, alpha_beta(5, 1, 150_000))
    for made, measured in zip(half.collectives, collective_blocks(tmp_path, "X").collectives, strict=True):
        assert made["provenance"]["kind"] == "assumed"
        for point, expected in zip(made["points"], measured["points"], strict=True):
            assert point == pytest.approx(expected, rel=0.01)


def test_a_network_is_found_again_from_what_its_formulas_make() -> None:
    base = load_profile("h100")
    near = base.links["intra_node"]
    made = Link("inter_node", 20_000, 40e9, near.provenance)
    profile = replace(base, links={"intra_node": near, "inter_node": made}, collectives={}, _shared={})
    bare = replace(base, collectives={}, _shared={})
    rows = [
        Measurement("X", op, 8 * nodes, nodes, "float32", size, time_ns, "formula", "ether")
        for op in ("all_reduce", "all_to_all")
        for nodes in (2, 4, 8)
        for size in (1 << 20, 1 << 25, 1 << 30)
        for time_ns in [modelled_ns(op, size, make_group(Axis("x", 8 * nodes, 1), 8, profile), profile)]
    ]
    found = fitted_network("ether", rows, near, bare)
    assert found.network == "ether" and found.level == "inter_node"
    assert found.alpha_ns == pytest.approx(made.alpha_ns, rel=0.05)
    assert found.bandwidth == pytest.approx(made.bandwidth, rel=0.05)
    known = fitted_network("ether", rows, near, bare, bandwidth=30e9)
    assert known.bandwidth == 30e9


def test_vtrain_s_columns_are_read_as_sums_inside_a_node(tmp_path: Path) -> None:
    path = tmp_path / "allreduce.csv"
    path.write_text("gpu,n_gpus,bytes,time_ns_in_place\na100,5,1048576,62000\n", encoding="utf-8")
    assert [row[:7] for row in read_measurements(path)] == [("a100", "all_reduce", 5, 1, "float32", 1 << 20, 62000.0)]


def test_releases_that_differ_have_points_of_their_own_which_serve_where_they_are_stated(tmp_path: Path) -> None:
    slow, fast = alpha_beta(20, 1, 300_000), alpha_beta(10, 1, 300_000)
    write(tmp_path, slow, "nccl-tests nccl-2.27.3")
    write(tmp_path, fast, "nccl-tests nccl-2.23")
    profile = with_collectives(load_profile("h100"), tmp_path, "X")
    assert {item.library for item in profile.other_collectives} >= {"nccl-2.23", "nccl-2.27"}
    own, place = profile.with_library("nccl-2.23"), ("all_to_all", "intra_node", 8)
    for known, time_us in ((own, fast), (profile.with_library("nccl-2.27"), slow)):
        for size, time_ns in known.collectives[place].points:
            assert time_ns == pytest.approx(1000 * time_us("all_to_all", 8, size), rel=2e-3)
    both = dict(profile.collectives[place].points)
    assert dict(own.collectives[place].points)[1 << 20] < both[1 << 20]
    assert profile.with_library("nccl-9.9") is profile
    assert profile_from_json(json.loads(json.dumps(profile_to_json(profile))), "again").other_collectives[0].library


def test_one_release_alone_is_the_usual_points(tmp_path: Path) -> None:
    write(tmp_path, alpha_beta(20, 1, 300_000), "nccl-tests nccl-2.27.3")
    assert not any("library" in item for item in collective_blocks(tmp_path, "X").collectives)
