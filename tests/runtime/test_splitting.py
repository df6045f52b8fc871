"""A backward pass in two parts gives every gradient that one in one part gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autopar.runtime.splitting import BackwardOutline, SplitBackward


def plain(x: Tensor, p: list[Tensor]) -> list[Tensor]:
    return [torch.tanh(x @ p[0]) @ p[1] + p[3]]


def shared_by_layers(x: Tensor, p: list[Tensor]) -> list[Tensor]:
    for _ in range(3):
        x = torch.tanh(x @ p[0] + p[3])
    return [x @ p[1]]


def beside_the_way(x: Tensor, p: list[Tensor]) -> list[Tensor]:
    return [(x @ p[0]).square().sum() + (p[0] @ p[1]).sum() + p[2].square().sum()]


def several_roots(x: Tensor, p: list[Tensor]) -> list[Tensor]:
    first = torch.tanh(x @ p[0])
    return [first, (first @ p[1]).relu(), p[2] @ p[0]]


def through_views(x: Tensor, p: list[Tensor]) -> list[Tensor]:
    rows = (x @ p[0]).view(2, 2, 4)
    return [(rows.transpose(0, 1) * p[3]).reshape(4, 4).t(), (x @ (p[1] @ p[2])).t()]


def a_product_of_parameters(x: Tensor, p: list[Tensor]) -> list[Tensor]:
    both = p[0] @ p[1]
    return [torch.tanh(x @ both) @ both, (x * p[3]).sum()]


class Sent(torch.autograd.Function):
    """A product whose backward pass is counted, as one that sends something."""

    times = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        Sent.times += 1
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum(0)


def with_a_function(x: Tensor, p: list[Tensor]) -> list[Tensor]:
    return [Sent.apply(torch.tanh(x @ p[0]), p[3]) @ p[1]]


MODELS = [
    plain,
    shared_by_layers,
    beside_the_way,
    several_roots,
    through_views,
    a_product_of_parameters,
    with_a_function,
]


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_one_pass(model: object) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, dtype=torch.float64)
    values = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)] + [torch.randn(4, dtype=torch.float64)]
    weights: list[Tensor] = []

    def roots(received: Tensor, leaves: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        made = model(received, leaves)  # type: ignore[operator]
        while len(weights) < len(made):
            weights.append(torch.randn_like(made[len(weights)]))
        return [(tensor, weight) for tensor, weight in zip(made, weights, strict=True)]

    whole, split = ([t.clone().requires_grad_() for t in (x, *values)] for _ in range(2))
    pairs = roots(whole[0], whole[1:])
    torch.autograd.backward([tensor for tensor, _ in pairs], [weight for _, weight in pairs])
    seen: list[int] = []
    for number, leaf in enumerate(split[1:]):
        leaf.register_post_accumulate_grad_hook(lambda _, number=number: seen.append(number))
    ends = [(get_gradient_edge(tensor), weight) for tensor, weight in roots(split[0], split[1:])]
    parts = SplitBackward(ends, [split[0]], split[1:])
    parts.first()
    torch.testing.assert_close(split[0].grad, whole[0].grad)
    assert not seen and all(leaf.grad is None for leaf in split[1:])
    parts.second()
    for number, (leaf, other) in enumerate(zip(split[1:], whole[1:], strict=True)):
        assert (leaf.grad is None) == (other.grad is None)
        assert seen.count(number) == (other.grad is not None)
        if other.grad is not None:
            torch.testing.assert_close(leaf.grad, other.grad)


def test_a_function_of_the_runtime_runs_backward_once() -> None:
    """What it sends for a parameter's gradient it has sent with that of its input."""
    x, weight, bias = (torch.randn(4, 4).requires_grad_(), torch.randn(4, 4).requires_grad_(), torch.ones(4))
    (made,) = with_a_function(x, [weight, weight, weight, bias.requires_grad_()])
    Sent.times = 0
    split = SplitBackward([(get_gradient_edge(made), torch.ones(4, 4))], [x], [weight, bias])
    split.first()
    split.second()
    assert Sent.times == 1
    assert bias.grad is not None


def twice(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return (x @ first).tanh() @ second


def with_a_shared_factor(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return (x @ first).tanh() @ first + second


def test_an_outline_serves_graphs_of_one_form_that_lead_to_the_same_leaves() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    outlines: list[BackwardOutline] = []
    runs = [(twice, one, other), (twice, one, other), (twice, other, one), (with_a_shared_factor, one, other)]
    for (run, *weights), known in zip(runs, (1, 1, 2, 3), strict=True):
        x = torch.randn(4, 4, requires_grad=True)
        expected = torch.autograd.grad(run(x, *weights).sum(), [x, one, other])
        made = run(x, *weights)
        one.grad = other.grad = None
        split = SplitBackward([(get_gradient_edge(made), torch.ones(4, 4))], [x], [one, other], outlines)
        split.first()
        split.second()
        torch.testing.assert_close([x.grad, one.grad, other.grad], list(expected))
        assert len(outlines) == known
