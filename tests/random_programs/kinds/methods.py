"""Methods of training: queues, codebooks, contrasts, experts, chance. What rows may name: `row`."""

from tests.random_programs.kinds.row import row

ROWS = (
    row(
        "moco queue ptr",
        """
        m = F.normalize(h.mean(1).detach(), dim=1)
        p = self.p
        h = h + (h @ self.q.clone().detach()).mean(2, keepdim=True)
        with torch.no_grad():
            self.q[:, : h.size(0)] = m.t()
            self.p.fill_((int(0) + h.size(0)) % (2 * B))
        """,
        init="""
        self.register_buffer("q", torch.randn(D, 2 * B))
        self.register_buffer("p", torch.zeros(1, dtype=torch.long))
        """,
    ),
    row(
        "momentum encoder",
        """
        with torch.no_grad():
            for a, b in zip(self.e.parameters(), self.l.parameters()):
                a.mul_(0.9).add_(b, alpha=0.1)
            t = self.e(h)
        h = h + self.l(h) - t
        """,
        init="""
        self.l = nn.Linear(D, D)
        self.e = nn.Linear(D, D).requires_grad_(False)
        """,
    ),
    row(
        "byol",
        """
        a = self.p(self.l(h))
        t = self.l(h.flip(1)).detach()
        self_l = 2 - 2 * F.cosine_similarity(a, t, dim=-1).mean()
        h = h + self_l
        """,
        init="""
        self.l = nn.Linear(D, D)
        self.p = nn.Linear(D, D)
        """,
    ),
    row(
        "vq",
        """
        d = (h[..., None, :] - self.w).square().sum(-1)
        i = d.argmin(-1)
        q = self.w[i]
        c = F.mse_loss(q, h.detach()) + 0.25 * F.mse_loss(h, q.detach())
        h = h + (q - h).detach() + c
        """,
        init="self.w = nn.Parameter(torch.randn(5, D) * 0.3)",
    ),
    row(
        "vq embedding",
        """
        d = torch.cdist(h, self.w)
        i = d.argmin(-1)
        q = F.embedding(i, self.w)
        c = F.mse_loss(q, h.detach())
        h = h + (q - h).detach() + c
        """,
        init="self.w = nn.Parameter(torch.randn(5, D) * 0.3)",
    ),
    row(
        "vq ema",
        """
        d = (h[..., None, :] - self.w).square().sum(-1)
        i = F.one_hot(d.argmin(-1), 5).to(h.dtype)
        q = i @ self.w
        with torch.no_grad():
            self.n.mul_(0.9).add_(i.sum((0, 1)), alpha=0.1)
            self.w.copy_(0.9 * self.w + 0.1 * torch.einsum("btk,btd->kd", i, h) / (self.n[:, None] + 1))
        h = h + (q - h).detach()
        """,
        init="""
        self.register_buffer("w", torch.randn(5, D) * 0.3)
        self.register_buffer("n", torch.ones(5))
        """,
    ),
    row(
        "sinkhorn",
        """
        s = (h.mean(1) @ self.w).div(0.5).exp()
        for _ in range(3):
            s = s / s.sum(0, keepdim=True)
            s = s / s.sum(1, keepdim=True)
        h = h + (s @ self.w.t())[:, None]
        """,
        init="self.w = nn.Parameter(torch.randn(D, 4) * 0.3)",
    ),
    row(
        "infonce",
        """
        a = F.normalize(h.mean(1), dim=1)
        s = a @ a.t() / 0.3
        s = s.masked_fill(torch.eye(len(s), dtype=torch.bool), -1000000000.0)
        h = h + F.cross_entropy(s, torch.arange(len(s)).roll(1))
        """,
    ),
    row(
        "triplet hard",
        """
        a = h.mean(1)
        d = torch.cdist(a, a)
        m = y[:, None] == y[None]
        h = h + F.relu((d * m).amax(1) - d.masked_fill(m, 9.0).amin(1) + 1).mean()
        """,
    ),
    row(
        "barlow",
        """
        a = h.mean(1)
        a = (a - a.mean(0)) / (a.std(0) + 0.1)
        c = a.t() @ a / len(a)
        h = h + (c - torch.eye(D, dtype=h.dtype)).square().sum() * 0.01
        """,
    ),
    row(
        "vicreg",
        """
        a = h.mean(1)
        h = h + F.relu(1 - torch.sqrt(a.var(0) + 0.0001)).mean()
        """,
    ),
    row(
        "ctc-like dp",
        """
        a = h.log_softmax(2)
        s = a[:, 0]
        for i in range(1, T):
            s = (
                torch.logsumexp(torch.stack([s, F.pad(s[:, :-1], (1, 0), value=-1000000000.0)]), 0)
                + a[:, i]
            )
        h = h + s.mean() * 0.1
        """,
    ),
    row(
        "crf",
        """
        s = h[:, 0]
        for i in range(1, T):
            s = torch.logsumexp(s[:, :, None] + self.w, 1) + h[:, i]
        h = h + torch.logsumexp(s, 1).mean() * 0.1
        """,
        init="self.w = nn.Parameter(torch.randn(D, D) * 0.3)",
    ),
    row(
        "moe dense",
        """
        g = (h @ self.g).softmax(-1)
        e = torch.einsum("btd,edf->btef", h, self.e)
        h = h + (g[..., None] * e).sum(2)
        """,
        init="""
        self.g = nn.Parameter(torch.randn(D, 3))
        self.e = nn.Parameter(torch.randn(3, D, D) * 0.3)
        """,
    ),
    row(
        "expert slices",
        """
        g = (h @ self.g).softmax(-1)
        for i in range(3):
            h = h + g[..., i : i + 1] * torch.einsum("btd,df->btf", h, self.e[i])
        """,
        init="""
        self.g = nn.Parameter(torch.randn(D, 3))
        self.e = nn.Parameter(torch.randn(3, D, D) * 0.3)
        """,
    ),
    row(
        "deq loop",
        """
        g = h
        for _ in range(4):
            g = torch.tanh(self.l(g) + h)
        h = g
        """,
        init="self.l = nn.Linear(D, D)",
    ),
    row(
        "checkpoint twice",
        """
        h = torch.utils.checkpoint.checkpoint(lambda a: torch.tanh(self.l(a)) * a, h, use_reentrant=False)
        h = torch.utils.checkpoint.checkpoint(self.l, h, use_reentrant=False)
        """,
        init="self.l = nn.Linear(D, D)",
    ),
    row(
        "dims of 1",
        """
        h = (
            h[:, :, :, None, None].squeeze(3).expand(-1, -1, -1, 2).sum(-1)
            + h.unsqueeze(0).mean(0)
            + h[None].squeeze()
        )
        """,
    ),
    row("empty cat", "h = torch.cat([h[:, :0], h, h[:, T:]], 1) + h[:, :, :0].sum(2, keepdim=True)"),
    row("sum empty", "h = h + h[:, :0].sum(1, keepdim=True) + h[:, :, D:].sum()"),
    row("one batch stat", "h = h / h.square().mean().sqrt()"),
    row(
        "clip by global norm in forward",
        """
        n = torch.sqrt(sum(((p**2).sum() for p in self.l.parameters())))
        h = h + self.l(h) * torch.clamp(1 / n, max=1.0)
        """,
        init="self.l = nn.Linear(D, D)",
    ),
    row(
        "param norm clamp rows",
        """
        w = self.w * (1 / self.w.norm(dim=0, keepdim=True).clamp(min=1))
        h = h @ w
        """,
        init="self.w = nn.Parameter(torch.randn(D, D))",
    ),
    row(
        "rand like",
        """
        h = (
            h
            + torch.rand_like(h) * 0
            + torch.bernoulli(torch.full_like(h, 1.0))
            + torch.randn_like(h) * 0.0
        )
        """,
    ),
    row(
        "multinomial",
        """
        i = torch.multinomial(h.mean(1).softmax(1).detach(), 2)
        h = h + i.sum() * 0.0
        """,
    ),
    row("randperm", "h = h + h[:, torch.randperm(T)].sum(1, keepdim=True)"),
    row(
        "stoch depth",
        "h = h + F.dropout(torch.ones(h.size(0), 1, 1, dtype=h.dtype), 0.3, True) * self.l(h)",
        init="self.l = nn.Linear(D, D)",
    ),
    row(
        "vae",
        """
        m, s = self.l(h).chunk(2, -1)
        h = m + torch.randn_like(s) * s.exp() * 0.0 + (m.square() + s.exp() - s).mean() * 0.1
        """,
        init="self.l = nn.Linear(D, 2 * D)",
    ),
)
