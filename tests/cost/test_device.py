"""What a process takes of a GPU beside its tensors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar.cost.device import MOST_COMMUNICATORS, SEGMENT_BYTES
from autopar.cost.profile import profile_from_json, profile_to_json
from autopar.errors import ProfileError
from autopar.profiler import load_profile
from tests.oracles.frozen.cases import PROFILES

H100 = load_profile("h100")
MEMORY = H100.memory
assert MEMORY is not None


def test_a_device_holds_whole_segments_and_more_than_is_allocated() -> None:
    for allocated in (1, SEGMENT_BYTES, 10**9 + 7, 7 * 10**10):
        assert MEMORY.reserved_bytes(allocated) % SEGMENT_BYTES == 0
        assert MEMORY.reserved_bytes(allocated) > allocated
    assert MEMORY.taken_bytes(1, 3) - MEMORY.taken_bytes(1, 1) == 2 * MEMORY.communicator_bytes


@pytest.mark.parametrize("capacity", [5 * 10**9, 16_944_988_160, H100.facts.capacity_bytes])
def test_what_is_usable_is_the_most_that_leaves_the_device_out_of_the_margin(capacity: int) -> None:
    usable, most = MEMORY.usable_bytes(capacity), capacity * MEMORY.tight_share
    assert MEMORY.taken_bytes(usable, MOST_COMMUNICATORS) <= most
    assert MEMORY.taken_bytes(usable + 2 * SEGMENT_BYTES, MOST_COMMUNICATORS) > most


def test_a_device_too_small_for_the_context_holds_no_tensors() -> None:
    assert MEMORY.usable_bytes(MEMORY.context_bytes) == 0
    tight = replace(H100, memory=replace(MEMORY, context_bytes=H100.facts.capacity_bytes))
    data = json.loads(json.dumps(profile_to_json(tight)))
    with pytest.raises(ProfileError, match="room for tensors"):
        profile_from_json(data, "mine")


def test_the_more_is_taken_the_less_likely_it_fits() -> None:
    capacity = H100.facts.capacity_bytes
    shares = (0, 0.5, 0.8, MEMORY.tight_share, 0.95, 1, 2)
    odds = [MEMORY.fits_probability(round(share * capacity), capacity) for share in shares]
    assert odds == sorted(odds, reverse=True)
    assert odds[0] == 1 and odds[3] == 0.5 and odds[-1] < 1e-3


def test_what_is_needed_at_most_leaves_two_in_a_hundred() -> None:
    needed = MEMORY.needed_bytes(10**10)
    assert needed > 10**10
    assert MEMORY.fits_probability(10**10, round(needed / MEMORY.tight_share)) == pytest.approx(0.98, abs=1e-3)
    assert MEMORY.needed_bytes(10**10, spread=2 * MEMORY.spread) > needed


def test_refilling_is_of_devices_that_are_fuller_than_is_usable() -> None:
    capacity = H100.facts.capacity_bytes
    usable = MEMORY.usable_bytes(capacity)
    assert MEMORY.refill_ns > 0
    assert MEMORY.refilling_ns(usable, capacity, 4) == 0
    assert MEMORY.refilling_ns(usable + 1, capacity, 4) == 4 * MEMORY.refill_ns
    assert replace(MEMORY, refill_ns=0).refilling_ns(capacity, capacity, 4) == 0


def test_a_block_that_knows_nothing_of_refilling_is_read() -> None:
    data = json.loads(json.dumps(profile_to_json(H100)))
    del data["memory"]["refill_ns"]
    assert profile_from_json(data, "mine").memory == replace(MEMORY, refill_ns=0)


def test_a_profile_without_the_block_keeps_its_reserve() -> None:
    frozen = load_profile(PROFILES["h100"])
    assert frozen.memory is None
    assert frozen.usable_bytes == frozen.facts.capacity_bytes - frozen.facts.reserve_bytes


def test_the_block_survives_a_file() -> None:
    assert profile_from_json(json.loads(json.dumps(profile_to_json(H100))), "mine").memory == MEMORY
