"""What crossings between stages cost, and which placements they are made in."""

from __future__ import annotations

import itertools

import pytest

from autopar.cost.collectives import sends_time_ns
from autopar.cost.crossing import End, Parcel, cheapest_handover, crossing_time_ns, sent_bytes, side, way
from autopar.cost.profile import ACROSS, INSIDE
from autopar.ir.mesh import Mesh, make_axes
from autopar.ir.placement import I, P, Placement, R, S
from autopar.profiler import load_profile
from autopar.runtime.crossing import crossing

MESH = Mesh("a100", 2, 4)
SHAPE = (64, 4096)
A100, V100 = load_profile("a100"), load_profile("v100")


def end(first: int, *sizes: int) -> End:
    axes = make_axes(tuple("xyz"[: len(sizes)]), sizes)
    count = 1
    for size in sizes:
        count *= size
    return End(range(first, first + count), axes, A100)


def parcel(maker: End, leaving: Placement, reader: End, arriving: Placement) -> Parcel:
    ends = side(maker.ranks, maker.axes, leaving), side(reader.ranks, reader.axes, arriving)
    return Parcel(crossing(SHAPE, *ends), 4)


def test_the_busiest_rank_and_the_slower_devices_count() -> None:
    one = parcel(end(0), (), end(4, 4), (S(0),))
    assert sent_bytes([one]) == {0: 64 * 4096 * 4}
    level, duration = crossing_time_ns([one], MESH, (A100, V100))
    times = [sends_time_ns(4, 64 * 4096 * 4, ACROSS, 4, profile) for profile in (A100, V100)]
    assert (level, duration) == (ACROSS, max(times))
    assert crossing_time_ns([parcel(end(0), (), end(1), ())], MESH, (A100, A100))[0] == INSIDE


def test_several_messages_wait_for_a_start_each_and_for_the_bytes_together() -> None:
    one, four = (sends_time_ns(count, 1 << 20, ACROSS, 4, A100) for count in (1, 4))
    assert four == one + 3 * (sends_time_ns(1, 1, ACROSS, 4, A100))


CASES: list[tuple[End, Placement, End, tuple[Placement, ...]]] = [
    (end(0, 4), (R,), end(4, 2, 2), ((R, R),)),
    (end(0, 4), (P,), end(4, 2, 2), ((S(0), I),)),
    (end(0, 4), (S(0),), end(4, 2), ((R,), (S(1),))),
    (end(0), (), end(1, 3), ((S(0),),)),
    (end(0, 2, 2), (S(0), S(0)), end(4, 4), ((I,),)),
]


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_handovers_are_the_cheapest_of_all(case: int, differentiable: bool) -> None:
    maker, made, reader, wanted = CASES[case]
    found = cheapest_handover(SHAPE, 4, differentiable, made, wanted, maker, reader, MESH)
    assert found is not None
    whole, best = I if differentiable else R, None
    options = [list(itertools.product((whole, S(0), S(1)), repeat=len(own.axes))) for own in (maker, reader)]
    for leaving, arriving in itertools.product(*options):
        ways = [way(SHAPE, 4, differentiable, made, leaving, maker, MESH)]
        ways += [way(SHAPE, 4, differentiable, arriving, target, reader, MESH) for target in wanted]
        if any(route is None for route in ways):
            continue
        total = sum(route.forward_ns + route.backward_ns for route in ways if route is not None)
        total += crossing_time_ns([parcel(maker, leaving, reader, arriving)], MESH, (A100, A100))[1]
        if differentiable:
            total += crossing_time_ns([parcel(reader, arriving, maker, leaving)], MESH, (A100, A100))[1]
        best = total if best is None else min(best, total)
    assert found.duration_ns == best


def test_across_nodes_slices_travel_and_are_gathered_inside() -> None:
    """Four ranks that hold all, four that want all: a large tensor crosses once, not four times."""
    large = (4096, 8192)
    found = cheapest_handover(large, 4, True, (I,), ((I, I),), end(0, 4), end(4, 2, 2), MESH)
    assert found is not None
    assert all(type_.kind == "S" for type_ in found.arriving), "each adapter carries a quarter; NVLink does the rest"
    small = cheapest_handover((8, 8), 4, True, (I,), ((I, I),), end(0, 4), end(4, 2, 2), MESH)
    assert small is not None and small.arriving == (I, I), "a gather of its own would take longer"
