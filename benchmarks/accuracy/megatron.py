"""GPT as Megatron-LM 2 and Megatron-DeepSpeed compute it, for predictions of what was measured with them.

The layers are those of `models.gpt`, but: one projection makes query, key and value; attention is not fused (product of
queries and keys, softmax, dropout, product with the values); and logits are float32 where the loss reads them. Scaling,
mask and softmax are one kernel, `scaled_masked_softmax`, where Megatron has one: when a rank's samples times heads are
a multiple of four. Otherwise they are an operator each, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Constraint


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    seq_len: int
    num_layers: int
    hidden_size: int
    num_heads: int
    fused_softmax: bool
    vocab_size: int = 51200
    dropout: float = 0.1


@torch.library.custom_op("megatron::scaled_masked_softmax", mutates_args=())
def scaled_masked_softmax(scores: Tensor, scale: float) -> Tensor:
    """Softmax of scale × scores (batch, head, query, key) over the keys up to the query."""
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores.float() * scale).masked_fill(future, float("-inf")).softmax(-1).to(scores.dtype)


@scaled_masked_softmax.register_fake
def _(scores: Tensor, scale: float) -> Tensor:
    return torch.empty_like(scores)


def _softmax_gradient(context: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
    (probabilities,) = context.saved_tensors  # type: ignore[attr-defined]
    weighted = gradient * probabilities
    return context.scale * (weighted - probabilities * weighted.sum(-1, keepdim=True)), None  # type: ignore[attr-defined]


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]  # type: ignore[attr-defined]


scaled_masked_softmax.register_autograd(_softmax_gradient, setup_context=_save)
autopar.register_rule("megatron.scaled_masked_softmax.default", "b h Q K -> b h Q K")


class Attention(nn.Module):
    """Causal multi-head self-attention, an operator a step."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.head_size = config, config.hidden_size // config.num_heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        heads = self.query_key_value(x).unflatten(2, (self.config.num_heads, 3 * self.head_size)).transpose(1, 2)
        query, key, value = heads.chunk(3, -1)
        probabilities = self._probabilities(torch.matmul(query, key.transpose(2, 3)))
        mixed = torch.matmul(F.dropout(probabilities, self.config.dropout, self.training), value)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _probabilities(self, scores: Tensor) -> Tensor:
        scale = self.head_size**-0.5
        if self.config.fused_softmax:
            return scaled_masked_softmax(scores, scale)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        masked = (scores.float() * scale).masked_fill(future, -10000.0)
        return masked.softmax(-1).to(scores.dtype)


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dropout = config.dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.mlp = Attention(config), MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        x = x + F.dropout(self.attention(self.attention_norm(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class Embedding(nn.Module):
    """A vector for each token plus a vector for its position."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.seq_len, config.hidden_size)
        self.dropout = config.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (batch, seq) of token numbers → (batch, seq, hidden)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return F.dropout(self.token(tokens) + self.position(positions), self.dropout, self.training)


class GPT(nn.Module):
    """Embedding, layers, and the mean cross-entropy of the next token; the head's weight is the embedding's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = Embedding(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens and labels (batch, seq) of token numbers → loss ()."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.final_norm(x), self.embedding.token.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def constraints(tensor_parallel: int) -> list[Constraint]:
    """Megatron's tensor parallelism, pinned: column and row pairs, the vocabulary split, everything else whole."""
    if tensor_parallel == 1:
        return []
    split = {"*query_key_value.weight": 0, "*output.weight": 1, "*up.weight": 0, "*down.weight": 1, "*token.weight": 0}
    weights = [Constraint(name, (f"S({dim})",), what="used", axis="tp") for name, dim in split.items()]
    whole = ("embedding", "final_norm", "layers.[0-9]", "layers.[0-9][0-9]", "layers.*_norm")
    stored = [Constraint(name, (f"S({dim})",), what="stored", axis="tp") for name, dim in split.items()]
    return [*weights, *stored, *(Constraint(path, ("I", "R", "P"), axis="tp") for path in whole)]


def build(config: Config, batch_size: int) -> tuple[GPT, dict[str, Tensor]]:
    """The model in float16 and one global batch, both without memory."""
    with torch.device("meta"):
        shape = (batch_size, config.seq_len)
        batch = {name: torch.empty(shape, dtype=torch.long) for name in ("tokens", "labels")}
        return GPT(config).half(), batch
