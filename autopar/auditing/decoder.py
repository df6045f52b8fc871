"""A decoder of given sizes, on meta tensors, as the softwares that train such models compute it.

Llama-like (RMS norms, rotary positions, gated) and GPT-like (layer norms, learned positions), grouped key/value heads,
experts or not, the head tied to the embedding or not. One projection makes query, key and value, in the order of the
key/value heads, each with its queries, so that tensor parallelism splits whole groups; another one gate and up, which
are two columns of each row of hidden values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.auditing.job import ModelSizes, TrainingJob
from autopar.ir.constraint import Constraint
from autopar.ops import register_rule

# What softwares compute in one kernel each ----------------------------------------


@torch.library.custom_op("autopar_audit::rotate", mutates_args=())
def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + head_size / 2]) of x (batch, head, seq, head_size) by its angle, of which cosines
    and sines are (seq, head_size / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


@torch.library.custom_op("autopar_audit::gated", mutates_args=())
def gated(made: Tensor) -> Tensor:
    """silu(gate) × value of made (…, mlp, 2), gate and value: SwiGLU (Shazeer, 2020)."""
    gate, value = made.unbind(-1)
    return F.silu(gate) * value


def _rotate_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    cosines, sines = ctx.saved_tensors
    return rotate(gradient, cosines, -sines), None, None


def _gated_gradient(ctx: Any, gradient: Tensor) -> Tensor:
    (made,) = ctx.saved_tensors
    gate, value = made.unbind(-1)
    share = gate.sigmoid()
    return torch.stack((gradient * value * share * (1 + gate * (1 - share)), gradient * gate * share), -1)


def _keep_angles(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _keep_made(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


rotate.register_fake(lambda x, cosines, sines: torch.empty(x.shape, dtype=x.dtype, device=x.device))
gated.register_fake(lambda made: torch.empty(made.shape[:-1], dtype=made.dtype, device=made.device))
rotate.register_autograd(_rotate_back, setup_context=_keep_angles)
gated.register_autograd(_gated_gradient, setup_context=_keep_made)
register_rule("autopar_audit.rotate.default", "b h s D, s E, s E -> b h s D")
register_rule("autopar_audit.gated.default", "b s f P -> b s f")


# The model ----------------------------------------


def _norm(sizes: ModelSizes) -> nn.Module:
    return nn.RMSNorm(sizes.hidden) if sizes.norm == "rms" else nn.LayerNorm(sizes.hidden)


class AuditedAttention(nn.Module):
    """Causal self-attention whose three projections are one product."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.sizes, self.queries = sizes, sizes.heads // sizes.kv_heads
        width = sizes.kv_heads * (self.queries + 2) * sizes.head_size
        self.query_key_value = nn.Linear(sizes.hidden, width, bias=sizes.has_bias)
        self.output = nn.Linear(sizes.heads * sizes.head_size, sizes.hidden, bias=sizes.has_bias)

    def forward(self, x: Tensor, cosines: Tensor | None, sines: Tensor | None) -> Tensor:
        """x (batch, seq, hidden), cosines and sines (seq, head_size / 2) → (batch, seq, hidden)."""
        queries, size = self.queries, self.sizes.head_size
        groups = self.query_key_value(x).unflatten(2, (-1, (queries + 2) * size))
        query, key, value = groups.split([queries * size, size, size], -1)
        query = query.unflatten(3, (queries, size)).flatten(2, 3).transpose(1, 2)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        if cosines is not None and sines is not None:
            query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=queries > 1)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class AuditedMLP(nn.Module):
    """Two linear layers and what is between them; gated, the first one makes gate and value."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.up = nn.Linear(sizes.hidden, sizes.ffn * (2 if sizes.is_gated else 1), bias=sizes.has_bias)
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=sizes.has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        made = self.up(x)
        hidden = gated(made.unflatten(2, (-1, 2))) if self.sizes.is_gated else _activated(made, self.sizes)
        return self.down(hidden)  # type: ignore[no-any-return]


def _activated(x: Tensor, sizes: ModelSizes) -> Tensor:
    if sizes.activation == "squared_relu":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if sizes.activation == "gelu_tanh" else "none")


class AuditedExperts(nn.Module):
    """A router, and experts whose products are grouped: each token passes the likeliest few."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.router = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        parts = 2 if sizes.is_gated else 1
        self.up = nn.Parameter(torch.empty(sizes.experts, parts * sizes.expert_ffn, sizes.hidden))
        self.down = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, sizes.expert_ffn))

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        sizes, tokens = self.sizes, x.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(sizes.chosen_experts)
        numbers, order = torch.sort(ids.reshape(-1))
        counts = torch.histc(numbers.float(), bins=sizes.experts, min=0, max=sizes.experts - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        rows = torch._grouped_mm(tokens[order // sizes.chosen_experts], self.up.transpose(-2, -1), ends)
        if sizes.is_gated:
            gate, value = rows.chunk(2, -1)
            rows = F.silu(gate) * value
        else:
            rows = _activated(rows, sizes)
        rows = torch._grouped_mm(rows, self.down.transpose(-2, -1), ends) * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0), device=order.device)
        mixed = rows[back].view(tokens.size(0), sizes.chosen_experts, sizes.hidden).sum(1)
        return mixed.unflatten(0, x.shape[:2])  # type: ignore[no-any-return]


class AuditedLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = _norm(sizes), _norm(sizes)
        self.attention = AuditedAttention(sizes)
        self.mlp = AuditedExperts(sizes) if sizes.experts else AuditedMLP(sizes)

    def forward(self, x: Tensor, cosines: Tensor | None, sines: Tensor | None) -> Tensor:
        """x (batch, seq, hidden), cosines and sines (seq, head_size / 2) → (batch, seq, hidden)."""
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class AuditedEmbedding(nn.Module):
    """A vector for each token, plus one for its position where positions are learned."""

    def __init__(self, sizes: ModelSizes, seq: int) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocab, sizes.hidden)
        is_learned = sizes.positions == "learned"
        self.position = nn.Embedding(max(seq, sizes.max_positions), sizes.hidden) if is_learned else None

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (batch, seq) of token numbers → (batch, seq, hidden)."""
        x: Tensor = self.token(tokens)
        return x if self.position is None else x + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class AuditedDecoder(nn.Module):
    """Embedding, layers, and the mean cross-entropy of the next token, of logits in float32 unless it is compiled."""

    def __init__(self, sizes: ModelSizes, seq: int, is_compiled: bool = False) -> None:
        super().__init__()
        self.sizes, self.is_compiled = sizes, is_compiled
        self.embedding = AuditedEmbedding(sizes, seq)
        self.layers = nn.ModuleList(AuditedLayer(sizes) for _ in range(sizes.layers))
        self.final_norm = _norm(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        if sizes.is_tied:
            self.head.weight = self.embedding.token.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens and labels (batch, seq) of token numbers → loss ()."""
        x = self.embedding(tokens)
        cosines, sines = self._angles(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        logits = self.head(self.final_norm(x))
        logits = logits if self.is_compiled else logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _angles(self, seq: int, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Cosines and sines of each position and frequency, (seq, head_size / 2): RoFormer (Su et al., 2021)."""
        if self.sizes.positions != "rotary":
            return None, None
        exponents = torch.arange(0, self.sizes.head_size, 2, device=x.device, dtype=torch.float32)
        positions = torch.arange(seq, device=x.device, dtype=torch.float32)
        angles = positions[:, None] * 10_000.0 ** (-exponents / self.sizes.head_size)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def built(
    sizes: ModelSizes, batch: int, seq: int, is_compiled: bool = False
) -> tuple[AuditedDecoder, dict[str, Tensor]]:
    """The model and one global batch, both without memory."""
    with torch.device("meta"):
        inputs = {name: torch.empty((batch, seq), dtype=torch.long) for name in ("tokens", "labels")}
        return AuditedDecoder(sizes, seq, is_compiled), inputs


def constraints(job: TrainingJob) -> list[Constraint]:
    """Megatron's tensor parallelism of this decoder, pinned: column and row pairs, the vocabulary split; between them
    everything whole, or with sequence parallelism, split along the sequence."""
    if job.tp == 1:
        return []
    split = {"*query_key_value.weight": 0, "*output.weight": 1, "*token.weight": 0, "*head.weight": 0}
    if job.model is None or not job.model.experts:
        split |= {"*mlp.up.weight": 0, "*mlp.down.weight": 1}
    weights = [Constraint(name, (f"S({dim})",), what="used", axis="tp") for name, dim in split.items()]
    between = ("S(1)", "P") if job.sequence_parallel else ("I", "R", "P")
    edges = ["layers.[0-9]", "layers.[0-9][0-9]", "layers.[0-9][0-9][0-9]", "layers.*_norm", "final_norm"]
    edges += [] if job.sequence_parallel else ["embedding"]  # learned positions have one dim alone
    return [*weights, *(Constraint(path, between, axis="tp") for path in edges)]
