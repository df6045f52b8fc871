"""What operators are taken apart into computes what they do, also with odd targets and on single samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.trace import trace
from tests.trace.interpret import graph_gradients

F = nn.functional
ENDED = torch.tensor([[3, 0, -1, 1, 2], [-1, 0, 0, 0, 0], [4, 2, 1, 0, 3], [2, -1, -1, -1, -1]])
ONE = torch.tensor([3, 0, -100, 1])
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0])
HALF = torch.full((4, 5), 0.5)

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "multilabel_margin": lambda h: F.multilabel_margin_loss(h, ENDED),
    "multilabel_margin of rows": lambda h: F.multilabel_margin_loss(h, ENDED, reduction="none").square().sum(),
    "multilabel_margin of one": lambda h: F.multilabel_margin_loss(h[0], ENDED[0]),
    "multi_margin": lambda h: F.multi_margin_loss(h, ONE.clamp_min(0), p=2, margin=0.5, weight=torch.arange(5.0)),
    "multilabel_soft_margin": lambda h: F.multilabel_soft_margin_loss(h, HALF, weight=torch.arange(5.0)),
    "soft_margin": lambda h: F.soft_margin_loss(h, ENDED.sign().float()),
    "cross_entropy": lambda h: F.cross_entropy(h, ONE, weight=torch.arange(5.0) + 1, label_smoothing=0.1),
    "nll": lambda h: F.nll_loss(h.log_softmax(-1), ONE, weight=torch.arange(5.0)),
    "huber": lambda h: F.huber_loss(h, HALF, delta=0.3),
    "smooth_l1": lambda h: F.smooth_l1_loss(h, HALF, beta=0.2),
    "kl_div": lambda h: F.kl_div(h.log_softmax(-1), HALF, log_target=True, reduction="batchmean"),
    "poisson_nll": lambda h: F.poisson_nll_loss(h, HALF * 6, full=True),
    "gaussian_nll": lambda h: F.gaussian_nll_loss(h, HALF, h.square(), full=True),
    "cosine_embedding": lambda h: F.cosine_embedding_loss(h, HALF, SIGNS, margin=0.2),
    "margin_ranking": lambda h: F.margin_ranking_loss(h[:, 0], h[:, 1], SIGNS, margin=0.2),
    "hinge_embedding": lambda h: F.hinge_embedding_loss(h, ENDED.sign().float(), margin=0.5),
    "triplet": lambda h: F.triplet_margin_loss(h, HALF, h.flip(0), p=3, swap=True),
    "bce": lambda h: F.binary_cross_entropy(h.sigmoid(), HALF, weight=torch.arange(5.0)),
    "bce_with_logits": lambda h: F.binary_cross_entropy_with_logits(h, HALF, pos_weight=torch.arange(5.0)),
}


class Net(nn.Module):
    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(6, 5), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.linear(x))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_what_torch_computes(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = Net(LOSSES[name]), {"x": torch.randn(4, 6)}
    expected = model(**inputs)
    expected.backward()
    loss, found = graph_gradients(trace(model, inputs), model, inputs)
    torch.testing.assert_close(loss, expected.detach())
    for own, parameter in model.named_parameters():
        torch.testing.assert_close(found[own], parameter.grad)
