"""GPT: a decoder-only transformer with the norm before each sublayer and learned positions.

The architecture is that of GPT-2 (Radford et al., 2019), except that query, key and value are three
projections instead of one fused one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import language_batch


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a global batch; the defaults train in seconds on a CPU."""

    vocab_size: int = 256
    seq_len: int = 64
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    mlp_ratio: int = 4
    dropout: float = 0.0
    tie_head: bool = False
    batch_size: int = 8


def gpt2() -> Config:
    """GPT-2 small: 124M parameters, head tied to the token embedding."""
    return Config(50257, 1024, num_layers=12, hidden_size=768, num_heads=12, tie_head=True)


def gpt2_xl() -> Config:
    """GPT-2 XL: 1.6B parameters, head tied to the token embedding."""
    return Config(50257, 1024, num_layers=48, hidden_size=1600, num_heads=25, tie_head=True)


def gpt_2_6b() -> Config:
    """The 2.6B model of Alpa's evaluation (OSDI'22), with its batch of 1,024 sequences."""
    return Config(51200, 1024, num_layers=32, hidden_size=2560, num_heads=32, tie_head=True, batch_size=1024)


def gpt_39b() -> Config:
    """The 39B model of Alpa's evaluation (OSDI'22), with its batch of 1,024 sequences."""
    return Config(51200, 1024, num_layers=48, hidden_size=8192, num_heads=64, tie_head=True, batch_size=1024)


class Attention(nn.Module):
    """Causal multi-head self-attention. Separate projections, so that each is split by whole heads."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.dropout = dropout
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) → (batch, head, seq, head_size)."""
        return x.unflatten(2, (-1, self.head_size)).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers with a GELU (its tanh approximation, as in GPT-2) between them."""

    def __init__(self, hidden_size: int, mlp_ratio: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, mlp_ratio * hidden_size)
        self.down = nn.Linear(mlp_ratio * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config.hidden_size, config.num_heads, config.dropout)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config.hidden_size, config.mlp_ratio)
        self.dropout = dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Embedding(nn.Module):
    """A vector for each token plus a vector for its position."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.seq_len, config.hidden_size)
        self.dropout = dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (batch, seq) of token numbers → (batch, seq, hidden)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class GPT(nn.Module):
    """Embedding, layers, and the mean cross-entropy of the next token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = Embedding(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        initialize(self, config.num_layers)
        if config.tie_head:
            self.head.weight = self.embedding.token.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens and labels (batch, seq) of token numbers → loss ()."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return next_token_loss(self.head(self.final_norm(x)), labels)


def dropout(probability: float) -> nn.Module:
    """Dropout, or nothing at all when the probability is zero, so that the traced graph is free of it."""
    return nn.Dropout(probability) if probability else nn.Identity()


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits (batch, seq, vocab) against labels (batch, seq)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def initialize(model: nn.Module, num_layers: int) -> None:
    """GPT-2's initialization: N(0, 0.02), and less for projections into the residual stream, of which each
    layer has two, so that the stream's variance does not grow with depth."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            into_residual = name.removesuffix(".weight").endswith(("output", "down"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if into_residual else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def build(config: Config) -> GPT:
    """The model with fresh random weights."""
    return GPT(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random tokens, labelled with the token that follows."""
    return language_batch(config.batch_size, config.seq_len, config.vocab_size, seed)
