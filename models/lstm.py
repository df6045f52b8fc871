"""A language model of recurrent layers: long short-term memory (Hochreiter and Schmidhuber, 1997).

The layers and sizes are those of Zaremba et al., 2014. Each of a layer's two weights holds its four gates
stacked, gate × unit × input, so that units can be split over devices: a device then owns its units' gates and
memory, and all that it needs of the others is their output of the step before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.batches import language_batch
from models.gpt import next_token_loss


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a global batch; the defaults train in seconds on a CPU."""

    vocab_size: int = 128
    seq_len: int = 8
    num_layers: int = 2
    hidden_size: int = 32
    fused: bool = False  # torch's own LSTM: one fast kernel for all layers, of which only samples can be split
    batch_size: int = 8


def zaremba_medium() -> Config:
    """The medium model for the Penn Treebank: 650 units a layer, 20 million parameters."""
    return Config(vocab_size=10_000, seq_len=35, hidden_size=650, batch_size=20)


def zaremba_large() -> Config:
    """The large model for the Penn Treebank: 1,500 units a layer, 66 million parameters."""
    return Config(vocab_size=10_000, seq_len=35, hidden_size=1500, batch_size=20)


class Layer(nn.Module):
    """One layer, unrolled over the sequence; it starts from zeros."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.input = nn.Parameter(torch.empty(4, hidden_size, hidden_size))
        self.recurrent = nn.Parameter(torch.empty(4, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(4, hidden_size))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden_size**-0.5), hidden_size**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, hidden) → the output of each step, (batch, seq, hidden)."""
        from_input = torch.einsum("bsi,gui->sgbu", x, self.input) + self.bias[:, None]
        output = memory = torch.zeros_like(x[:, 0])
        outputs = []
        for step in from_input:
            gates = step + torch.einsum("bi,gui->gbu", output, self.recurrent)
            output, memory = advance(gates, memory)
            outputs.append(output)
        return torch.stack(outputs, dim=1)


class Layers(nn.ModuleList):
    """Layers one after the other, called as `nn.LSTM` is."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__(Layer(hidden_size) for _ in range(num_layers))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x (batch, seq, hidden) → the last layer's outputs, (batch, seq, hidden); final states are not kept."""
        for layer in self:
            x = layer(x)
        return x, None


def advance(gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """gates (4, batch, unit) before their nonlinearities, memory (batch, unit) → the output and the next memory."""
    write, forget, read = gates[0].sigmoid(), gates[1].sigmoid(), gates[2].sigmoid()
    memory = forget * memory + write * gates[3].tanh()
    return read * memory.tanh(), memory


class LSTM(nn.Module):
    """Embedding, layers, and the mean cross-entropy of the next token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        size, num_layers = config.hidden_size, config.num_layers
        self.layers = nn.LSTM(size, size, num_layers, batch_first=True) if config.fused else Layers(size, num_layers)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens and labels (batch, seq) of token numbers → loss ()."""
        outputs, _ = self.layers(self.embedding(tokens))
        return next_token_loss(self.head(outputs), labels)


def build(config: Config) -> LSTM:
    """The model with fresh random weights."""
    return LSTM(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random tokens, labelled with the token that follows."""
    return language_batch(config.batch_size, config.seq_len, config.vocab_size, seed)
