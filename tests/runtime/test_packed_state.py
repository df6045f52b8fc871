"""Packed parameters of odd shapes in odd shards: whole state in and out, and checkpoints between any two packings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar import runtime as rt
from tests.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

Tensors = dict[str, Tensor]
SHAPES = {
    "q": (7, 5), "k": (3, 5), "v": (4, 5), "c": (6, 11), "m": (5, 9), "a": (9, 3), "b": (5, 9), "s": (13,), "z": (),
}  # fmt: skip
SEPARATE: dict[str, Any] = {name: (shape, {}) for name, shape in SHAPES.items()}
MERGED: dict[str, Any] = {
    "deep.qkv": ((14, 5), {"pieces": tuple(rt.Piece(f"..{name}", SHAPES[name]) for name in "qkv")}),
    "c_0": ((6, 4), {"pieces": (rt.Piece("c", (6, 11), 1, 0, 4),)}),
    "c_1": ((6, 7), {"pieces": (rt.Piece("c", (6, 11), 1, 4, 7),)}),
    "m_t": ((9, 5), {"pieces": (rt.Piece("m", (5, 9), transposed=True),)}),
    "ab": ((9, 8), {"pieces": (rt.Piece("a", (9, 3)), rt.Piece("b", (5, 9), transposed=True)), "packed_dim": 1}),
    "s": ((13,), {}), "z": ((), {}),
}  # fmt: skip
CROSSED: dict[str, Any] = {  # slices of one parameter in two others, in another order
    "s_k": ((3, 10), {"pieces": (rt.Piece("k", (3, 5)), rt.Piece("q", (7, 5), 0, 4, 3)), "packed_dim": 1}),
    "v_q": ((8, 5), {"pieces": (rt.Piece("q", (7, 5), 0, 0, 4), rt.Piece("v", (4, 5)))}),
    "c_t": ((11, 6), {"pieces": (rt.Piece("c", (6, 11), transposed=True),)}),
    "m": ((5, 9), {}), "a": ((9, 3), {}), "b": ((5, 9), {}), "z": ((), {}),
    "s_1": ((9,), {"pieces": (rt.Piece("s", (13,), 0, 4, 9),)}),
    "s_0": ((4,), {"pieces": (rt.Piece("s", (13,), 0, 0, 4),)}),
}  # fmt: skip


def separate(p: Any) -> Tensors:
    return {name: getattr(p, name) for name in SHAPES}


def merged(p: Any) -> Tensors:
    qkv, c, (a, b) = p.deep.qkv, torch.cat([p.c_0, p.c_1], 1), p.ab.split([3, 5], 1)
    return {"q": qkv[:7], "k": qkv[7:10], "v": qkv[10:], "c": c, "m": p.m_t.t(), "a": a, "b": b.t(), "s": p.s, "z": p.z}


def crossed(p: Any) -> Tensors:
    q = torch.cat([p.v_q[:4], p.s_k[:, 5:]])
    found = {"q": q, "k": p.s_k[:, :5], "v": p.v_q[4:], "c": p.c_t.t(), "s": torch.cat([p.s_0, p.s_1])}
    return {**{name: getattr(p, name) for name in "mabz"}, **found}


def program(
    axes: dict[str, int], declared: dict[str, Any], stored: dict[str, str], of_model: Callable[[Any], Tensors]
) -> type[rt.Program]:
    """A weighted sum of squares of the model's parameters, however they are stored."""
    none = " ".join("I" for _ in axes)

    class Packed(rt.Program):
        AXES = axes
        INPUTS = (rt.Input("x", (), torch.float32, " ".join("R" for _ in axes)),)
        TIED = {"again": "inner.k"}  # noqa: RUF012

        def __init__(self, mesh: rt.RankMesh) -> None:
            super().__init__(mesh)
            self.inner, deep = rt.Parameters(), rt.Parameters()
            for name, (shape, options) in declared.items():
                placed = stored.get(name, none)
                holder = deep if name.startswith("deep.") else self.inner
                setattr(holder, name.removeprefix("deep."), rt.Parameter(shape, stored=placed, uses=(none,), **options))
            self.inner.deep = deep

        def forward(self, x: Tensor) -> Tensor:
            own = of_model(self.inner)
            return torch.stack([(own[name] * (i + 1)).square().sum() for i, name in enumerate(SHAPES)]).sum() * x

    return Packed


FOUR = {"deep.qkv": "S(0) S(0)", "c_0": "S(1) S(0)", "c_1": "I S(1)", "m_t": "S(1) I", "ab": "S(0) S(1)", "s": "S(0) I"}
TWO = {"s_k": "S(1)", "v_q": "S(0)", "c_t": "S(0)", "m": "S(1)", "s_1": "S(0)"}
LAYOUTS: dict[str, tuple[int, type[rt.Program]]] = {
    "merged on 4": (4, program({"a": 2, "b": 2}, MERGED, FOUR, merged)),
    "crossed on 2": (2, program({"a": 2}, CROSSED, TWO, crossed)),
    "separate on 2": (2, program({"a": 2}, SEPARATE, {"c": "S(1)", "q": "S(0)", "b": "S(0)"}, separate)),
    "separate on 1": (1, program({}, SEPARATE, {}, separate)),
    "merged on 1": (1, program({}, MERGED, {}, merged)),
}


def start() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    state = {f"inner.{name}": torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {**state, "again": state["inner.k"]}


def optimizer_of(part: rt.Rank, lr: float, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(part.parameters(), lr=lr / 10, momentum=0.9)
    groups = [
        {"params": [p for p in part.parameters() if p.dim() > 1], "lr": lr, "weight_decay": 0.1},
        {"params": [p for p in part.parameters() if p.dim() <= 1], "lr": lr / 2, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups)


def steps(part: rt.Rank, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        losses.append(part.train_step(torch.tensor(0.5)).item())
        optimizer.step()
    return losses


def state_of(rank: int, world: int, layout: str) -> tuple[Tensors, Tensors]:
    part = rt.build(LAYOUTS[layout][1])
    part.load_full_state_dict(start())
    part.train_step(torch.tensor(0.5))
    return part.full_state_dict(), part.full_gradients()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_state_and_gradients_have_the_models_names(layout: str, rank_pool: Callable[[int], RankPool]) -> None:
    expected = start()
    gradients = {f"inner.{name}": expected[f"inner.{name}"] * (i + 1) ** 2 for i, name in enumerate(SHAPES)}
    for state, found in rank_pool(LAYOUTS[layout][0]).run(state_of, layout):
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
        torch.testing.assert_close(found, {**gradients, "again": gradients["inner.k"]})


def save(rank: int, world: int, layout: str, folder: str, kind: str) -> tuple[list[float], Tensors]:
    part = rt.build(LAYOUTS[layout][1])
    part.load_full_state_dict(start())
    optimizer = optimizer_of(part, 0.01, kind)
    steps(part, optimizer, 3)
    for group in optimizer.param_groups:
        group["lr"] *= 3
    rt.save_checkpoint(folder, part, optimizer, step=3)
    return steps(part, optimizer, 3), part.full_state_dict()


def resume(rank: int, world: int, layout: str, folder: str, kind: str) -> tuple[list[float], Tensors]:
    part = rt.build(LAYOUTS[layout][1])
    part.load_full_state_dict({name: torch.zeros_like(tensor) for name, tensor in start().items()})
    optimizer = optimizer_of(part, 0.5, kind)
    steps(part, optimizer, 1)  # whatever it holds is replaced
    assert rt.load_checkpoint(folder, part, optimizer) == 3
    return steps(part, optimizer, 3), part.full_state_dict()


@pytest.mark.parametrize(
    ("saved", "loaded", "kind"),
    [
        ("merged on 4", "crossed on 2", "adamw"),
        ("crossed on 2", "merged on 4", "sgd"),
        ("separate on 2", "merged on 4", "adamw"),
        ("merged on 4", "separate on 1", "adamw"),
        ("merged on 1", "separate on 2", "sgd"),
    ],
)
def test_training_goes_on_under_another_packing(
    saved: str, loaded: str, kind: str, rank_pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    expected, tensors = rank_pool(LAYOUTS[saved][0]).run(save, saved, str(tmp_path), kind)[0]
    for losses, found in rank_pool(LAYOUTS[loaded][0]).run(resume, loaded, str(tmp_path), kind):
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(found, tensors, rtol=1e-6, atol=1e-7)
