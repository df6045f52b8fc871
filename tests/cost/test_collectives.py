"""Collective times: the formulas by hand, monotone, measured points where there are some."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost import Profile, collective_time_ns, redistribution, step_time_ns, waits_along
from autopar.cost.profile import CollectivePoints, Link, Protocol, Provenance, Waits
from autopar.ir.mesh import make_axes
from autopar.ir.placement import Axis, P, R, S, parse_placement
from autopar.ir.redistribution import Step
from autopar.profiler import load_profile

SOURCE = Provenance("assumed", "test", "2026-01-01")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
MEGABYTE = 1 << 20


def flat_profile(near: float = 1e9, far: float = 1e8, near_alpha: int = 0, far_alpha: int = 0) -> Profile:
    """H100 with other links, and nothing measured."""
    links = {
        "intra_node": Link("intra_node", near_alpha, near, SOURCE),
        "inter_node": Link("inter_node", far_alpha, far, SOURCE),
    }
    return replace(load_profile("h100"), links=links, collectives={}, _shared={})


def test_ring_moves_twice_p_minus_one_over_p() -> None:
    """1 GB/s is one byte a nanosecond, so without start-up costs times are bytes."""
    profile, axis = flat_profile(), Axis("x", 4, 1)
    size = 4 * MEGABYTE
    assert collective_time_ns("all_reduce", size, axis, 8, profile) == 2 * 3 * size // 4
    assert collective_time_ns("all_gather", size, axis, 8, profile) == 3 * size // 4
    assert collective_time_ns("reduce_scatter", size, axis, 8, profile) == 3 * size // 4
    assert collective_time_ns("all_to_all", size, axis, 8, profile) == 3 * size // 4
    assert collective_time_ns("send", size, axis, 8, profile) == size


def test_small_messages_take_the_tree() -> None:
    profile, axis = flat_profile(near_alpha=1000), Axis("x", 8, 1)
    assert collective_time_ns("all_reduce", 8, axis, 8, profile) == 2 * 3 * 1000 + 2 * 8
    assert collective_time_ns("all_reduce", 64 * MEGABYTE, axis, 8, profile) == 14 * 1000 + 14 * 64 * MEGABYTE // 8


def test_a_tree_of_nodes_sends_across_beside_what_is_added_up_inside() -> None:
    """2 nodes of 4: each byte of a quarter across once, in less time than 2 · 3/4 of them take inside."""
    profile, axis = flat_profile(near=1e9, far=1e9, near_alpha=0, far_alpha=100_000), Axis("x", 8, 1)
    size = 4 * MEGABYTE
    assert collective_time_ns("all_reduce", size, axis, 4, profile) == 2 * 100_000 + 2 * 3 * size // 4
    slow = flat_profile(near=1e9, far=1e8, near_alpha=0, far_alpha=100_000)
    assert collective_time_ns("all_reduce", size, axis, 4, slow) == 2 * 100_000 + 10 * size // 4


def test_hierarchy_sends_fewer_bytes_across_more_than_two_nodes() -> None:
    """4 nodes of 4: reduce-scatter inside, all-reduce of a quarter across (2 · 3/4 of it), all-gather inside."""
    profile, axis = flat_profile(near=1e9, far=2e7, near_alpha=0, far_alpha=1000), Axis("x", 16, 1)
    size = 4 * MEGABYTE
    inside, across = 2 * 3 * size // 4, 6 * 1000 + 50 * 2 * 3 * (size // 4) // 4
    assert inside + across < 50 * 2 * size // 4, "what a tree sends across"
    assert collective_time_ns("all_reduce", size, axis, 4, profile) == inside + across


def test_a_far_ring_uses_the_adapters_of_all_its_ranks_in_a_node() -> None:
    profile, axis = flat_profile(near=2.5e8, far=5e7), Axis("x", 8, 1)
    size = 8 * MEGABYTE
    expected = 7 * size // 8 * 20 // 4  # 20 ns a byte, shared by the 4 ranks of a node
    assert collective_time_ns("all_gather", size, axis, 4, profile) == expected
    lone = collective_time_ns("all_gather", size, Axis("x", 2, 4), 4, profile)
    assert lone == size // 2 * 20, "neighbours along the axis are nodes apart"


PROFILES = load_profile("a100"), flat_profile(near_alpha=3000, far_alpha=9000)  # read once: examples have a deadline


@given(st.sampled_from(KINDS), st.integers(1, 1 << 32), st.integers(1, 1 << 30), st.sampled_from([2, 3, 8, 16, 64]))
def test_more_bytes_never_take_less(kind: str, size: int, more: int, ranks: int) -> None:
    for profile in PROFILES:
        axis = Axis("x", ranks, 1)
        less = collective_time_ns(kind, size, axis, 8, profile)
        assert 0 < less <= collective_time_ns(kind, size + more, axis, 8, profile)


@given(st.sampled_from(KINDS), st.integers(1, 1 << 32), st.floats(1, 10), st.sampled_from([2, 8, 16]))
def test_more_bandwidth_is_never_slower(kind: str, size: int, factor: float, ranks: int) -> None:
    slow, axis = flat_profile(near_alpha=500, far_alpha=5000), Axis("x", ranks, 1)
    for fast in (flat_profile(1e9 * factor, 1e8, 500, 5000), flat_profile(1e9, 1e8 * factor, 500, 5000)):
        assert collective_time_ns(kind, size, axis, 8, fast) <= collective_time_ns(kind, size, axis, 8, slow)


def test_nothing_to_send_takes_no_time() -> None:
    assert collective_time_ns("all_reduce", 0, Axis("x", 8, 1), 8, load_profile("h100")) == 0
    assert collective_time_ns("all_reduce", MEGABYTE, Axis("x", 1, 1), 8, load_profile("h100")) == 0


def test_measured_points_are_met_and_interpolated() -> None:
    points = CollectivePoints("all_reduce", "intra_node", 2, ((1024, 5000), (4096, 10000)), SOURCE)
    profile = replace(flat_profile(), collectives={("all_reduce", "intra_node", 2): points})
    axis = Axis("x", 2, 1)
    times = [collective_time_ns("all_reduce", size, axis, 8, profile) for size in (1, 1024, 2048, 4096, 8192)]
    assert times[0] == 5000
    assert times[4] == pytest.approx(20000, abs=1)
    assert times[1:4] == [pytest.approx(t, abs=1) for t in (5000, 5000 * 2**0.5, 10000)]


def test_ranks_beyond_the_cores_talk_slower() -> None:
    facts = replace(load_profile("h100").facts, cores=2)
    profile = replace(flat_profile(), facts=facts)
    axis = Axis("x", 2, 1)
    assert collective_time_ns("send", 1000, axis, 4, profile) == 2 * collective_time_ns("send", 1000, axis, 2, profile)


# What links can say ----------------------------------------


def near_profile(link: Link) -> Profile:
    """H100 with that link inside and across nodes, and nothing measured."""
    return replace(load_profile("h100"), links={link.level: link}, collectives={}, _shared={})


def test_starting_and_the_own_pass_are_paid_once() -> None:
    """A pass at 2 GB/s is half a nanosecond a byte; a gather and a scatter are half an all-reduce."""
    plain, size, axis = Link("intra_node", 0, 1e9, SOURCE), 4 * MEGABYTE, Axis("x", 4, 1)
    dear = near_profile(replace(plain, start_ns=7000, pass_bandwidth=2e9))
    for kind, passes in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1), ("all_to_all", 0), ("send", 0)):
        extra = collective_time_ns(kind, size, axis, 8, dear) - collective_time_ns(
            kind, size, axis, 8, near_profile(plain)
        )
        assert extra == 7000 + passes * size // 4, kind


@given(st.sampled_from(KINDS), st.integers(1, 1 << 30), st.sampled_from([2, 4, 16, 64]))
def test_the_better_protocol_counts(kind: str, size: int, ranks: int) -> None:
    axis, slow, fast = Axis("x", ranks, 1), Protocol(9000, 1.0), Protocol(1000, 0.5)
    one, other, both = (
        collective_time_ns(kind, size, axis, 64, near_profile(link))
        for link in (
            Link("intra_node", slow.alpha_ns, 1e11, SOURCE),
            Link("intra_node", fast.alpha_ns, 0.5e11, SOURCE),
            Link("intra_node", slow.alpha_ns, 1e11, SOURCE, low_latency=fast),
        )
    )
    assert both == pytest.approx(min(one, other), abs=1)


@given(st.sampled_from(KINDS), st.sampled_from([2, 3, 8, 16, 64]))
def test_large_sizes_tend_to_the_bandwidth_and_small_ones_to_the_latency(kind: str, ranks: int) -> None:
    profile, axis = flat_profile(1e11, 1e10, 3000, 9000), Axis("x", ranks, 1)
    small = [collective_time_ns(kind, size, axis, 8, profile) for size in (1, 64)]
    assert small[0] >= 3000
    assert small[1] <= 1.1 * small[0]
    large = [collective_time_ns(kind, size, axis, 8, profile) for size in (1 << 40, 1 << 41)]
    assert large[1] == pytest.approx(2 * large[0], rel=1e-3)


@given(st.sampled_from(["all_reduce", "all_gather", "all_to_all"]), st.integers(1, 1 << 32), st.sampled_from([2, 4, 8]))
def test_levels_are_never_worse_than_one_flat_ring(kind: str, size: int, nodes: int) -> None:
    """All links as slow as the slow level: that is what a ring which knows of no nodes would see."""
    axis = Axis("x", 8 * nodes, 1)
    flat = collective_time_ns(kind, size, axis, 1, flat_profile(1e11, 1e10, 3000, 9000))
    assert collective_time_ns(kind, size, axis, 8, flat_profile(1e11, 1e10, 3000, 9000)) <= flat


def test_devices_share_the_adapters_of_their_node() -> None:
    """Four adapters of 1 GB/s for eight devices: half an adapter each when all talk, a whole one for four devices."""
    link = Link("inter_node", 0, 1e9, SOURCE, node_bandwidth=4e9)
    profile, size = near_profile(link), 8 * MEGABYTE
    across = Axis("x", 2, 8)  # eight groups at once, a rank of each in a node
    assert collective_time_ns("all_reduce", size, across, 8, profile) == 2 * size
    assert collective_time_ns("all_reduce", size, Axis("x", 2, 4), 4, profile) == size
    assert collective_time_ns("send", size, across, 8, profile) == 2 * size


def test_wiring_gives_groups_their_own_bandwidth() -> None:
    link = Link("intra_node", 0, 1e9, SOURCE, bandwidth_by_ranks=((4, 2e9),))
    times = [collective_time_ns("all_gather", 4 * MEGABYTE, Axis("x", n, 1), 8, near_profile(link)) for n in (2, 4)]
    assert times == [2 * MEGABYTE, 3 * MEGABYTE // 2]


# Redistributions ----------------------------------------


def test_a_step_costs_what_the_table_sends() -> None:
    profile, axes = flat_profile(), make_axes(("x", "y"), (2, 4))
    shape, placement = (8, 16), (R, S(0))
    forward, backward = step_time_ns(shape, 4, placement, axes, Step(1, S(0), R), 8, profile)
    assert forward == backward == 3 * (8 * 16 * 4) // 4
    assert step_time_ns(shape, 4, (R, R), axes, Step(1, R, S(0)), 8, profile) == (0, 0)
    assert step_time_ns(shape, 4, (R, P), axes, Step(1, P, R), 8, profile) == (768, 768)


def test_the_cheapest_route_counts_the_backward_only_for_differentiable_tensors() -> None:
    profile, axes = flat_profile(), make_axes(("x",), (4,))
    source, target = parse_placement("P"), parse_placement("S(0)")
    arguments = ((8, 16), 4, source, target, axes, 8, profile)
    route = redistribution(*arguments)
    assert route is not None
    assert route.steps == (Step(0, P, S(0)),)
    assert (route.forward_ns, route.backward_ns) == (384, 384)
    once = redistribution(*arguments, differentiable=False)
    assert once is not None
    assert (once.forward_ns, once.backward_ns) == (384, 0)


# Waits ----------------------------------------


def with_waits(*ranks: int) -> Profile:
    found = {("intra_node", n): Waits("intra_node", n, ((1000, 0), (3000, 100 * n)), SOURCE) for n in ranks}
    known = load_profile("cpu")
    return replace(known, facts=replace(known.facts, cores=8), waits=found, _shared={})


@pytest.mark.parametrize(
    ("length_ns", "waited_ns"), [(0, 0), (1000, 0), (2000, 100), (2999, 199), (3000, 200), (10**9, 200)]
)
def test_waits_lie_between_their_points(length_ns: int, waited_ns: int) -> None:
    waits = waits_along(Axis("tp", 2, 1), 2, with_waits(2))
    assert waits is not None
    assert waits.after(length_ns) == waited_ns


def test_waits_are_those_of_the_nearest_number_of_ranks_as_much_slower_as_they_share_cores() -> None:
    profile = with_waits(2, 4)
    three, four, more = (waits_along(Axis("tp", n, 1), n, profile) for n in (3, 4, 8))
    assert [waits and waits.points[-1] for waits in (three, four, more)] == [(3000, 200), (3000, 400), (3000, 400)]
    pairs = waits_along(Axis("tp", 2, 1), 32, profile)
    assert pairs is not None
    assert pairs.points == ((4000, 0), (12000, 800))


def test_no_waits_are_priced_where_none_were_measured() -> None:
    assert waits_along(Axis("tp", 2, 1), 2, load_profile("h100")) is None
    assert waits_along(Axis("tp", 1, 1), 2, with_waits(2)) is None
    assert waits_along(Axis("dp", 2, 2), 2, with_waits(2)) is None, "across nodes"


def in_node(points: dict[int, tuple[tuple[int, int], ...]], kind: str = "all_gather") -> Profile:
    """A profile with measured points of a collective inside a node, by ranks."""
    measured = {
        (kind, "intra_node", ranks): CollectivePoints(kind, "intra_node", ranks, own, SOURCE)
        for ranks, own in points.items()
    }
    return replace(flat_profile(near_alpha=1000), collectives=measured)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
def test_groups_between_measured_ones_are_where_a_ring_has_them(ranks: int) -> None:
    """At 2 bytes a nanosecond whatever the formula of the link, which has half of that, says."""
    size = 1 << 20
    profile = in_node({n: ((1, 1), (size, (n - 1) * size // n // 2)) for n in (2, 4, 8)})
    expected = (ranks - 1) * size / ranks / 2
    assert collective_time_ns("all_gather", size, Axis("x", ranks, 1), ranks, profile) == pytest.approx(expected, 1e-3)


def test_groups_beyond_the_largest_pay_their_further_messages() -> None:
    size = 1 << 20
    profile = in_node({8: ((1, 10_000), (size, 500_000))})
    expected = 500_000 * (15 / 16) / (7 / 8) + 8 * 1000
    assert collective_time_ns("all_gather", size, Axis("x", 16, 1), 16, profile) == pytest.approx(expected, 1e-3)
    modelled = replace(profile, collectives={})
    across = [collective_time_ns("all_gather", size, Axis("x", 16, 1), 8, item) for item in (profile, modelled)]
    assert across[0] == across[1], "across nodes only the formula is known"


@given(st.integers(1, 1 << 32), st.integers(1, 1 << 30), st.integers(2, 72), st.sampled_from(KINDS))
def test_more_bytes_never_take_less_in_groups_that_were_not_measured(size: int, more: int, n: int, kind: str) -> None:
    profile, axis = load_profile("h100"), Axis("x", n, 1)
    less, greater = (collective_time_ns(kind, b, axis, n, profile) for b in (size, size + more))
    assert 0 < less <= greater
