"""Views, slices, writes in place and what moves elements by an index. What rows may name: `row`."""

from tests.random_programs.kinds.row import row

ROWS = (
    row(
        "index_put acc",
        """
        i = torch.tensor([0, 2, 2])
        g = torch.zeros_like(h)
        g = g.index_put(
            (slice(None) if False else torch.arange(h.size(0))[:, None], i[None]), h[:, :3], accumulate=True
        )
        h = h + g
        """,
    ),
    row(
        "index_put_ acc dim2",
        """
        h = h.clone()
        h[:, :, torch.tensor([0, 1, 1])] += h[:, :, :3] * 2
        """,
    ),
    row(
        "masked_scatter",
        """
        m = torch.ones(h.size(1), h.size(2), dtype=torch.bool).tril()
        h = h.masked_scatter(m, h.flip(2))
        """,
    ),
    row(
        "copy_ slice",
        """
        h = h + 0
        h[:, 1:3].copy_(h[:, 0:1] * 2)
        """,
    ),
    row(
        "copy_ slice of perm",
        """
        h = h + 0
        h.transpose(1, 2)[:, :3].copy_(h[:, :, :3].transpose(1, 2).flip(1) * 2)
        """,
    ),
    row(
        "fill_diagonal_",
        """
        w = self.w.clone()
        w.fill_diagonal_(0.5)
        h = h @ w
        """,
        init="self.w = nn.Parameter(torch.randn(D, D) * 0.3)",
    ),
    row(
        "diagonal write batch",
        """
        s = h @ h.transpose(1, 2)
        s.diagonal(dim1=1, dim2=2).fill_(-1.0)
        h = h + s.softmax(-1) @ h
        """,
    ),
    row(
        "diagonal_scatter",
        """
        s = h @ h.transpose(1, 2)
        s = torch.diagonal_scatter(s, h.sum(2), 0, 1, 2)
        h = h + s.softmax(-1) @ h
        """,
    ),
    row("select_scatter", "h = torch.select_scatter(h, h[:, 0] * 2, 1, 2)"),
    row("slice_scatter step", "h = torch.slice_scatter(h, h[:, :3] * 2, 1, 0, 6, 2)"),
    row(
        "narrow add_",
        """
        h = h.clone()
        h.narrow(2, 1, 3).add_(h.narrow(2, 3, 3).clone())
        """,
    ),
    row(
        "unbind modify",
        """
        a = list(h.unbind(2))
        a[1] = a[0] * a[2]
        h = torch.stack(a, 2)
        """,
    ),
    row(
        "tensor_split",
        """
        a, b, c = h.tensor_split(3, 2)
        h = torch.cat([c, a, b], 2)
        """,
    ),
    row(
        "split sizes",
        """
        a, b, c = h.split([1, 5, 2], 2)
        h = torch.cat([c * 2, a, b.sin()], 2)
        """,
    ),
    row(
        "hsplit/dstack",
        """
        a, b = h.hsplit(2)
        h = torch.cat([a * b, b], 1)
        """,
        divisor=2,
        length=6,
    ),
    row(
        "unfold views",
        """
        u = h.unfold(1, 3, 1)
        h = F.pad(u.mean(-1), (0, 0, 1, 1)) + h
        """,
    ),
    row(
        "unfold step2",
        """
        u = h.unfold(2, 4, 2)
        h = h + u.sum((-1, -2))[..., None] * 0.1
        """,
    ),
    row(
        "as_strided view",
        """
        h = h + h.contiguous().as_strided(
            (h.size(0), h.size(1), 3), (h.size(1) * h.size(2), h.size(2), 2)
        ).sum(-1, keepdim=True)
        """,
    ),
    row("movedim", "h = h + torch.movedim(h, 2, 0).cumsum(0).movedim(0, 2) * 0.1"),
    row("swapaxes flatten", "h = h.swapaxes(1, 2).flatten(1).view(h.size(0), h.size(1), h.size(2))"),
    row(
        "tril indices",
        """
        i = torch.tril_indices(4, 4)
        h = h + h[:, i[0], i[1]].sum(1)[:, None, None] * 0.1
        """,
    ),
    row(
        "take_along",
        """
        i = h.argsort(2)
        h = h + torch.take_along_dim(h, i, 2)
        """,
    ),
    row(
        "gather pos",
        """
        i = h.argmax(1, keepdim=True)
        h = h + torch.gather(h, 1, i.expand(-1, h.size(1), -1))
        """,
    ),
    row(
        "index 2 tensors",
        """
        a = torch.tensor([0, 1, 2])
        b = torch.tensor([1, 0, 3])
        h = h + h[:, a, b].sum(1)[:, None, None]
        """,
    ),
    row(
        "index separated",
        """
        a = torch.tensor([0, 1])
        h = h + h[a, :, a].sum() * 0.01
        """,
    ),
    row("index negative", "h = h + h[:, [-1, -2, 0]].sum(1, keepdim=True)"),
    row("take flat", "h = h + torch.take(h, torch.tensor([0, 5, 9])).sum() * 0.1"),
    row("index_select rep", "h = h.index_select(1, torch.tensor([0, 0, 1, 2, 2, 5]))", length=6),
    row("index_copy", "h = h.index_copy(2, torch.tensor([1, 3]), h[..., :2] * 2)"),
    row("index_fill", "h = h.index_fill(1, torch.tensor([1]), 0.3)"),
    row(
        "constants",
        """
        i = torch.arange(D).flip(0)
        w = torch.ones(T, D, dtype=h.dtype).cumsum(1) * self.scale + torch.tensor([0.5], dtype=h.dtype) @ self.table[:1]
        h = h * (w / w.amax(1, keepdim=True))
        h = h[:, :, i] + self.table.flip(0)[i % 3].sum(1)
        h = h.put(torch.tensor([1, 7]), self.table.flatten()[:2].to(h.dtype))
        """,
        init="""
        self.register_buffer("scale", torch.linspace(0.5, 1.5, D), persistent=False)
        self.table = torch.arange(3.0 * D).reshape(3, D) / D
        """,
    ),
    row("put", "h = h.put(torch.tensor([1, 7]), h.flatten()[:2] * 3)"),
    row("index_reduce", 'h = h.index_reduce(1, torch.tensor([0, 0, 1]), h[:, 1:4].detach(), "mean")'),
    row(
        "scatter_reduce amax",
        """
        i = (torch.arange(h.size(1)) % 2)[None, :, None].expand_as(h)
        g = torch.zeros(h.size(0), 2, h.size(2), dtype=h.dtype).scatter_reduce(
            1, i, h, "amax", include_self=False
        )
        h = h + g.sum(1, keepdim=True)
        """,
    ),
    row(
        "scatter_reduce mean",
        """
        i = (torch.arange(h.size(1)) % 2)[None, :, None].expand_as(h)
        g = torch.zeros(h.size(0), 2, h.size(2), dtype=h.dtype).scatter_reduce(
            1, i, h, "mean", include_self=True
        )
        h = h + g.sum(1, keepdim=True)
        """,
    ),
    row(
        "scatter_reduce prod",
        """
        i = (torch.arange(h.size(1)) % 2)[None, :, None].expand_as(h)
        g = torch.ones(h.size(0), 2, h.size(2), dtype=h.dtype).scatter_reduce(1, i, h + 1.5, "prod")
        h = h + 0.1 * g.sum(1, keepdim=True)
        """,
    ),
    row(
        "scatter_reduce sum batch idx",
        """
        g = torch.zeros(3, h.size(2), dtype=h.dtype).scatter_reduce(
            0, y.clamp(max=2)[:, None].expand(-1, h.size(2)), h.mean(1), "sum"
        )
        h = h + g.mean(0)
        """,
    ),
    row(
        "segment by index_add labels",
        """
        g = torch.zeros(C, h.size(2), dtype=h.dtype).index_add(0, y, h.mean(1))
        n = torch.bincount(y, minlength=C).clamp(min=1)
        h = h + (g / n[:, None])[y][:, None]
        """,
    ),
    row(
        "scatter_add labels",
        """
        g = torch.zeros(C, h.size(2), dtype=h.dtype).scatter_add(
            0, y[:, None].expand(-1, h.size(2)), h.mean(1)
        )
        h = h + g[y][:, None] * 0.1
        """,
    ),
    row(
        "segment_reduce",
        'h = h + torch.segment_reduce(h.mean(1), "sum", lengths=torch.tensor([1, h.size(0) - 1])).sum(0)',
    ),
)
