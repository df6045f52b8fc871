"""The host tier of CPU ranks: what is there is none of torch's allocations, and copies take as long as is stated."""

from __future__ import annotations

import time

import pytest
import torch

from autopar.runtime.host_link import HostLink, LinkRates, host_tensor
from benchmarks.accuracy.lifetimes import track

CPU = torch.device("cpu")
MB = 1 << 20


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_host_tensor_is_as_asked_for(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of any shape and dtype; what it is given it keeps."""
    x = host_tensor(shape, dtype, CPU)
    assert (x.shape, x.dtype, x.is_contiguous()) == (torch.Size(shape), dtype, True)
    x.fill_(3)
    assert torch.equal(x, torch.full(shape, 3, dtype=dtype))


def test_memory_of_the_host_is_not_the_allocators_and_serves_again() -> None:
    """The record of the allocator does not have it; views keep it, and the next tensor as large gets it once no view is
    left."""
    kept = []
    lifetimes = track(lambda: kept.append(host_tensor((MB,), torch.float32, CPU)))
    assert lifetimes.left_bytes - lifetimes.resident_bytes < MB
    x = kept.pop()
    address, view = x.data_ptr(), x[3:5]
    del x
    assert host_tensor((MB,), torch.float32, CPU).data_ptr() != address
    del view
    others = [host_tensor((MB,), torch.float32, CPU) for _ in range(2)]
    assert address in [other.data_ptr() for other in others]


def test_copies_of_a_direction_follow_each_other() -> None:
    """4 MB at 100 MB/s take 40 ms a copy: two down are not there before 80, whatever else the host does."""
    link = HostLink(CPU, LinkRates(1e8, 1e8, 1_000_000))
    device, host, other = torch.ones(MB), host_tensor((MB,), torch.float32, CPU), torch.zeros(MB)
    begin = time.perf_counter()
    first, second, up = link.down([(host, device)]), link.down([(host, device)]), link.up([(other, host)])
    first.wait()
    assert time.perf_counter() - begin >= 0.04
    up.wait()
    second.wait()
    assert time.perf_counter() - begin >= 0.083
    assert torch.equal(host, device) and torch.equal(other, device)


def test_without_rates_nothing_is_waited_for() -> None:
    """A CPU rank whose program states no link."""
    link, host = HostLink(CPU), host_tensor((4,), torch.float32, CPU)
    link.down([(host, torch.ones(4))]).wait()
    assert host.tolist() == [1, 1, 1, 1]
