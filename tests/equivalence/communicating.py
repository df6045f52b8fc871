"""Small models of the operators that communicate inside, each with a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

Batch = dict[str, Tensor]


class Images(nn.Module):
    """Grouped, strided and dilated convolutions, all norms and all pools; then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 5, padding=2)
        self.batch_norm = nn.BatchNorm2d(8, momentum=0.3)
        self.depthwise = nn.Conv2d(8, 16, 3, padding="same", groups=8)
        self.group_norm = nn.GroupNorm(4, 16)
        self.strided = nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=2)
        self.instance_norm = nn.InstanceNorm2d(16, affine=True)
        self.dilated = nn.Conv2d(16, 8, 3, padding=2, dilation=2, bias=False)
        self.untracked = nn.BatchNorm2d(8, affine=False, track_running_stats=False)
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.batch_norm(self.stem(images))), 3, 1, 1)
        x = F.gelu(self.group_norm(self.depthwise(x)))
        x = F.avg_pool2d(self.instance_norm(self.strided(x)), 3, 1, 1, count_include_pad=False)
        x = F.adaptive_avg_pool2d(self.untracked(self.dilated(x)).relu(), 1).flatten(1)
        return F.cross_entropy(self.head(x), labels)


def images(size: int = 16) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = Images().double()  # gradients of the biases that a norm takes away again are zero, and nothing else is
    return model, {"images": torch.randn(4, 3, size, size).double(), "labels": torch.randint(10, (4,))}


def image_model(module: Any) -> tuple[nn.Module, Batch]:
    """One of the example models that read images, on half its batch."""
    torch.manual_seed(0)
    config = module.Config(batch_size=4)
    return module.build(config), module.example_inputs(config)


def mixtral(implementation: str = "grouped_mm") -> tuple[nn.Module, Batch]:
    """Two layers, two of five experts for each token, and a large auxiliary loss: means over all tokens."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.5, use_cache=False, experts_implementation=implementation,
    )  # fmt: skip
    ids = torch.randint(64, (4, 8))
    labels = torch.randint(64, (4, 8))
    labels[0, :5] = -100  # ranks hold unequal counts
    return transformers.MixtralForCausalLM(config).double(), {"input_ids": ids, "labels": labels}


class Bags(nn.Module):
    """Bags of equal length, and of their own lengths with a factor for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.equal = nn.EmbeddingBag(30, 8, mode="mean", padding_idx=3)
        self.ragged = nn.EmbeddingBag(21, 8, mode="sum", include_last_offset=True)
        self.factors = nn.Parameter(torch.randn(12))
        self.head = nn.Linear(16, 5)

    def forward(self, matrix: Tensor, rows: Tensor, begins: Tensor, labels: Tensor) -> Tensor:
        pair = self.equal(matrix), self.ragged(rows, begins, self.factors)
        return F.cross_entropy(self.head(torch.cat(pair, 1)), labels)


def bags() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    matrix = torch.randint(30, (4, 5))
    matrix[1, :3] = 3  # rows of padding
    begins = torch.tensor([0, 5, 5, 9, 12])
    batch = {"matrix": matrix, "rows": torch.randint(21, (12,)), "begins": begins, "labels": torch.randint(5, (4,))}
    return Bags().double(), batch


class Recurrent(nn.Module):
    """Whole layers of both directions, with projections and given states; then cells, unrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(6, 8, num_layers=2, bidirectional=True, proj_size=4, batch_first=True)
        self.lstm, self.gru = nn.LSTMCell(8, 8), nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, state: Tensor, memory: Tensor, labels: Tensor) -> Tensor:
        outputs, (last, _) = self.layers(x, (state.transpose(0, 1).contiguous(), memory.transpose(0, 1).contiguous()))
        pair, hidden = None, last[:2].transpose(0, 1).flatten(1)
        for step in outputs.unbind(1):
            pair = self.lstm(step, pair)
            hidden = self.gru(pair[0], hidden)
        return F.cross_entropy(self.head(hidden), labels)


def recurrent() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    x, state, memory = torch.randn(4, 3, 6), torch.randn(4, 4, 4), torch.randn(4, 4, 8)
    batch = {"x": x.double(), "state": state.double(), "memory": memory.double()}
    return Recurrent().double(), {**batch, "labels": torch.randint(5, (4,))}
