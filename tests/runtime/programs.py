"""A small transformer with tied embeddings, and programs as the emitter would write them for it.

One class, `Emitted`, holds the local computation of every plan; a plan is a mesh and the placements of its
parameters. Tensor parallelism runs over the axis "tp", everything else over "dp" (and "node" where there is
one).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import runtime as rt
from autopar.runtime import redistribute

aten = torch.ops.aten


@dataclass(frozen=True)
class Sizes:
    vocab: int = 30
    width: int = 8
    heads: int = 4
    hidden: int = 16
    layers: int = 2
    batch: int = 8
    length: int = 6


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query = nn.Linear(sizes.width, sizes.width)
        self.key = nn.Linear(sizes.width, sizes.width)
        self.value = nn.Linear(sizes.width, sizes.width)
        self.output = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.norm_2 = nn.LayerNorm(sizes.width)
        self.up = nn.Linear(sizes.width, sizes.hidden)
        self.down = nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """The single-device model that all programs below stand for."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocab, sizes.width)
        self.position = nn.Embedding(sizes.length, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Plan:
    """A mesh, and how parameters that tensor parallelism leaves whole are stored on the other axes."""

    axes: dict[str, int] = field(default_factory=dict)
    zero: int = 0
    zero_dim: int = 0
    microbatches: int = 1
    batch_axes: tuple[str, ...] = ("dp",)

    @property
    def batch(self) -> str:
        return " ".join("S(0)" if name in self.batch_axes else "R" for name in self.axes)

    def parameter(self, shape: tuple[int, ...], tp: str = "I->R", dtype: torch.dtype = torch.float32) -> rt.Parameter:
        """`tp`: stored and used type on the axis "tp"; the batch axes follow the ZeRO stage."""
        stored, used = tp.split("->")
        dim = min(self.zero_dim, len(shape) - 1)
        kept = f"S({dim})" if self.zero else "I"
        if stored.startswith("S") and kept == stored:
            kept = "S(1)" if kept == "S(0)" and len(shape) > 1 else "I" if len(shape) == 1 else "S(0)"
        return rt.Parameter(
            shape,
            dtype,
            stored=" ".join(stored if name == "tp" else kept for name in self.axes),
            uses=(" ".join(used if name == "tp" else "R" for name in self.axes),),
            regather=self.zero == 3 and kept != "I",
            reduce_each_microbatch=self.zero >= 2 and kept != "I",
        )


def emitted(sizes: Sizes, plan: Plan, dtype: torch.dtype = torch.float32) -> type[rt.Program]:
    """The program of the model under a plan, as a class to build."""
    has_tp = "tp" in plan.axes
    column, row = ("S(0)->S(0)", "S(1)->S(1)") if has_tp else ("I->R", "I->R")

    def linear(out: int, into: int, kind: str) -> rt.Parameters:
        weight = {"column": column, "row": row}[kind]
        bias = column if kind == "column" else "I->I"
        return rt.Parameters(
            weight=plan.parameter((out, into), weight, dtype), bias=plan.parameter((out,), bias, dtype)
        )

    def norm() -> rt.Parameters:
        return rt.Parameters(
            weight=plan.parameter((sizes.width,), "I->I", dtype),
            bias=plan.parameter((sizes.width,), "I->I", dtype),
        )

    class EmittedAttention(rt.Block):
        def __init__(self, mesh: rt.RankMesh) -> None:
            super().__init__(mesh)
            self.query = linear(sizes.width, sizes.width, "column")
            self.key = linear(sizes.width, sizes.width, "column")
            self.value = linear(sizes.width, sizes.width, "column")
            self.output = linear(sizes.width, sizes.width, "row")

    class EmittedLayer(rt.Block):
        def __init__(self, mesh: rt.RankMesh) -> None:
            super().__init__(mesh)
            self.norm_1 = norm()
            self.attention = EmittedAttention(mesh)
            self.norm_2 = norm()
            self.up = linear(sizes.hidden, sizes.width, "column")
            self.down = linear(sizes.width, sizes.hidden, "row")

        def forward(self, x: Tensor) -> Tensor:
            a, width = self.attention, [sizes.width]
            h = aten.layer_norm.default(x, width, self.norm_1.weight, self.norm_1.bias)
            h = self.enter(h)
            q, k, v = (
                aten.linear.default(h, p.weight, p.bias)
                .view(h.shape[0], h.shape[1], -1, sizes.width // sizes.heads)
                .transpose(1, 2)
                for p in (a.query, a.key, a.value)
            )
            mixed = aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, True).transpose(1, 2).flatten(2)
            x = x + self.leave(aten.linear.default(mixed, a.output.weight)) + a.output.bias
            h = self.enter(aten.layer_norm.default(x, width, self.norm_2.weight, self.norm_2.bias))
            h = aten.gelu.default(aten.linear.default(h, self.up.weight, self.up.bias))
            return x + self.leave(aten.linear.default(h, self.down.weight)) + self.down.bias

        def enter(self, x: Tensor) -> Tensor:
            return redistribute(x, self.mesh["tp"], "I -> R") if has_tp else x

        def leave(self, x: Tensor) -> Tensor:
            return redistribute(x, self.mesh["tp"], "P -> I") if has_tp else x

    class Emitted(rt.Program):
        AXES = plan.axes
        MICROBATCHES = plan.microbatches
        TIED = {"head.weight": "token.weight"}  # noqa: RUF012
        INPUTS = tuple(
            rt.Input(name, (sizes.batch, sizes.length), torch.int64, plan.batch, 0) for name in ("tokens", "labels")
        )

        def __init__(self, mesh: rt.RankMesh) -> None:
            super().__init__(mesh)
            self.token = rt.Parameters(weight=plan.parameter((sizes.vocab, sizes.width), column, dtype))
            self.position = rt.Parameters(weight=plan.parameter((sizes.length, sizes.width), "I->I", dtype))
            self.layers = nn.ModuleList(EmittedLayer(mesh) for _ in range(sizes.layers))
            self.norm = norm()

        def prepare(self, microbatches: list[tuple[Tensor, ...]]) -> None:
            self.count = sum(rt.valid_count(labels, self._batch_axes()) for _, labels in microbatches)

        def _batch_axes(self) -> tuple[rt.Axis, ...]:
            return tuple(axis for axis in self.axes if axis.name in plan.batch_axes)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            tp = (self.mesh["tp"],) if has_tp else ()
            if has_tp:
                x = rt.embedding(tokens, self.token.weight, tp, sizes.vocab)
                x = redistribute(x, self.mesh["tp"], "P -> I")
            else:
                x = aten.embedding.default(self.token.weight, tokens)
            x = x + self.position.weight
            for layer in self.layers:
                x = layer(x)
            x = aten.layer_norm.default(x, [sizes.width], self.norm.weight, self.norm.bias)
            if has_tp:
                x = redistribute(x, self.mesh["tp"], "I -> R")
            logits = aten.linear.default(x, self.token.weight)
            loss = rt.cross_entropy(
                logits.flatten(0, 1),
                labels.flatten(),
                reduction_axes=self._batch_axes(),
                class_axes=tp,
                num_classes=sizes.vocab,
                count=self.count,
            )
            for axis in self._batch_axes():
                loss = redistribute(loss, axis, "P -> I")
            return loss

    return Emitted


def batch(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Tokens and labels, of which some are ignored, unevenly over the rows."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes.batch, sizes.length)
    tokens = torch.randint(sizes.vocab, shape, generator=generator)
    labels = torch.randint(sizes.vocab, shape, generator=generator)
    labels[0, :4] = -100
    labels[1, 1] = -100
    return {"tokens": tokens, "labels": labels}
