"""Rows that say what no measurement is, and shapes beyond any table: what is predicted stays what devices can do."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from autopar.cost import Profile
from autopar.cost.compute import node_time_ns
from autopar.ir.graph import Tensor
from autopar.profiler import load_profile, profile_names
from autopar.profiler.published.cases import LINEAR, cases_of
from autopar.profiler.published.measurements import read_measurements
from autopar.profiler.published.products import bounded_ns
from autopar.profiler.published.rows import rows_of
from benchmarks.accuracy.gpu_collectives import shipped_names, shipped_predictions
from benchmarks.accuracy.gpu_operators import Predictor, report

PRODUCT = {"gpu": "H100-SXM5-80GB", "dtype": "bfloat16", "m": "256", "n": "256", "k": "256", "time_us": "5.0"}
ATTENTION = {
    "gpu": "H100-SXM5-80GB", "dtype": "bfloat16", "causal": "1", "batch": "1", "q_len": "512", "kv_len": "512",
    "heads": "8", "kv_heads": "8", "head_dim": "128", "kernel": "fa", "time_us": "5.0", "software": "s",
}  # fmt: skip
ODD = ("", "nan", "inf", "-1", "many", "1e30", "2.5")


@pytest.mark.parametrize("row", [PRODUCT, ATTENTION], ids=["product", "attention"])
def test_odd_values_are_counted_and_end_no_other_row(row: dict[str, str]) -> None:
    numbers = [name for name in row if row[name][0].isdigit() and name != "causal"]
    odd = [{**row, name: value} for name in numbers for value in ODD]
    odd = [one for one in odd if one["time_us"] not in ("2.5", "1e30")]
    short = {name: value for name, value in row.items() if name != "dtype"}
    not_read: Counter[str] = Counter()
    found = report(cases_of([*odd, short, row], not_read), Predictor(None), not_read=not_read)
    assert sum(not_read.values()) == len(odd) + 1
    assert {one["rows"] for one in found} == {1}


def test_heads_that_share_unevenly_are_told_or_predicted() -> None:
    not_read: Counter[str] = Counter()
    found = report(cases_of([{**ATTENTION, "kv_heads": "3"}, ATTENTION], not_read), Predictor(None), not_read=not_read)
    assert found[0]["rows"] + sum(not_read.values()) == 2


def test_numbers_with_decimals_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "gemm.csv"
    path.write_text(f"\ufeff{','.join(PRODUCT)}\n{','.join({**PRODUCT, 'm': '256.0'}.values())}\n", encoding="utf-8")
    assert [case.key for case in cases_of(rows_of(path))] == [(256, 256, 256)]


def test_odd_rows_of_collectives_are_left_out(tmp_path: Path) -> None:
    head = "gpu,link,op,gpus,nodes,dtype,message_bytes,time_us,software\n"
    good = "NVIDIA-H100-80GB,,allreduce,8.0,1,float16,1048576,30.0,nccl\n"
    odd = ["8,3", "0,1", "nan,1", "8,nan", "8,inf", "-8,1", ",", "eight,1"]
    text = head + good + "".join(f"H100-SXM5-80GB,,all_reduce,{counts},float16,1048576,30.0,nccl\n" for counts in odd)
    text += "".join(f"H100-SXM5-80GB,,all_reduce,8,1,float16,{told},nccl\n" for told in ("0,3", "5,0", "5,nan", "x,1"))
    path = tmp_path / "collectives.csv"
    path.write_text(text + good.replace("allreduce", "barrier"))
    rows = read_measurements(path)
    assert [row.op for row in rows] == ["all_reduce", "barrier"]
    (made,) = shipped_predictions(rows)
    assert made.time_ns > 0
    assert shipped_names("B300-SXM6") == ("b300",)
    assert not shipped_names("A100-PCIe-80GB")


# Physical bounds ----------------------------------------


def test_times_of_smaller_products_are_none_above_larger_ones_nor_below_the_least() -> None:
    made = bounded_ns(np.array([[9.0, 2.0], [3.0, 4.0]]), np.array([[0.1, 0.1], [3.5, 0.1]]))
    assert made.tolist() == [[2.0, 2.0], [3.5, 4.0]]


@pytest.mark.parametrize("name", [name for name in profile_names() if name != "cpu"])
def test_products_grow_with_their_rows_and_stay_below_the_peak(name: str) -> None:
    """Far beyond the tables, too: tiny ones, and a million rows."""
    profile = load_profile(name)
    for dtype in ("bfloat16", "float32"):
        peak = profile.peak_flops(dtype)
        for n, k in ((64, 64), (4096, 4096), (131072, 4096)):
            times = [_product_ns(profile, dtype, m, n, k) for m in (16, 64, 1024, 16384, 262144, 1 << 20)]
            assert all(later > 0.8 * earlier for earlier, later in itertools.pairwise(times)), (n, k, times)
            assert times[-1] >= 0.99 * 2e9 * (1 << 20) * n * k / peak
            assert n > 64 or times[0] < 1e5, "of a tile"


def _product_ns(profile: Profile, dtype: str, m: int, n: int, k: int) -> int:
    tensors = {value: Tensor(value, (1,), dtype, True) for value in ("x", "w", "y")}
    return node_time_ns(LINEAR, ((m, k), (n, k)), ((m, n),), tensors, profile)[0]
