"""BERT: a bidirectional encoder that fills in masked words (Devlin et al., 2019).

Norms come after each sublayer's sum, activations are exact GELUs, and the head's matrix is the token embedding. There
is no second task (whether one sentence follows the other), and no dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import random_integers

UNMASKED = -100
"""The label of a position that is not to be filled in; `F.cross_entropy` ignores it."""


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a global batch; the defaults train in seconds on a CPU."""

    vocab_size: int = 256
    seq_len: int = 32
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    mlp_ratio: int = 4
    norm_epsilon: float = 1e-12
    masked: float = 0.15  # share of the positions that are to be filled in
    batch_size: int = 8


def bert_base() -> Config:
    """BERT base: 110M parameters."""
    return Config(30522, 512, num_layers=12, hidden_size=768, num_heads=12, batch_size=256)


def bert_large() -> Config:
    """BERT large: 335M parameters."""
    return Config(30522, 512, num_layers=24, hidden_size=1024, num_heads=16, batch_size=256)


def bert_taso(batch_size: int = 1) -> Config:
    """The encoder that TASO (SOSP'19) and Tensat (MLSys'21) optimise: eight layers of BERT large on 64 tokens.

    Their graph has neither embedding nor head, so that those are kept small here.
    """
    return Config(512, 64, num_layers=8, hidden_size=1024, num_heads=16, batch_size=batch_size)


class Attention(nn.Module):
    """Multi-head self-attention without a mask: every position sees all."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) → (batch, head, seq, head_size)."""
        return x.unflatten(2, (-1, self.head_size)).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.mlp_ratio * config.hidden_size)
        self.down = nn.Linear(config.mlp_ratio * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = _norm(config)
        self.mlp = MLP(config)
        self.mlp_norm = _norm(config)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        x = self.attention_norm(x + self.attention(x))
        return self.mlp_norm(x + self.mlp(x))


class Embedding(nn.Module):
    """The norm of the sum of three vectors: of the token, its position, and its sentence."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.seq_len, config.hidden_size)
        self.sentence = nn.Embedding(2, config.hidden_size)
        self.norm = _norm(config)

    def forward(self, tokens: Tensor, sentences: Tensor) -> Tensor:
        """tokens and sentences (batch, seq) → (batch, seq, hidden)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.norm(self.token(tokens) + self.sentence(sentences) + self.position(positions))


class Head(nn.Module):
    """Scores of each word of the vocabulary, by its embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = _norm(config)
        self.words = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, vocab)."""
        return self.words(self.norm(F.gelu(self.dense(x))))


class BERT(nn.Module):
    """Embedding, layers, and the mean cross-entropy of the masked words."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = Embedding(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.head = Head(config)
        self.apply(_initialize)
        self.head.words.weight = self.embedding.token.weight

    def forward(self, tokens: Tensor, sentences: Tensor, labels: Tensor) -> Tensor:
        """tokens, sentences (0 or 1) and labels (a token, or UNMASKED), (batch, seq) each → loss ()."""
        x = self.embedding(tokens, sentences)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=UNMASKED)


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)


def _initialize(module: nn.Module) -> None:
    """N(0, 0.02) for every matrix, zero for every bias."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def build(config: Config) -> BERT:
    """The model with fresh random weights."""
    return BERT(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random words in two sentences; some are replaced by the vocabulary's last word, the mask."""
    shape = (config.batch_size, config.seq_len)
    words = random_integers(config.vocab_size - 1, shape, seed)
    count = max(1, round(config.masked * config.seq_len))
    masked = random_integers(1 << 30, shape, seed + 1).argsort(dim=1) < count
    second_starts = random_integers(config.seq_len, (config.batch_size, 1), seed + 2)
    return {
        "tokens": words.masked_fill(masked, config.vocab_size - 1),
        "sentences": (torch.arange(config.seq_len, device=words.device) >= second_starts).long(),
        "labels": words.masked_fill(~masked, UNMASKED),
    }
