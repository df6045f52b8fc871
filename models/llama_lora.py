"""Llama with low-rank adapters (LoRA, Hu et al., 2022): every linear map of a layer has one, nothing else is trained.

An adapter adds scaling × B·A to the frozen map, with A to a few features and B from them. Written as one writes it,
nothing merged, in one of the two ways that packages have: on the "output", W·x + scaling × B·(A·x), three products and
a sum, as peft does; or on the "weight", (W + scaling × B·A)·x, a parametrization of the weight
(`torch.nn.utils.parametrize`) that is made anew in each forward pass, as minLoRA and others do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.utils import parametrize

from models import llama


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's sizes, and those of the adapters; the defaults train in seconds on a CPU."""

    rank: int = 4
    alpha: float = 8.0  # the scaling is alpha / rank
    initial_std: float = 0.02  # of B; zero in the paper, where A then has no gradient in the first step
    adapts: Literal["output", "weight"] = "output"


def llama2_7b(rank: int = 16, alpha: float = 32.0) -> Config:
    """Llama 2 7B with adapters that start as in the paper: 40M trained parameters of rank 16."""
    return Config(32000, 4096, 32, 4096, 32, 32, 11008, rank=rank, alpha=alpha, initial_std=0.0)


def llama_block(seq_len: int = 256, batch_size: int = 1, adapts: Literal["output", "weight"] = "output") -> Config:
    """One layer of hidden 2,048 (that of Llama 3.2 1B but for the heads), rank 16; its vocabulary is kept small."""
    return Config(512, seq_len, 1, 2048, 32, 8, 8192, batch_size=batch_size, rank=16, alpha=32.0, adapts=adapts)


class Adapted(nn.Module):
    """base(x) + scaling × B(A(x)), of which only A and B are trained."""

    def __init__(self, base: nn.Linear, config: Config) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, config.rank, bias=False)
        self.up = nn.Linear(config.rank, base.out_features, bias=False)
        self.scaling = config.alpha / config.rank
        nn.init.kaiming_uniform_(self.down.weight, a=5**0.5)
        nn.init.normal_(self.up.weight, std=config.initial_std)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, in) → (…, out)."""
        return self.base(x) + self.scaling * self.up(self.down(x))


class AdaptedWeight(nn.Module):
    """W + scaling × B·A, of which only A and B are trained: a parametrization of a linear map's weight."""

    def __init__(self, base: nn.Linear, config: Config) -> None:
        super().__init__()
        self.down = nn.Parameter(base.weight.new_empty(config.rank, base.in_features))
        self.up = nn.Parameter(base.weight.new_empty(base.out_features, config.rank))
        self.scaling = config.alpha / config.rank
        nn.init.kaiming_uniform_(self.down, a=5**0.5)
        nn.init.normal_(self.up, std=config.initial_std)

    def forward(self, weight: Tensor) -> Tensor:
        """weight (out, in) → (out, in)."""
        return weight + self.scaling * (self.up @ self.down)


def build(config: Config) -> llama.Llama:
    """The model with fresh random weights, of which only the adapters' ask for gradients."""
    model = llama.build(config).requires_grad_(False)
    for layer in model.layers:
        for module in (layer.attention, layer.mlp):
            for name, child in list(module.named_children()):
                setattr(module, name, _adapted(child, config))
    return model


def _adapted(base: nn.Linear, config: Config) -> nn.Module:
    if config.adapts == "output":
        return Adapted(base, config)
    return parametrize.register_parametrization(base, "weight", AdaptedWeight(base, config))


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random tokens, labelled with the token that follows."""
    return llama.example_inputs(config, seed)
