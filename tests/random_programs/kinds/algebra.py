"""Distances, decompositions and products. What rows may name: `row`."""

from tests.random_programs.kinds.row import row

ROWS = (
    row("cdist", "h = h + torch.cdist(h, h + 0.3).softmax(-1) @ h"),
    row(
        "cdist1",
        "h = h + torch.cdist(h, self.w, p=1.0).softmax(-1) @ self.w",
        init="self.w = nn.Parameter(torch.randn(5, D))",
    ),
    row("pdist", "h = h + F.pdist(h.mean(1)).mean()"),
    row(
        "cosine_similarity",
        """
        h = (
            h * F.cosine_similarity(h, h.roll(1, 1), dim=2)[..., None]
            + F.cosine_similarity(h, h.roll(1, 2), dim=1)[:, None]
        )
        """,
    ),
    row("pairwise", "h = h + F.pairwise_distance(h, h.roll(1, 1))[..., None]"),
    row("cross", "h = h + F.pad(torch.cross(h[..., :3], h[..., 3:6], dim=2), (0, D - 3))"),
    row(
        "trace etc",
        """
        s = h.transpose(1, 2) @ h
        h = h + s.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None] * 0.01
        """,
    ),
    row(
        "logdet",
        """
        s = h.transpose(1, 2) @ h + 2 * torch.eye(D, dtype=h.dtype)
        h = h + torch.logdet(s)[:, None, None] * 0.01
        """,
    ),
    row(
        "cholesky",
        """
        s = h.transpose(1, 2) @ h + 2 * torch.eye(D, dtype=h.dtype)
        h = h + h @ torch.linalg.cholesky(s) * 0.1
        """,
    ),
    row(
        "inv",
        """
        s = h.transpose(1, 2) @ h + 2 * torch.eye(D, dtype=h.dtype)
        h = h + h @ torch.linalg.inv(s) * 0.1
        """,
    ),
    row(
        "solve",
        """
        s = self.w + 3 * torch.eye(D, dtype=h.dtype)
        h = h + torch.linalg.solve(s, h.transpose(1, 2)).transpose(1, 2)
        """,
        init="self.w = nn.Parameter(torch.randn(D, D) * 0.2)",
    ),
    row(
        "qr",
        """
        q, r = torch.linalg.qr(self.w)
        h = h @ q
        """,
        init="self.w = nn.Parameter(torch.randn(D, D))",
    ),
    row(
        "svd",
        """
        u, s, v = torch.linalg.svd(self.w)
        h = h * s
        """,
        init="self.w = nn.Parameter(torch.randn(D, D))",
    ),
    row(
        "eigh",
        """
        s = torch.linalg.eigvalsh(self.w + self.w.t())
        h = h * s
        """,
        init="self.w = nn.Parameter(torch.randn(D, D))",
    ),
    row(
        "matrix_exp",
        "h = h @ torch.matrix_exp(self.w - self.w.t())",
        init="self.w = nn.Parameter(torch.randn(D, D) * 0.2)",
    ),
    row(
        "matrix_power",
        "h = h @ torch.linalg.matrix_power(self.w, 3)",
        init="self.w = nn.Parameter(torch.randn(D, D) * 0.4)",
    ),
    row(
        "triangular",
        """
        h = h + torch.linalg.solve_triangular(
            self.w.tril(-1) + torch.eye(D, dtype=h.dtype), h.transpose(1, 2), upper=False
        ).transpose(1, 2)
        """,
        init="self.w = nn.Parameter(torch.randn(D, D) * 0.2)",
    ),
    row(
        "einsum trace",
        """
        h = (
            h
            + torch.einsum("bii->b", h[:, :, : h.size(1)] @ h[:, :, : h.size(1)].transpose(1, 2))[
                :, None, None
            ]
            * 0.01
        )
        """,
    ),
    row(
        "einsum diag",
        """
        s = h.transpose(1, 2) @ h
        h = h + torch.einsum("bii->bi", s)[:, None] * 0.1
        """,
    ),
    row(
        "einsum triple",
        'h = h + torch.einsum("btd,de,bte->bte", h, self.w, h)',
        init="self.w = nn.Parameter(torch.randn(D, D) * 0.4)",
    ),
    row(
        "einsum bcast",
        'h = h + torch.einsum("...d,...e->...e", h, self.w[None, None]) * 0.1',
        init="self.w = nn.Parameter(torch.randn(D))",
    ),
    row(
        "einsum ones", 'h = h + torch.einsum("btd,ad->btd", h, self.w)', init="self.w = nn.Parameter(torch.randn(1, D))"
    ),
    row("einsum outer", 'h = h + torch.einsum("btd,bse->bt", h, h)[..., None] * 0.01'),
    row("einsum sum over batch", 'h = h + torch.einsum("btd,bse->de", h, h).mean(0) * 0.01'),
    row(
        "einsum heads",
        """
        q = h.view(h.size(0), h.size(1), 2, -1)
        s = torch.einsum("bthd,bshd->bhts", q, q).softmax(-1)
        h = h + torch.einsum("bhts,bshd->bthd", s, q).reshape(h.shape)
        """,
        divisor=2,
    ),
    row(
        "bmm expanded",
        "h = h + torch.bmm(h, self.w.expand(h.size(0), D, D))",
        init="self.w = nn.Parameter(torch.randn(D, D) * 0.3)",
    ),
    row(
        "bmm expanded left",
        "h = h + torch.bmm(self.w.unsqueeze(0).expand(h.size(0), -1, -1), h)",
        init="self.w = nn.Parameter(torch.randn(T, T) * 0.3)",
    ),
    row(
        "baddbmm",
        "h = torch.baddbmm(h, self.w.expand(h.size(0), T, T), h, beta=0.5, alpha=0.3)",
        init="self.w = nn.Parameter(torch.randn(T, T) * 0.3)",
    ),
    row(
        "addmm/addmv/addr",
        """
        m = h.mean(1)
        h = (
            h
            + torch.addmv(self.b, self.w, m.mean(0), beta=0.2, alpha=2.0)
            + torch.addr(self.w, self.b, self.b, alpha=0.3)[0]
            + torch.addmm(self.b, m, self.w, beta=0.5, alpha=0.7)[:, None]
        )
        """,
        init="""
        self.w = nn.Parameter(torch.randn(D, D) * 0.3)
        self.b = nn.Parameter(torch.randn(D))
        """,
    ),
    row(
        "tensordot",
        "h = h + torch.tensordot(h, self.w, dims=([2], [1]))",
        init="self.w = nn.Parameter(torch.randn(D, D) * 0.3)",
    ),
    row("bilinear", "h = h + self.w(h, h.roll(1, 2)) * 0.3", init="self.w = nn.Bilinear(D, D, D)"),
    row(
        "kron",
        "h = h @ torch.kron(self.a, self.b)",
        init="""
        self.a = nn.Parameter(torch.randn(2, 2))
        self.b = nn.Parameter(torch.randn(D // 2, D // 2))
        """,
        divisor=2,
    ),
    row(
        "mv dot",
        """
        h = (
            h
            + (h @ self.w)[..., None]
            + torch.dot(self.w, self.w)
            + torch.inner(h, self.w)[..., None]
            + torch.outer(self.w, self.w)[0]
        )
        """,
        init="self.w = nn.Parameter(torch.randn(D) * 0.3)",
    ),
    row(
        "chain_matmul",
        "h = h @ torch.linalg.multi_dot([self.a, self.b, self.a])",
        init="""
        self.a = nn.Parameter(torch.randn(D, D) * 0.4)
        self.b = nn.Parameter(torch.randn(D, D) * 0.4)
        """,
    ),
)
