"""Ranks as threads: they talk as processes do, and what would hang ends with the reason."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.random_programs.exchange import MeetingError
from tests.random_programs.world import device_mesh, thread_world

AXES = (("a", 2), ("b", 3))


def sums(rank: int) -> tuple[list[float], list[float]]:
    mesh = device_mesh(AXES)
    inner = torch.full((2,), float(rank))
    dist.all_reduce(inner, group=mesh.get_group("b"))
    shard = DTensor.from_local(torch.full((1,), float(rank)), mesh, (Shard(0), Replicate()), run_check=False)
    return inner.tolist(), shard.full_tensor().tolist()


def test_threads_reduce_over_their_own_groups() -> None:
    results = thread_world(6).run(sums)
    assert [inner for inner, _ in results] == [[3.0, 3.0]] * 3 + [[12.0, 12.0]] * 3
    assert [whole for _, whole in results] == [[float(rank % 3), float(rank % 3 + 3)] for rank in range(6)]
    assert thread_world(6).sent == [{"all_reduce": 8, "all_gather": 8}] * 6


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("SUM", 9.0), ("AVG", 3.0), ("MAX", 4.0), ("MIN", 2.0), ("PRODUCT", 24.0)],
)
def test_ranks_reduce_as_they_are_asked(operation: str, expected: float) -> None:
    """All but the greatest was once summed: means of DTensors' shards looked wrong, and least values would have."""

    def reduced(rank: int) -> tuple[float, float]:
        how, value, part = getattr(dist.ReduceOp, operation), torch.tensor(2.0 + rank), torch.empty(1)
        dist.reduce_scatter_single(part, value.expand(3).contiguous(), op=how)
        dist.all_reduce(value, op=how)
        return value.item(), part.item()

    assert thread_world(3).run(reduced) == [(expected, expected)] * 3


def test_ranks_refuse_a_reduction_that_they_lack() -> None:
    with pytest.raises(MeetingError, match="expected one of"):
        thread_world(2).run(lambda rank: dist.all_reduce(torch.ones(1, dtype=torch.int), op=dist.ReduceOp.BAND))


def test_a_result_is_there_only_once_it_was_waited_for() -> None:
    def early(rank: int) -> tuple[float, float]:
        value = torch.ones(())
        work = dist.all_reduce(value, async_op=True)
        before = value.item()
        work.wait()
        return before, value.item()

    for before, after in thread_world(2).run(early):
        assert before != before and after == 2.0  # NaN first


def fails_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("no more")
    dist.all_reduce(torch.ones(3))


def other_shapes(rank: int) -> None:
    dist.all_reduce(torch.ones(3 + rank))


def one_stays_away(rank: int) -> None:
    if rank:
        dist.all_reduce(torch.ones(3))


def not_waited_for(rank: int) -> None:
    dist.all_reduce(torch.ones(3), async_op=True)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (fails_on_one, "rank 1 failed(.|\n)*ValueError: no more"),
        (other_shapes, r"rank \d called all_reduce sum \(\d,\) torch.float32, others all_reduce"),
        (one_stays_away, r"rank 1 waits for all_reduce sum .*missing \[0\].*done: \[0\]"),
        (not_waited_for, "ended without having waited for 1 of its collectives"),
    ],
)
def test_what_would_hang_ends_with_the_reason(job: object, reason: str) -> None:
    with pytest.raises(MeetingError, match=reason):
        thread_world(2).run(job)
    assert thread_world(2).run(lambda rank: rank) == [0, 1]  # the threads go on
