"""Precisions of measured rows: products in float8 whose operands were cast before, float16, and what is not known."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from autopar.cost.provenance import Provenance
from autopar.cost.tables import Table
from autopar.profiler import load_profile
from benchmarks.accuracy.gpu.float8 import cast_before, cast_ns
from benchmarks.accuracy.gpu.plans import reason_against
from benchmarks.accuracy.gpu.predictions import with_float16
from benchmarks.accuracy.gpu.rows import read_rows
from benchmarks.accuracy.gpu.softwares import read_softwares

PEAK, ROW_NS, EACH_NS = 1e15, 4.0, 0.0016
AXES = ((512.0, 4096.0, 8192.0, 16384.0, 32768.0), (2048.0, 3072.0, 4096.0, 8192.0, 12288.0, 16384.0),
        (2048.0, 4096.0, 8192.0, 16384.0))  # fmt: skip


def table(casts: float) -> Table:
    rates = [
        (2e9 * m * n * k / PEAK + casts * m * (ROW_NS + EACH_NS * k)) / (2 * m * n * k) / 1e-6
        for m, n, k in product(*AXES)
    ]
    source = Provenance("published", "a test", "2026-11-28")
    return Table("NT float8_e4m3fn", AXES, tuple(rates), source, unit_ns=1e-6)


def test_the_cast_is_read_off_products_of_other_numbers_of_features() -> None:
    assert cast_ns(table(1)) == pytest.approx((ROW_NS, EACH_NS), rel=0.02)
    row, each = cast_ns(table(0))
    assert row < 0.05 and each < 1e-4


def test_what_was_cast_before_takes_its_product_alone_and_no_less_than_the_peak() -> None:
    made = cast_before(table(1), PEAK)
    for m, n, k in product(*AXES):
        assert made.kernel_ns((m, n, k), 2 * m * n * k) == pytest.approx(2e9 * m * n * k / PEAK, rel=0.03)
    assert min(cast_before(table(1), PEAK / 2).rates) * 1e-6 >= 2e9 / PEAK * 0.999


def test_training_in_float16_takes_what_the_device_does_in_float16() -> None:
    v100, a100 = load_profile("v100"), load_profile("a100")
    assert with_float16(v100).peak_flops("bfloat16") == v100.peak_flops("float16") > v100.peak_flops("bfloat16")
    assert with_float16(a100).tables == a100.tables and with_float16(a100).facts == a100.facts


def test_rows_of_a_precision_that_a_profile_does_not_know_are_listed(tmp_path: Path) -> None:
    sizes = "layers,hidden,heads,kv_heads,head_dim,ffn,gated_mlp,vocab,tied_embeddings"
    (tmp_path / "models.csv").write_text(f"model,{sizes}\nmini,2,64,4,4,16,128,0,256,1\n")
    head = "id,gpu,gpus,model,precision,seq,micro_batch,global_batch,tp,pp,step_time_s"
    rows = [f"{n},{gpu},8,mini,{kind},64,1,8,1,1,1.0" for n, (gpu, kind) in enumerate(
        [("A100-SXM4-80GB", "FP8"), ("H100-SXM5-80GB", "fp8"), ("h100", "nvfp4"), ("h100", "bf16"), ("MI300X", "bf16")]
    )]  # fmt: skip
    (tmp_path / "rows.csv").write_text("\n".join([head, *rows, ""]))
    reasons = [reason_against(row, read_softwares()) for row in read_rows(tmp_path / "rows.csv")]
    assert reasons[1] == reasons[3] == ""
    assert "no products in float8" in reasons[0] and "nvfp4" in reasons[2] and "--profile MI300X" in reasons[4]
