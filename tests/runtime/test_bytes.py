"""The bytes that a step moves are those that its declarations say and that torch.distributed is handed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from autopar import runtime as rt
from autopar.runtime import comm
from tests.rank_pool import RankPool
from tests.runtime.programs import Model, Plan, Sizes, batch, emitted

SIZES = Sizes(vocab=29, width=8, hidden=13)


def counted(rank: int, world: int, plan: Plan) -> dict[tuple[str, str], int]:
    """Bytes of one step; those that reach torch.distributed must be as many."""
    part = rt.build(emitted(SIZES, plan))
    part.init_from(Model(SIZES))
    handed: Counter[str] = Counter()

    def spy(name: str, original: Callable[..., Any], largest: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            handed[name] += args[largest].numel() * args[largest].element_size()
            return original(*args, **kwargs)

        return call

    with (
        mock.patch.object(dist, "all_reduce", spy("all_reduce", dist.all_reduce, 0)),
        mock.patch.object(comm, "_all_gather", spy("all_gather", comm._all_gather, 0)),
        mock.patch.object(dist, "all_to_all_single", spy("reduce_scatter", dist.all_to_all_single, 1)),
        rt.count_bytes() as counts,
    ):
        part.train_step(**batch(SIZES, 0))
    by_kind: Counter[str] = Counter()
    for (kind, _), number in counts.items():
        by_kind[kind] += number
    assert by_kind == handed
    return dict(counts)


def whole_bytes(multiple: int = 1, names: Callable[[str], bool] = lambda name: True) -> int:
    """Bytes of the model's parameters, the first dim padded to a multiple."""
    shapes = [tensor.shape for name, tensor in Model(SIZES).named_parameters() if names(name)]
    return sum(4 * -(-shape[0] // multiple) * multiple * shape[1:].numel() for shape in shapes)


LOSS_BYTES = 2 * 4  # the valid count and the loss, a float32 each


def in_layers(name: str) -> bool:
    return name.startswith("layers.")


def test_data_parallel(rank_pool: Callable[[int], RankPool]) -> None:
    for counts in rank_pool(2).run(counted, Plan({"dp": 2})):
        assert counts == {("all_reduce", "dp"): whole_bytes() + LOSS_BYTES}


def test_zero_1_and_2(rank_pool: Callable[[int], RankPool]) -> None:
    for counts in rank_pool(2).run(counted, Plan({"dp": 2}, zero=1)):
        assert counts.pop(("all_reduce", "dp")) == LOSS_BYTES
        assert counts == {("all_gather", "dp"): whole_bytes(2), ("reduce_scatter", "dp"): whole_bytes(2)}
    for counts in rank_pool(2).run(counted, Plan({"dp": 2}, zero=2, microbatches=4)):
        assert counts["all_gather", "dp"] == whole_bytes(2)
        assert counts["reduce_scatter", "dp"] == 4 * whole_bytes(2)


def test_zero_3_gathers_twice_in_blocks_and_once_in_the_root(rank_pool: Callable[[int], RankPool]) -> None:
    root = whole_bytes(2, lambda name: not in_layers(name))
    layers = whole_bytes(2, in_layers)
    for microbatches in (1, 2):
        plan = Plan({"dp": 2}, zero=3, microbatches=microbatches)
        for counts in rank_pool(2).run(counted, plan):
            assert counts["all_gather", "dp"] == microbatches * (root + 2 * layers)
            assert counts["reduce_scatter", "dp"] == microbatches * (root + layers)


def test_hybrid_shards_reduce_before_they_sum(rank_pool: Callable[[int], RankPool]) -> None:
    """Stored S(0) on one axis and I on the other: the all-reduce moves shards, not whole gradients."""

    counts = rank_pool(4).run(counted_hybrid)
    assert all(count["reduce_scatter", "dp"] == whole_bytes(2) for count in counts)
    assert counts[0]["all_reduce", "node"] == whole_bytes(2) // 2 + LOSS_BYTES  # the first rank has no short shard


class HybridPlan(Plan):
    """Sharded over dp inside each node, whole across nodes."""

    def parameter(self, shape: tuple[int, ...], tp: str = "", dtype: torch.dtype = torch.float32) -> rt.Parameter:
        return rt.Parameter(shape, dtype, stored="I S(0)", uses=("R R",))


def counted_hybrid(rank: int, world: int) -> dict[tuple[str, str], int]:
    return counted(rank, world, HybridPlan({"node": 2, "dp": 2}, batch_axes=("node", "dp")))
