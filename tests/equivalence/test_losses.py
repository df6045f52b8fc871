"""Losses of any kind, in any plan: what they divide by is the whole batch's, masks leave what they do on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError, TraceError
from autopar.trace import trace
from tests.equivalence.alike import assert_alike, both

MICROBATCHED = ("microbatches", "stages of microbatches")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X, Y = torch.randn(8, 16, generator=seeded(0)), torch.randint(10, (8,), generator=seeded(1))
WEIGHTS = torch.rand(8, generator=seeded(2))


class Net(nn.Module):
    """Two layers, and a loss of the scores, labels and weights; `w`: of classes."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.loss = nn.Linear(16, 24), nn.Linear(24, 10), loss
        self.register_buffer("w", torch.rand(10) + 0.1)
        self.log_variance = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        return self.loss(self.b(torch.tanh(self.a(x))), y, m, self)


def each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


def normalised(z: Tensor, y: Tensor, m: Tensor, _: Net) -> Tensor:
    """Weights that are divided by their sum, and then by the root of their squares' sum."""
    w = m / m.sum()
    return (each(z, y) * (w / w.pow(2).sum().sqrt())).sum()


def balanced(z: Tensor, y: Tensor, m: Tensor, _: Net) -> Tensor:
    """Classes weigh less the more of the batch there is of them."""
    count = F.one_hot(y, 10).float().sum(0)
    return (each(z, y) * (1 / (count + 1))[y]).mean()


def focal(z: Tensor, y: Tensor, m: Tensor, _: Net) -> Tensor:
    loss = each(z, y)
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def gaussian(z: Tensor, y: Tensor, m: Tensor, _: Net) -> Tensor:
    return F.gaussian_nll_loss(z[:, :5], y[:, None].float().expand(-1, 5), z[:, 5:].exp())


def uncertain(z: Tensor, y: Tensor, m: Tensor, net: Net) -> Tensor:
    """Terms weighed by parameters, which are terms themselves: of the step, not of each microbatch."""
    terms = torch.stack([F.cross_entropy(z, y), z.pow(2).mean()])
    return (terms * torch.exp(-net.log_variance) + net.log_variance).sum() + 0.1 * net.log_variance[0]


def soft(y: Tensor) -> Tensor:
    return F.one_hot(y, 10).float() * 0.9 + 0.01


SUMS: dict[str, Callable[..., Tensor]] = {
    "weighted mean": lambda z, y, m, net: (each(z, y) * m).sum() / m.sum(),
    "counted mean": lambda z, y, m, net: (each(z, y) * (m > 0.5)).sum() / (m > 0.5).sum().clamp(min=1),
    "mean of rows": lambda z, y, m, net: ((z.pow(2) * m[:, None]).sum(1) / m.clamp(min=0.1)).mean(),
    "normalised weights": normalised,
    "balanced classes": balanced,
    "class weights": lambda z, y, m, net: F.cross_entropy(z, y, weight=net.w, ignore_index=3),
    "two means": lambda z, y, m, net: F.cross_entropy(z, y) + 0.1 * F.cross_entropy(z * 2, y, ignore_index=1),
    "unlike terms": lambda z, y, m, net: (
        (each(z, y) * m).sum() / m.sum() + 0.1 * F.mse_loss(z, torch.ones_like(z))
        + F.cross_entropy(z, y, weight=net.w, label_smoothing=0.1)
    ),
    "one less a mean": lambda z, y, m, net: 1 - F.cosine_similarity(z, soft(y)).mean() + 2,
    "constants": lambda z, y, m, net: sum([each(z, y).mean(), z.pow(2).mean()]) + net.w.sum() - 3,
    "penalty": lambda z, y, m, net: F.cross_entropy(z, y) + 0.1 * sum(p.pow(2).sum() for p in net.parameters()),
    "probabilities": lambda z, y, m, net: F.cross_entropy(z, soft(y), weight=net.w, label_smoothing=0.1),
    "focal": focal,
    "gaussian": gaussian,
    "uncertain": uncertain,
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("loss", SUMS)
@both(*MICROBATCHED, "dp", "stages")
def test_losses_that_are_sums_over_samples(loss: str, how: str) -> None:
    assert_alike(Net(SUMS[loss]), (X, Y, WEIGHTS), how)


@pytest.mark.sampled
@pytest.mark.parametrize("loss", ["counted mean", "unlike terms"])
@both("tp", "zero3", "searched")
def test_losses_in_other_plans(loss: str, how: str) -> None:
    assert_alike(Net(SUMS[loss]), (X, Y, WEIGHTS), how)


def test_what_only_serves_sums_of_the_batch_does_not_run_again() -> None:
    program = assert_alike(Net(SUMS["counted mean"]), (X, Y, WEIGHTS), "microbatches")
    forward = program.source.partition("def forward")[2]
    assert program.source.count("aten.gt.Scalar") == 2  # beside the sum, the product with the mask
    assert "aten.sum.default(gt" not in forward and "self.whole['sum_2']" in forward


def dice(z: Tensor, y: Tensor, m: Tensor, _: Net) -> Tensor:
    p, t = z.softmax(1), F.one_hot(y, 10).float()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


COUPLED: dict[str, Callable[..., Tensor]] = {
    "dice": dice,
    "contrastive": lambda z, y, m, net: F.cross_entropy(z @ z.T, torch.arange(8)),
    "distances": lambda z, y, m, net: torch.cdist(z, z).mean(),
    "sorted": lambda z, y, m, net: (z.sort(0).values - torch.linspace(-1, 1, 8)[:, None]).pow(2).mean(),
    "variance": lambda z, y, m, net: z.var(0).mean(),
    "balance of experts": lambda z, y, m, net: (z.softmax(1).mean(0) * z.softmax(1).mean(0).detach()).sum(),
    "log of a mean": lambda z, y, m, net: torch.log(z.pow(2).mean() + 1),
}


@pytest.mark.parametrize("loss", COUPLED)
def test_what_couples_samples_goes_without_microbatches(loss: str) -> None:
    model, inputs = Net(COUPLED[loss]), (X, Y, WEIGHTS)
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    with pytest.raises(PlanError, match=r"test_losses\.py:\d+: .* mixes samples .*Use microbatches=1"):
        autopar.template_plan(model, mesh, inputs, dp=2, microbatches=2)
    for how in ("dp", "stages"):
        assert_alike(Net(COUPLED[loss]), inputs, how)


# Rows that a mask leaves

IDS = torch.randint(50, (4, 6), generator=seeded(0))
LABELS, MASK = IDS.roll(-1, 1), torch.rand(4, 6, generator=seeded(9)) > 0.4
TARGETS = torch.randn(4, 6, generator=seeded(3))


class Tokens(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.body, self.norm = nn.Embedding(50, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.head, self.one, self.loss = nn.Linear(16, 50), nn.Linear(16, 1), loss

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.body(self.emb(ids)))
        return self.loss(self, h, labels, mask, y)

    def scores(self, h: Tensor) -> Tensor:
        return self.head(h)

    def number(self, h: Tensor) -> Tensor:
        return self.one(h).squeeze(-1)


def flat(net: Tokens, h: Tensor, y: Tensor, m: Tensor, t: Tensor) -> Tensor:
    z, y, m = net.scores(h).view(-1, 50), y.view(-1), m.view(-1)
    return F.cross_entropy(z[m, :], y[m], label_smoothing=0.1)


def by_places(net: Tokens, h: Tensor, y: Tensor, m: Tensor, t: Tensor) -> Tensor:
    places = m.view(-1).nonzero().squeeze(-1)
    return F.cross_entropy(net.scores(h).view(-1, 50)[places], torch.index_select(y.view(-1), 0, places))


def squares(net: Tokens, h: Tensor, y: Tensor, m: Tensor, t: Tensor) -> Tensor:
    error = net.number(h)[m] - t[m]
    return (error**2).mean() + 0.1 * error.abs().sum() + (1 - error).mul(0.5).mean(0)


def robust(net: Tokens, h: Tensor, y: Tensor, m: Tensor, t: Tensor) -> Tensor:
    error = (net.number(h) - t)[m]
    scale = (error.square() + 1).log().sqrt() + torch.maximum(error.exp().reciprocal(), torch.ones_like(error))
    return F.huber_loss(error, torch.zeros_like(error), delta=0.5) + (error.sin() * scale.rsqrt()).mean()


def ctc(net: Tokens, h: Tensor, y: Tensor, m: Tensor, t: Tensor) -> Tensor:
    """Of targets one after another, which the mask leaves anywhere in a sample's row; in each of the reductions."""
    frames, lengths = torch.full_like(y[:, 0], h.shape[1]), m.sum(-1)
    given = net.scores(h).log_softmax(-1).transpose(0, 1), y.clamp_min(1).masked_select(m), frames, lengths
    each = F.ctc_loss(*given, reduction="none", zero_infinity=True) * 0.1
    return (
        F.ctc_loss(*given, zero_infinity=True) + F.ctc_loss(*given, reduction="sum", zero_infinity=True) + each.mean()
    )


ROWS: dict[str, Callable[..., Tensor]] = {
    "index": lambda net, h, y, m, t: F.cross_entropy(net.scores(h)[m], y[m]),
    "head": lambda net, h, y, m, t: F.cross_entropy(net.scores(F.gelu(net.norm(h[m]))), y[m]),
    "labels": lambda net, h, y, m, t: F.cross_entropy(net.scores(h)[y != 7], y[y != 7]),
    "flat": flat,
    "places": by_places,
    "places by dim": lambda net, h, y, m, t: F.cross_entropy(
        net.scores(h)[m.nonzero(as_tuple=True)], y[torch.where(m)]
    ),
    "sum": lambda net, h, y, m, t: nn.CrossEntropyLoss(reduction="sum", ignore_index=3)(net.scores(h)[m], y[m]),
    "spread": lambda net, h, y, m, t: F.cross_entropy(net.scores(h)[m], y[m], reduction="none").mean(),
    "nll": lambda net, h, y, m, t: F.nll_loss(F.log_softmax(net.scores(h)[m], dim=-1), y[m]),
    "mse": lambda net, h, y, m, t: F.mse_loss(net.number(h)[m], t[m]),
    "smooth": lambda net, h, y, m, t: F.smooth_l1_loss(net.number(h)[m], t[m], beta=0.5),
    "bce": lambda net, h, y, m, t: F.binary_cross_entropy_with_logits(net.number(h)[m], t[m].sigmoid()),
    "select": lambda net, h, y, m, t: torch.masked_select((net.number(h) - t) ** 2, m).mean(),
    "select sum": lambda net, h, y, m, t: (net.number(h) - t).abs().masked_select(m & (t > 0)).sum() / m.sum(),
    "squares": squares,
    "robust": robust,
    "ctc": ctc,
    "rows": lambda net, h, y, m, t: net.scores(h)[m].pow(2).mean(-1).mean() + net.scores(h)[m].mean(0).pow(2).sum(),
    "both": lambda net, h, y, m, t: F.cross_entropy(net.scores(h)[~m], y[~m]) + F.mse_loss(net.number(h)[m], t[m]),
}


@pytest.mark.sampled
@pytest.mark.parametrize("loss", ROWS)
@both("dp", "tp")
def test_losses_of_rows_that_a_mask_leaves(loss: str, how: str) -> None:
    assert_alike(Tokens(ROWS[loss]), (IDS, LABELS, MASK, TARGETS), how)


@pytest.mark.sampled
@pytest.mark.parametrize("loss", [name for name in ROWS if name != "rows"])  # a square of a mean
@both(*MICROBATCHED)
def test_rows_that_a_mask_leaves_in_microbatches(loss: str, how: str) -> None:
    assert_alike(Tokens(ROWS[loss]), (IDS, LABELS, MASK, TARGETS), how)


@pytest.mark.sampled
@pytest.mark.parametrize("loss", ["index", "mse", "select", "sum"])
@both("dp", "microbatches")
def test_a_mask_that_leaves_nothing(loss: str, how: str) -> None:
    """A mean of nothing is nan, its gradients too."""
    assert_alike(Tokens(ROWS[loss]), (IDS, LABELS, MASK & False, TARGETS), how, steps=1)


def test_what_rows_left_out_hold_does_not_matter() -> None:
    """Not even where it is infinite."""
    targets = torch.where(MASK, TARGETS, float("inf"))
    assert_alike(Tokens(ROWS["squares"]), (IDS, LABELS, MASK, targets), "dp")
    assert_alike(Tokens(ROWS["mse"]), (IDS, LABELS, MASK, targets), "microbatches")


REFUSED: dict[str, tuple[str, Callable[..., Any]]] = {
    "another mask": ("rows that different masks leave", lambda net, z, y, m, t: F.cross_entropy(z[m], y[~m])),
    "sort": ("found sort", lambda net, z, y, m, t: z[m].sort(0).values.mean()),
    "shape": ("found the shape", lambda net, z, y, m, t: z[m].shape[0] * z.mean()),
    "number": ("found len", lambda net, z, y, m, t: z.mean() * len(z[m])),
    "deviation": ("found std", lambda net, z, y, m, t: z[m].std()),
    "other rows": ("such rows and others", lambda net, z, y, m, t: F.mse_loss(z[m], torch.zeros(13, 50))),
    "columns": ("rows of 1 and of 0 dims", lambda net, z, y, m, t: (z[m] - t[m]).mean()),
    "product": ("as its weights", lambda net, z, y, m, t: F.linear(z[m], z[m]).mean()),
    "lengths": (
        "lengths are not their mask's",
        lambda net, z, y, m, t: F.ctc_loss(
            z.log_softmax(-1).transpose(0, 1), y[m], torch.full_like(y[:, 0], 6), m.sum(-1).clamp(max=2)
        ),
    ),
    "cumulated": ("found cumsum", lambda net, z, y, m, t: t[m].cumsum(0).mean() * z.mean()),
}


@pytest.mark.parametrize("how", REFUSED)
def test_other_uses_of_rows_are_refused_with_their_line(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    found, loss = REFUSED[how]
    model = Tokens(lambda net, h, y, m, t: loss(net, net.scores(h), y, m, t))
    with pytest.raises(TraceError, match=rf"(?s)test_losses\.py:\d+: .*ignore_index.*{found}"):
        trace(model, (IDS, LABELS, MASK, TARGETS))
    assert capfd.readouterr() == ("", "")


def test_writing_to_a_tensor_leaves_rows_that_were_taken() -> None:
    def loss(net: Tokens, h: Tensor, y: Tensor, m: Tensor, t: Tensor) -> Tensor:
        number = net.number(h) * 1
        rows = number[m]
        number.add_(1)
        return rows.mean() + number.pow(2).mean()

    assert_alike(Tokens(loss), (IDS, LABELS, MASK, TARGETS), "dp")


# Checks of values, and what else tracing stops at


class Checked(Net):
    def __init__(self, check: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(lambda z, y, m, net: F.cross_entropy(z, y))
        self.check = check

    def forward(self, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        self.check(x, y)
        return super().forward(x, y, m)


def raising(x: Tensor, y: Tensor) -> None:
    if torch.isnan(x).any() or not torch.isfinite(x).all():
        raise ValueError("not finite")


def asserting(x: Tensor, y: Tensor) -> None:
    assert (y >= 0).all() and (y < 10).all(), "labels"


def telling(x: Tensor, y: Tensor) -> None:
    if not (y < 10).all().item():
        print("labels")


def otherwise(x: Tensor, y: Tensor) -> Tensor:
    if bool((y >= 0).all()):
        return y
    else:
        raise ValueError("labels")


def distribution(x: Tensor, y: Tensor) -> Any:
    return torch.distributions.Normal(x, x.abs() + 1)


def checked_by_torch(x: Tensor, y: Tensor) -> None:
    """As transformers' torch_compilable_check: Llava counts the places of its images."""
    torch._check_tensor_all((y >= 0).sum() == y.numel(), lambda: "labels")
    torch._check_tensor_all_with(ValueError, y < 10)


@pytest.mark.parametrize("check", [raising, asserting, telling, otherwise, checked_by_torch, distribution])
def test_checks_of_values_are_taken_as_passed(check: Any) -> None:
    assert_alike(Checked(check), (X, Y, WEIGHTS), "dp")


def test_what_values_decide_is_refused_without_torchs_graph(capfd: pytest.CaptureFixture[str]) -> None:
    def double(z: Tensor, y: Tensor, m: Tensor, net: Net) -> Tensor:
        if z.sum() > 0:
            z = z * 2
        return F.cross_entropy(z, y)

    with pytest.raises(TraceError, match=r"test_losses\.py:\d+: if z\.sum\(\) > 0"):
        trace(Net(double), (X, Y, WEIGHTS))
    assert capfd.readouterr() == ("", "")


class Fourier(nn.Module):
    """Writes into parts of a complex tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.how = nn.Parameter(torch.randn(4, 4, 5, dtype=torch.cfloat)), how

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        f = torch.fft.rfft(x)
        made = torch.einsum("bix,iox->box", f[:, :, :5], self.w)
        out = torch.zeros_like(f) if self.how != "select" else f.clone()
        if self.how == "select":
            out[:, :, 0] = made[:, :, 1]
        else:
            out[:, :, :5] = made
        if self.how == "twice":
            out[..., -2:] = made[..., :2]
        return F.mse_loss(torch.fft.irfft(out, n=x.shape[-1]), y)


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["slice", "twice", "select"])
@both("dp", "tp", "microbatches")
def test_writing_into_complex_tensors(form: str, how: str) -> None:
    inputs = torch.randn(8, 4, 16, generator=seeded(1)), torch.randn(8, 4, 16, generator=seeded(2))
    assert_alike(Fourier(form), inputs, how)


def test_sparse_tensors_are_refused() -> None:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__(lambda z, y, m, net: F.cross_entropy(torch.sparse.mm(net.near, z), y))
            self.register_buffer("near", torch.eye(8).to_sparse())

    with pytest.raises(TraceError, match=r"expected dense tensors, found near of layout torch\.sparse_coo"):
        trace(Sparse(), (X, Y, WEIGHTS))
    with pytest.raises(TraceError, match=r"found a result of .* of layout torch\.sparse_coo|expected dense"):
        trace(Net(lambda z, y, m, net: torch.sparse.mm(z.to_sparse(), z.T).to_dense().sum()), (X, Y, WEIGHTS))
