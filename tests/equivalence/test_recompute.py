"""Recomputed programs compute what the model computes, send what was predicted, and keep what was predicted."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.equivalence import planned, zoo
from tests.equivalence.harness import differences, run_rank, run_single
from tests.rank_pool import pool

pytestmark = pytest.mark.ranks

CHOICES: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp_sequence": {"tp": 2, "sequence_parallel": True},
    "zero3": {"dp": 2, "zero": 3},
    "zero3_tp": {"dp": 2, "tp": 2, "zero": 3},
}


@cache
def single(model_name: str) -> Any:
    return run_single(*zoo.build(model_name), ("sgd",))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("recompute", ["block", "full"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("model_name", ["gpt", "llama", "moe", "hf_bert"])
def test_recomputed_program_equals_model(model_name: str, choice: str, recompute: str, microbatches: int) -> None:
    model, batch = zoo.build(model_name)
    program = planned.template_program(model_name, **CHOICES[choice], recompute=recompute, microbatches=microbatches)
    assert "rt.recomputed(" in program.source and program.plan.recompute
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(program.plan.mesh.num_devices).run(run_rank, program.source, state, batch, ("sgd",))
    found = differences(single(model_name), results[0])
    assert not found, "\n".join(found)
    assert {loss.item() for loss, *_ in results} == {results[0][0].item()}
    assert results[0][4] == {kind: size for kind, size in program.plan.predicted.comm_bytes.items() if size}
