"""Tables that know one dtype: which call stands where, how they are written, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from autopar.cost import Profile, node_time_ns
from autopar.cost.profile import profile_from_json, profile_to_json
from autopar.cost.provenance import Provenance
from autopar.cost.tables import Table, read_tables, write_table
from autopar.errors import ProfileError
from autopar.ir.graph import Node, Ref, Tensor
from autopar.ir.routing import Routing
from autopar.ops.loads import busiest
from autopar.profiler import template_profile

SOURCE = Provenance("published", "a test", "2026-11-26")
AXES = ((16.0, 4096.0), (16.0, 4096.0), (16.0, 4096.0))
ALONE = Table("NT bfloat16", AXES, (2000.0,) * 8, SOURCE, unit_ns=1e-6, least_ns=1500.0)  # 500 TFLOP/s
FLASH = Table(
    "flash causal forward bfloat16", ((1.0, 256.0), (64.0, 4096.0), (64.0, 128.0), (1.0, 8.0)),
    (1000.0,) * 8 + (500.0,) * 8, SOURCE, unit_ns=1e-6,
)  # fmt: skip


def like(table: Table, name: str, times: float) -> Table:
    return replace(table, name=name, like=table.name, times=times)


def device(*tables: Table) -> Profile:
    known = template_profile()
    free = {name: replace(curve, call_ns=(0, 0)) for name, curve in known.operators.items()}
    peaks = {"float32": 1e14, "bfloat16": 1e15, "float16": 1e15}
    facts = replace(known.facts, memory_bandwidth=1e12, peak_flops=peaks)
    return replace(known, facts=facts, operators=free, tables={table.name: table for table in tables}, _shared={})


WHOLE = device(
    ALONE, like(ALONE, "NN bfloat16", 2.0), like(ALONE, "TN bfloat16", 3.0), FLASH,
    like(FLASH, "flash causal backward bfloat16", 2.5),
)  # fmt: skip


def times_of(
    op: str, operands: list[tuple[int, ...]], result: tuple[int, ...], dtype: str = "bfloat16", **keywords: bool
) -> tuple[int, int]:
    names = "abc"[: len(operands)]
    tensors = {name: Tensor(name, shape, dtype, True) for name, shape in zip(names, operands, strict=True)}
    node = Node("y", f"aten.{op}.default", tuple(map(Ref, names)), tuple(keywords.items()), ("y",))
    return node_time_ns(node, tuple(operands), (result,), {**tensors, "y": Tensor("y", result, dtype, True)}, WHOLE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_layer_has_a_table_for_each_of_its_three_products(dtype: str) -> None:
    """float16 has none of its own, and that of bfloat16."""
    flops = 2 * 512 * 1024 * 2048
    forward, backward = times_of("linear", [(2, 256, 2048), (1024, 2048)], (2, 256, 1024), dtype)
    assert forward == pytest.approx(flops * 2e-3, abs=1)
    assert backward == pytest.approx((2 + 3) * flops * 2e-3, abs=2)


def test_a_dtype_that_is_slower_has_no_other_ones_table() -> None:
    """As bfloat16 on a V100, which multiplies it without tensor cores."""
    facts = replace(WHOLE.facts, peak_flops={"float32": 1e13, "bfloat16": 1e15, "float16": 1e13})
    assert replace(WHOLE, facts=facts).alike("float16") == ("float16",)
    assert WHOLE.alike("float16") == ("float16", "bfloat16") and WHOLE.alike("float32") == ("float32",)


def test_a_mask_that_is_a_tensor_has_a_price_of_its_own_where_a_profile_knows_one() -> None:
    """Else that of attention without a mask; never the causal one."""
    full = replace(FLASH, name="flash full forward bfloat16", rates=(800.0,) * 16)
    masked = replace(FLASH, name="flash masked forward bfloat16", rates=(1600.0,) * 16)
    shape, mask = (2, 4, 1024, 128), (2, 1, 1024, 1024)
    flops = 4 * 2 * 4 * 1024 * 1024 * 128
    for tables, rate in (((FLASH, full, masked), 1.6e-3), ((FLASH, full), 0.8e-3)):
        tensors = {name: Tensor(name, shape, "bfloat16", True) for name in "abcy"}
        tensors["m"] = Tensor("m", mask, "bool", False)
        op = "aten.scaled_dot_product_attention.default"
        node = Node("y", op, tuple(map(Ref, "abcm")), (), ("y",))
        forward, _ = node_time_ns(node, (shape,) * 3 + (mask,), (shape,), tensors, device(*tables))
        assert forward == pytest.approx(flops * rate, rel=0.01)


def test_no_kernel_takes_less_than_the_least_and_operands_come_from_memory_beside_the_grid() -> None:
    assert times_of("linear", [(16, 16), (16, 16)], (16, 16))[0] == 1500
    wide = 1 << 16
    forward, _ = times_of("linear", [(1, wide), (wide, wide)], (1, wide))
    assert forward >= 2 * wide * wide / 1e12 * 1e9, "a row of one is beside the grid"


def test_batches_are_like_one_product_of_as_many_rows() -> None:
    known = device(replace(ALONE, name="NN bfloat16", rates=(4000.0,) * 4 + (1000.0,) * 4))
    few, many = ((batch, 16, 64) for batch in (1, 256))
    node = Node("y", "aten.bmm.default", (Ref("a"), Ref("b")), (), ("y",))
    found = []
    for shape in (few, many):
        operands = shape, (shape[0], 64, 256)
        result = (*shape[:2], 256)
        tensors = {name: Tensor(name, result, "bfloat16") for name in "aby"}
        flops = 2 * math.prod(shape) * 256
        found.append(node_time_ns(node, operands, (result,), tensors, known)[0] / flops)
    assert found[1] == pytest.approx(1e-3, rel=0.01) and found[0] > 3 * found[1]


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_experts_are_one_product_of_their_tiles_and_a_product_each_where_rows_are_summed(weights: str) -> None:
    """Eight experts of which four are here: of 512 choices 256, and what the busier of two ranks has beyond that, of
    each expert a tile of 128 rows.

    Results are float32 where the choices' weights are, as a DeepSeek's; the products are of the experts' dtype.
    """
    tokens, width, hidden = 256, 512, 1024
    shapes = (tokens, width), (tokens, 2), (tokens, 2), (4, width, hidden), (4, hidden, width)
    names = ("x", "ids", "weights", "up", "down")
    node = Node("y", "autopar.routed_experts.default", (*map(Ref, names), "silu", False, 8), (), ("y",))
    tensors = {name: Tensor(name, (1,), "int64" if name == "ids" else "bfloat16", name != "ids") for name in names}
    tensors["weights"], tensors["y"] = (Tensor(name, (1,), weights, True) for name in ("weights", "y"))
    slow = like(ALONE, "NN bfloat16", 20.0)
    known = device(ALONE, slow, like(ALONE, "TN bfloat16", 30.0))
    forward, backward = node_time_ns(node, shapes, (shapes[0],), tensors, known)
    rows = busiest(Routing.balanced(), tokens, 2, 8, 2).mean
    assert 256 < rows < 272
    flops, tiled = (2 * count * width * hidden * 2 for count in (rows, 4 * 128))
    assert forward == pytest.approx(20 * 1.1 * tiled * 2e-3, rel=1e-3)
    assert backward == pytest.approx((1.1 * tiled + 30 * flops) * 2e-3, rel=1e-3)


def test_grouped_products_are_one_kernel_in_bfloat16_alone_and_read_all_matrices() -> None:
    """Of few rows, what they take is reading the experts' matrices; of fewer rows than experts, those of as many."""
    node = Node("y", "aten._grouped_mm.default", (Ref("x"), Ref("w")), (), ("y",))

    def forward_ns(rows: int, experts: int, dtype: str, profile: Profile) -> int:
        shapes, result = ((rows, 256), (experts, 256, 512)), (rows, 512)
        tensors = {name: Tensor(name, (1,), dtype) for name in "xwy"}
        return node_time_ns(node, shapes, (result,), tensors, profile)[0]

    known = device(ALONE, like(ALONE, "NN bfloat16", 1.0))
    of_a_tile = 2 * 128 * 256 * 512 * 2e-3 * 1.1
    for rows, tiles in ((64, 8), (8 * 129, 16), (4, 4)):
        assert forward_ns(rows, 8, "bfloat16", known) == pytest.approx(tiles * of_a_tile, rel=1e-3)
    assert forward_ns(8 * 128, 8, "float16", known) < 8 * of_a_tile, "no such kernel in float16"
    fast = replace(known, facts=replace(known.facts, memory_bandwidth=1e9), _shared={})
    read = 2 * (64 * 256 + 8 * 256 * 512 + 64 * 512)
    assert forward_ns(64, 8, "bfloat16", fast) == pytest.approx(read / 0.75, rel=1e-3)


def test_attention_stands_by_sequences_of_all_heads_length_width_and_sharing() -> None:
    for batch, rate in ((1, None), (64, 500e-6)):
        q, kv = (batch, 4, 512, 64), (batch, 2, 512, 64)
        forward, backward = times_of("scaled_dot_product_attention", [q, kv, kv], q, is_causal=True)
        flops = 2 * batch * 4 * 512 * 512 * 128 // 2
        assert backward == pytest.approx(2.5 * forward, rel=1e-3)
        if rate:
            assert forward == pytest.approx(flops * rate, rel=1e-3)
        else:
            assert 500e-6 < forward / flops < 1000e-6
    unmasked, _ = times_of("scaled_dot_product_attention", [q, kv, kv], q)
    assert unmasked != 2 * forward, "no table knows it: by its family's curve"


def test_large_tables_are_lines_of_text_and_others_name_what_they_are_like() -> None:
    axes = tuple(tuple(float(2**n) for n in range(count)) for count in (20, 20, 20))
    rates = tuple(float(f"{1 + n % 977 / 7:.3g}") for n in range(8000))
    large = Table("NT bfloat16", axes, rates, SOURCE, 1e-6, 900.0)
    known = device(large, like(large, "TN bfloat16", 1.25))
    data: dict[str, Any] = json.loads(json.dumps(profile_to_json(known)))
    first, second = data["tables"]
    assert len(first["rates"]) == 400 and "rates" not in second and second["like"] == "NT bfloat16"
    again = profile_from_json(data, "mine")
    assert dict(again.tables) == dict(known.tables)
    assert again.tables["TN bfloat16"].ns_per_flop((3, 5, 7)) == 1.25 * large.ns_per_flop((3, 5, 7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"like": "nothing"}, "expected to be like a table above, found 'nothing'"),
        ({"rates": ["1 2 three"], "axes": [[1.0], [1.0], [1.0, 2.0, 3.0]]}, "expected lines of rates, found"),
        ({"rates": ["1 -2"], "axes": [[1.0], [1.0], [1.0, 2.0]]}, "expected rates above 0"),
        ({"rates": ["1 2 3"]}, "expected a rate for each vertex, found 3"),
        ({"axes": [[1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]}, "expected a grid of other dims, found 2"),
    ],
)
def test_a_malformed_table_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=f"mine: NT bfloat16: {message}"):
        read_tables([{**write_table(ALONE), **change}], "mine")


def test_a_slower_device_is_slower_in_all() -> None:
    slow = ALONE.slowed(3.0)
    assert slow.kernel_ns((512, 512, 512), 1e9) == pytest.approx(3 * ALONE.kernel_ns((512, 512, 512), 1e9))
    assert slow.kernel_ns((16, 16, 16), 1) == 4500


def test_attention_of_one_query_takes_what_reading_its_keys_does() -> None:
    """Its table is by what a group of queries shares; where it is not measured, that of many queries says it, and how
    fast memory is. Several queries never take its price."""
    axes = ((64.0, 1024.0), (32.0, 128.0), (1.0, 4.0))
    decode = Table("decode forward float32", axes, (4000.0, 1000.0) * 4, SOURCE, unit_ns=1e-6)  # four queries: a read
    many = Table("attention full forward", ((32.0, 512.0), (16.0, 128.0)), (5.0,) * 4, SOURCE, unit_ns=1e-6)
    kept = (8, 4, 256, 32)

    def spent(heads: int, queries: int, *tables: Table) -> int:
        sizes = ((8, heads, queries, 32), kept, kept)
        tensors = {n: Tensor(n, shape, "float32", False) for n, shape in zip("abcy", (*sizes, sizes[0]), strict=True)}
        op, keywords = "aten.scaled_dot_product_attention.default", (("enable_gqa", True),)
        node = Node("y", op, tuple(map(Ref, "abc")), keywords, ("y",))
        return node_time_ns(node, sizes, (sizes[0],), tensors, device(*tables))[0]

    flops = 4 * 8 * 4 * 256 * 32
    assert spent(4, 1, many, decode) == pytest.approx(flops * 4e-3, abs=1)
    assert spent(16, 1, many, decode) == pytest.approx(4 * flops * 1e-3, abs=1)
    assert spent(8, 1, many, decode) == pytest.approx(2 * flops * 2e-3, abs=1)
    num_bytes = 4 * (2 * 8 * 4 * 256 * 32 + 2 * 8 * 4 * 32)
    assert spent(4, 1, many) == pytest.approx(max(flops * 5e-6, num_bytes / 1e3), abs=2)
    assert spent(4, 8, many, decode) == spent(4, 8, many)
