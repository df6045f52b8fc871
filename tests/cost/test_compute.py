"""Operator times: FLOPs by hand, rooflines, what has a gradient; and the measured host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cost import flops, load_profile, node_time_ns, template_profile
from autopar.cost.compute import optimizer_time_ns
from autopar.cost.fit import profile_from_points
from autopar.cost.profile import profile_from_json
from autopar.ir.graph import Node, Ref, Tensor

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
    assert optimizer_time_ns(1 << 30, 1, profile) < optimizer_time_ns(1 << 31, 1, profile)
    extra = optimizer_time_ns(1 << 30, 11, profile) - optimizer_time_ns(1 << 30, 1, profile)
    assert extra == 10 * profile.facts.launch_ns[0]


# The measured host ----------------------------------------


def raw_points(slow: float = 1.0) -> dict[str, object]:
    """What measure.py prints, on a machine of 100 GFLOP/s and 10 GB/s with 1 µs launches."""

    def point(family: str, op: str, operands: list[Shape], result: Shape, ns: float) -> dict[str, object]:
        rows = [[list(shape), 4, True] for shape in operands]
        total = round(1000 + slow * ns)
        return {
            "family": family, "op": op, "shape": list(result), "detail": "", "operands": rows,
            "result": [list(result), 4], "forward_ns": total, "backward_ns": 3000 + 2 * total,
        }  # fmt: skip

    points = [point("matmul", "linear", [(n, n), (n, n)], (n, n), 2 * n**3 / 100) for n in (64, 256, 1024)]
    points += [point("pointwise", "mul", [(n, n)] * 2, (n, n), 12 * n * n / 10) for n in (64, 256, 1024)]
    sent = [{"collective": "all_reduce", "ranks": 2, "points": [[1024, 20000], [1 << 20, 1020000]]}]
    overlap = [{"collective": "overlap", "ranks": 2, "points": [[4000, 2000, 5000]]}]
    return {
        "launch": [1000, 1000, 3000], "view": [500, 500, 3000], "points": points,
        "optimizer": [[64, 5000], [1 << 20, 3_000_000]],
        "dtypes": {"float32": [384, 2 * 384**3 / 100]},
        "collectives": sent + overlap, "host": {"torch": "2"},
    }  # fmt: skip


def test_a_profile_fitted_to_points_meets_them() -> None:
    host = {"model": "test", "cores": 2, "memory": 8 << 30}
    data = profile_from_points(raw_points(), host, "2026-01-01")
    profile = profile_from_json(json.loads(json.dumps(data)), "points")
    assert profile.peak_flops("float32") == pytest.approx(1e11, rel=0.01)
    assert profile.facts.memory_bandwidth == pytest.approx(1e10, rel=0.01)
    assert profile.facts.overlap_slowdown == 2.0, "2 µs of messages cost compute 1 µs"
    node = call("linear", [(256, 256), (256, 256)], (256, 256))
    forward, backward = node_time_ns(*node, profile)
    assert forward == pytest.approx(1000 + 2 * 256**3 / 100, rel=0.01)
    assert backward == pytest.approx(2 * forward, rel=0.01)
    assert profile.link("intra_node").alpha_ns == 10000
    assert profile.provenance["facts"].startswith("measured: test, one thread a rank")


def test_the_cache_is_written_whole_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.cost import host

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = profile_from_points(raw_points(), {"model": "test", "cores": 2, "memory": 8 << 30}, "2026-01-01")
    measured = []

    def measure_once() -> dict[str, object]:
        measured.append(1)
        return data

    monkeypatch.setattr(host, "measure_host", measure_once)
    first, second = host.host_profile(), host.host_profile()
    assert first.facts == second.facts
    assert len(measured) == 1
    assert [path.suffix for path in sorted((tmp_path / "autopar").iterdir())] == [".json", ".lock"]
