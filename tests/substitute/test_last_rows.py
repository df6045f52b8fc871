"""Products of slices of sequences have their rows copied together, where they would else read weights each time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.substitute.last_rows import with_rows_together
from autopar.trace import trace
from autopar.trace.interpreter import run_graph


class LastToken(nn.Module):
    """Logits of the last token of each sequence."""

    def __init__(self, dim: int = 1, requires_grad: bool = False) -> None:
        super().__init__()
        self.dim, self.head = dim, nn.Linear(6, 5).requires_grad_(requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x[:, -1:] if self.dim else x[1:])
        return logits.sum() if self.training else logits


def test_rows_of_sequences_are_put_together() -> None:
    module, inputs = LastToken().eval(), {"x": torch.randn(3, 4, 6)}
    graph = trace(module, inputs, mode="inference")
    told = with_rows_together(graph)
    assert [node.op for node in told.nodes if node.op not in {own.op for own in graph.nodes}] == ["aten.clone.default"]
    weights = {item.tensor: module.state_dict()[item.name] for item in graph.stored}
    found, expected = (run_graph(one, weights, inputs)[one.outputs[0]] for one in (told, graph))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("module", [LastToken(dim=0), LastToken(requires_grad=True)])
def test_products_that_torch_runs_as_one_stay(module: nn.Module) -> None:
    """A slice of the batch has no gaps; with a gradient torch copies rows itself."""
    mode = "train" if any(p.requires_grad for p in module.parameters()) else "inference"
    graph = trace(module.train(mode == "train"), {"x": torch.randn(3, 4, 6)}, mode=mode)
    assert with_rows_together(graph) is graph
