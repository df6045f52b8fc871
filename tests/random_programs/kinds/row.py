"""A kind of model: its lines, and the source of a model of such blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from textwrap import dedent, indent

import torch
from torch import nn

from tests.random_programs.cases import Written
from tests.random_programs.check import Subject
from tests.random_programs.programs import Leaf, load

SOURCE = """import torch
import torch.nn.functional as F
from torch import nn

B, T, D, C = {sizes}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
{init}
        self.o = nn.Linear(D, D)

    def forward(self, h, y):
{forward}
        return torch.tanh(self.o(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, D)
        self.one = Block()
        self.two = Block()
        self.head = nn.Linear(D, C)

    def forward(self, x, y, yt):
        h = torch.tanh(self.enter(x))
        h = self.one(h, y)
        h = self.two(h, y)
        z = self.head(h.mean(1))
{loss}
        return loss
"""


@dataclass(frozen=True)
class Row:
    """A kind of model. Lines may name `torch`, `F`, `nn`, the sizes B, T, D, C and `self`.

    forward: changes h [B, T, D], with labels y [B]. loss: makes `loss` of z [B, C], h, y and labels yt [B, T].
    divisor: of D. length: T, where the lines need it. Only `F.dropout` may draw numbers that results depend on: a
    model on one device draws no others as ranks do.
    """

    name: str
    forward: str
    init: str
    loss: str
    divisor: int
    length: int | None

    def source(self, sizes: tuple[int, ...]) -> str:
        """The model's, for B, T, D and C."""
        parts = {name: indent(getattr(self, name), " " * 8) for name in ("init", "forward", "loss")}
        return SOURCE.format(sizes=", ".join(map(str, sizes)), **parts)


def row(
    name: str, forward: str = "pass", *, init: str = "pass", loss: str = "loss = F.cross_entropy(z, y)",
    divisor: int = 1, length: int | None = None,
) -> Row:  # fmt: skip
    """A row whose lines may be indented."""
    return Row(name, *(dedent(text).strip() for text in (forward, init, loss)), divisor, length)


class KindSubject(Subject):
    """A model of a kind; its weights are as its layers and lines make them."""

    @cached_property
    def model(self) -> nn.Module:
        """In float64."""
        torch.set_default_dtype(torch.float64)
        try:
            torch.manual_seed(self.program.seed)
            model: nn.Module = load(self.program.source).Model()
            return model
        finally:
            torch.set_default_dtype(torch.float32)


def subject_of(kind: Row, seed: int) -> KindSubject:
    """A model in random sizes, with a batch."""
    rng = random.Random(f"{kind.name} {seed}")
    batch, length = rng.choice([4, 4, 6, 8, 5]), kind.length or rng.choice([4, 6, 6, 7, 5])
    width = rng.choice([width for width in (8, 8, 6, 7, 9, 12) if width % kind.divisor == 0])
    classes = rng.choice([5, 6, 4])
    leaves = (
        Leaf("x", "float", (batch, length, 6)),
        Leaf("y", "ids", (batch,), high=classes),
        Leaf("yt", "ids", (batch, length), high=classes),
    )
    source = kind.source((batch, length, width, classes))
    return KindSubject(Written(source, leaves, False, rng.randrange(6)))  # type: ignore[arg-type]
