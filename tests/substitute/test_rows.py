"""Rows of samples and positions keep their dims where each is computed by itself, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ops import run
from autopar.substitute.rows import over_rows, with_rows
from autopar.trace import trace

SAMPLES, LENGTH, WIDTH = 2, 3, 4


class ByRow(nn.Module):
    """Flattened rows, each computed by itself, in groups of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.norm, self.table = nn.LayerNorm(WIDTH), nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        a = torch.addmm(self.bias, x.view(-1, WIDTH), self.matrix).view(x.shape)
        rows = self.norm(x.sin().flatten(0, 1))
        kept = torch.cat([rows, rows.softmax(1)], 1)[:, 1:5].cumsum(-1) + rows.amax(1, keepdim=True)
        b = torch.mm(kept, self.matrix).view(-1, 2, 2).transpose(1, 2).reshape(x.shape)
        c = self.table(ids.flatten()).view(x.shape)
        rows = x.cos().flatten(0, 1)
        losses = F.cross_entropy(rows, ids.flatten() % WIDTH, reduction="none").view(ids.shape)
        last = F.cross_entropy(x.flatten(0, 1) @ self.matrix, ids.flatten() % WIDTH)
        return (a * b + c).mean() + (losses * ids).mean() + last


class OverRows(nn.Module):
    """Flattened rows that meet, or are told apart by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e = (x.mul(number).flatten(0, 1) for number in self.scale)
        numbers = torch.arange(SAMPLES * LENGTH)
        found = [
            a - a.amax(0),
            b.cumsum(0),
            c * numbers[:, None],
            d[numbers.flip(0)],
            F.batch_norm(e, None, None, training=True),
        ]
        return torch.stack([one.view(x.shape) for one in found]).square().sum()


def value_of(graph: Graph, given: dict[str, Any]) -> Tensor:
    """The loss that a graph computes; each result has the shape that the graph says."""
    values = dict(given)
    for node in graph.nodes:
        for name, value in zip(node.outputs, run(node, values.__getitem__, "cpu"), strict=True):
            if name is not None:
                values[name] = value
                assert tuple(value.shape) == graph.tensors[name].shape, (node.name, value.shape)
    assert graph.loss is not None
    return values[graph.loss]


def test_rows_that_are_computed_by_themselves_keep_their_dims() -> None:
    torch.manual_seed(0)
    model, x, ids = ByRow(), torch.randn(SAMPLES, LENGTH, WIDTH), torch.randint(5, (SAMPLES, LENGTH))
    graph = trace(model, (x, ids))
    given = {"x": x, "ids": ids, **graph.values, **dict(model.named_parameters())}
    told = with_rows(graph, over_rows(graph))
    flat = [node.op for node in told.nodes if told.tensors[node.results[0]].shape[:1] == (SAMPLES * LENGTH,)]
    assert flat == ["aten.reshape.default"] * 2  # of the mean loss, and its targets
    assert over_rows(told) == ()
    torch.testing.assert_close(value_of(told, given), value_of(graph, given))


def test_rows_that_meet_stay_flat() -> None:
    graph = trace(OverRows(), (torch.randn(SAMPLES, LENGTH, WIDTH),))
    assert over_rows(graph) == ()
    flat = next(node.name for node in graph.nodes if "reshape" in node.op)
    with pytest.raises(PlanError, match="found none; plan again"):
        with_rows(graph, (flat,))
