"""What a measured software holds: sums and gradients that it keeps, what streams have pinned, and how sure that is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.profiler import load_profile
from autopar.simulate import simulate
from benchmarks.accuracy.gpu.memory import allocated_bytes, held, reduced_bytes, sent_ahead_bytes, sums_bytes
from benchmarks.accuracy.gpu.plans import plan_of, resized, traced
from benchmarks.accuracy.gpu.rows import Row, Sizes
from benchmarks.accuracy.gpu.softwares import read_softwares, software_of

SOFTWARES = read_softwares()
NANOTRON = software_of("nanotron", SOFTWARES)
SIZES = Sizes(2, 256, 4, 4, 64, 512, True, 1024, True)
ROW = Row(
    "1", "s", "nanotron", "H100-SXM5-80GB", 4, 4, "tiny", SIZES, "bf16", 128, 2, 16, 1, 4, 1, sequence_parallel=True
)
H100 = load_profile("h100")


def planned(row: Row):
    return plan_of(resized(traced([row], NANOTRON), [row], row), row, NANOTRON)


def test_what_is_reduced_is_whole_and_its_slice() -> None:
    graph, plan = planned(ROW)
    whole = 2 * 128 * 256 * 2  # micro batch × length × hidden × 2 bytes
    reduced = 1 + 2 * SIZES.layers  # the embedding, and two products of each layer
    assert reduced_bytes(plan.stages[0], graph) == pytest.approx(reduced * whole * (1 + 1 / 4))
    assert sent_ahead_bytes(graph, plan, 0) == pytest.approx(ROW.microbatches * reduced * whole * 1.25)


def test_the_host_is_ahead_by_its_queue_at_most() -> None:
    few, many = (sent_ahead_bytes(*planned(replace(ROW, global_batch=batch)), 0) for batch in (512, 1024))
    assert few == many


def test_what_is_kept_and_pinned_is_held() -> None:
    assert H100.memory is not None
    graph, plan = planned(ROW)
    timeline = simulate(graph, plan, H100)
    forgets, lets_go = replace(NANOTRON, keeps_gradients=False), replace(NANOTRON, pinned=0.0)
    sums = sums_bytes(graph, plan, 0)
    kept = [allocated_bytes(graph, plan, software, timeline)[0] for software in (NANOTRON, forgets)]
    assert kept[0] - kept[1] == sums // 2
    all_of_it, unpinned = (held(graph, plan, software, timeline, H100.memory)[0] for software in (NANOTRON, lets_go))
    assert all_of_it.reserved_bytes > unpinned.reserved_bytes >= kept[0]
    assert all_of_it.spread > unpinned.spread == H100.memory.spread


def test_without_tensor_parallelism_nothing_is_pinned() -> None:
    graph, plan = planned(replace(ROW, tp=1, dp=4, sequence_parallel=False))
    assert sent_ahead_bytes(graph, plan, 0) == 0
