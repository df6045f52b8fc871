"""What all layers of a stage read and is computed once, such as a mask, is held once."""

from __future__ import annotations

import torch
from torch import nn

import autopar
from autopar.profiler import load_profile
from autopar.request import Request, SearchBudget
from autopar.staged.layered import Layered
from autopar.staged.search import StagedSearch
from autopar.staged.ways import Setting, StageStrategy
from autopar.trace import find_blocks, trace

LENGTH, WIDTH, LAYERS = 512, 8, 6
MASK_BYTES = 4 * LENGTH * LENGTH


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + mask @ self.linear(x)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(LENGTH)
        mask = (places[:, None] >= places[None, :]).to(torch.float32)
        for layer in self.layers:
            x = layer(x, mask)
        return x.square().mean()


def test_a_mask_that_all_layers_read_counts_once() -> None:
    graph = trace(Masked(), {"x": torch.ones(4, LENGTH, WIDTH)})
    request = Request(autopar.Mesh("a100", devices_per_node=2), "train", "adamw", None, (), SearchBudget())
    layered, safe = (
        Layered(graph, find_blocks(graph, ()), request, load_profile("a100"), constants_once=once)
        for once in (True, False)
    )
    assert layered.layers.count == LAYERS
    for num_devices, axes in StagedSearch(layered).shapes:
        setting = Setting(axes, num_devices, 2 // num_devices, layered.counts[0])
        choice = layered.place_of(setting).placements.trade_offs(1).fastest()
        kind = layered.kind(StageStrategy(setting, choice, "none"))
        assert kind.resident_bytes.sum() < MASK_BYTES / 2, "not with each layer"
        assert kind.workspace_bytes.max() >= MASK_BYTES, "but beside them"
        assert safe.kind(StageStrategy(setting, choice, "none")).resident_bytes.sum() > LAYERS * MASK_BYTES
