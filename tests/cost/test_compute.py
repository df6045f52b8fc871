"""Operator times: FLOPs by hand, rooflines, what has a gradient; and the measured host."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cost import flops, node_time_ns
from autopar.cost.compute import node_call, optimizer_time_ns, split_backward_ns
from autopar.cost.profile import Point, Profile, profile_from_json, profile_to_json
from autopar.ir.graph import Node, Ref, Tensor
from autopar.ops.table import operator
from autopar.ops.work import Product
from autopar.profiler import load_profile, measure, template_profile
from autopar.profiler.fit import profile_from_points

Shape = tuple[int, ...]


def call(
    op: str, operands: list[Shape], result: Shape, gradients: list[bool] | None = None, args: tuple[object, ...] = ()
) -> tuple[Node, tuple[Shape, ...], tuple[Shape, ...], Mapping[str, Tensor]]:
    """A node on float32 tensors a, b, ... with result y."""
    names = "abcdefg"[: len(operands)]
    wanted = gradients or [True] * len(operands)
    tensors = {n: Tensor(n, s, "float32", g) for n, s, g in zip(names, operands, wanted, strict=True)}
    tensors["y"] = Tensor("y", result, "float32", any(wanted))
    node = Node("y", f"aten.{op}.default", (*args, *map(Ref, names)), (), ("y",))
    return node, tuple(operands), (result,), tensors


@pytest.mark.parametrize(
    ("op", "operands", "result", "expected"),
    [
        ("linear", [(8, 16, 32), (64, 32), (64,)], (8, 16, 64), 2 * 8 * 16 * 32 * 64),
        ("addmm", [(64,), (128, 32), (32, 64)], (128, 64), 2 * 128 * 32 * 64),
        ("bmm", [(4, 8, 16), (4, 16, 32)], (4, 8, 32), 2 * 4 * 8 * 16 * 32),
        ("matmul", [(8, 16), (16, 4)], (8, 4), 2 * 8 * 16 * 4),
        ("conv2d", [(2, 8, 10, 10), (16, 8, 3, 3)], (2, 16, 8, 8), 2 * 2 * 16 * 64 * 72),
        ("conv2d", [(2, 8, 10, 10), (16, 4, 3, 3)], (2, 16, 8, 8), 2 * 2 * 16 * 64 * 36),  # two groups
        ("scaled_dot_product_attention", [(2, 4, 8, 16)] * 3, (2, 4, 8, 16), 4 * 2 * 4 * 8 * 8 * 16),
        ("gelu", [(8, 16)], (8, 16), 8 * 16),
        ("view", [(8, 16)], (128,), 0),
    ],
)
def test_flops(op: str, operands: list[Shape], result: Shape, expected: int) -> None:
    node, shapes, results, _ = call(op, operands, result)
    assert flops(node, shapes, results) == expected


def test_flops_of_an_einsum_count_every_index_once() -> None:
    node, shapes, results, _ = call("einsum", [(8, 16), (8, 4, 2)], (16, 4, 2), args=("bd,bec->dec",))
    assert flops(node, shapes, results) == 2 * 8 * 16 * 4 * 2


def test_a_causal_mask_halves_attention() -> None:
    node, shapes, results, _ = call("scaled_dot_product_attention", [(2, 4, 8, 16)] * 3, (2, 4, 8, 16))
    causal = Node("y", node.op, node.args, (("is_causal", True),), ("y",))
    assert 2 * flops(causal, shapes, results) == flops(node, shapes, results)


def test_large_products_run_near_peak_and_none_above() -> None:
    profile = load_profile("h100")
    node, shapes, results, tensors = call("linear", [(8192, 8192), (8192, 8192)], (8192, 8192))
    forward, backward = node_time_ns(node, shapes, results, tensors, profile)
    ideal = flops(node, shapes, results) / profile.peak_flops("float32") * 1e9
    assert ideal < forward < 2 * ideal
    assert backward == pytest.approx(2 * forward, rel=0.01)


def test_low_precision_is_faster() -> None:
    node, shapes, results, tensors = call("linear", [(4096, 4096), (4096, 4096)], (4096, 4096))
    profile = load_profile("a100")
    full = node_time_ns(node, shapes, results, tensors, profile)
    half = {name: replace(tensor, dtype="bfloat16") for name, tensor in tensors.items()}
    assert node_time_ns(node, shapes, results, half, profile)[0] < full[0] / 4


def test_only_differentiable_operands_cost_a_gradient() -> None:
    profile = template_profile()
    times = []
    for wanted in ([True, True], [True, False], [False, False]):
        node, shapes, results, tensors = call("linear", [(64, 512), (512, 512)], (64, 512), wanted)
        times.append(node_time_ns(node, shapes, results, tensors, profile)[1])
    assert abs(times[0] - 2 * times[1]) <= 1  # rounded to whole nanoseconds
    assert times[2] == 0


def test_memory_bound_operators_take_their_bytes() -> None:
    profile = load_profile("h100")
    node, shapes, results, tensors = call("mul", [(1 << 14, 1 << 14)] * 2, (1 << 14, 1 << 14))
    forward, _ = node_time_ns(node, shapes, results, tensors, profile)
    ideal = 3 * 4 * (1 << 28) / profile.facts.memory_bandwidth * 1e9
    assert ideal < forward < 1.3 * ideal


def test_views_move_nothing_and_lookups_read_rows_only() -> None:
    profile = load_profile("h100")
    view = call("view", [(1 << 20, 64)], (64, 1 << 20))
    assert node_time_ns(*view, profile) == (0, 0)
    lookup = call("embedding", [(1 << 20, 64), (8,)], (8, 64), [True, False])
    forward, backward = node_time_ns(*lookup, profile)
    assert forward < 2 * profile.facts.launch_ns[0]
    assert backward > 10 * forward, "the table's gradient is dense"


def test_an_unknown_operator_is_memory_bound() -> None:
    profile = load_profile("h100")
    unknown = call("never_heard_of", [(1 << 20,)], (1 << 20,))
    assert node_time_ns(*unknown, profile)[0] == node_time_ns(*call("abs", [(1 << 20,)], (1 << 20,)), profile)[0]


def test_optimizer_time_grows_with_bytes_and_tensors() -> None:
    profile = load_profile("h100")
    assert optimizer_time_ns(1 << 30, 1, 1, True, profile) < optimizer_time_ns(1 << 31, 1, 1, True, profile)
    extra = optimizer_time_ns(1 << 30, 11, 11, True, profile) - optimizer_time_ns(1 << 30, 1, 1, True, profile)
    assert extra == 10 * profile.facts.launch_ns[0]


# The measured host ----------------------------------------


def raw_points() -> dict[str, Any]:
    """What the measuring scripts print, on a machine of 100 GFLOP/s and 10 GB/s where calls take 1 µs and 2 µs."""

    def point(
        family: str, op: str, shape: Shape, operands: list[Shape], result: Shape, ns: float, kind: str = ""
    ) -> dict[str, object]:
        rows = [[list(shape), 4, True] for shape in operands]
        return {
            "family": family, "op": op, "shape": list(shape), "detail": "", "kind": kind, "operands": rows,
            "result": [list(result), 4], "forward_ns": round(1000 + ns), "backward_ns": round(3000 + 2000 + 2 * ns),
        }  # fmt: skip

    def product(kind: str, m: int, n: int, k: int, rate: float) -> dict[str, object]:
        return point("matmul", "mm", (m, n, k), [(m, k), (k, n)], (m, n), 2 * m * n * k / rate, kind) | {
            "forward_ns": round(2 * m * n * k / rate)
        }

    rates = {16: 50.0, 256: 100.0}  # products of few rows are slower
    points = [product(kind, m, n, k, rates[m]) for kind in ("NT", "NN", "TN") for m in rates for n in (64, 256)
              for k in (64, 256)]  # fmt: skip
    points += [point("linear", "linear", (n, n, n), [(n, n), (n, n)], (n, n), 2 * n**3 / 100) for n in (2, 64, 256)]
    least = 2 * 16 * 64 * 64 / 50  # the smallest product's time is not part of the call
    points[-3] |= {"forward_ns": round(1000 + least), "backward_ns": round(3000 + 2 * (2000 + least))}
    families = (("pointwise", "mul", 2), ("column_sum", "sum", 1), ("straight_copy", "clone", 1), ("view", "t", 1))
    for family, op, operands in families:
        points += [
            point(family, op, (n, n), [(n, n)] * operands, (n, n), 4 * (operands + 1) * n * n / 10)
            for n in (1, 64, 1024)
        ]
    return {
        "launch": [1000, 1000, 3000], "view": [1000, 2000, 3000], "points": points,
        "optimizer": [[64, 5000], [1 << 20, 3_000_000]],
        "dtypes": {"float32": [384, 2 * 384**3 / 100]},
        "collectives": [{"collective": "all_reduce", "ranks": 2, "points": [[1024, 20000], [1 << 20, 1020000]]}],
        "busy_share": {"2": 0.5}, "host": {"torch": "2"},
        "runtime": {"optimizer": [20_000, 150_000], "parameter": 40_000, "convert": 9_000, "function": [5000, 4000],
                    "branch": [3000, 50_000], "pass": 200_000, "send": [[1000, 100_000], [3000, 500_000]],
                    "receive": 30_000, "late": 700_000, "carry": [[1000, 300_000], [3000, 700_000]]},
    }  # fmt: skip


def fitted() -> Profile:
    """The profile of `raw_points`, through its file form."""
    data = profile_from_points(raw_points(), {"model": "test", "cores": 2, "memory": 8 << 30}, "2026-01-01")
    return profile_from_json(json.loads(json.dumps(data)), "points")


@pytest.mark.parametrize("most", [20_000, 19_000, 20_001, 900])
def test_points_of_a_busy_host_where_many_bytes_take_no_longer_than_few_make_a_profile(most: int) -> None:
    raw = raw_points()
    raw["collectives"][0]["points"][-1] = [1 << 20, most]
    data = profile_from_points(raw, {"model": "test", "cores": 2, "memory": 8 << 30}, "2026-01-01")
    link = profile_from_json(json.loads(json.dumps(data)), "points").links["intra_node"]
    assert link.bandwidth <= 10.1 * (1 << 20) / most * 1e9


def test_a_profile_fitted_to_points_meets_them() -> None:
    profile = fitted()
    assert profile.peak_flops("float32") == pytest.approx(1e11, rel=0.01)
    assert profile.facts.memory_bandwidth == pytest.approx(1e10, rel=0.01)
    assert profile.facts.overlap_slowdown == 2.0, "gloo's threads take half a core"
    node = call("linear", [(256, 256), (256, 256)], (256, 256))
    forward, backward = node_time_ns(*node, profile)
    assert forward == pytest.approx(1000 + 2 * 256**3 / 100, rel=0.01)
    assert backward == pytest.approx(2 * forward, rel=0.02)
    assert profile.link("intra_node").alpha_ns == 10000
    assert profile.provenance["facts"].startswith("measured: test, one thread a rank")
    assert profile.provenance["tables/NT"] == profile.provenance["runtime"] == profile.provenance["facts"]
    again = profile_from_json(json.loads(json.dumps(profile_to_json(profile))), "again")
    assert (again.tables, again.runtime, again.operators) == (profile.tables, profile.runtime, profile.operators)


def test_products_cost_by_shape_and_layout() -> None:
    """Of few rows the forward product is slow; so is the gradient of the input, whose rows they are too; the weight's
    gradient has 256 rows, and is as fast as ever."""
    forward, backward = node_time_ns(*call("linear", [(16, 256), (256, 256)], (16, 256)), fitted())
    flops = 2 * 16 * 256 * 256
    called = 1000, 2000  # a call beside its kernel, forward and for each gradient
    assert forward == pytest.approx(flops / 50 + called[0], rel=0.01)
    assert backward == pytest.approx(flops / 50 + flops / 100 + 2 * called[1], rel=0.01)


def test_a_product_of_one_row_takes_as_long_as_its_operands_take_to_come() -> None:
    profile = fitted()
    forward, _ = node_time_ns(*call("linear", [(1, 1024), (1024, 1024)], (1, 1024)), profile)
    read_and_written = 4 * (1024 + 1024 * 1024 + 1024)
    assert forward == pytest.approx(read_and_written / 10 + 1000, rel=0.02)
    assert forward > 2 * 1024 * 1024 / 50 + 1000, "what the table's border says"


def test_between_the_vertices_of_a_table_rates_are_geometric_means() -> None:
    table = fitted().tables["NT"]
    assert table.ns_per_flop((64, 100, 100)) == pytest.approx((1 / 50 / 100) ** 0.5, rel=1e-3)
    assert table.ns_per_flop((4096, 9, 9)) == pytest.approx(1 / 100, rel=1e-3), "outside, the border's value holds"


def test_a_bias_has_its_gradient_summed_over_rows() -> None:
    shapes = [(256, 256), (256, 256), (256,)]
    wanted = ([True, True, True], [True, True, False])
    with_bias, without = (node_time_ns(*call("linear", shapes, (256, 256), w), fitted())[1] for w in wanted)
    assert with_bias - without == pytest.approx(1000 + 4 * 256 * 256 / 10, rel=0.3)


@pytest.mark.parametrize(
    ("equation", "operands", "expected"),
    [
        ("bd,df->bf", [(8, 16), (16, 4)], Product(1, 8, 4, 16)),
        ("gsec,gsm->egcm", [(2, 8, 4, 3), (2, 8, 5)], Product(2, 12, 5, 8)),
        ("egcm,emh->egch", [(4, 2, 3, 5), (4, 5, 7)], Product(4, 6, 7, 5)),
        ("gsec,egcm->gsm", [(2, 8, 4, 3), (4, 2, 3, 5)], Product(2, 8, 5, 12, copied=(0, 480))),
    ],
)
def test_an_einsum_is_a_product(equation: str, operands: list[Shape], expected: Product) -> None:
    """The last one sums over e and c, which lie apart in the second operand: it is copied first."""
    node, shapes, results, tensors = call("einsum", operands, (1,), args=(equation,))
    product = operator(node.op).work.product
    assert product is not None and product(node_call(node, shapes, results, tensors)) == expected


def test_an_einsum_costs_its_own_call_beside_its_kernels() -> None:
    """Ten and fifteen microseconds more than the product that it becomes, forward and for each gradient."""
    raw = raw_points()
    products = [
        {**p, "op": "bmm", "kind": "batched", "operands": [[[8, m, k], 4, True], [[8, k, n], 4, True]],
         "result": [[8, m, n], 4], "forward_ns": 8 * p["forward_ns"]}
        for p in raw["points"] if p.get("kind") == "NN" for m, n, k in [p["shape"]]
    ]  # fmt: skip
    least = min(p["forward_ns"] for p in raw["points"] if p["op"] == "mm")
    called = {
        **raw["points"][0], "family": "einsum", "op": "einsum", "kind": "", "detail": "egcm,emh->egch",
        "shape": [2, 1, 2, 4, 4], "operands": [[[2, 1, 2, 4], 4, True], [[2, 4, 4], 4, True]],
        "result": [[2, 1, 2, 4], 4], "forward_ns": 10_000 + least, "backward_ns": 3000 + 2 * (15_000 + least),
    }  # fmt: skip
    raw["points"] += [*products, called]
    data = profile_from_points(raw, {"model": "test", "cores": 2, "memory": 8 << 30}, "2026-01-01")
    profile = profile_from_json(json.loads(json.dumps(data)), "points")
    before = replace(profile, operators={k: v for k, v in profile.operators.items() if k != "einsum"}, _shared={})
    node = call("einsum", [(8, 1, 64, 64), (8, 64, 64)], (8, 1, 64, 64), args=("egcm,emh->egch",))
    (forward, backward), (less, least_of_all) = (node_time_ns(*node, which) for which in (profile, before))
    assert (forward - less, backward - least_of_all) == (10_000 - 1000, 2 * (15_000 - 2000))


def test_an_optimizer_of_dtensors_costs_more_a_parameter() -> None:
    profile = fitted()
    plain, sharded = (optimizer_time_ns(1 << 20, 10, 80, kind, profile) for kind in (False, True))
    assert sharded - plain == 10 * (150_000 - 20_000)


def test_points_of_another_machine_do_not_mix(tmp_path: Path) -> None:
    """A run that was stopped goes on, with what it has measured; a file of another torch is refused."""
    file, host = tmp_path / "points", {"torch": "2.13", "node": "here"}
    first = measure.KeptPoints(file, host)
    assert first.get("a", lambda: 1) == 1
    assert measure.KeptPoints(file, host).get("a", lambda: 2) == 1
    with pytest.raises(SystemExit, match=r"do not mix; name another file"):
        measure.KeptPoints(file, {**host, "torch": "2.10"})


def test_all_is_measured_in_rounds_of_which_medians_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast round, as machines have them that change their speed, is fast for all points, and changes none."""
    speeds = iter((1.0, 0.5, 1.25, 1.0))
    speed = 0.0

    def measure_launch(*_: object) -> tuple[int, int, int]:
        nonlocal speed  # it is what a round begins with, and the second thing it measures
        speed = next(speeds) if not asked or asked[-1] == "typed" else speed
        asked.append("launch")
        return round(1000 * speed), round(2000 * speed), 0

    def timed(name: str) -> Callable[..., int]:
        return lambda *_: asked.append(name) or round(8000 * speed)  # type: ignore[func-returns-value]

    asked: list[str] = []
    cases = [case for case in measure.operator_cases() if case.op == "linear"]
    monkeypatch.setattr(measure, "operator_cases", lambda: cases)
    monkeypatch.setattr(measure, "TYPES", ("bfloat16",))
    monkeypatch.setattr(measure, "measure_launch", measure_launch)
    monkeypatch.setattr(measure, "measure_case", lambda *_: (round(100 * speed), round(300 * speed)))
    monkeypatch.setattr(measure, "measure_optimizer", timed("optimizer"))
    monkeypatch.setattr(measure, "measure_dtype", timed("dtype"))
    monkeypatch.setattr(measure, "measure_type", lambda *_: asked.append("typed") or [])
    found = measure.measure_operators(
        measure.KeptPoints(tmp_path / "kept", {}), measure.WorkTimer("cpu"), lambda _: None
    )
    assert found["launch"] == [1000, 2000, 0]
    assert [(p["forward_ns"], p["backward_ns"]) for p in found["points"]] == [(100, 300)] * len(cases)
    assert found["dtypes"]["float32"] == [384, 8000]
    asked.clear()
    again = measure.measure_operators(
        measure.KeptPoints(tmp_path / "kept", {}), measure.WorkTimer("cpu"), lambda _: None
    )
    assert not asked, "a run that was stopped goes on where it was"
    assert json.dumps(again) == json.dumps(found)


def test_the_cache_is_written_whole_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.profiler import host

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = profile_to_json(fitted())
    measured = []

    def measure_once() -> dict[str, object]:
        measured.append(1)
        return data

    monkeypatch.setattr(host, "measure_host", measure_once)
    first, second = host.host_profile(), host.host_profile()
    assert first.facts == second.facts
    assert len(measured) == 1
    assert [path.suffix for path in sorted((tmp_path / "autopar").iterdir())] == [".json", ".lock"]


SPLIT: dict[str, tuple[list[Shape], Shape, tuple[bool, ...], float]] = {
    "linear": ([(64, 4096), (4096, 4096)], (64, 4096), (True, False), 1.0),
    "layer_norm": ([(4096, 4096), (4096,), (4096,)], (4096, 4096), (True, False, False), 1.7),  # read once more: 5 of 3
    "mul": ([(4096, 4096), (4096,)], (4096, 4096), (True, False), 1.02),
    "scaled_dot_product_attention": ([(2, 4, 256, 64)] * 3, (2, 4, 256, 64), (True, True, True), 1.0),
}


@pytest.mark.parametrize("op", SPLIT)
def test_the_parts_of_a_backward_pass_are_worth_the_whole_and_what_is_read_again(op: str) -> None:
    operands, result, leads_back, most = SPLIT[op]
    node, shapes, results, tensors = call(op, operands, result)
    profile = load_profile("a100")
    whole = node_time_ns(node, shapes, results, tensors, profile)[1]
    (led, own), _ = split_backward_ns(node, shapes, results, tensors, leads_back, profile)
    launch = profile.facts.launch_ns[1]
    assert whole - launch <= led + own <= most * whole + launch
    assert (own == 0) == all(leads_back) and led > 0


def test_an_operator_with_a_parameter_costs_a_call_of_autograd_more_in_parts() -> None:
    known = fitted()
    assert known.runtime is not None
    data = json.loads(json.dumps(profile_to_json(known)))
    del data["runtime"]["branch_ns"]  # as of a profile that was measured before
    before = profile_from_json(data, "before")
    node, shapes, results, tensors = call("linear", [(64, 64), (64, 64)], (64, 64))
    for leads_back, more in (((True, False), (3000, 50_000)), ((True, True), (0, 0)), ((False, False), (0, 0))):
        (first, second), (less, least) = (
            split_backward_ns(node, shapes, results, tensors, leads_back, profile)[0] for profile in (known, before)
        )
        assert (first - less, second - least) == more
    assert known.shared_by(4).runtime == replace(
        known.runtime, optimizer_ns=(40_000, 300_000), parameter_ns=80_000, convert_ns=18_000,
        function_ns=(10_000, 8000), branch_ns=(6000, 100_000), pass_ns=400_000,
        send_ns=((1000, 200_000), (3000, 1_000_000)), receive_ns=60_000, late_ns=1_400_000,
        carry_ns=((1000, 600_000), (3000, 1_400_000)),
    )  # fmt: skip


def test_a_pass_takes_its_thread_to_be_called_and_to_send_and_receive() -> None:
    """Between the sizes in a straight line; of larger messages no more, for the network takes no more at once."""
    runtime = fitted().runtime
    assert runtime is not None
    for sizes, send_ns in (((), 0), ((1,), 100_000), ((2000,), 300_000), ((1 << 30, 1000), 600_000)):
        for received in (0, 2):
            assert runtime.around_pass_ns(sizes, received) == 200_000 + send_ns + received * 30_000
    before = replace(runtime, pass_ns=0, send_ns=(), receive_ns=0, late_ns=0, carry_ns=())  # as measured before
    assert before.around_pass_ns((1000,), 3) == before.carrying_ns((1000,)) == 0


def test_the_networks_threads_carry_large_messages_in_proportion() -> None:
    runtime = fitted().runtime
    assert runtime is not None
    for sizes, carrying_ns in (((), 0), ((1,), 300_000), ((2000, 2000), 1_000_000), ((6000,), 1_400_000)):
        assert runtime.carrying_ns(sizes) == carrying_ns


def test_a_dtype_takes_as_long_beside_float32_as_it_was_measured_to_take() -> None:
    """Of tables and curves alike; float32 itself, and what was not measured, stay what they are."""
    known = fitted()
    ratios = {"matmul": (4.0, 2.0), "pointwise": (1.5, 1.5)}
    curves = dict(known.operators)
    for family, (forward, backward) in ratios.items():
        like = Point("op", (512,), "float32", 1000, 1000)
        typed = Point("op", (512,), "bfloat16", round(1000 * forward), round(1000 * backward))
        curves[family] = replace(curves[family], points=(like, typed), call_ns=(0, 0))
    profile = replace(known, operators=curves, _shared={})
    for op, operands in (("linear", [(1024, 512), (512, 512)]), ("mul", [(1024, 512), (1024, 512)])):
        node, shapes, results, tensors = call(op, operands, (1024, 512))
        typed_tensors = {name: replace(tensor, dtype="bfloat16") for name, tensor in tensors.items()}
        whole, typed_times = (node_time_ns(node, shapes, results, t, profile) for t in (tensors, typed_tensors))
        ratio = ratios["matmul" if op == "linear" else "pointwise"]
        assert typed_times[0] == pytest.approx(ratio[0] * whole[0], rel=0.1)
        assert typed_times[1] == pytest.approx(ratio[1] * whole[1], rel=0.1)
        others = {name: replace(tensor, dtype="float64") for name, tensor in tensors.items()}
        plain = replace(known, operators={f: replace(c, points=()) for f, c in curves.items()}, _shared={})
        same = (node_time_ns(node, shapes, results, others, which) for which in (profile, plain))
        assert len(set(same)) == 1
