"""Axes with shares: how planner and runtime cut by them, what a plan may cut so, how it is written down."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import runtime as rt
from autopar.errors import PlacementError, PlanError
from autopar.ir import verifier
from autopar.ir.graph import Graph
from autopar.ir.mesh import make_axes
from autopar.ir.placement import Axis, R, S, evenly, is_even, lengths_along, local_shape, longest_part, num_shards
from autopar.ir.plan import Branch, Fork, Plan
from autopar.ir.shares import alike_ranks, axis_text, seen_from
from autopar.ops import admits
from autopar.pipeline import template_of_graph
from autopar.runtime import pieces
from autopar.runtime.placement import local_slices, parse_placement
from autopar.trace import trace
from models import mlp, wide_resnet

SHARES = st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple)


def rank_axis(shares: tuple[int, ...], index: int) -> rt.Axis:
    return rt.Axis("x", len(shares), index, None, shares=shares)


@given(shares=SHARES, unit=st.integers(0, 3), inner=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_planner_and_runtime_cut_alike_in_these_proportions(shares: tuple[int, ...], unit: int, inner: int) -> None:
    size, axes = unit * sum(shares), (Axis("x", len(shares), inner, shares), Axis("y", inner, 1))
    placement, end = (S(0), S(0)), 0
    for index, share in enumerate(shares):
        lengths = []
        for other in range(inner):
            own = (rank_axis(shares, index), rt.Axis("y", inner, other, None))
            (part,) = local_slices((size,), parse_placement("S(0) S(0)", 2), own)
            assert local_shape((size,), placement, axes, (index, other)) == (part.stop - part.start,)
            assert part.start == end or not len(range(size)[part])
            end = max(end, part.stop)
            lengths.append(part.stop - part.start)
        assert sum(lengths) == unit * share
    assert end == size
    whole = torch.arange(2 * size).view(2, size)
    parts = pieces.split(whole, 1, rank_axis(shares, 0))
    assert parts.shape == (len(shares), 2, longest_part(size, axes[0]))
    assert torch.equal(pieces.join(parts, 1, size, rank_axis(shares, 0)), whole)


def test_lengths_that_shares_do_not_divide_are_no_length_of_a_program() -> None:
    with pytest.raises(rt.ProgramError, match=r"shares \(2, 1\) of axis x divide, found 8"):
        rt.local_size(8, rank_axis((2, 1), 0))


def test_what_shares_say_of_a_tensor() -> None:
    axes = (Axis("x", 2, 1, (3, 1)),)
    assert num_shards((S(0),), 0, axes) == 4 and not is_even((8, 2), (S(0),), axes) and is_even((8, 2), (R,), axes)
    assert lengths_along((8, 2), (S(0),), 0, axes) == {6, 2}
    assert evenly(axes) == (Axis("x", 2, 1),)
    assert axis_text(Axis("dp", 4, 1, (2, 1, 1, 1))) == "dp=4 (1 × 2, 3 × 1)"


def test_ranks_are_alike_by_devices_and_shares() -> None:
    mesh = autopar.Mesh([("a100", 1, 2), ("v100", 1, 4)])
    axes = make_axes(("dp", "tp"), (3, 2))
    assert alike_ranks(mesh, axes) == [range(2), range(2, 6)]
    shared = (axes[0]._replace(shares=(2, 2, 1)), axes[1])
    assert alike_ranks(mesh, shared) == [range(2), range(2, 4), range(4, 6)]
    assert alike_ranks(autopar.Mesh("a100", 1, 6), shared) == [range(4), range(4, 6)]
    assert seen_from(shared, 5)[0].shares == (1, 2, 2) and seen_from(shared, 3)[0].shares == (2, 1, 2)


# What is refused ----------------------------------------


@cache
def graph() -> Graph:
    config = mlp.Config(widths=(6, 8, 4), batch_size=8)
    return trace(mlp.build(config), mlp.example_inputs(config))


@cache
def plan() -> Plan:
    return template_of_graph(graph(), autopar.Mesh("cpu", devices_per_node=2), dp=2, zero=3)


def shared(shares: tuple[int, ...], of: Plan | None = None) -> Plan:
    of = of or plan()
    return of.placed(axes=(of.stage.axes[0]._replace(shares=shares), *of.stage.axes[1:]))


def test_a_plan_with_shares_is_verified_printed_and_read_back() -> None:
    own = shared((3, 1))
    verifier.verify(graph(), own, admits)
    assert Plan.from_json(own.to_json()) == own
    assert Plan.from_json(own.to_json()).to_json() == own.to_json()
    assert "as (dp=2 (1 × 3, 1 × 1))" in str(own)
    assert "shares      of the batch over dp: 3/4 on rank 0 (cpu), 1/4 on rank 1 (cpu)" in str(own)
    assert "of the batch over dp: 3/4 on rank 0" in own.explain("*")
    assert "(1 × 3, 1 × 1)" in plan().diff(own)


@pytest.mark.parametrize("shares", [(3, 1, 1), (2, 2), (3, 0), (3, -1)])
def test_shares_of_another_length_or_of_nothing_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="expected shares of axis dp as 2 positive numbers without a common factor"):
        verifier.verify(graph(), shared(shares), admits)


def test_shares_in_a_file_that_are_no_numbers_are_refused() -> None:
    data = json.loads(shared((3, 1)).to_json())
    data["axes"][0][3] = ["3", "1"]
    with pytest.raises(PlanError, match=r"format says; at /axes/0/3/1: expected an integer"):
        Plan.from_json(json.dumps(data))


def test_a_batch_that_shares_do_not_divide_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"expected dim 0 of features \[8, 6\] to be a multiple of 5"):
        verifier.verify(graph(), shared((3, 2)), admits)


def test_parameters_that_are_used_in_slices_are_refused() -> None:
    config = mlp.Config(widths=(8, 8, 4), batch_size=8)
    whole = trace(mlp.build(config), mlp.example_inputs(config))
    split = template_of_graph(whole, autopar.Mesh("cpu", devices_per_node=2), tp=2)
    with pytest.raises(PlacementError, match="to be used whole over axis tp, which has shares"):
        verifier.verify(whole, shared((3, 1), split), admits)


def test_shares_of_several_axes_or_stages_or_beside_branches_are_refused() -> None:
    both = template_of_graph(graph(), autopar.Mesh("cpu", devices_per_node=4), dp=2, tp=2)
    axes = tuple(axis._replace(shares=(3, 1)) for axis in both.stage.axes)
    with pytest.raises(PlanError, match="expected shares on one axis, found dp=2"):
        verifier.verify(graph(), both.placed(axes=axes), admits)
    own = shared((3, 1))
    fork = Fork("dp", (Branch(0, (graph().nodes[0].name,)), Branch(1, (graph().nodes[1].name,))))
    with pytest.raises(PlanError, match=r"expected branches on equal ranks with equal shares, .* with dp=2"):
        verifier.verify(graph(), own.placed(forks=(fork,)), admits)
    staged = replace(own, stages=(own.stage, own.stage))
    with pytest.raises(PlanError, match="expected shares in plans of one stage"):
        verifier.verify(graph(), staged, admits)


def test_windows_share_out_their_samples_only() -> None:
    config = wide_resnet.Config(batch_size=4)
    whole = trace(wide_resnet.build(config), wide_resnet.example_inputs(config))
    convolution = next(node for node in whole.nodes if ".conv" in node.op)
    axes = (Axis("x", 2, 1, (3, 1)),)
    assert admits(whole, convolution, ((S(0),), (R,)), ((S(0),),), axes) is None
    reason = admits(whole, convolution, ((S(2),), (R,)), ((S(2),),), axes)
    assert reason is not None and "axis x, which has shares, cuts more than the samples" in reason
