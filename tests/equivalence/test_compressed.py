"""Gradients summed in fewer bits: nothing is lost over steps, ranks stay equal, bytes are as predicted, losses fall as
with exact sums. Nobody gets them who has not asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.runtime.compressing import _coded, _decoded
from tests.equivalence.compressed import summed_on_ranks, trained_in_fewer_bits
from tests.equivalence.test_algorithms import case, program_of
from tests.rank_pool import pool

SHAPES = [(96, 70), (70,), (33, 5, 4), (300, 40), ()]
KINDS = {"int8": ("int8", 0.0), "topk(0.05)": ("topk", 0.05), "powersgd(2)": ("powersgd", 2.0)}
STEPS = 12


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_applied_and_what_is_left_add_up_to_the_exact_sums(kind: str, world: int) -> None:
    results = pool(world).run(summed_on_ranks, *KINDS[kind], SHAPES, STEPS)
    applied = [torch.cat([x.flatten() for x in own]) for own, _ in results[0][0]]
    exact = [torch.cat([x.flatten() for x in whole]) for _, whole in results[0][0]]
    for found, _, _ in results[1:]:
        for (own, _), (first, _) in zip(found, results[0][0], strict=True):
            assert all(map(torch.equal, own, first))
    missing = torch.stack(exact).sum(0) - torch.stack(applied).sum(0)
    left = sum(float(tensor.double().sum()) for _, kept, _ in results for tensor in kept)
    assert left == pytest.approx(float(missing.double().sum()), abs=1e-2)
    norm = torch.stack(exact).norm()
    assert 0 < (torch.stack(applied) - torch.stack(exact)).norm() / norm < (0.016 if kind == "int8" else 1.5)


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-39, 1e-37, 1e-3, 1e30])
def test_values_of_any_size_are_coded(scale: float) -> None:
    """Those too small to have a scale are left out whole; NaN and infinity stay to be seen."""
    rows = torch.randn(2, 512, generator=torch.Generator().manual_seed(0)) * scale
    coded, left = _coded(rows)
    decoded = _decoded(coded)
    assert coded.shape == (2, 512 + 8) and decoded.isfinite().all()
    torch.testing.assert_close(decoded + left.view(2, -1), rows)
    assert left.abs().max() <= max(rows.abs().max() / 127, torch.finfo(torch.float32).tiny * 127)
    assert _decoded(_coded(torch.full((1, 256), float("nan")))[0]).isnan().all()


@pytest.mark.ranks
def test_many_ranks_largest_values_are_summed_exactly() -> None:
    """Where their places and values are no fewer than all: the sparse sum turns dense."""
    found, left, sent = pool(2).run(summed_on_ranks, "topk", 0.3, SHAPES, 1)[0]
    for own, exact in zip(*found[0], strict=True):
        torch.testing.assert_close(own, exact)
    assert not left and set(sent) == {"all_reduce"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("algorithm", "plan"),
    [
        ("int8", {"dp": 2}),
        ("topk(0.02)", {"dp": 2, "microbatches": 2}),
        ("powersgd(4)", {"dp": 2}),
        ("int8", {"dp": 4, "hsdp": 2, "zero": 3}),
        ("int8", {"dp": 2, "tp": 2}),
    ],
)
def test_programs_train_as_with_exact_sums(algorithm: str, plan: dict[str, Any]) -> None:
    model, batches = case("gpt")
    state, devices = dict(model.state_dict()), plan.get("dp", 1) * plan.get("tp", 1)
    exact, fewer = program_of("gpt", **plan), program_of("gpt", **plan, algorithm=algorithm)
    losses, _, _ = pool(devices).run(trained_in_fewer_bits, exact.source, state, batches[0], 25)[0]
    results = pool(devices).run(trained_in_fewer_bits, fewer.source, state, batches[0], 25)
    if "tp" not in plan and "hsdp" not in plan:
        for _, own, _ in results[1:]:
            assert all(torch.equal(value, results[0][1][name]) for name, value in own.items())
    assert losses[-1] < losses[0] - 0.4
    band = 0.02 if algorithm == "int8" else 0.1
    assert all(abs(a - b) < band * losses[0] for a, b in zip(losses, results[0][0], strict=True))
    predicted = {kind: size for kind, size in fewer.plan.predicted.comm_bytes.items() if size}
    assert max((sent for _, _, sent in results), key=lambda sent: sum(sent.values())) == predicted


def test_no_search_compresses_unless_it_may() -> None:
    """On nodes with a slow link between them, where it pays."""
    model, batches = case("gpt")
    mesh = autopar.Mesh("v100", nodes=8, devices_per_node=1)
    found = {
        allow: autopar.parallelize(model, mesh, batches[0], search="fast", allow=allow, check=False).plan
        for allow in ((), ("offload",), ("compression",))
    }
    assert found[()].algorithm is None and found["offload",].algorithm is None


def test_compression_is_taken_where_it_is_faster() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, device="meta") for _ in range(4)))
    x = torch.empty(64, 2048, device="meta")
    mesh = autopar.Mesh("v100", nodes=4, devices_per_node=1)
    asked: dict[str, Any] = {"loss_fn": lambda y: y.square().mean(), "search": "fast", "constraints": (
        autopar.Constraint("*", ("S(0)",), what="input"), autopar.Constraint("*", ("I",), what="stored"),
        autopar.Constraint("*", ("R",), what="used"), autopar.Constraint(stages=1, microbatches=1),
    )}  # fmt: skip
    exact = autopar.parallelize(model, mesh, (x,), **asked).plan
    plan = autopar.parallelize(model, mesh, (x,), allow=("compression",), **asked).plan
    assert plan.algorithm is not None and plan.algorithm.name == "int8"
    assert plan.predicted.step_time_ns < exact.predicted.step_time_ns
    assert "in fewer bits" in str(plan)
    assert autopar.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("text", ["topk", "topk(0)", "topk(1.5)", "powersgd(0)", "powersgd(1.5)", "int8(2)"])
def test_shares_and_ranks_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(autopar.errors.PlanError, match="expected algorithm as"):
        program_of("mlp", dp=2, algorithm=text)
