"""Losses. What rows may name: `row`."""

from tests.random_programs.kinds.row import row

ROWS = (
    row(
        "loss weights ignore",
        loss="""
        loss = F.cross_entropy(
            z, y.masked_fill(y == 0, -100), weight=torch.linspace(0.5, 2, C, dtype=z.dtype)
        )
        """,
    ),
    row(
        "loss weights smooth ignore sum",
        loss="""
        loss = F.cross_entropy(
            z,
            y,
            weight=torch.linspace(0.5, 2, C, dtype=z.dtype),
            ignore_index=1,
            reduction="sum",
            label_smoothing=0.1,
        )
        """,
    ),
    row(
        "loss smooth mean w",
        loss="""
        loss = F.cross_entropy(
            z,
            y,
            weight=torch.linspace(0.5, 2, C, dtype=z.dtype),
            ignore_index=1,
            label_smoothing=0.1,
        )
        """,
    ),
    row("loss none mean", loss='loss = F.cross_entropy(z, y, reduction="none", ignore_index=2).mean()'),
    row(
        "loss none weights",
        loss="""
        l = F.cross_entropy(z, y, reduction="none")
        w = (y > 1).to(z.dtype)
        loss = (l * w).sum() / w.sum().clamp(min=1)
        """,
    ),
    row(
        "loss tokens 3d",
        loss="""
        zt = self.head(h).transpose(1, 2)
        loss = F.cross_entropy(zt, yt, ignore_index=0)
        """,
    ),
    row(
        "loss tokens flat",
        loss="""
        loss = F.cross_entropy(
            self.head(h).view(-1, C),
            yt.view(-1),
            ignore_index=0,
            weight=torch.linspace(0.5, 2, C, dtype=z.dtype),
        )
        """,
    ),
    row(
        "loss nll2d",
        loss="""
        loss = F.nll_loss(
            self.head(h).log_softmax(-1).transpose(1, 2),
            yt,
            weight=torch.linspace(0.5, 2, C, dtype=z.dtype),
            ignore_index=3,
        )
        """,
    ),
    row(
        "loss nll2d none",
        loss="""
        loss = F.nll_loss(self.head(h).log_softmax(-1).transpose(1, 2), yt, reduction="none")[
            :, 1:
        ].mean()
        """,
    ),
    row("loss poisson", loss="loss = F.poisson_nll_loss(z, y[:, None].expand_as(z).double(), full=True)"),
    row("loss gauss", loss="loss = F.gaussian_nll_loss(z, y[:, None].expand_as(z).double(), z.exp(), full=True)"),
    row(
        "loss kl log",
        loss="""
        loss = F.kl_div(
            z.log_softmax(1),
            z.detach().roll(1, 0).log_softmax(1),
            log_target=True,
            reduction="batchmean",
        )
        """,
    ),
    row("loss kl mean", loss='loss = F.kl_div(z.log_softmax(1), z.detach().roll(1, 1).softmax(1), reduction="mean")'),
    row(
        "loss bce w",
        loss="""
        t = F.one_hot(y, C).double()
        loss = F.binary_cross_entropy_with_logits(
            z,
            t,
            weight=torch.linspace(0.5, 2, C, dtype=z.dtype),
            pos_weight=torch.linspace(1, 3, C, dtype=z.dtype),
        )
        """,
    ),
    row(
        "loss bce",
        loss="""
        t = F.one_hot(y, C).double()
        loss = F.binary_cross_entropy(z.sigmoid(), t, reduction="sum")
        """,
    ),
    row("loss hinge emb", loss="loss = F.hinge_embedding_loss(z, torch.where(z.detach() > 0, 1, -1))"),
    row(
        "loss margin rank",
        loss="""
        loss = F.margin_ranking_loss(
            z[:, 0], z[:, 1], torch.where(y > 2, 1, -1).double(), margin=0.3
        )
        """,
    ),
    row(
        "loss multilabel margin",
        loss="""
        t = torch.full((len(y), C), -1)
        t[:, 0] = 1
        loss = (
            F.multilabel_margin_loss(z, t)
            + F.multilabel_soft_margin_loss(z, F.one_hot(y, C).double())
            + F.soft_margin_loss(z, torch.where(z.detach() > 0, 1.0, -1.0))
        )
        """,
    ),
    row(
        "loss multi margin",
        loss="""
        loss = F.multi_margin_loss(
            z, y, p=2, margin=0.7, weight=torch.linspace(0.5, 2, C, dtype=z.dtype)
        )
        """,
    ),
    row(
        "loss triplet",
        loss="""
        a = h.mean(1)
        loss = F.triplet_margin_loss(
            a, a.roll(1, 0), a.roll(2, 0), swap=True
        ) + F.triplet_margin_with_distance_loss(a, a.roll(1, 1), a.roll(2, 1))
        """,
    ),
    row(
        "loss ctc",
        loss="""
        loss = F.ctc_loss(
            self.head(h).log_softmax(-1).transpose(0, 1),
            yt[:, :2].clamp(min=1),
            torch.full((len(y),), T),
            torch.full((len(y),), 2),
        )
        """,
    ),
    row(
        "loss huber l1 smooth",
        loss="""
        t = F.one_hot(y, C).double()
        loss = (
            F.huber_loss(z, t, delta=0.3)
            + F.smooth_l1_loss(z, t, beta=0.2)
            + F.l1_loss(z, t)
            + F.mse_loss(z, t, reduction="sum") * 0.1
        )
        """,
    ),
    row(
        "loss mse weight",
        loss="""
        t = F.one_hot(y, C).double()
        loss = F.mse_loss(z, t, weight=(y > 1).double()[:, None].expand_as(z))
        """,
    ),
    row(
        "loss soft ce",
        loss="""
        t = F.one_hot(y, C).double() * 0.9 + 0.1 / C
        loss = F.cross_entropy(
            z, t, label_smoothing=0.2, weight=torch.linspace(0.5, 2, C, dtype=z.dtype)
        )
        """,
    ),
    row(
        "loss logit adj",
        loss="loss = F.cross_entropy(z + torch.bincount(y, minlength=C).double().clamp(min=1).log(), y)",
    ),
    row(
        "loss sum of mean and sum",
        loss="""
        loss = (
            F.cross_entropy(z, y)
            + 0.01 * z.square().sum()
            + h.abs().mean()
            + (z.mean(0) - 0.1).square().sum()
        )
        """,
    ),
    row("loss var", loss="loss = F.cross_entropy(z, y) + z.var() + z.std(0).mean() + h.std()"),
    row("loss max", loss="loss = F.cross_entropy(z, y) + z.max() + z.amax(1).mean() + h.amin()"),
    row(
        "loss logsumexp all",
        loss="loss = F.cross_entropy(z, y) + torch.logsumexp(z, (0, 1)) + torch.logsumexp(z.flatten(), 0)",
    ),
    row(
        "loss masked mean y",
        loss="""
        m = yt > 1
        l = F.cross_entropy(self.head(h).transpose(1, 2), yt, reduction="none")
        loss = (l * m).sum() / m.sum()
        """,
    ),
    row(
        "loss per sample mean",
        loss="""
        m = (yt > 1).double()
        l = F.cross_entropy(self.head(h).transpose(1, 2), yt, reduction="none")
        loss = ((l * m).sum(1) / m.sum(1).clamp(min=1)).mean()
        """,
    ),
    row(
        "loss index rows",
        loss="""
        l = F.cross_entropy(self.head(h).transpose(1, 2), yt, reduction="none")
        loss = l[yt > 1].mean()
        """,
    ),
    row(
        "loss topk ohem",
        loss="""
        l = F.cross_entropy(self.head(h).transpose(1, 2), yt, reduction="none")
        loss = l.flatten(1).topk(2, 1)[0].mean()
        """,
    ),
    row(
        "loss rlhf ppo",
        loss="""
        p = self.head(h).log_softmax(-1).gather(2, yt[..., None])[..., 0]
        r = (p - p.detach()).exp()
        a = (p.detach() - p.detach().mean()) / (p.detach().std() + 0.001)
        loss = -torch.min(r * a, r.clamp(0.8, 1.2) * a).mean()
        """,
    ),
    row(
        "loss dpo",
        loss="""
        p = self.head(h).log_softmax(-1).gather(2, yt[..., None])[..., 0].sum(1)
        n = len(p) // 2
        c, r = p[:n], p[n : 2 * n]
        loss = -F.logsigmoid(c - r).mean()
        """,
    ),
)
