"""A limit that a refusal names can be met, even where the clock ends a search sooner than it did for the refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.errors import InfeasibleError
from autopar.intraop import LeastMemory
from autopar.ir.mesh import logical_meshes
from autopar.ir.plan import Plan
from autopar.planning import Place, divided
from autopar.profiler import load_profile
from autopar.refusal import fit_or_refuse
from autopar.request import Request, SearchBudget
from autopar.trace import find_blocks, trace
from models import mlp

MESH = autopar.Mesh("a100", devices_per_node=2)
LEAST = LeastMemory(50, (("x", "stored", 50),))


def place() -> Place:
    config = mlp.Config()
    torch.manual_seed(0)
    graph = trace(mlp.build(config), mlp.example_inputs(config))
    request = Request(MESH, "train", "adamw", 10**9, (), SearchBudget())
    return Place(divided(graph, find_blocks(graph), 1), logical_meshes(MESH)[0], request, load_profile("a100"))


PLACE = place()
PLAN = PLACE.within(10**9, 10)


def with_peak(num_bytes: int, limit: int) -> Plan:
    return replace(PLAN, predicted=replace(PLAN.predicted, peak_bytes=num_bytes), memory_limit=limit)


def asked(limit: int, below: Mapping[int, int], at_last: int | None) -> Plan:
    """below: the peak of the plan that is found within each limit. at_last: of the one that is found in the end."""

    def plan_below(_: str, least: int) -> Plan:
        if least not in below:
            raise InfeasibleError("none was found in time")
        return with_peak(below[least], limit)

    def plan_at_last(_: str, least: LeastMemory) -> Plan:
        assert least is LEAST
        if at_last is None:
            raise InfeasibleError("none")
        return with_peak(at_last, limit)

    return fit_or_refuse(["here"], lambda _: (with_peak(100, limit), LEAST), plan_below, plan_at_last)[1]


def test_what_the_clock_kept_from_being_found_is_looked_for_at_last() -> None:
    with pytest.raises(InfeasibleError) as refused:
        asked(1, {99: 90, 89: 70}, None)
    assert refused.value.smallest_bytes == 70
    assert asked(70, {99: 90, 89: 70}, None).predicted.peak_bytes == 70
    assert asked(70, {99: 90}, 70).predicted.peak_bytes == 70
    with pytest.raises(InfeasibleError) as again:
        asked(70, {99: 90}, None)
    assert again.value.smallest_bytes == 90


def test_a_limit_of_usage_between_too_tight_and_too_loose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of usage up to 502 the peak is 900, of more 1,100; below 500 there is no plan."""

    def within(_: Place, usage_limit: int, seconds: float) -> Plan:
        if usage_limit < 500:
            raise InfeasibleError("no choice fits")
        return with_peak(900 if usage_limit <= 502 else 1100, usage_limit)

    monkeypatch.setattr(Place, "within", within)
    with pytest.raises(InfeasibleError):
        PLACE.fit(10, 1000)
    assert PLACE.fit(10, 1000, floor=500).predicted.peak_bytes == 900
