"""A batch that is merged behind another dim, (length, batch, …) → (length · batch, …), is followed sample by sample.

Rows that do not meet go in microbatches, whatever is done with them; what mixes rows is refused there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.microbatch import microbatch_types
from autopar.trace import trace
from autopar.trace.interpreter import run_graph
from tests.carried.compared import differences

BATCH, LENGTH, WIDTH = 8, 5, 8
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2}, "tp": {"tp": 2}, "zero3": {"dp": 2, "zero": 3}, "microbatches": {"dp": 2, "microbatches": 2},
    "searched": {"devices": 2},
}  # fmt: skip


class Attention(nn.Module):
    """nn.MultiheadAttention with all that it takes."""

    def __init__(self, batch_first: bool, padding: bool = False, causal: bool = False, weights: bool = False) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)
        self.batch_first, self.padding, self.causal, self.weights = batch_first, padding, causal, weights

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) if self.batch_first else self.enter(x).transpose(0, 1)
        padding = x[..., 0] > 0.9 if self.padding else None
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if self.causal else None
        made, weights = self.attention(h, h, h, key_padding_mask=padding, attn_mask=causal, need_weights=self.weights)
        loss = self.leave(made).square().mean()
        return loss + weights.square().mean() if self.weights else loss


class Encoder(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=batch_first)
        self.enter, self.leave = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.encoder, self.batch_first = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), batch_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) if self.batch_first else self.enter(x).transpose(0, 1)
        return self.leave(self.encoder(h)).square().mean()


class Both(nn.Module):
    """Encoder and decoder."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.enter, self.leave, self.batch_first = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1), batch_first
        self.both = nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.0, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) if self.batch_first else self.enter(x).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.leave(self.both(h, h, tgt_mask=mask, tgt_is_causal=True)).square().mean()


class Language(nn.Module):
    """A loss over (length, batch), the length first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[..., 0] * 2).long() % 11
        scores = self.head(self.embed(tokens).transpose(0, 1))[:-1]
        return F.cross_entropy(scores.reshape(-1, 11), tokens.t()[1:].reshape(-1), ignore_index=1)


class Written(nn.Module):
    """Attention as it is written by hand: (length, batch · heads), products of matrices, then (length · batch)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.enter(x).transpose(0, 1).chunk(3, -1)
        q, k, v = (part.reshape(LENGTH, -1, WIDTH // 2).transpose(0, 1) for part in (q, k, v))
        made = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)
        rows = F.layer_norm(F.gelu(self.leave(made.transpose(0, 1).reshape(-1, WIDTH))), (WIDTH,))
        rows = torch.addmm(torch.zeros(WIDTH), rows, self.leave.weight)
        return rows.view(LENGTH, -1, WIDTH).cumsum(0).square().mean()


class Frames(nn.Module):
    """Each frame of a film, the time first, through convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.leave = nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = x.transpose(0, 1).reshape(-1, 1, 2, 3)
        h = self.leave(F.relu(self.norm(self.convolution(frames))).mean((2, 3)))
        return h.view(LENGTH, -1, 3).cumsum(0).square().mean()


class Numbered(nn.Module):
    """Rows meet what is made of their numbers: positions, weights."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.positions = nn.Linear(6, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).transpose(0, 1).reshape(-1, WIDTH)
        h = h + self.positions(torch.arange(LENGTH).repeat_interleave(BATCH))
        weight = torch.arange(LENGTH * BATCH).float() / 40
        return ((torch.softmax(h, -1) * weight[:, None]).sum(1) * weight * h.amax(1)).mean()


class Views(nn.Module):
    """Two views of each sample in one batch, parted again."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = self.leave(torch.relu(self.enter(torch.cat([x[:, 0], x[:, 1], x[:, 2]]))))
        one, other = z.split([BATCH, 2 * BATCH])
        agree = (F.normalize(one, dim=1) * F.normalize(z[BATCH : 2 * BATCH], dim=1)).sum(1)
        return other.tanh().mean() - agree.mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attention(False, padding=True, causal=True),
    "attention, batch first": lambda: Attention(True, padding=True, weights=True),
    "encoder": lambda: Encoder(False), "encoder, batch first": lambda: Encoder(True), "both": lambda: Both(False),
    "language": Language, "written": Written, "frames": Frames, "numbered": Numbered, "views": Views,
}  # fmt: skip
CASES = [(name, plan) for name in MODELS for plan in ("dp", "microbatches")]
CASES += [(name, plan) for name in ("attention", "written", "views") for plan in ("tp", "zero3", "searched")]


def made(model: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(1)
    return model(), (torch.randn(BATCH, LENGTH, 6),)


@pytest.mark.sampled(always=("frames-microbatches",))
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_program_equals_the_model(name: str, plan: str) -> None:
    model, inputs = made(MODELS[name])
    assert differences(model, inputs, **PLANS[plan]) == []


@pytest.mark.parametrize("microbatches", [1, 2])
def test_stages_of_encoders_equal_the_model(microbatches: int) -> None:
    model, inputs = made(MODELS["encoder"])
    assert differences(model, inputs, pp=2, microbatches=microbatches) == []


def test_a_batch_as_long_as_what_is_before_it() -> None:
    torch.manual_seed(1)
    assert differences(Written(), (torch.randn(LENGTH - 1, LENGTH, 6),), dp=2, microbatches=2) == []


def test_dropout_in_between_draws_as_on_one_device() -> None:
    class Dropped(Numbered):
        def forward(self, x: Tensor) -> Tensor:
            rows = self.enter(x).transpose(0, 1).reshape(-1, WIDTH)
            back = F.dropout(self.enter(x).transpose(0, 1).contiguous(), 0.4)
            return F.dropout(rows.tanh(), 0.3).square().mean() + back[:2].sum() / BATCH

    model, inputs = made(Dropped)
    assert differences(model, inputs, dp=2) == []


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda h: h.cumsum(0),
    "roll": lambda h: h.roll(1, 0),
    "flip": lambda h: h.flip(0),
    "sort": lambda h: h.sort(0)[0],
    "products": lambda h: h @ h.t() @ h,
    "softmax": lambda h: h.softmax(0) * h,
    "largest": lambda h: h.amax(0, keepdim=True) * h,
    "reshape": lambda h: h.reshape(BATCH, LENGTH, WIDTH).cumsum(1),
    "slice": lambda h: h[3:11],
    "neighbours": lambda h: (h[1:] - h[:-1]).abs(),
    "lookup": lambda h: F.embedding(torch.arange(7), h),
    "gather": lambda h: h.gather(0, torch.arange(16).reshape(2, 8)),
    "index": lambda h: h[torch.arange(20)],
    "convolution": lambda h: F.conv1d(h.t()[None], torch.ones(8, 8, 3, dtype=h.dtype)),
    "tril": lambda h: h.tril(),
    "classes": lambda h: F.cross_entropy(h.t(), torch.arange(WIDTH)),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "group norm": lambda h: F.group_norm(h.t()[None], 4),
    "views": lambda h: torch.cat([h[:BATCH], h[BATCH : 2 * BATCH]]).cumsum(0),
    "contrast": lambda h: F.cross_entropy(h @ h.t() - 9 * torch.eye(len(h)), torch.arange(len(h)).roll(BATCH)),
}


class Mixed(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.mix = nn.Linear(6, WIDTH), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.enter(x).transpose(0, 1).reshape(-1, WIDTH)).square().mean()


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_meet_are_refused_in_microbatches_with_their_line(name: str) -> None:
    """And the graph, whatever form its tensors have, is the model."""
    model, inputs = made(lambda: Mixed(MIXING[name]).double())
    inputs = (inputs[0].double(),)
    graph = trace(model, inputs)
    with pytest.raises(PlanError, match=r"test_inner_batch\.py:\d+: expected an operator .*microbatches=1"):
        microbatch_types(graph, 2)
    found = run_graph(graph, dict(model.named_parameters()), {"x": inputs[0]})
    torch.testing.assert_close(found[graph.loss or ""], model(*inputs))
