"""Master weights are cast where they are used, and gradients where they are made: what it takes, and what stays."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.compute import pointwise_time_ns
from autopar.ir.graph import Graph
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.simulate import Overlap, Timeline, simulate
from autopar.simulate.incremental import Incremental
from autopar.trace import trace
from models import gpt

H100 = load_profile("h100")
KEPT_APART = Overlap(casts=False)


@cache
def _graph(precision: torch.dtype | None) -> tuple[nn.Module, Graph]:
    config = gpt.Config(num_layers=2, hidden_size=64, batch_size=8)
    with torch.device("meta"):
        model = gpt.build(config)
        return model, trace(model, gpt.example_inputs(config), compute_dtype=precision)


def _steps(precision: torch.dtype | None, devices: int = 1, **options: int) -> tuple[Timeline, Timeline]:
    """The step of a template, and the same where nothing is cast."""
    graph = _graph(precision)[1]
    mesh = autopar.Mesh("h100", devices_per_node=devices)
    plan = template_of_graph(graph, mesh, **options, precision="bf16" if precision else None)
    part = divided_graph(graph, plan.microbatches)
    return simulate(part, plan, H100), simulate(part, plan, H100, KEPT_APART)


def _computed_ns(timeline: Timeline) -> int:
    return sum(e.end_ns - e.start_ns for e in timeline.events if e.stream[0] == 0 and "compute" in e.stream)


def _casts_ns(parts: int = 1) -> int:
    """A kernel for each parameter, which reads four bytes and writes two, or the other way round."""
    sizes = [math.prod(parameter.shape) // parts for parameter in _graph(torch.bfloat16)[0].parameters()]
    return sum(pointwise_time_ns(6 * size, H100) for size in sizes)


def test_on_one_device_each_parameter_is_cast_and_each_gradient_back() -> None:
    cast, apart = _steps(torch.bfloat16)
    assert cast.step_time_ns - apart.step_time_ns == 2 * _casts_ns()


def test_each_microbatch_casts_its_gradients_and_none_its_weights() -> None:
    cast, apart = _steps(torch.bfloat16, microbatches=4)
    assert cast.step_time_ns - apart.step_time_ns == 5 * _casts_ns()


def test_shards_are_cast_each_time_that_they_are_gathered() -> None:
    """Forward and backward, a half each; the gradients before they are cut. Collectives beside slow down a little."""
    cast, apart = _steps(torch.bfloat16, devices=2, dp=2, zero=3)
    expected = 2 * _casts_ns(2) + _casts_ns()
    assert _computed_ns(cast) - _computed_ns(apart) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("options", [{}, {"dp": 2}, {"dp": 2, "zero": 3}])
def test_nothing_is_cast_where_what_is_stored_is_used(options: dict[str, int]) -> None:
    cast, apart = _steps(None, devices=2 if options else 1, **options)
    assert cast.step_time_ns == apart.step_time_ns and cast.peak_bytes == apart.peak_bytes


@pytest.mark.parametrize("devices, tp", [(1, 1), (2, 2)])
def test_the_copies_stay_where_no_axis_gathers_them_either(devices: int, tp: int) -> None:
    cast, _ = _steps(torch.bfloat16, devices=devices, tp=tp)
    kept = cast.memory_at_peak["parameters"]
    assert cast.memory_at_peak["gathered"] == kept // 2, "two bytes of four"


@pytest.mark.parametrize(
    "options", [{"dp": 2, "zero": 3}, {"dp": 2, "microbatches": 2}, {"tp": 2}, {"dp": 2, "zero": 1, "microbatches": 2}]
)
def test_parts_and_the_whole_cast_alike(options: dict[str, int]) -> None:
    graph = _graph(torch.bfloat16)[1]
    plan = template_of_graph(graph, autopar.Mesh("h100", devices_per_node=2), **options, precision="bf16")
    part = divided_graph(graph, plan.microbatches)
    whole, cut = (Incremental(part, H100, in_parts=in_parts).timeline(plan) for in_parts in (False, True))
    assert (whole.step_time_ns, whole.peak_bytes) == (cut.step_time_ns, cut.peak_bytes)
