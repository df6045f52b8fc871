"""Every change of type, forward and backward, against whole tensors; integers, so exactly equal.

The oracle uses nothing but the meaning of the types: what a rank holds of a tensor (or of a gradient) of a
type, and how whole tensors come back from what the ranks hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autopar import runtime as rt
from autopar.runtime.placement import (
    conversion_steps,
    conversion_way,
    local_slices,
    parse_placement,
    parse_type,
    parse_way,
)
from autopar.runtime.redistributing import TABLE, redistribute
from autopar.runtime.stored import sized_steps
from tests.rank_pool import RankPool

CHANGES = [
    "I -> R", "R -> I", "I -> S(0)", "I -> S(2)", "R -> S(0)", "R -> S(1)", "S(0) -> R", "S(1) -> R",
    "S(0) -> I", "S(2) -> I", "S(0) -> S(1)", "S(1) -> S(0)", "S(1) -> S(2)", "S(2) -> S(0)", "P -> R",
    "P -> I", "P -> S(0)", "P -> S(1)", "I -> P", "R -> P",
]  # fmt: skip
SHAPES = [(4, 8, 4), (5, 3, 7), (1, 4, 2)]
SHARED = {2: ((3, 1), (4, 8, 4)), 4: ((1, 3, 2, 2), (8, 16, 8))}  # by world: shares, and a shape that they divide
DUAL = {"S": "S", "I": "I", "R": "P", "P": "R"}


def whole_tensor(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, shape, generator=generator).double()


def held(whole: Tensor, kind: str, rank: int, world: int, seed: int, shares: tuple[int, ...] = ()) -> Tensor:
    """What a rank holds of a tensor of a type; summands are random but for the last rank's."""
    type_ = parse_type(kind)
    if type_.is_shard and shares:
        unit = whole.size(type_.dim) // sum(shares)
        return whole.split([unit * share for share in shares], type_.dim)[rank].clone()
    if type_.is_shard:
        chunk = -(-whole.size(type_.dim) // world)
        parts = whole.split(chunk, type_.dim)
        empty = whole.narrow(type_.dim, 0, 0)
        return (parts[rank] if rank < len(parts) else empty).clone()
    if type_.kind != "P":
        return whole.clone()
    summands = [whole_tensor(tuple(whole.shape), seed + 1 + r) for r in range(world - 1)]
    summands.append(whole - sum(summands, torch.zeros(())))
    return summands[rank]


def joined(parts: list[Tensor], kind: str) -> Tensor:
    """The whole tensor from what the ranks hold; equal copies must be equal."""
    type_ = parse_type(kind)
    if type_.is_shard:
        return torch.cat(parts, type_.dim)
    if type_.kind == "P":
        return torch.stack(parts).sum(0)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def dual(kind: str) -> str:
    return kind if kind.startswith("S") else DUAL[kind]


def change_all(
    rank: int, world: int, shapes: list[tuple[int, ...]] = SHAPES, shares: tuple[int, ...] = ()
) -> list[tuple[Tensor, Tensor]]:
    axis = replace(rt.make_rank_mesh({"x": world}).axes[0], shares=shares)
    results = []
    for change in CHANGES:
        source, target = change.split(" -> ")
        for shape in shapes:
            x = held(whole_tensor(shape, 0), source, rank, world, 10, shares).requires_grad_()
            type_ = parse_type(source)
            y = redistribute(x, axis, change, shape[type_.dim] if type_.is_shard else None)
            y.backward(held(whole_tensor(shape, 1), dual(target), rank, world, 20, shares))
            assert y.is_contiguous()
            results.append((y.detach(), x.grad))
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_every_change_equals_the_whole(rank_pool: Callable[[int], RankPool], world: int) -> None:
    check_all(rank_pool(world).run(change_all), SHAPES)


@pytest.mark.parametrize("world", SHARED)
def test_every_change_of_unequal_shares_equals_the_whole(rank_pool: Callable[[int], RankPool], world: int) -> None:
    shares, shape = SHARED[world]
    check_all(rank_pool(world).run(change_all, [shape], shares), [shape])


def check_all(by_rank: list[list[tuple[Tensor, Tensor]]], shapes: list[tuple[int, ...]]) -> None:
    for index, (change, shape) in enumerate((c, s) for c in CHANGES for s in shapes):
        source, target = change.split(" -> ")
        values = joined([results[index][0] for results in by_rank], target)
        gradients = joined([results[index][1] for results in by_rank], dual(source))
        assert torch.equal(values, whole_tensor(shape, 0)), (change, shape)
        assert torch.equal(gradients, whole_tensor(shape, 1)), (change, shape)


def test_the_list_of_changes_is_the_table() -> None:
    kinds = {tuple(parse_type(word).kind for word in change.split(" -> ")) for change in CHANGES}
    assert kinds == set(TABLE)


def test_unknown_change_is_refused() -> None:
    axis = rt.Axis("x", 2, 0, None)
    with pytest.raises(rt.ProgramError, match="no redistribution 'S\\(0\\) -> P'"):
        redistribute(torch.ones(2), axis, "S(0) -> P")
    with pytest.raises(rt.ProgramError, match="expected a placement type"):
        redistribute(torch.ones(2), axis, "S(x) -> R")


def change_integers(rank: int, world: int) -> bool:
    axis = rt.make_rank_mesh({"x": world}).axes[0]
    whole = torch.arange(10).view(5, 2)
    part = redistribute(whole, axis, "I -> S(0)")
    mask = redistribute(part > 4, axis, "S(0) -> R", 5)
    summands = redistribute(mask, axis, "R -> P")
    again = [
        redistribute(summands, axis, "P -> R"),
        redistribute(redistribute(summands, axis, "P -> S(0)"), axis, "S(0) -> R", 5),
    ]
    assert all(torch.equal(found, mask) for found in again)
    return torch.equal(redistribute(part, axis, "S(0) -> R", 5), whole) and torch.equal(mask, whole > 4)


def test_integers_and_bools(rank_pool: Callable[[int], RankPool]) -> None:
    assert all(rank_pool(4).run(change_integers))


PATHS = [
    ("S(0) S(0)", "R R"), ("R R", "S(0) S(0)"), ("S(0) S(0)", "R S(0)"), ("R S(0)", "S(0) S(0)"),
    ("S(0) S(1)", "S(1) S(0)"), ("S(0) I", "R S(1)"), ("S(1) S(1)", "S(0) R"), ("I I", "R R"),
    ("S(0) S(1)", "R S(1) -> R R"), ("S(0) S(1)", "S(0) R -> R R"), ("S(0) S(0)", "S(0) S(1) -> S(0) R -> R R"),
]  # fmt: skip


def walk_paths(rank: int, world: int) -> None:
    """From each placement to another, step by step, on a 2 × 2 mesh and a shape that nothing divides."""
    mesh = rt.make_rank_mesh({"a": 2, "b": 2})
    whole = whole_tensor((5, 7), 0)
    for stored, used in PATHS:
        start, goal = parse_placement(stored, 2), parse_way(used, 2)[-1]
        x = whole[local_slices(whole.shape, start, mesh.axes)].clone()
        for sized in sized_steps(whole.shape, start, conversion_way(start, used), mesh):
            step = sized.step
            x = redistribute(x, mesh.axes[step.axis], f"{step.source} -> {step.target}", sized.sizes)
        assert torch.equal(x, whole[local_slices(whole.shape, goal, mesh.axes)]), (stored, used)


def test_two_axes_that_shard_one_dim(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(4).run(walk_paths)


def steps(stored: str, used: str) -> list[str]:
    found = conversion_steps(parse_placement(stored, 2), parse_placement(used, 2))
    return [f"{step.axis}: {step.source} -> {step.target}" for step in found]


def test_steps_put_slices_first_and_gathers_last() -> None:
    assert steps("S(0) I", "R S(1)") == ["1: I -> S(1)", "0: S(0) -> R"]
    assert steps("S(0) I", "R R") == ["1: I -> R", "0: S(0) -> R"]
    assert steps("S(0) S(0)", "R R") == ["1: S(0) -> R", "0: S(0) -> R"]
    assert steps("S(0) S(0)", "R S(0)") == ["1: S(0) -> R", "0: S(0) -> R", "1: R -> S(0)"]
    assert steps("I S(0)", "I S(0)") == []


@pytest.mark.parametrize("way", ["R R", "R S(0) -> R R", "S(0) S(0) -> S(0) R -> R R", "S(0) R"])
def test_a_use_names_its_steps(way: str) -> None:
    stored = parse_placement("S(0) S(0)", 2)
    if way in ("R R", "S(0) R"):
        assert conversion_way(stored, way) == conversion_steps(stored, parse_placement(way, 2))
    else:  # the outer axis before the inner one; no step at all
        with pytest.raises(rt.ProgramError, match=r"change one type, on no axis outside .*found S\(0\) S\(0\) ->"):
            conversion_way(stored, way)


@pytest.mark.parametrize(("size", "axes"), [(7, (2, 2)), (1, (4,)), (50257, (4, 2)), (0, (2,))])
def test_local_sizes_add_up(size: int, axes: tuple[int, ...]) -> None:
    covered: list[int] = []
    for coordinate in torch.cartesian_prod(*[torch.arange(n) for n in axes]).view(-1, len(axes)).tolist():
        split = [rt.Axis(f"a{i}", n, c, None) for i, (n, c) in enumerate(zip(axes, coordinate, strict=True))]
        start = rt.local_offset(size, *split)
        covered += range(start, start + rt.local_size(size, *split))
    assert covered == list(range(size))
