"""What softwares do once a step, beside what is simulated of it."""

from dataclasses import replace

import pytest
import torch

from autopar.cost import collective_time_ns
from autopar.profiler import load_profile
from autopar.trace import trace
from benchmarks.accuracy.gpu import decoder
from benchmarks.accuracy.gpu.memory import sums_bytes
from benchmarks.accuracy.gpu.plans import plan_of
from benchmarks.accuracy.gpu.predictions import Planned, overlap_of, used_profile
from benchmarks.accuracy.gpu.rows import Row, Sizes
from benchmarks.accuracy.gpu.softwares import read_softwares, software_of
from benchmarks.accuracy.gpu.steps import once_a_step_s

SIZES = Sizes(2, 256, 4, 4, 64, 512, True, 1024, True)
NANOTRON = software_of("nanotron", read_softwares())


def planned(dp: int, zero: int) -> Planned:
    """Of a small model on nodes of eight."""
    row = Row("1", "s", "nanotron", "H100-SXM5-80GB", dp, 8, "tiny", SIZES, "bf16", 128, 1, dp, dp, 1, 1, zero=zero)
    config = decoder.Config(128, 2, 256, 4, 4, 64, 512, 1024, is_gated=True, norm="rms", positions="rotary")
    graph = trace(*decoder.build(config, dp), mode="train", compute_dtype=torch.bfloat16)
    return Planned(row, *plan_of(graph, row, NANOTRON))


@pytest.mark.parametrize(("dp", "zero", "is_whole"), [(16, 1, True), (8, 1, True), (16, 0, False), (1, 1, False)])
def test_late_sums_in_one_buffer_are_of_all_gradients_on_every_rank(dp: int, zero: int, is_whole: bool) -> None:
    """nanotron's ZeRO-1 all-reduces all gradients and copies what comes back of each parameter from each rank."""
    item = planned(dp, zero)
    assert item.graph is not None and item.plan is not None
    profile = used_profile(load_profile("h100"), NANOTRON, "bf16", "efa")
    (stage,) = item.plan.stages
    num_bytes = sums_bytes(item.graph, item.plan, 0)
    wanted = NANOTRON.step_ns + 1e9 * NANOTRON.step_passes * num_bytes / profile.facts.memory_bandwidth
    if is_whole:
        (axis,) = stage.axes
        wanted += collective_time_ns("all_reduce", num_bytes, axis, 8, profile)
        wanted -= collective_time_ns("reduce_scatter", num_bytes, axis, 8, profile)
        wanted += dp * len(stage.storage) * NANOTRON.copy_ns
    assert once_a_step_s(item.row, item.graph, item.plan, NANOTRON, profile) == pytest.approx(wanted / 1e9)


def test_softwares_without_such_sums_take_their_step_alone() -> None:
    item, foundry = planned(16, 1), software_of("llm-foundry", read_softwares())
    assert item.graph is not None and item.plan is not None
    profile = load_profile("h100")
    assert once_a_step_s(item.row, item.graph, item.plan, foundry, profile) == foundry.step_ns / 1e9


def test_what_travels_together_is_by_the_kind_of_zero() -> None:
    """DDP's buckets are of 25 MiB in 16 bits; what is summed late is one."""
    row = planned(8, 0).row
    assert overlap_of(row, NANOTRON).bucket_bytes == 50 << 20
    assert overlap_of(replace(row, zero=1), NANOTRON).bucket_bytes > 1 << 50
