"""Profiles from tables that others published: grids filled in, sources left out, and a whole folder to a profile."""

from __future__ import annotations

import csv
import gzip
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar import cli
from autopar.cost import Profile
from autopar.cost.provenance import Provenance
from autopar.cost.tables import Table
from autopar.errors import ProfileError
from autopar.profiler import load_profile
from autopar.profiler.published.attention import flops_of, held_beyond, place_of
from autopar.profiler.published.carrying import carried
from autopar.profiler.published.grids import completed, fitted, weights
from autopar.profiler.published.make import gpu_of, profile_from_folder
from autopar.profiler.published.rows import four_fifths, gpus_in, read_rows
from benchmarks.accuracy.gpu_operators import Predictor, cases_of, report
from tests.oracles.frozen.cases import PROFILES

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 24576, 32768, 65536)
DATE = "2026-11-26"


def product_us(m: int, n: int, k: int) -> float:
    """Of a made-up H100: 128 × 128 tiles in waves of 132, at 600 TFLOP/s, never below 3 µs."""
    waves = math.ceil(math.ceil(m / 128) * math.ceil(n / 128) / 132)
    return 3 + waves * 132 * 128 * 128 * 2 * k / 600e6


def attention_us(batch: int, length: int, heads: int, shared: int) -> float:
    return 8 + 4.0 * batch * heads * length**2 * 128 / 2 / 500e6 * (1 + 20 / (batch * heads)) * (heads / shared) ** 0.02


def written(folder: Path, name: str, rows: Iterable[Mapping[str, object]]) -> None:
    rows = list(rows)
    with gzip.open(folder / name, "wt", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an H100, and of software that is wrong about an A100."""
    made = tmp_path_factory.mktemp("tables")
    base = {"gpu": "H100-SXM5-80GB", "dtype": "bfloat16"}
    shapes = list(itertools.product(SIZES, SIZES, SIZES))
    written(made, "gemm_H100.csv.gz", (
        {**base, "m": m, "n": n, "k": k, "time_us": times * product_us(m, n, k), "software": software}
        for m, n, k in shapes for software, times in (("one", 0.98), ("another", 1.02))
    ))  # fmt: skip
    wrong = {"gpu": "A100-SXM4-80GB", "dtype": "bfloat16", "software": "vllm-0.14.0"}
    right = {**wrong, "software": "sglang"}
    written(made, "gemm_A100.csv.gz", (
        {**told, "m": m, "n": n, "k": k, "time_us": times * product_us(m, n, k)}
        for m, n, k in shapes for told, times in ((wrong, 0.5), (right, 2.0))
    ))  # fmt: skip
    lengths, heads = (64, 128, 256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16, 32, 64)
    written(made, "attention_forward.csv.gz", (
        {**base, "causal": 1, "batch": batch, "q_len": length, "kv_len": length, "heads": count, "kv_heads": shared,
         "head_dim": 128, "time_us": attention_us(batch, length, count, shared), "software": "one", "kernel": "fa"}
        for batch in (1, 2, 4, 8, 16, 32, 64) for length in lengths for count in heads
        for shared in {1, max(1, count // 4), count}
    ))  # fmt: skip
    layers = [(4096, 4096, 4096), (8192, 4096, 4096)]
    written(made, "gemm_training_layouts.csv.gz", (
        {"gpu": "B200", "dtype": "bfloat16", "role": role, "layout": "", "batch": 1, "m": m, "n": n, "k": k,
         "time_us": product_us(m, n, k) * times, "software": "te"}
        for m, n, k in layers for role, times in (("forward", 2), ("grad_input", 2.2), ("grad_weight", 3))
    ))  # fmt: skip
    written(made, "attention_forward_backward.csv.gz", (
        {"gpu": "B200", "dtype": "bfloat16", "causal": 1, "pass": side, "batch": 1, "seq": 8192, "heads": 32,
         "kv_heads": 32, "qk_head_dim": 128, "v_head_dim": 128, "qkv_contiguous": 1, "time_us": time, "software": "te"}
        for side, time in (("forward", 100), ("backward", 270))
    ))  # fmt: skip
    return made


@pytest.fixture(scope="module")
def made(folder: Path) -> Profile:
    return profile_from_folder(folder, load_profile(PROFILES["h100"]), DATE)


def test_a_grid_is_completed_from_what_its_lines_have_in_common() -> None:
    """A jump at one coordinate, in all lines, is not seen from neighbours."""
    random = np.random.default_rng(0)
    axes = [2.0 ** np.arange(12)] * 3
    jump = np.where(np.arange(12) == 6, 0.5, 0.0)[:, None, None]
    smooth = sum(np.meshgrid(*[0.1 * np.arange(12.0)] * 3, indexing="ij"))
    whole = smooth + jump
    missing = random.random(whole.shape) < 0.2
    found = completed(np.where(missing, np.nan, whole), axes)
    assert np.array_equal(found[~missing], whole[~missing]), "what is there stays"
    assert np.abs(found - whole)[missing].mean() < 0.05
    assert np.abs(found - whole)[6][missing[6]].mean() < 0.2


def test_scattered_points_are_met_by_the_values_of_a_grid() -> None:
    random = np.random.default_rng(0)
    axes = [[1.0, 4.0, 16.0, 64.0], [1.0, 10.0, 100.0], [1.0, 2.0]]
    wanted = random.normal(size=(4, 3, 2))
    points = np.exp(np.stack([random.random(600) * np.log(axis[-1]) for axis in axes], axis=1))
    corners, shares = weights(points, axes)
    values = (wanted.ravel()[corners] * shares).sum(axis=1)
    assert fitted(points, values, axes, (1e-3,) * 3) == pytest.approx(wanted, abs=0.02)


def test_products_that_were_left_out_are_predicted(made: Profile, folder: Path) -> None:
    table = made.tables["NT bfloat16"]
    assert table.kernel_ns((4096, 4096, 4096), 2 * 4096**3) == pytest.approx(
        1000 * product_us(4096, 4096, 4096), rel=0.01
    )
    assert "another, one" in table.provenance.source
    rows = read_rows(folder, "gemm_H100.csv.gz")
    errors = [
        row for row in report(cases_of(rows), Predictor(folder)) if row["software"] == "" and row["size"] == "all"
    ]
    assert len(errors) == 1 and 2 * 0.15 * len(SIZES) ** 3 < errors[0]["rows"] < 2 * 0.25 * len(SIZES) ** 3
    assert errors[0]["median"] < 0.07


def test_residuals_are_of_rows_that_were_left_out(made: Profile) -> None:
    """Two softwares, 2% apart from each other's mean: most rows lie within a few percent, none of it by chance."""
    known = {(item.family, item.kind): item for item in made.residuals if item.from_ns == 20_000}
    assert {family for family, _ in known} == {"matmul", "attention"}
    item = known["matmul", "bfloat16"]
    low, middle, high = item.quantiles
    assert -0.25 < low < -0.015 and abs(middle) < 0.05 and 0.015 < high < 0.25
    assert item.count > 100 and "left out" in item.provenance.source
    assert made.residual("matmul", "float16", 30_000) is item, "multiplied as fast"
    assert made.residual("softmax", "bfloat16", 30_000) is None


def test_gradients_are_so_many_times_as_slow_as_the_tables_of_training_say(made: Profile) -> None:
    assert made.tables["NN bfloat16"].times == pytest.approx(1.1, rel=0.01)
    assert made.tables["TN bfloat16"].times == pytest.approx(1.5, rel=0.01)
    assert made.tables["flash causal backward bfloat16"].times == pytest.approx(2.7)


def test_attention_is_met_and_what_has_no_mask_is_as_a_causal_one_of_as_many_operations(made: Profile) -> None:
    table = made.tables["flash causal forward bfloat16"]
    for batch, length, heads, shared in ((1, 4096, 32, 32), (8, 1024, 8, 2), (64, 8192, 16, 4)):
        shape = (batch, length, length, heads, shared, 128, 1)
        wanted = 1000 * attention_us(batch, length, heads, shared)
        assert table.kernel_ns(place_of(shape), flops_of(shape)) == pytest.approx(wanted, rel=0.06)
    unmasked = made.tables["flash full forward bfloat16"].ns_per_flop((64, 4096, 128, 1))
    assert unmasked == pytest.approx(table.ns_per_flop((64, 4096 * 2**0.5, 128, 1)), rel=0.03)


def test_collectives_of_the_folder_take_the_place_of_those_for_the_same_groups(folder: Path, tmp_path: Path) -> None:
    """And groups that were not measured stay what they were."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    rows = [
        {"gpu": "A100-SXM4-80GB", "link": "NVLink3", "op": "all_reduce", "gpus": 2, "nodes": 1, "dtype": "float16",
         "message_bytes": 1 << power, "time_us": 10 + 2**power / 1e5, "software": "nccl-tests"}
        for power in range(10, 31)
    ]  # fmt: skip
    written(tmp_path, "collectives.csv.gz", rows)
    base = load_profile(PROFILES["a100"])
    known = profile_from_folder(tmp_path, base, DATE).collectives
    two, eight = ("all_reduce", "intra_node", 2), ("all_reduce", "intra_node", 8)
    assert known[two] != base.collectives[two] and known[two].points[-1][0] == 1 << 30
    assert known[eight] == base.collectives[eight]


def test_software_whose_figures_cannot_be_is_left_out(folder: Path) -> None:
    known = profile_from_folder(folder, load_profile(PROFILES["a100"]), DATE).tables["NT bfloat16"]
    assert known.kernel_ns((4096,) * 3, 2 * 4096**3) == pytest.approx(2000 * product_us(4096, 4096, 4096), rel=0.01)


def test_a_gpu_is_known_by_the_words_of_its_name_or_told(folder: Path) -> None:
    assert gpus_in(folder, "gemm_H100*")["H100-SXM5-80GB"] == 2 * len(SIZES) ** 3
    assert gpu_of(folder, load_profile(PROFILES["h100"])) == "H100-SXM5-80GB"
    with pytest.raises(ProfileError, match=r"expected rows of a GPU like 'v100-16gb' in .*A100-SXM4-80GB.*--like"):
        gpu_of(folder, load_profile(PROFILES["v100"]))


def test_another_gpu_has_times_by_its_own_peak_and_bandwidth(made: Profile) -> None:
    facts = made.facts
    half = replace(facts, peak_flops={name: rate / 2 for name, rate in facts.peak_flops.items()})
    found = {table.name: table for table in carried(made.tables.values(), "H100", facts, half)}
    for name, at in (("NT bfloat16", (8192,) * 3), ("flash causal forward bfloat16", (256, 8192, 128, 1))):
        assert found[name].ns_per_flop(at) == pytest.approx(2 * made.tables[name].ns_per_flop(at), rel=0.02)
        assert found[name].provenance.kind == "assumed"
    small = (64, 64, 64)
    assert found["NT bfloat16"].ns_per_flop(small) == pytest.approx(
        made.tables["NT bfloat16"].ns_per_flop(small), rel=0.02
    )


def test_shapes_that_are_left_out_are_a_fifth_and_always_the_same() -> None:
    kept = [four_fifths((m, n)) for m in range(100) for n in range(20)]
    assert 0.77 < sum(kept) / len(kept) < 0.83
    assert kept == [four_fifths((m, n)) for m in range(100) for n in range(20)]


def test_the_command_writes_a_profile_that_is_read_again(
    folder: Path, made: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    options = ["--from", str(folder), "--into", PROFILES["h100"]]
    assert cli.main(["profile", *options, "-o", str(path)]) == 0
    assert "NT bfloat16" in capsys.readouterr().out
    again = load_profile(str(path))
    assert {name: table.rates for name, table in again.tables.items()} == {
        name: table.rates for name, table in made.tables.items()
    }
    assert again.operators["matmul"].call_ns == (0, 0) and again.links == made.links
    assert cli.main(["profile", *options[:2]]) == 2
    assert "expected --into PROFILE" in capsys.readouterr().err


def test_longer_attention_than_was_measured_takes_as_long_a_flop_as_the_longest() -> None:
    axes = ((1.0, 16.0), (1024.0, 16384.0, 65536.0), (64.0, 128.0), (1.0, 8.0))
    rates = tuple(float(1 + number) for number in range(24))
    table = Table("flash full forward bfloat16", axes, rates, Provenance("published", "a test", DATE))
    measured = (16.0, 65536.0, 64.0, 1.0)
    held = held_beyond(table, np.array([measured]), 16384.0)
    for at in itertools.product(*axes):
        like = at if at == measured else (at[0], min(at[1], 16384.0), *at[2:])
        assert held.ns_per_flop(at) == pytest.approx(table.ns_per_flop(like))
    assert held_beyond(table, np.array([measured]), 65536.0) is table
