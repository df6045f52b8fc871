"""Tensors that torch only marks as conjugated or negated are computed: ranks send memory as it lies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.trace import trace
from tests.trace.interpret import graph_gradients


class Marked(nn.Module):
    """`imag` of a conjugate is a view of what is not conjugated, marked as negated."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        wave = torch.complex(x @ self.w, (x @ self.w).sin())
        return (wave.conj().imag * wave.conj().real + (wave.mH @ wave).real.sum()).square().mean()


def test_marks_are_computed() -> None:
    """What took a mark off again failed on ranks where a conversion between had computed it."""
    torch.manual_seed(0)
    model, x = Marked().double(), torch.randn(4, 6, dtype=torch.float64)
    graph = trace(model, {"x": x})
    assert not {node.op for node in graph.nodes} & {"aten._conj.default", "aten._neg_view.default"}
    loss, gradients = graph_gradients(graph, model, {"x": x})
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients["w"], model.w.grad)
