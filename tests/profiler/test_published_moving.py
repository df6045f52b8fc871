"""Memory-bound operators and float32 products of published tables: kernels alone, eager calls, what is like them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from autopar.cost import Profile
from autopar.cost.compute import pointwise_time_ns
from autopar.profiler import load_profile
from autopar.profiler.published.cases import cases_of
from autopar.profiler.published.eager import floor_ns, kernel_ns, row_ns
from autopar.profiler.published.moving import FILES, carried_moving, with_moving
from autopar.profiler.published.products import single_tables
from autopar.profiler.published.rows import everything, read_rows
from tests.oracles.frozen.cases import PROFILES

DATE = "2026-11-26"
EAGER = "torch-2.1.0 eager cu121 (event pair round one call)"


def add_us(num_bytes: float) -> float:
    """Of a made-up kernel: 2 µs to start and end, and 2 TB/s."""
    return 2 + num_bytes / 2e6


def written(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    rows = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def made(tmp_path: Path) -> Profile:
    told = {"gpu": "H100-SXM5-80GB", "pass": "forward", "cols": 4096}
    alone = [
        {**told, "op": "add", "rows": 1 << n, "dtype": "float16", "time_us": add_us(3 * 2 * 4096 << n), "software": "k"}
        for n in range(17)
    ]
    floor = floor_ns(told["gpu"], "softmax", EAGER) / 1000  # type: ignore[arg-type]
    eager = [
        {**told, "op": "softmax", "rows": 1 << n, "dtype": "float32", "software": EAGER,
         "time_us": max(floor, floor / 2 + 2 * add_us(2 * 4 * 4096 << n))}
        for n in range(19)
    ]  # fmt: skip
    written(tmp_path / "memory_bound.csv", [*alone, *eager])
    return with_moving(load_profile(PROFILES["h100"]), tmp_path, [str(told["gpu"])], DATE, everything)


def test_a_row_of_an_eager_call_is_the_host_or_half_of_it_and_the_kernel() -> None:
    floor = floor_ns("V100-PCIe-32GB", "add", EAGER)
    assert floor == 32_400 and floor_ns("V100-PCIe-32GB", "add", "kernels alone") == 0
    assert row_ns(1000, floor) == floor and kernel_ns(floor, floor) is None
    assert kernel_ns(row_ns(90_000, floor), floor) == 90_000 and kernel_ns(700, 0.0) == 700


def test_kernels_take_what_was_measured_without_a_launch_on_top(made: Profile) -> None:
    for num_bytes in (1 << 12, 1 << 20, 3 << 24, 1 << 29):
        assert pointwise_time_ns(num_bytes, made) == pytest.approx(1000 * add_us(max(num_bytes, 24_576)), rel=0.07)
    assert made.operators["pointwise"].call_ns == (0, 0)
    assert made.operators["pointwise"].provenance.kind == "published"


def test_eager_calls_show_kernels_above_their_floor_and_what_nobody_measured_is_like_pointwise(made: Profile) -> None:
    softmax, dropout = made.operators["softmax"], made.operators["dropout"]
    bandwidth = made.facts.memory_bandwidth
    found = softmax.forward.effective_work(1 << 29) * 1e9 / bandwidth
    assert found == pytest.approx(2000 * add_us(1 << 29), rel=0.05)
    assert dropout.provenance.kind == "assumed"
    assert dropout.forward.effective_work(1e9) > made.operators["pointwise"].forward.effective_work(1e9)


def test_another_device_moves_bytes_by_its_own_bandwidth(made: Profile) -> None:
    found = carried_moving(load_profile(PROFILES["a100"]), made, DATE)
    ratio = made.facts.memory_bandwidth / found.facts.memory_bandwidth
    assert pointwise_time_ns(8, found) == pytest.approx(pointwise_time_ns(8, made), abs=2)
    assert pointwise_time_ns(1 << 30, found) == pytest.approx(ratio * pointwise_time_ns(1 << 30, made), rel=0.01)
    assert found.operators["pointwise"].provenance.kind == "assumed"


def test_every_kind_of_row_is_asked_of_its_operator(tmp_path: Path) -> None:
    """And rows of operators that the model does not have are passed over."""
    base = {"gpu": "H100-SXM5-80GB", "dtype": "bfloat16", "time_us": 50, "software": "s"}
    sizes = {"m": 512, "n": 512, "k": 512}
    rows: list[dict[str, object]] = [
        {**base, **sizes},
        {**base, **sizes, "batch": 4},
        {**base, "module": "q_proj", "kind": "linear", "rows": 512, "n": 512, "k": 512},
        {**base, "groups": 4, "m_per_group": 512, "n": 512, "k": 512, "stage": "forward"},
        {**base, "tokens": 512, "hidden": 512, "moe_ffn": 512, "top_k": 2, "experts": 8, "tp": 1, "ep": 2},
        {**base, "op": "embedding", "pass": "forward", "rows": 512, "cols": 512},
        {**base, "op": "rope", "pass": "forward", "rows": 512, "cols": 512},
    ]
    calls = list(cases_of([{name: str(value) for name, value in row.items()} for row in rows]))
    assert [call.family for call in calls] == [
        "products", "products, batched", "products, modules", "products, grouped", "experts", "memory-bound, embedding",
    ]  # fmt: skip
    profile = load_profile("h100")
    one, four, layer, grouped, _, _ = (call.predicted_ns(profile) for call in calls)
    assert one == layer and one < four and one < grouped
    assert list(tmp_path.glob(FILES)) == []


def test_float32_products_lie_anywhere_and_are_met_between_them(tmp_path: Path) -> None:
    def kernel_us(m: int, n: int, k: int) -> float:
        return 4 + 2 * m * n * k / 40e6

    floor = floor_ns("H100-SXM5-80GB", "linear", EAGER) / 1000
    sizes = (300, 512, 900, 1700, 2048, 3000, 5000, 8192)
    written(tmp_path / "gemm_fp32.csv", (
        {"gpu": "H100-SXM5-80GB", "dtype": "float32", "m": m, "n": n, "k": k, "software": EAGER,
         "time_us": max(floor, floor / 2 + kernel_us(m, n, k))}
        for m in sizes for n in sizes for k in sizes if (m, n, k) != (2048, 1700, 900)
    ))  # fmt: skip
    profile = load_profile(PROFILES["h100"])
    tables = {table.name: table for table in single_tables(tmp_path, ["H100-SXM5-80GB"], profile.facts, DATE)}
    found = tables["NT float32"].kernel_ns((2048, 1700, 900), 2.0 * 2048 * 1700 * 900)
    assert found == pytest.approx(1000 * kernel_us(2048, 1700, 900), rel=0.04)
    assert tables["TN float32"].provenance.kind == "assumed"
    assert not single_tables(tmp_path, ["V100-PCIe-32GB"], profile.facts, DATE)
    assert read_rows(tmp_path, "gemm_fp32.csv")
