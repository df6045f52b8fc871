"""Batches against latency: what holds a bound, and what is said where nothing does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import autopar
from autopar.colocation import request_curve
from autopar.errors import InfeasibleError
from autopar.serving import BatchLatency, LatencyCurve, StepLatency
from tests.serving.decoders import decoder


def step(ms: float, interval: tuple[float, float] | None = None) -> StepLatency:
    return StepLatency(int(ms * 1e6), None if interval is None else (int(interval[0] * 1e6), int(interval[1] * 1e6)))


CURVE = LatencyCurve(
    (
        BatchLatency(1, step(4), {16: step(5)}),
        BatchLatency(2, step(5), {16: step(9)}),
        BatchLatency(4, step(6, (5, 9)), {16: step(17)}),
        BatchLatency(8, refusal="does not fit"),
    )
)


def test_the_largest_batch_holds_both_bounds_with_its_interval() -> None:
    assert CURVE.largest(None).batch == 4
    assert CURVE.largest(9.0).batch == 4
    assert CURVE.largest(8.9).batch == 2  # nine in ten steps end within 9 ms
    assert CURVE.largest(8.9, 6.0).batch == 1
    assert CURVE.largest(9.0, tail=1.8).batch == 2  # 5 ms, and 9 ms in the slowest of a hundred
    assert CURVE.points[1].tokens_s == 400.0
    assert CURVE.points[3].tokens_s == 0.0


def test_a_bound_that_nothing_holds_names_the_shortest_step() -> None:
    with pytest.raises(InfeasibleError, match=r"within 3.0 ms.*found 4 ms and 5 ms for prompts of 16 at least"):
        CURVE.largest(3.0)
    with pytest.raises(InfeasibleError, match="no batch is served: does not fit"):
        LatencyCurve(CURVE.points[3:]).largest(3.0)


def test_the_bound_decides_the_batch_by_what_is_predicted(tmp_path: Path) -> None:
    """Of a model on meta, whose weights are nowhere, planned for GPUs that are not there; and `autopar pack` reads what
    is written."""
    with torch.device("meta"):
        model = type(decoder("llama"))(decoder("llama").config)
    mesh = autopar.Mesh("h100", devices_per_node=2)
    options = {"max_length": 4096, "prompt_lengths": [64], "batches": [1, 1024], "tp": 2}
    whole = autopar.serve(model, mesh, max_batch=1024, **options)  # type: ignore[arg-type]
    assert whole.max_batch == 1024
    small, large = (point.decode.upper_ns / 1e6 for point in whole.curve.points if point.decode is not None)
    assert small < large
    assert whole.curve.points[0].peak_bytes < whole.curve.points[1].peak_bytes
    assert whole.curve.largest((small + large) / 2).batch == 1
    assert whole.checked_against_eager == "no, the weights are on meta"
    whole.save(tmp_path)
    requests = request_curve(json.loads((tmp_path / "curve.json").read_text()), prompt_length=64, new_tokens=3)
    decode, prefill = (whole.curve.points[0].decode, whole.curve.points[0].prefill[64])
    assert decode is not None
    assert requests.points[0] == (1, prefill.upper_ns + 2 * decode.upper_ns, whole.curve.points[0].peak_bytes)
