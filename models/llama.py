"""Llama: RMS norms, rotary positions, SwiGLU and grouped-query attention (Touvron et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import language_batch
from models.gpt import next_token_loss


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a global batch; the defaults train in seconds on a CPU."""

    vocab_size: int = 256
    seq_len: int = 64
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 8
    num_kv_heads: int = 2
    mlp_size: int = 192
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    batch_size: int = 8


def llama2_7b() -> Config:
    """Llama 2 7B: one key/value head for each query head."""
    return Config(32000, 4096, 32, 4096, num_heads=32, num_kv_heads=32, mlp_size=11008)


def llama3_8b() -> Config:
    """Llama 3 8B: four query heads for each key/value head."""
    return Config(128256, 8192, 32, 4096, num_heads=32, num_kv_heads=8, mlp_size=14336, rope_base=500_000.0)


def llama3_70b() -> Config:
    """Llama 3 70B: eight query heads for each key/value head."""
    return Config(128256, 8192, 80, 8192, num_heads=64, num_kv_heads=8, mlp_size=28672, rope_base=500_000.0)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key/value head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        kv_size = config.num_kv_heads * self.head_size
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.key = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.value = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """x (batch, seq, hidden), cosines and sines (seq, head_size / 2) → (batch, seq, hidden)."""
        query = rotate(self._heads(self.query(x)), cosines, sines)
        key = rotate(self._heads(self.key(x)), cosines, sines)
        value = self._heads(self.value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, seq, heads × head_size) → (batch, head, seq, head_size)."""
        return x.unflatten(2, (-1, self.head_size)).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) × up(x)) (Shazeer, 2020)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.down = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """x (batch, seq, hidden), cosines and sines (seq, head_size / 2) → (batch, seq, hidden)."""
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Embedding, layers, and the mean cross-entropy of the next token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        self.rope_base = config.rope_base
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(initialize)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens and labels (batch, seq) of token numbers → loss ()."""
        x = self.token_embedding(tokens)
        angles = rotary_angles(tokens.shape[1], self.head_size, self.rope_base, x.device)
        cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        return next_token_loss(self.head(self.final_norm(x)), labels)


def rotary_angles(seq_len: int, head_size: int, base: float, device: torch.device) -> Tensor:
    """The angle of each position and frequency, (seq, head_size / 2), in float32: RoFormer (Su et al., 2021),
    eq. 15. Computed in each forward and not kept in a buffer: a model built on meta stays whole."""
    exponents = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    positions = torch.arange(seq_len, device=device, dtype=torch.float32)
    return positions[:, None] * base**-exponents


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + head_size / 2]) of x (batch, head, seq, head_size) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def initialize(module: nn.Module) -> None:
    """N(0, 0.02) for every matrix."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def build(config: Config) -> Llama:
    """The model with fresh random weights."""
    return Llama(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random tokens, labelled with the token that follows."""
    return language_batch(config.batch_size, config.seq_len, config.vocab_size, seed)
