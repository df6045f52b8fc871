"""Reductions, scans, norms and orders. What rows may name: `row`."""

from tests.random_programs.kinds.row import row

ROWS = (
    row("amax dim1", "h = h + torch.amax(h, 1, keepdim=True) * 0.1"),
    row("amax dim2", "h = h + torch.amax(h, 2, keepdim=True) * 0.1"),
    row("amax dim0", "h = h + torch.amax(h, 0, keepdim=True) * 0.1"),
    row("amin dim1", "h = h + torch.amin(h, 1, keepdim=True) * 0.1"),
    row("amin dim2", "h = h + torch.amin(h, 2, keepdim=True) * 0.1"),
    row("amin dim0", "h = h + torch.amin(h, 0, keepdim=True) * 0.1"),
    row("logsumexp dim1", "h = h + torch.logsumexp(h, 1, keepdim=True) * 0.1"),
    row("logsumexp dim2", "h = h + torch.logsumexp(h, 2, keepdim=True) * 0.1"),
    row("logsumexp dim0", "h = h + torch.logsumexp(h, 0, keepdim=True) * 0.1"),
    row("prod dim1", "h = h + torch.prod(h, 1, keepdim=True) * 0.1"),
    row("prod dim2", "h = h + torch.prod(h, 2, keepdim=True) * 0.1"),
    row("var dim1", "h = h + torch.var(h, 1, keepdim=True) * 0.1"),
    row("var dim2", "h = h + torch.var(h, 2, keepdim=True) * 0.1"),
    row("var dim0", "h = h + torch.var(h, 0, keepdim=True) * 0.1"),
    row("std dim1", "h = h + torch.std(h, 1, keepdim=True) * 0.1"),
    row("std dim2", "h = h + torch.std(h, 2, keepdim=True) * 0.1"),
    row("std dim0", "h = h + torch.std(h, 0, keepdim=True) * 0.1"),
    row("mean dim1", "h = h + torch.mean(h, 1, keepdim=True) * 0.1"),
    row("mean dim2", "h = h + torch.mean(h, 2, keepdim=True) * 0.1"),
    row("mean dim0", "h = h + torch.mean(h, 0, keepdim=True) * 0.1"),
    row("nansum dim1", "h = h + torch.nansum(h, 1, keepdim=True) * 0.1"),
    row("nansum dim2", "h = h + torch.nansum(h, 2, keepdim=True) * 0.1"),
    row("nansum dim0", "h = h + torch.nansum(h, 0, keepdim=True) * 0.1"),
    row("nanmean dim1", "h = h + torch.nanmean(h, 1, keepdim=True) * 0.1"),
    row("nanmean dim2", "h = h + torch.nanmean(h, 2, keepdim=True) * 0.1"),
    row("nanmean dim0", "h = h + torch.nanmean(h, 0, keepdim=True) * 0.1"),
    row(
        "amax ties",
        """
        h = torch.round(h * 2) * h.detach() * 0 + h.clamp(-0.1, 0.1)
        h = h + h.amax((1, 2), keepdim=True) + h.amin(2, keepdim=True)
        """,
    ),
    row(
        "max ties",
        """
        h = h.clamp(-0.1, 0.1)
        h = h + h.max(2, keepdim=True)[0] + h.min(1, keepdim=True)[0]
        """,
    ),
    row(
        "max all ties",
        """
        h = h.clamp(-0.1, 0.1)
        h = h + h.max()
        """,
    ),
    row(
        "amax all ties",
        """
        h = h.clamp(-0.1, 0.1)
        h = h + h.amax() * 0.5 + torch.aminmax(h, dim=2, keepdim=True)[0]
        """,
    ),
    row(
        "median ties",
        """
        h = h.clamp(-0.1, 0.1)
        h = h + h.median(2, keepdim=True)[0]
        """,
    ),
    row(
        "maximum ties",
        """
        a = h.clamp(-0.1, 0.1)
        h = torch.maximum(a, a.roll(1, 2)) + h
        """,
    ),
    row("norm inf", 'h = h / torch.linalg.vector_norm(h, float("inf"), 2, keepdim=True)'),
    row("norm 1 3", "h = h / torch.linalg.vector_norm(h, 3, 2, keepdim=True) + h.norm(1, 1, keepdim=True) * 0.1"),
    row("norm 0", "h = h / (1 + torch.linalg.vector_norm(h, 0, 2, keepdim=True))"),
    row("norm all", "h = h / h.norm() * 3"),
    row("norm -inf", 'h = h + torch.linalg.vector_norm(h, -float("inf"), 2, keepdim=True)'),
    row("std unbiased false", "h = (h - h.mean(2, keepdim=True)) / (h.std(2, keepdim=True, unbiased=False) + 0.1)"),
    row("var correction3", "h = h / (torch.var(h, (1, 2), correction=3, keepdim=True) + 0.1)"),
    row(
        "std_mean",
        """
        s, m = torch.std_mean(h, 1, keepdim=True)
        h = (h - m) / (s + 0.1)
        """,
    ),
    row(
        "var_mean batch",
        """
        s, m = torch.var_mean(h, (0, 1))
        h = (h - m) / (s + 0.1).sqrt()
        """,
    ),
    row("cummax", "h = h + h.cummax(2)[0] + h.cummin(1)[0]"),
    row("cumprod", "h = h + (1 + 0.1 * h).cumprod(2) + (1 + 0.1 * h).cumprod(1)"),
    row("cumsum both", "h = h + 0.1 * h.cumsum(2) + 0.1 * h.cumsum(1) + 0.1 * h.cumsum(0)"),
    row("logcumsumexp", "h = h + 0.1 * torch.logcumsumexp(h, 2) + 0.1 * torch.logcumsumexp(h, 1)"),
    row("diff n2", "h = h + F.pad(h.diff(n=2, dim=2), (1, 1))"),
    row(
        "trapz",
        """
        h = (
            h
            + torch.trapezoid(h, dim=2)[..., None] * 0.1
            + F.pad(torch.cumulative_trapezoid(h, dim=1), (0, 0, 1, 0))
        )
        """,
    ),
    row("softmax splits", "h = h.softmax(2) * h.log_softmax(1) + h.softmax(0)"),
    row(
        "softmin hardshrink", "h = F.softmin(h, 2) * 4 + F.hardshrink(h, 0.1) + F.softshrink(h, 0.1) + F.tanhshrink(h)"
    ),
    row("gumbel", "h = h + F.gumbel_softmax(h * 0 + 1.0, dim=2, hard=True).detach() * 0"),
    row(
        "topk",
        """
        v, i = h.topk(3, 2)
        h = h + v.sum(2, keepdim=True) + i.sum(2, keepdim=True) * 0.01
        """,
    ),
    row(
        "topk dim1 smallest",
        """
        v, i = h.topk(2, 1, largest=False)
        h = h + v.mean(1, keepdim=True)
        """,
    ),
    row(
        "sort desc",
        """
        v, i = h.sort(2, descending=True)
        h = h + v.cumsum(2) * 0.1 + i * 0.01
        """,
    ),
    row(
        "argsort gather",
        """
        i = h.argsort(1)
        h = torch.gather(h, 1, i) + h
        """,
    ),
    row("msort", "h = h + torch.msort(h)"),
    row("kthvalue", "h = h + h.kthvalue(2, 2, keepdim=True)[0]"),
    row("mode", "h = h + (h * 3).round().mode(2, keepdim=True)[0].detach() * 0.1"),
    row("quantile", "h = h + h.quantile(0.3, 2, keepdim=True) + h.nanquantile(0.6, 1, keepdim=True)"),
    row("renorm", "h = h.renorm(2, 1, 1.0)"),
    row(
        "searchsorted",
        """
        b = torch.linspace(-1, 1, 5, dtype=h.dtype)
        h = h + torch.searchsorted(b, h.detach().contiguous()) * 0.1 + torch.bucketize(h.detach(), b) * 0.1
        """,
    ),
    row("histc", "h = h + torch.histc(h.detach(), 4, -1, 1)[:1] * 0.01"),
)
