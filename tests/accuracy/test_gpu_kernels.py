"""Rows say how their software runs: operators one by one or compiled, and what float32 products are made of."""

from dataclasses import replace

import pytest
import torch

from autopar.profiler import load_profile
from benchmarks.accuracy.gpu import decoder
from benchmarks.accuracy.gpu.plans import profiles_of
from benchmarks.accuracy.gpu.predictions import planned, predicted, with_tf32
from benchmarks.accuracy.gpu.rows import Row, Sizes
from benchmarks.accuracy.gpu.softwares import read_softwares

SIZES = Sizes(2, 2048, 16, 16, 128, 8192, True, 32768, True)
ROW = Row("eager", "s", "torchtitan", "A100-SXM4-80GB", 8, 8, "tiny", SIZES, "bf16", 2048, 4, 32, 8, 1, 1, zero=3)


def seconds(*rows: Row) -> dict[str, float]:
    """By the rows' ids."""
    softwares = read_softwares()
    found = [predicted(item, softwares, profiles_of(rows)) for item in planned(rows, softwares)]
    assert not any(item.reason for item in found)
    return {item.row.id: item.seconds for item in found}


def test_compiled_rows_join_what_eager_ones_run_one_by_one() -> None:
    found = seconds(ROW, replace(ROW, id="compiled", is_compiled=True))
    assert found["compiled"] < 0.99 * found["eager"]


def test_a_decoder_computes_the_same_with_kernels_of_its_own_and_without() -> None:
    config = decoder.Config(16, 1, 32, 2, 1, 16, 64, 128, is_gated=True, norm="rms", positions="rotary")
    ours, plain = (decoder.Decoder(replace(config, has_own_kernels=own)) for own in (True, False))
    plain.load_state_dict(ours.state_dict())
    tokens = torch.arange(32).view(2, 16)
    losses = [model(tokens, tokens) for model in (ours, plain)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_tf32_products_take_twice_bfloat16s_where_there_are_such_cores() -> None:
    a100, v100 = load_profile("a100"), load_profile("v100")
    tables = with_tf32(a100).tables
    assert tables["NT float32"].unit_ns == 2 * tables["NT bfloat16"].unit_ns
    assert with_tf32(v100) is v100


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_rows_in_32_bits_are_planned(precision: str) -> None:
    """The step in TF32 is shorter than the one in float32 and longer than in 16 bits."""
    row = replace(ROW, id="row", precision=precision)
    other = seconds(replace(row, precision={"fp32": "tf32", "tf32": "bf16"}[precision]))
    assert seconds(row)["row"] > other["row"]
