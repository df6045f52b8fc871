"""Ranks that would train different things say so, and which ranks they are, before they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar import runtime as rt
from autopar.runtime import agreement
from tests.rank_pool import pool

ROWS = 64


class Linear(rt.Program):
    AXES = {"tp": 2}  # noqa: RUF012
    INPUTS = (rt.Input("x", (4, 8), torch.float32, "R"), rt.Input("y", (4,), torch.float32, "R"))

    def __init__(self, mesh: rt.RankMesh) -> None:
        super().__init__(mesh)
        self.w = rt.Parameter((8,), stored="I", uses=("I",))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x @ self.w, y)


class Lookup(rt.Program):
    """A vocabulary of which each rank holds half, in the embedding and in the loss."""

    AXES = {"tp": 2}  # noqa: RUF012
    INPUTS = (rt.Input("ids", (4,), torch.int64, "R"), rt.Input("labels", (4,), torch.int64, "R"))

    def __init__(self, mesh: rt.RankMesh) -> None:
        super().__init__(mesh)
        self.table = rt.Parameter((ROWS, 6), stored="S(0)", uses=("S(0)",))
        self.head = rt.Parameter((ROWS, 6), stored="S(0)", uses=("S(0)",))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        tp = self.mesh["tp"]
        x = rt.redistribute(rt.embedding(ids, self.table, tp, ROWS), tp, "P -> I")
        logits = rt.redistribute(x, tp, "I -> R") @ self.head.T
        return rt.cross_entropy(logits, labels, class_axes=(tp,), num_classes=ROWS)


def told(act: Any) -> str:
    try:
        act()
    except (rt.ProgramError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def batches(rank: int, world: int, differing: str, step: int, local: bool) -> list[str]:
    built = rt.build(Linear)
    built.init_from({"w": torch.ones(8)})
    found = []
    for number in range(3):
        batch = {"x": torch.ones(4, 8), "y": torch.ones(4)}
        if rank == 1 and number == step and differing:
            batch[differing][2] += 1
        found.append(told(lambda batch=batch: built.train_step(**batch, local=local)))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["x", "y"])
def test_batches_that_differ_are_named_with_their_ranks(name: str) -> None:
    for found in pool(2).run(batches, name, 0, False):
        assert f"found {name} of rank 0, another on rank 1" in found[0] and "local=True" in found[0]
        assert found[1:] == ["", ""]


@pytest.mark.ranks
def test_equal_batches_and_parts_are_let_be() -> None:
    assert pool(2).run(batches, "", 0, False) == [["", "", ""]] * 2
    assert pool(2).run(batches, "", 0, True) == [["", "", ""]] * 2


@pytest.mark.ranks
def test_the_same_part_is_to_be_equal_where_ranks_share_it() -> None:
    assert all("found x of rank 0, another on rank 1" in found[0] for found in pool(2).run(batches, "x", 0, True))


@pytest.mark.ranks
def test_batches_are_compared_in_the_first_steps_alone() -> None:
    assert all(found[1] for found in pool(2).run(batches, "x", 1, False))
    assert agreement.CHECKED_STEPS == 2
    assert pool(2).run(batches, "x", 2, False) == [["", "", ""]] * 2


def weights(rank: int, world: int, seed_by_rank: bool) -> str:
    torch.manual_seed(rank if seed_by_rank else 0)
    built = rt.build(Linear)
    return told(lambda: built.init_from({"w": torch.randn(8)}, broadcast=False))


@pytest.mark.ranks
def test_weights_that_differ_are_named() -> None:
    assert all(
        "the weights" in found and "w of rank 0, another on rank 1" in found for found in pool(2).run(weights, True)
    )
    assert pool(2).run(weights, False) == ["", ""]


def programs(rank: int, world: int, change: str) -> str:
    kind: Any = Linear
    if change == "code" and rank == 1:
        kind = type("Linear", (Linear,), {"forward": lambda self, x, y: F.l1_loss(x @ self.w, y)})
    elif change == "inputs" and rank == 1:
        kind = type("Linear", (Linear,), {"INPUTS": Linear.INPUTS[::-1]})
    elif change == "torch" and rank == 1:
        own, torch.__version__ = torch.__version__, "1.13.0"  # type: ignore[assignment]
        try:
            return told(lambda: rt.build(kind))
        finally:
            torch.__version__ = own
    elif change == "runtime" and rank == 1:
        own_digest, agreement._runtime_digest = agreement._runtime_digest, lambda: "other"  # type: ignore[assignment]
        try:
            return told(lambda: rt.build(kind))
        finally:
            agreement._runtime_digest = own_digest
    return told(lambda: rt.build(kind))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("change", "named"),
    [("code", "program.py"), ("inputs", "program.py"), ("torch", "torch's version"), ("runtime", "autopar.runtime")],
)
def test_programs_and_versions_that_differ_are_named(change: str, named: str) -> None:
    for found in pool(2).run(programs, change):
        assert f"found {named} of rank 0, another on rank 1" in found, found
    assert pool(2).run(programs, "nothing") == ["", ""]


def out_of_range(rank: int, world: int, name: str, value: int) -> str:
    built = rt.build(Lookup)
    generator = torch.Generator().manual_seed(0)
    built.init_from({key: torch.randn(ROWS, 6, generator=generator) for key in ("table", "head")})
    batch = {"ids": torch.arange(4), "labels": torch.arange(4)}
    batch[name][1] = value
    return told(lambda: built.train_step(**batch))


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ids", "labels"])
@pytest.mark.parametrize("value", [ROWS, -1, 10**6, ROWS - 1])
def test_numbers_outside_of_a_split_vocabulary_are_an_index_error(name: str, value: int) -> None:
    found = pool(2).run(out_of_range, name, value)
    if value == ROWS - 1:
        assert found == ["", ""]
    else:
        assert all(text.startswith("IndexError") and str(value) in text for text in found)


@pytest.mark.ranks
def test_labels_that_are_ignored_may_be_any() -> None:
    assert pool(2).run(out_of_range, "labels", -100) == ["", ""]
