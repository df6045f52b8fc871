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


POINTS = torch.tensor([0.0, 0.0, -0.0, 1.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 40.0, -40.0, 200.0, -200.0, 1e-30, 1e30])
"""Zeros, ties, borders, and numbers whose exponentials are none."""
TARGETS = torch.tensor([0.0, 1.0, 0, 1, 0, 0, 0, 0, 2, -2, 39.5, -39.5, 200, -200, 0, 0], dtype=torch.float64)
CLASS = torch.tensor([0, 1, 3, 2])
EDGES: dict[str, Callable[[Tensor], Tensor]] = {
    "distances of many rows": lambda h: torch.cdist(h.repeat(2)[:, None], h.repeat(2)[:, None]),
    "distances of few rows": lambda h: torch.cdist(h[:, None], h[:, None]),
    "largest and smallest": lambda h: torch.stack(torch.aminmax(h.view(4, 4), dim=1)),
    "largest and smallest of all": lambda h: torch.stack(torch.aminmax(h[:5])),
    **{f"norm {p}": lambda h, p=p: h.view(4, 4)[:, :2].norm(p, 1) for p in (0.5, 1.0, 2.0, 3.0, float("inf"))},
    "norm of zeros": lambda h: h[:3].norm() + h[:3].norm(1) + h[:3].norm(3) + torch.linalg.norm(h[:3]),
    "norm of matrices": lambda h: torch.linalg.matrix_norm(h[:4].view(2, 2)) + h[:2].view(1, 2).norm("fro"),
    "normalised": lambda h: F.normalize(h.view(8, 2), dim=1),
    "cosines": lambda h: F.cosine_similarity(h.view(8, 2), h.view(8, 2).flip(0)),
    "pairs": lambda h: F.pairwise_distance(h.view(8, 2), h.view(8, 2).flip(1)),
    "renorm": lambda h: h.view(8, 2).renorm(2, 0, 1.0),
    "huber": lambda h: F.huber_loss(h, TARGETS, reduction="none", delta=0.5),
    "smooth_l1": lambda h: F.smooth_l1_loss(h, TARGETS, reduction="none", beta=0.5),
    "smooth_l1 without": lambda h: F.smooth_l1_loss(h, TARGETS, reduction="none", beta=0.0),
    "l1": lambda h: F.l1_loss(h, TARGETS, reduction="none"),
    "soft_margin": lambda h: F.soft_margin_loss(h, TARGETS.sign(), reduction="none"),
    "multi_margin": lambda h: F.multi_margin_loss(h.view(4, 4), CLASS, reduction="none"),
    "multi_margin squared": lambda h: F.multi_margin_loss(h.view(4, 4), CLASS, p=2, reduction="none"),
    "triplet of equals": lambda h: F.triplet_margin_loss(h.view(8, 2), h.view(8, 2), h.view(8, 2), reduction="none"),
    "hinge": lambda h: F.hinge_embedding_loss(h, TARGETS.sign() + (TARGETS == 0), margin=1.0, reduction="none"),
    "ranking": lambda h: F.margin_ranking_loss(h, TARGETS, torch.ones(16), margin=0.0, reduction="none"),
    "bce": lambda h: F.binary_cross_entropy(h.clamp(0, 1), TARGETS.clamp(0, 1), reduction="none"),
    "bce with logits": lambda h: F.binary_cross_entropy_with_logits(h, TARGETS.clamp(0, 1), reduction="none"),
    "log sigmoid": F.logsigmoid,
    "glu": lambda h: F.glu(h.view(8, 2), 1),
    "xlog1py": lambda h: torch.special.xlog1py(0.0, h) + torch.special.xlog1py(h, 0.5),
    "bce, weighed": lambda h: F.binary_cross_entropy(h.clamp(0, 1), TARGETS.clamp(0, 1), weight=TARGETS),
    "bce summed": lambda h: F.binary_cross_entropy(h.sigmoid(), TARGETS.clamp(0, 1), reduction="sum"),
    "xlogy": lambda h: torch.xlogy(h.abs(), h.abs()) + torch.special.entr(h.abs()),
    "xlogy of numbers": lambda h: torch.xlogy(0.0, h.abs()) + torch.xlogy(h, 0.5) + torch.xlogy(2.0, h.abs()),
    "softplus": lambda h: F.softplus(h) + F.mish(h) + F.silu(h),
    "clamps": lambda h: h.clamp(-1, 1) + F.hardtanh(h) + F.relu6(h) + F.threshold(h, 0, 1),
    "hard": lambda h: F.hardsigmoid(h) + F.hardswish(h),
    "leaks": lambda h: F.leaky_relu(h, 0.1) + F.elu(h) + F.celu(h) + F.selu(h) + F.softshrink(h) + F.hardshrink(h),
    "roots": lambda h: h.clamp(min=0).sqrt() + h.abs().rsqrt() + h.abs().pow(0.5) + h.abs() ** 1.5,
    "powers": lambda h: h**2 + h**0 + torch.pow(h.abs(), torch.tensor(2.0)) + torch.pow(2.0, h.clamp(max=9)),
    "signs": lambda h: h.abs() + h.sgn() * h + torch.copysign(h, -h) + torch.maximum(h, -h) + torch.fmax(h, h.detach()),
    "angles": lambda h: torch.atan2(h, h) + torch.hypot(h, h) + torch.logaddexp(h, h) + torch.asin(h.clamp(-1, 1)),
    "extremes": lambda h: h.max() + h.min() + h[:5].amax() + h.view(4, 4).amin(1) + h.view(4, 4).max(0).values,
    "median": lambda h: h.median() + h[:6].median(0).values,
    "products": lambda h: h[:4].prod() + h.view(4, 4).prod(1) + h.view(4, 4).cumprod(1)[:, -1],
    "spreads": lambda h: h[:3].std() + h[:3].var() + h[:1].var(correction=0) + h[3:5].std(correction=0),
    "sums of exponentials": lambda h: torch.logsumexp(h.view(4, 4), 1) + torch.logcumsumexp(h, 0)[:4],
    "softmax of what is hidden": lambda h: h.view(4, 4).masked_fill(torch.eye(4) == 1, -torch.inf).softmax(1),
    "written": lambda h: torch.where(h > 0, h.log(), h) * torch.where(h > 0, 1.0, 0.0),
    "sinc": lambda h: torch.sinc(h) + torch.special.i0e(h) + torch.erf(h) + torch.logit(h, eps=1e-3),
}  # fmt: skip


class Point(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.h = function, nn.Parameter(POINTS.double())

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(self.h * x) * 0.5).sum()


@pytest.mark.parametrize("name", EDGES)
def test_gradients_at_kinks_and_beyond_numbers_are_those_of_torch(name: str) -> None:
    """Distances of equal rows had no gradient but NaN: torch computes them by a formula of its own, and takes them
    apart into the root of a number that is zero. So for cross-entropies of probabilities that are 0 or 1."""
    model, inputs = Point(EDGES[name]), {"x": torch.ones(16, dtype=torch.float64)}
    expected = model(**inputs)
    expected.backward()
    loss, found = graph_gradients(trace(model, inputs), model, inputs)
    torch.testing.assert_close(loss, expected.detach(), equal_nan=True)
    torch.testing.assert_close(found["h"], model.h.grad, equal_nan=True)
