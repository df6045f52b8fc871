"""A decoder of any of the usual kinds, as the software that trained it computes it; on meta tensors.

Llama-like (RMS norms, rotary positions, gated) and GPT-like (layer norms, learned positions), grouped key/value heads,
heads of any width, experts in all or some layers, the head tied to the embedding or not. One projection makes query,
key and value, as in Megatron-LM, llm-foundry and nanotron, and so do gate and up: their products are what was measured.
Its rows are in the order of the key/value heads, each with its queries, so that tensor parallelism splits whole groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Constraint

ACTIVATIONS = {"gelu": "none", "gelu_tanh": "tanh"}


# What these softwares compute in one kernel each ----------------------------------------


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + head_size / 2]) of x (batch, head, seq, head_size) by its angle, of which cosines
    and sines are (seq, head_size / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


@torch.library.custom_op("decoder::rotate", mutates_args=())
def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """`rotated`, in one kernel."""
    return rotated(x, cosines, sines)


@rotate.register_fake
def _(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("decoder::squared_relu", mutates_args=())
def squared_relu(x: Tensor) -> Tensor:
    """relu(x)²: Primer's activation, which Megatron-LM compiles."""
    return F.relu(x).square()


@squared_relu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _squared_relu_gradient(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return 2 * F.relu(x) * gradient


def _rotate_back(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
    cosines, sines = ctx.saved_tensors  # type: ignore[attr-defined]
    return rotate(gradient, cosines, -sines), None, None


def _keep_angles(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs[1:])


def swiglu(made: Tensor) -> Tensor:
    """silu(gate) × value of made (batch, seq, mlp, 2), gate and value."""
    gate, value = made.unbind(-1)
    return F.silu(gate) * value


@torch.library.custom_op("decoder::gated", mutates_args=())
def gated(made: Tensor) -> Tensor:
    """`swiglu`, in one kernel."""
    return swiglu(made)


@gated.register_fake
def _(made: Tensor) -> Tensor:
    return torch.empty(made.shape[:-1], dtype=made.dtype, device=made.device)


def _gated_gradient(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
    (made,) = ctx.saved_tensors  # type: ignore[attr-defined]
    gate, value = made.unbind(-1)
    share = gate.sigmoid()
    return torch.stack((gradient * value * share * (1 + gate * (1 - share)), gradient * gate * share), -1)


def _keep_made(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


rotate.register_autograd(_rotate_back, setup_context=_keep_angles)
gated.register_autograd(_gated_gradient, setup_context=_keep_made)
squared_relu.register_autograd(_squared_relu_gradient, setup_context=_keep_made)
autopar.register_rule("decoder.rotate.default", "b h s D, s E, s E -> b h s D")
autopar.register_rule("decoder.gated.default", "b s f P -> b s f")
autopar.register_rule("decoder.squared_relu.default", "b s f -> b s f")


# The model ----------------------------------------


@dataclass(frozen=True)
class Config:
    """Sizes of the model, and how its software computes it. shared_size: of the expert that all tokens pass, 0 without
    one. dense_layers: those without experts, where others have them. has_own_kernels: rotary positions and gates are a
    kernel each, else as many as PyTorch has operators."""

    seq_len: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    vocab_size: int
    is_gated: bool = False
    norm: str = "layer"  # or "rms"
    positions: str = "learned"  # or "rotary", "none"
    activation: str = "gelu"  # or "gelu_tanh", "squared_relu", "silu"
    has_bias: bool = False
    is_tied: bool = True
    is_causal: bool = True
    fuses_attention: bool = True
    has_own_kernels: bool = True
    dropout: float = 0.0
    float32_logits: bool = False
    num_experts: int = 0
    chosen_experts: int = 1
    expert_size: int = 0
    shared_size: int = 0
    dense_layers: tuple[int, ...] = ()

    @property
    def queries_a_group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads


def norm(config: Config) -> nn.Module:
    """Over the hidden size."""
    return nn.RMSNorm(config.hidden_size) if config.norm == "rms" else nn.LayerNorm(config.hidden_size)


class Attention(nn.Module):
    """Self-attention whose three projections are one product."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width = config.num_kv_heads * (config.queries_a_group + 2) * config.head_size
        self.query_key_value = nn.Linear(config.hidden_size, width, bias=config.has_bias)
        self.output = nn.Linear(config.num_heads * config.head_size, config.hidden_size, bias=config.has_bias)

    def forward(self, x: Tensor, cosines: Tensor | None, sines: Tensor | None) -> Tensor:
        """x (batch, seq, hidden), cosines and sines (seq, head_size / 2) → (batch, seq, hidden)."""
        queries, size = self.config.queries_a_group, self.config.head_size
        groups = self.query_key_value(x).unflatten(2, (-1, (queries + 2) * size))
        query, key, value = groups.split([queries * size, size, size], -1)
        query = query.unflatten(3, (queries, size)).flatten(2, 3).transpose(1, 2)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        if cosines is not None and sines is not None:
            turned = rotate if self.config.has_own_kernels else rotated
            query, key = turned(query, cosines, sines), turned(key, cosines, sines)
        return self.output(self._mixed(query, key, value).transpose(1, 2).flatten(2))

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The values, mixed: (batch, head, seq, head_size)."""
        config = self.config
        dropout = config.dropout if self.training else 0.0
        if config.fuses_attention:
            return F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=config.is_causal, enable_gqa=config.queries_a_group > 1
            )
        scores = torch.matmul(query, key.transpose(2, 3)) * config.head_size**-0.5
        if config.is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -10000.0)
        return torch.matmul(F.dropout(scores.softmax(-1), dropout, self.training), value)


class MLP(nn.Module):
    """Two linear layers and what is between them; gated, the first one makes gate and value."""

    def __init__(self, config: Config, size: int) -> None:
        super().__init__()
        self.config = config
        width = size * (2 if config.is_gated else 1)
        self.up = nn.Linear(config.hidden_size, width, bias=config.has_bias)
        self.down = nn.Linear(size, config.hidden_size, bias=config.has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        made = self.up(x)
        if self.config.is_gated:
            pairs = made.unflatten(2, (-1, 2))
            return self.down(gated(pairs) if self.config.has_own_kernels else swiglu(pairs))
        return self.down(self._activated(made))

    def _activated(self, x: Tensor) -> Tensor:
        if self.config.activation == "squared_relu":
            return squared_relu(x)
        return F.gelu(x, approximate=ACTIVATIONS[self.config.activation])


class Routed(nn.Module):
    """A router, and experts whose products are grouped: each token passes the likeliest few."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, parts = config, 2 if config.is_gated else 1
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.up = nn.Parameter(torch.empty(config.num_experts, parts * config.expert_size, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, config.expert_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (tokens, hidden) → (tokens, hidden), by the operators that `autopar.trace.routing` knows."""
        count, chosen = self.config.num_experts, self.config.chosen_experts
        weights, ids = self.router(tokens).softmax(-1).topk(chosen)
        numbers, order = torch.sort(ids.reshape(-1))
        ends = torch.cumsum(torch.histc(numbers.float(), bins=count, min=0, max=count - 1), 0, dtype=torch.int32)
        rows = self._between(torch._grouped_mm(tokens[order // chosen], self.up.transpose(-2, -1), ends))
        rows = torch._grouped_mm(rows, self.down.transpose(-2, -1), ends) * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0), device=order.device)
        return rows[back].view(tokens.size(0), chosen, tokens.size(1)).sum(1)

    def _between(self, rows: Tensor) -> Tensor:
        if self.config.is_gated:
            return F.silu(rows[..., ::2]) * rows[..., 1::2]  # in pairs, so that hidden values can be split
        return F.gelu(rows, approximate=ACTIVATIONS.get(self.config.activation, "none"))


class Experts(nn.Module):
    """Routed experts, and the one that all tokens pass, where there is one."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.routed = Routed(config)
        self.shared = MLP(config, config.shared_size) if config.shared_size else None

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → (batch, seq, hidden)."""
        mixed = self.routed(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return mixed if self.shared is None else mixed + self.shared(x)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm, self.mlp_norm, self.attention = norm(config), norm(config), Attention(config)
        has_experts = config.num_experts and number not in config.dense_layers
        self.mlp = Experts(config) if has_experts else MLP(config, config.mlp_size)

    def forward(self, x: Tensor, cosines: Tensor | None, sines: Tensor | None) -> Tensor:
        """x (batch, seq, hidden), cosines and sines (seq, head_size / 2) → (batch, seq, hidden)."""
        x = x + self._dropped(self.attention(self.attention_norm(x), cosines, sines))
        return x + self._dropped(self.mlp(self.mlp_norm(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Embedding(nn.Module):
    """A vector for each token, plus one for its position where positions are learned."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.seq_len, config.hidden_size) if config.positions == "learned" else None

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (batch, seq) of token numbers → (batch, seq, hidden)."""
        x = self.token(tokens)
        return x if self.position is None else x + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Decoder(nn.Module):
    """Embedding, layers, and the mean cross-entropy of the next token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_layers))
        self.final_norm = norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.is_tied:
            self.head.weight = self.embedding.token.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens and labels (batch, seq) of token numbers → loss ()."""
        x = self.embedding(tokens)
        cosines, sines = self._angles(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        logits = self.head(self.final_norm(x))
        if self.config.float32_logits:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _angles(self, seq_len: int, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Cosines and sines of each position and frequency, (seq, head_size / 2): RoFormer (Su et al., 2021)."""
        if self.config.positions != "rotary":
            return None, None
        exponents = torch.arange(0, self.config.head_size, 2, device=x.device, dtype=torch.float32)
        positions = torch.arange(seq_len, device=x.device, dtype=torch.float32)
        angles = positions[:, None] * 10_000.0 ** (-exponents / self.config.head_size)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def constraints(tensor_parallel: int, sequence_parallel: bool, splits_experts: bool = False) -> list[Constraint]:
    """Megatron's tensor parallelism, pinned: column and row pairs, the vocabulary split; between them everything whole,
    or with sequence parallelism, split along the sequence. splits_experts: so are each expert's hidden values."""
    if tensor_parallel == 1:
        return []
    split = {
        "*query_key_value.weight": 0,
        "*output.weight": 1,
        "*up.weight": 0,
        "*down.weight": 1,
        "*token.weight": 0,
        "*head.weight": 0,
    }  # of experts `*.up` is no weight of a layer
    split |= {"*routed.up": 1, "*routed.down": 2} if splits_experts else {}
    weights = [Constraint(name, (f"S({dim})",), what="used", axis="tp") for name, dim in split.items()]
    between = ("S(1)", "P") if sequence_parallel else ("I", "R", "P")
    edges = ["layers.[0-9]", "layers.[0-9][0-9]", "layers.[0-9][0-9][0-9]", "layers.*_norm", "final_norm"]
    edges += [] if sequence_parallel else ["embedding"]  # learned positions have one dim alone
    summands = [Constraint("*routed_experts*", ("P",), what="tensor", axis="tp")] if splits_experts else []
    return [*weights, *summands, *(Constraint(path, between, axis="tp") for path in edges)]


def build(config: Config, batch_size: int) -> tuple[Decoder, dict[str, Tensor]]:
    """The model in float32 and one global batch, both without memory."""
    with torch.device("meta"):
        shape = (batch_size, config.seq_len)
        batch = {name: torch.empty(shape, dtype=torch.long) for name in ("tokens", "labels")}
        return Decoder(config), batch
