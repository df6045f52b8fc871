"""Which gradients the first part of a backward pass makes, beside those of what the stage has received."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from autopar.runtime.splitting import SplitBackward
from autopar.simulate.facts import tensors_on_the_way
from autopar.trace import trace


class Biased(nn.Module):
    """A bias made of a table that `readers` products add, and a scale that one makes use of."""

    def __init__(self, readers: int) -> None:
        super().__init__()
        self.readers = readers
        self.table, self.scale = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        bias, factor = self.table.exp(), self.scale.sin()
        for _ in range(self.readers):
            x = (x * x + bias).tanh()
        return (x * factor).sum()


class Beside(nn.Module):
    """Two results: of what is received, and of a parameter alone, which a later stage hands a gradient back for."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale.sin(), self.table.exp() * mask


def made_of_table_on_the_way(readers: int) -> set[str]:
    """The results of operators on parameters that are found to be on the way, by operator."""
    graph = trace(Biased(readers), (torch.ones(4),))
    graph = replace(
        graph,
        received=graph.inputs,
        tensors={n: replace(t, differentiable=True) for n, t in graph.tensors.items()},
    )
    way = tensors_on_the_way(graph)
    return {node.op.split(".")[1] for node in graph.nodes if not way.isdisjoint(node.results)} & {"exp", "sin"}


def test_what_one_operator_reads_waits_and_what_several_read_does_not() -> None:
    assert made_of_table_on_the_way(readers=1) == set()
    assert made_of_table_on_the_way(readers=2) == {"exp"}


def test_the_runtime_makes_the_same_gradients_first() -> None:
    for readers in (1, 2):
        model, x = Biased(readers), torch.ones(4, requires_grad=True)
        loss = model(x)
        root = (torch.autograd.graph.get_gradient_edge(loss), torch.ones_like(loss))
        split = SplitBackward([root], [x], list(model.parameters()))
        del loss
        split.first()
        aside = [leaf for leaf, _ in split._aside]
        assert [leaf is model.table for leaf in aside] == [True] * (readers - 1)
        split.second()
        assert model.table.grad is not None and model.scale.grad is not None


def test_what_only_a_source_of_gradients_comes_of_does_not_wait() -> None:
    graph = trace(Beside(), (torch.ones(4), torch.ones(4)), mode="inference")
    values = {n: replace(t, differentiable=True) for n, t in graph.tensors.items()}
    answered = tuple((name, ()) for name in graph.outputs)
    way = tensors_on_the_way(replace(graph, received=graph.inputs[:1], tensors=values, answered=answered, ends=()))
    found = {node.op.split(".")[1] for node in graph.nodes if not way.isdisjoint(node.results)}
    model, x = Beside(), torch.ones(4, requires_grad=True)
    roots = [(torch.autograd.graph.get_gradient_edge(made), torch.ones_like(made)) for made in model(x, torch.ones(4))]
    split = SplitBackward(roots, [x], list(model.parameters()))
    split.first()
    assert found == {"mul", "exp"}
    assert [leaf is model.table for leaf, _ in split._aside] == [True]


def test_what_is_received_without_a_gradient_leads_nowhere() -> None:
    graph = trace(Beside(), (torch.ones(4), torch.ones(4)), mode="inference")
    answered = tuple((name, ()) for name in graph.outputs)
    assert not tensors_on_the_way(replace(graph, received=graph.inputs, answered=answered, ends=()))
