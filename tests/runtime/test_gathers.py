"""Parameters that are gathered once a step: in the order in which they are read, each awaited where it is."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from autopar import runtime as rt
from autopar.runtime import comm, redistribute
from autopar.runtime.mesh import Axis
from autopar.runtime.packing import BUCKET_BYTES, FIRST_BUCKET_BYTES, LONE_BYTES, pack_gathers
from tests.rank_pool import RankPool

WIDTH = 1024  # a matrix is gathered alone, which a vector is not


def test_small_ones_come_with_the_first_of_their_way_and_large_ones_alone() -> None:
    items = [("a", "x", 8), ("b", "x", LONE_BYTES), ("c", "y", 8), ("d", "x", FIRST_BUCKET_BYTES - 8), ("e", "x", 8)]
    found = pack_gathers(items, lambda item: item[1], lambda item: item[2])
    assert [[name for name, _, _ in group] for group in found] == [["a", "d"], ["b"], ["c"], ["e"]]


def test_only_the_first_bucket_of_a_way_is_small() -> None:
    sizes = [LONE_BYTES // 2] * (3 + 2 * (BUCKET_BYTES // LONE_BYTES))
    found = [len(group) for group in pack_gathers(sizes, lambda size: 0, lambda size: size)]
    assert found == [2 * (FIRST_BUCKET_BYTES // LONE_BYTES), 2 * (BUCKET_BYTES // LONE_BYTES), 1]


class Backwards(rt.Program):
    """x · second · third + offset, of which the last is declared first; nothing reads `idle`."""

    AXES = {"dp": 2}  # noqa: RUF012
    MICROBATCHES = 2
    INPUTS = (rt.Input("x", (8, WIDTH), torch.float32, "S(0)", microbatch_dim=0),)

    def __init__(self, mesh: rt.RankMesh) -> None:
        super().__init__(mesh)
        self.idle = rt.Parameter((WIDTH, WIDTH), stored="S(0)", uses=("R",))
        self.third = rt.Parameter((WIDTH, WIDTH), stored="S(0)", uses=("R",))
        self.offset = rt.Parameter((WIDTH,), stored="S(0)", uses=("R",))
        self.second = rt.Parameter((WIDTH, WIDTH), stored="S(0)", uses=("R",))

    def forward(self, x: Tensor) -> Tensor:
        made = (x @ self.second) @ self.third + self.offset
        return redistribute(made.square().sum(), self.mesh["dp"], "P -> I", wait=False)


def read_backwards(rank: int, world: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, WIDTH)
    weights = {name: torch.randn(WIDTH, WIDTH).mul_(0.02).requires_grad_() for name in ("third", "second")}
    weights["offset"] = torch.randn(WIDTH, requires_grad=True)
    part = rt.build(Backwards)
    part.load_full_state_dict({**weights, "idle": torch.zeros(WIDTH, WIDTH)})
    declared, read = ["idle", "third", "offset", "second"], ["second", "third", "offset", "idle"]
    assert orders_of_a_step(part, x) == (declared, read)
    assert orders_of_a_step(part, x) == orders_of_a_step(part, x) == (read, read)
    loss = ((x @ weights["second"]) @ weights["third"] + weights["offset"]).square().sum()
    loss.backward()
    for name, gradient in part.full_gradients().items():  # of three steps
        torch.testing.assert_close(gradient, weights[name].grad * 3, rtol=1e-4, atol=1e-2)


def orders_of_a_step(part: rt.Rank, x: Tensor) -> tuple[list[str], list[str]]:
    """The order in which gathers start, and that in which they are awaited."""
    names = {id(part._state.parameters[name].local): name for name in ("idle", "third", "second")}
    started: list[str] = []
    awaited: list[str] = []
    start = comm.start_all_gather

    def watched(output: Tensor, shard: Tensor, axis: Axis) -> comm.Wait:
        name, wait = names.get(id(shard), "offset"), start(output, shard, axis)  # small ones travel in a copy
        started.append(name)

        def waits() -> None:
            awaited.append(name)
            wait()

        return waits

    with patch.object(comm, "start_all_gather", watched):
        part.train_step(x)
    return started, awaited


def test_parameters_are_gathered_in_the_order_in_which_they_are_read(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(read_backwards)
