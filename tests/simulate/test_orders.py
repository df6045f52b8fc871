"""When blocks' parameters are brought: a block that others stand in begins before them, and ends after them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.schedule import BACKWARD
from autopar.profiler import template_profile
from autopar.simulate.parted import stage_in_one
from autopar.simulate.parts import Part
from autopar.trace import trace


class Inner(nn.Module):
    """A block of two linear layers; the second is a block without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.Sequential(nn.GELU()), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Outer(nn.Module):
    """An embedding of its own, then blocks, and nothing after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(32, 8), nn.ModuleList(Inner() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Whole(nn.Module):
    """The outer block, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Outer(), nn.Linear(8, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens)).square().mean()


@cache
def lowered() -> Part:
    """The program of a rank that regathers all parameters, with its orders."""
    model, batch = Whole(), {"tokens": torch.zeros(4, 6, dtype=torch.long)}
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    plan = autopar.template_plan(model, mesh, batch, dp=2, zero=3)
    (part,) = stage_in_one(trace(model, batch), plan, template_profile()).parts
    return part


def test_units_begin_outermost_first_and_end_with_the_last_that_is_inside() -> None:
    program, orders = lowered().program, lowered().orders
    assert [program.units[unit] for unit in orders.visits] == ["body", "body.layers.0", "body.layers.1"]
    ends = {program.units[unit]: number for unit, number in orders.last.items()}
    assert ends["body"] == ends["body.layers.1"] > ends["body.layers.0"]


def test_the_backward_pass_enters_the_inner_unit_first_where_both_return_the_same() -> None:
    program, direction = lowered().program, lowered().directions[BACKWARD]
    entered = [[program.units[unit] for unit in units] for units in direction.entered.values()]
    assert entered == [["body.layers.1", "body"], ["body.layers.0"]]
    numbers = list(direction.entered)
    assert numbers[0] == max(step.number for step in direction.steps if step.item.unit not in (0,))


def test_ahead_of_a_call_that_runs_again_is_what_it_begins_with() -> None:
    model, batch = Whole(), {"tokens": torch.zeros(4, 6, dtype=torch.long)}
    plan = autopar.template_plan(model, autopar.Mesh("cpu", devices_per_node=2), batch, dp=2, zero=3)
    again = replace(plan, recompute=("body.layers.0", "body.layers.1"))
    (part,) = stage_in_one(trace(model, batch), again, template_profile()).parts
    number = {path: unit for unit, path in enumerate(part.program.units)}
    first, second, body = number["body.layers.0"], number["body.layers.1"], number["body"]
    assert part.orders.before == {first: (body,), second: (first,)}
    assert sorted(part.orders.again.values()) == [(first,), (second,)]
    assert part.orders.running_again == {first, second}
    (whole,) = stage_in_one(trace(model, batch), replace(plan, recompute=("body",)), template_profile()).parts
    assert whole.orders.begun_with(number["body.layers.1"]) == (body, first)
