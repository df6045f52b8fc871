"""A model whose routing is given to it, and routings that are drawn: each batch brings the scores of its experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.routing import POWER_LAW, Routing
from autopar.ops.loads import layers_of, weights_of

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOICES, LAYERS = 512, 32, 128, 8, 2, 2


class GivenRouting(nn.Module):
    """Layers of Mixtral's experts, of which each token takes those with the highest scores among its inputs."""

    def __init__(self) -> None:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        super().__init__()
        config = MixtralConfig(
            hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=CHOICES,
            experts_implementation="grouped_mm",
        )  # fmt: skip
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(MixtralExperts(config) for _ in range(LAYERS))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        x = self.first(x)
        for number, experts in enumerate(self.layers):
            weights, ids = scores[:, number].topk(CHOICES, -1)
            x = x + experts(x, ids, weights.softmax(-1))
        return x.square().mean()


def batch(routing: Routing, draw: int) -> dict[str, Tensor]:
    """One batch, of which tokens draw experts one after the other without replacement: by the largest of the logarithm
    of each weight and noise of Gumbel's distribution. Which expert is how popular is drawn by a power law, too."""
    generator = torch.Generator().manual_seed(draw)
    noise = -(-torch.rand(TOKENS, LAYERS, EXPERTS, generator=generator).clamp_min(1e-12).log()).log()
    logits = torch.stack([_logits(routing, generator) for _ in range(LAYERS)])
    return {"x": torch.randn(TOKENS, WIDTH, generator=generator), "scores": logits + noise}


def _logits(routing: Routing, generator: torch.Generator) -> Tensor:
    if routing.kind == POWER_LAW:
        weights = torch.arange(1.0, EXPERTS + 1) ** -routing.exponent
        return weights[torch.randperm(EXPERTS, generator=generator)].log()
    (likely,) = layers_of(routing, CHOICES, EXPERTS)
    return torch.tensor(weights_of(_array(likely), CHOICES)).float().log()


def _array(values: Any) -> Any:
    import numpy

    return numpy.asarray(values)
