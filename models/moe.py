"""A GPT in which every other MLP is a mixture of experts, routed as in GShard (Lepikhin et al., 2021).

Each token goes to its two likeliest experts. An expert takes a fixed number of tokens from each sequence, its
capacity, first choices before second ones, and the rest are dropped: the residual path still carries them. So
all shapes are static, and tokens reach experts and come back by einsums with a tensor that says which slot of
which expert each token takes. (GShard sends a token to its second expert at random, with a probability that
grows with its weight; here it always goes, so that equal inputs give equal outputs.)

Dims: g sequence (GShard's group), s token in it, e expert, c slot of an expert, m hidden size, h MLP size.
Routing never mixes two sequences, so g can be split over devices like any batch dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import gpt
from models.batches import language_batch


@dataclass(frozen=True)
class Config(gpt.Config):
    """GPT's sizes, and those of the experts, which are in layers 1, 3, 5, …"""

    num_experts: int = 4
    capacity_factor: float = 1.25
    balance_weight: float = 0.01

    def __post_init__(self) -> None:
        if self.num_layers % 2:
            raise ValueError(f"layers come in pairs, without and with experts: num_layers is {self.num_layers}")

    @property
    def capacity(self) -> int:
        """How many tokens of one sequence an expert takes: its even share, times the factor."""
        even_share = 2 * self.seq_len / self.num_experts
        return min(self.seq_len, math.ceil(self.capacity_factor * even_share))


def moe_380m() -> Config:
    """The 380M model of Alpa's evaluation (OSDI'22), with its batch of 1,024 sequences."""
    return _alpa(num_layers=8, hidden_size=768, num_heads=16, num_experts=8)


def moe_2_4b() -> Config:
    """The 2.4B model of Alpa's evaluation (OSDI'22), with its batch of 1,024 sequences."""
    return _alpa(num_layers=16, hidden_size=1024, num_heads=16, num_experts=16)


def moe_70b() -> Config:
    """The 70B model of Alpa's evaluation (OSDI'22), with its batch of 1,024 sequences."""
    return _alpa(num_layers=32, hidden_size=2048, num_heads=32, num_experts=64)


def _alpa(*, num_layers: int, hidden_size: int, num_heads: int, num_experts: int) -> Config:
    return Config(
        vocab_size=32000,
        seq_len=1024,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        mlp_ratio=8,
        tie_head=True,
        batch_size=1024,
        num_experts=num_experts,
    )


class Router(nn.Module):
    """Chooses two experts for each token, and a slot in each."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.capacity = config.capacity
        self.scores = nn.Linear(config.hidden_size, config.num_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (g, s, m) → dispatch (g, s, e, c), one where token s takes slot c of expert e, else zero; combine
        (g, s, e, c), the weight of that expert's output for the token; and the balance loss ()."""
        probabilities = self.scores(x).float().softmax(dim=-1)
        first, second = top_two(probabilities)
        first_slots = take_slots(first, 0, self.capacity)
        second_slots = take_slots(second, first.sum(dim=1, keepdim=True), self.capacity)
        first_weights, second_weights = normalized_weights(probabilities, first, second)
        combine = first_slots * first_weights + second_slots * second_weights
        dispatch = first_slots | second_slots
        return dispatch.to(x.dtype), combine.to(x.dtype), balance_loss(probabilities, first)


def top_two(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """probabilities (g, s, e) → the likeliest and second likeliest expert, one-hot booleans (g, s, e)."""
    num_experts = probabilities.shape[-1]
    first = one_hot(probabilities.argmax(dim=-1), num_experts)
    second = one_hot(probabilities.masked_fill(first, -1.0).argmax(dim=-1), num_experts)
    return first, second


def take_slots(choice: Tensor, taken: Tensor | int, capacity: int) -> Tensor:
    """choice (g, s, e) boolean, taken (g, 1, e) slots that are gone already → (g, s, e, c) boolean:
    tokens take an expert's slots in sequence order, and none once they run out."""
    chosen = choice.long()
    position = chosen.cumsum(dim=1) - chosen + taken
    slot = (position * chosen).sum(dim=-1)
    return choice.unsqueeze(-1) & one_hot(slot, capacity).unsqueeze(-2)


def one_hot(index: Tensor, size: int) -> Tensor:
    """index (…) → boolean (…, size). An index past the end gives no one at all: that is how tokens drop."""
    return index.unsqueeze(-1) == torch.arange(size, device=index.device)


def normalized_weights(probabilities: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The probabilities of both choices, scaled to sum to one for each token: (g, s, 1, 1) each."""
    first_probability = (probabilities * first).sum(dim=-1)
    second_probability = (probabilities * second).sum(dim=-1)
    total = first_probability + second_probability
    return (first_probability / total)[..., None, None], (second_probability / total)[..., None, None]


def balance_loss(probabilities: Tensor, first: Tensor) -> Tensor:
    """E · Σₑ (share of tokens whose first choice is e) · (mean probability of e), over each sequence, then
    the mean over sequences. 1 when the load is even, E when one expert gets all."""
    share = first.to(probabilities.dtype).mean(dim=1)
    return probabilities.shape[-1] * (share * probabilities.mean(dim=1)).sum(dim=-1).mean()


class MixtureOfExperts(nn.Module):
    """A router, and the MLPs of all experts in two stacked weights."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        mlp_size = config.mlp_ratio * config.hidden_size
        self.router = Router(config)
        self.up = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, mlp_size))
        self.down = nn.Parameter(torch.empty(config.num_experts, mlp_size, config.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (g, s, m) → (g, s, m) and the balance loss ()."""
        dispatch, combine, balance = self.router(x)
        slots = torch.einsum("gsec,gsm->egcm", dispatch, x)
        hidden = F.gelu(torch.einsum("egcm,emh->egch", slots, self.up), approximate="tanh")
        outputs = torch.einsum("egch,ehm->egcm", hidden, self.down)
        return torch.einsum("gsec,egcm->gsm", combine, outputs), balance


class ExpertLayer(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = gpt.Attention(config.hidden_size, config.num_heads, config.dropout)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MixtureOfExperts(config)
        self.dropout = gpt.dropout(config.dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (g, s, m) → (g, s, m) and the balance loss ()."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        mixture, balance = self.mlp(self.mlp_norm(x))
        return x + self.dropout(mixture), balance


class MoE(nn.Module):
    """GPT with experts in every other layer; the loss includes the weighted mean of their balance losses."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.balance_weight = config.balance_weight
        self.embedding = gpt.Embedding(config)
        layer_types = (gpt.Layer, ExpertLayer)
        self.layers = nn.ModuleList(layer_types[index % 2](config) for index in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        gpt.initialize(self, config.num_layers)
        if config.tie_head:
            self.head.weight = self.embedding.token.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens and labels (g, s) of token numbers → loss ()."""
        x = self.embedding(tokens)
        balances = []
        for dense_layer, expert_layer in zip(self.layers[::2], self.layers[1::2], strict=True):
            x, balance = expert_layer(dense_layer(x))
            balances.append(balance)
        loss = gpt.next_token_loss(self.head(self.final_norm(x)), labels)
        return loss + self.balance_weight * torch.stack(balances).mean()


def build(config: Config) -> MoE:
    """The model with fresh random weights."""
    return MoE(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random tokens, labelled with the token that follows."""
    return language_batch(config.batch_size, config.seq_len, config.vocab_size, seed)
