"""Copies to the host and back in a simulated step: hidden by a fast link, waited for on a slow one; memory leaves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

import autopar
from autopar.cost.host_memory import HostMemory
from autopar.cost.provenance import Provenance
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import template_profile
from autopar.simulate import Timeline, simulate
from autopar.simulate.host_copies import DOWN, UP
from autopar.trace import trace
from models import gpt


@cache
def graph() -> Graph:
    config = gpt.Config(num_layers=5, hidden_size=64, num_heads=4, seq_len=64, vocab_size=256, batch_size=8)
    with torch.device("meta"):
        return trace(gpt.build(config), gpt.example_inputs(config))


@cache
def plan(pp: int = 1) -> Plan:
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    choices = {"dp": 2, "microbatches": 2} if pp == 1 else {"pp": 2, "microbatches": 4}
    return template_of_graph(graph(), mesh, **choices, offload="activations")  # type: ignore[arg-type] # of several types


@cache
def played(link: float | None, pp: int = 1) -> Timeline:
    """Under a link of so many bytes a second, which costs the rank itself nothing; None without copies."""
    told = Provenance("assumed", "a link of this test", "2026-11-27")
    host = HostMemory(2**40, link or 1.0, link or 1.0, 0, told)
    profile = replace(template_profile(), host_memory=host, _shared={})
    own = plan(pp) if link else replace(plan(pp), copied_out=())
    return simulate(divided_graph(graph(), own.microbatches), own, profile)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_link_without_end_costs_no_time_and_spares_memory(pp: int) -> None:
    fast, plain = played(1e18, pp), played(None, pp)
    assert plain.step_time_ns <= fast.step_time_ns <= plain.step_time_ns + 10 * plan(pp).microbatches
    assert fast.peak_bytes < 0.9 * plain.peak_bytes
    assert not any("host" in kind for kind, ns in fast.exposed.items() if ns > 1000)
    assert plain.host_bytes == 0 < fast.host_bytes


def test_each_block_goes_and_comes_once_a_microbatch() -> None:
    found = Counter(event.stream[1] for event in played(1e18).events if event.stream[1] in (DOWN, UP))
    blocks = len(plan().copied_out)
    assert found == {DOWN: 2 * blocks, UP: 2 * blocks}


def test_a_slow_link_is_waited_for() -> None:
    """The step is no shorter than what each direction takes, one copy after the other; waiting is told."""
    link = 1e8
    slow, fast = played(link), played(1e18)
    each = slow.host_bytes / link * 1e9 * plan().microbatches
    assert slow.step_time_ns > fast.step_time_ns and slow.step_time_ns >= each
    assert slow.exposed["activation host up"] > 0 and slow.exposed["activation host down"] > 0
    assert slow.peak_bytes == fast.peak_bytes and slow.host_bytes == fast.host_bytes
    for stream in (DOWN, UP):
        spans = sorted((event.start_ns, event.end_ns) for event in slow.events if event.stream[1] == stream)
        assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_host_memory_counts_microbatches_in_flight() -> None:
    """Of two stages under 1f1b: two of the first stage's microbatches."""
    both = played(1e18, 2)
    alone = simulate(
        divided_graph(graph(), 4), replace(plan(2), schedule="gpipe"), replace(template_profile(), _shared={})
    )
    assert both.host_bytes * 2 == alone.host_bytes
