"""What searches leave to Python's collector of cycles: next to nothing, as it goes through all of it."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import torch

import autopar
from autopar.collector import cached_method
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.simulate import Incremental
from autopar.step import StepSimulator
from autopar.trace import trace
from models import gpt


class _Asked:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()

    @cached_method
    def twice(self, number: int) -> list[int]:
        self.asked[number] += 1
        return [number, number]


def test_a_cached_method_runs_once_an_object_and_goes_with_it() -> None:
    one, other = _Asked(), _Asked()
    assert one.twice(1) is one.twice(1) and one.twice(2) == [2, 2] and other.twice(1) is not one.twice(1)
    assert one.asked == {1: 1, 2: 1} and other.asked == {1: 1}
    gc.disable()
    try:
        known = weakref.ref(one)
        del one
        assert known() is None
    finally:
        gc.enable()


def test_a_simulator_goes_with_all_that_it_knows() -> None:
    """Of two stages, with gathers and gradients of several parts, played twice."""
    config = gpt.Config(num_layers=4, hidden_size=64, num_heads=2, seq_len=16, vocab_size=64, batch_size=8)
    with torch.device("meta"):
        model = gpt.build(config)
    graph = trace(model, {name: tensor.to("meta") for name, tensor in gpt.example_inputs(config).items()})
    mesh = autopar.Mesh("a100", devices_per_node=4)
    plan = template_of_graph(graph, mesh, dp=2, pp=2, microbatches=2, zero=3, recompute="full")
    part = divided_graph(graph, 2)
    gc.collect()
    gc.disable()
    try:
        before = _alive()
        simulator = Incremental(part, load_profile("a100").shared_by(4))
        simulator.timeline(plan)
        assert all(_alive()[name] > before[name] for name in NAMES), _alive()
        del simulator
        assert _alive() == before
    finally:
        gc.enable()


NAMES = ("Variants", "KnownParts", "PartPlayer", "Part", "Lowered", "Marked")


def _alive() -> dict[str, int]:
    """How many objects there are that simulators keep."""
    kinds = Counter(type(one).__name__ for one in gc.get_objects())
    return {name: kinds[name] for name in NAMES}


def test_a_program_keeps_nothing_of_what_its_search_found_out() -> None:
    config = gpt.Config(64, 16, 1, 16, 2, batch_size=4)
    program = autopar.parallelize(
        gpt.build(config), autopar.Mesh("h100", devices_per_node=2), gpt.example_inputs(config), search="fast"
    )
    assert isinstance(program.plan.simulator, StepSimulator)
    assert not program.plan.simulator.graph.found and not program._graph.found
    assert program.plan.timeline().step_time_ns == program.plan.predicted.step_time_ns
