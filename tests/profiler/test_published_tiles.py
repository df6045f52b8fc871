"""Attention as PyTorch runs it: the formula's numbers are found again, and meet what an H100 was measured to take."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from autopar.cost.tables import Table
from autopar.profiler import load_profile
from autopar.profiler.published.attention import with_kernel
from autopar.profiler.published.cases import cases_of
from autopar.profiler.published.checking import BurstProfile
from autopar.profiler.published.make import with_own_attention
from autopar.profiler.published.rows import four_fifths, read_rows
from autopar.profiler.published.tiles import COLUMNS, FILES, Tiled, efficient_times, fit, tiled_tables

DATE = "2026-11-27"
GPU = "H100-SXM5-80GB"
MEASURED = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "h100_measured"
KERNEL = Tiled(132, 5000.0, 0.6, {64: (1000.0, 9.0), 128: (2000.0, 12.0)})
TIMES = {"torch_cudnn": 1.0, "torch": 1.02, "torch_flash2": 1.5, "torch_masked": 2.0, "torch_efficient": 3.0}
SHAPES = [
    (batch, length, length, heads, heads, width, causal)
    for batch in (1, 8) for length in (256, 1024, 8192)
    for heads in (16, 64) for width in (64, 128) for causal in (0, 1)
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows of a made-up kernel, in both directions."""
    (tmp_path / "device.json").write_text(json.dumps({"device": {"multiprocessors": 132}}))
    for direction, columns in COLUMNS.items():
        rows = []
        for kernel, times in TIMES.items():
            for shape in SHAPES:
                seen = (*shape[:-1], 0) if kernel == "torch_masked" else shape
                time = times * KERNEL.row_ns(seen) / 1000
                row = dict(zip(columns, shape, strict=True)) | {"kernel": kernel, "pass": direction, "time_us": time}
                rows.append({**row, "gpu": GPU, "dtype": "bfloat16"})
        with (tmp_path / FILES[direction].rstrip("*").replace("*", "_measured")).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return tmp_path


def by_name(tables: list[Table]) -> dict[str, Table]:
    return {table.name: table for table in tables}


def test_a_kernel_s_numbers_are_found_again() -> None:
    found = fit({shape: KERNEL.row_ns(shape) for shape in SHAPES}, 132)
    assert found.start == pytest.approx(KERNEL.start, rel=0.01) and found.late == pytest.approx(KERNEL.late, rel=0.01)
    for width, numbers in KERNEL.by_width.items():
        assert found.by_width[width] == pytest.approx(numbers, rel=0.01)


def test_the_kernel_that_pytorch_chooses_serves_and_a_mask_takes_as_many_times_as_measured(folder: Path) -> None:
    tables = by_name(tiled_tables(folder, GPU, DATE))
    at, flops = (128.0, 1024.0, 128.0, 4.0), 4.0 * 128 * 1024**2 * 128
    taken = KERNEL.time_ns(128, 1024, 128, False)
    assert tables["flash full forward bfloat16"].kernel_ns(at, flops) == pytest.approx(taken, rel=0.03)
    assert tables["flash2 full forward bfloat16"].kernel_ns(at, flops) == pytest.approx(1.5 * taken, rel=0.03)
    assert tables["flash masked backward bfloat16"].kernel_ns(at, flops) == pytest.approx(2 * taken, rel=0.05)
    causal = KERNEL.time_ns(128, 1024, 128, True)
    assert tables["flash causal forward bfloat16"].kernel_ns(at, flops / 2) == pytest.approx(causal, rel=0.03)
    assert {table.provenance.kind for table in tables.values()} == {"measured"}


def test_elsewhere_a_mask_asks_for_the_memory_efficient_kernel(folder: Path) -> None:
    """But where the peaks are the same, the times are."""
    assert efficient_times(folder, GPU)["forward"][0] == pytest.approx(2.0, rel=0.01)
    ampere, hopper = (with_own_attention(folder, load_profile(name), DATE) for name in ("a100", "h200"))
    full, masked = (ampere.tables[f"flash {kind} backward bfloat16"] for kind in ("full", "masked"))
    at = (64, 2048, 128, 1)
    assert masked.ns_per_flop(at) == pytest.approx(2 * full.ns_per_flop(at), rel=0.01)
    assert full is load_profile("a100").tables["flash full backward bfloat16"]
    assert hopper.tables["flash full forward bfloat16"].provenance.kind == "assumed"
    own = with_own_attention(folder, load_profile("h100"), DATE).tables["flash full forward bfloat16"]
    assert hopper.tables["flash full forward bfloat16"].rates == own.rates


def test_a_software_s_own_kernel_is_of_attention_too() -> None:
    """So that what a software is slower by counts for it."""
    made = with_kernel(load_profile("h100"), "flash_attn_fa3")
    table = made.tables["flash causal forward bfloat16"]
    assert table.family == "attention"
    assert table.rates == load_profile("h100").tables["flash_attn_fa3 causal forward bfloat16"].rates


def test_what_an_h100_was_measured_to_take_is_met_at_shapes_left_out() -> None:
    made = with_own_attention(MEASURED, load_profile("h100"), DATE, four_fifths)
    asked = BurstProfile(replace(made, _shared={}))
    rows = [row for name in FILES.values() for row in read_rows(MEASURED, name, gpu=GPU)]
    errors = [
        abs(math.expm1(math.log(asked.predicted_ns(case) / case.measured_ns)))
        for case in cases_of(rows)
        if not four_fifths(case.key) and case.kernel != "torch_masked"
    ]
    assert len(errors) > 50
    assert median(errors) <= 0.06 and sorted(errors)[int(0.9 * len(errors))] <= 0.2
