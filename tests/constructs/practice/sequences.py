"""Sequences: recurrence, masks, scans, experts and preferences."""

PROGRAMS = {
    "transcriptions of other lengths": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.GRU(6, 8, batch_first=True, bidirectional=True)
        self.o = nn.Linear(16, 6)

    def forward(self, x, y, xl, yl):
        h, _ = self.e(x)
        lp = F.log_softmax(self.o(h), -1).transpose(0, 1)
        return F.ctc_loss(lp, y, xl, yl, zero_infinity=True)

def batch():
    torch.manual_seed(1)
    return {
        "x": torch.randn(B, 12, 6),
        "y": torch.randint(1, 6, (B, 4)),
        "xl": torch.tensor([12, 10, 9, 12, 8, 7, 12, 11]),
        "yl": torch.tensor([4, 3, 2, 4, 1, 2, 3, 4]),
    }
""",
    "masked tokens, averaged by count": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(11, 8)
        self.l = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.o = nn.Linear(8, 11, bias=False)
        self.o.weight = self.e.weight

    def forward(self, ids, labels, mask):
        h = self.l(self.e(ids), src_key_padding_mask=~mask)
        l = F.cross_entropy(self.o(h).transpose(1, 2), labels, reduction="none", ignore_index=-100)
        keep = (labels != -100) & mask
        return (l * keep).sum() / keep.sum().clamp(min=1)

def batch():
    torch.manual_seed(1)
    ids = torch.randint(0, 11, (B, 7))
    m = torch.arange(7)[None] < torch.tensor([7, 3, 5, 1, 7, 2, 6, 4])[:, None]
    y = ids.masked_fill(torch.rand(B, 7) < 0.6, -100)
    y[4:6] = -100
    return {"ids": ids, "labels": y, "mask": m}
""",
    "the last valid step": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(9, 6)
        self.r = nn.LSTM(6, 5, 2, batch_first=True)
        self.o = nn.Linear(5, 3)

    def forward(self, ids, lens, y):
        h, _ = self.r(self.e(ids))
        last = h.gather(1, (lens - 1).view(-1, 1, 1).expand(-1, 1, h.size(2))).squeeze(1)
        return F.multi_margin_loss(self.o(last), y, p=2, margin=0.7)

def batch():
    torch.manual_seed(1)
    return {
        "ids": torch.randint(1, 9, (B, 6)),
        "lens": torch.tensor([6, 3, 2, 5, 1, 4, 6, 2]),
        "y": torch.randint(0, 3, (B,)),
    }
""",
    "a selective scan": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(6, 16)
        self.c = nn.Conv1d(8, 8, 3, padding=2, groups=8)
        self.x = nn.Linear(8, 7)
        self.dt = nn.Linear(1, 8)
        self.A = nn.Parameter(torch.log(torch.arange(1, 4).double()).repeat(8, 1))
        self.D = nn.Parameter(torch.ones(8))
        self.o = nn.Linear(8, 6)

    def forward(self, u):
        x, z = self.i(u).chunk(2, -1)
        x = F.silu(self.c(x.transpose(1, 2))[..., : u.size(1)].transpose(1, 2))
        d, b, c = self.x(x).split([1, 3, 3], -1)
        d = F.softplus(self.dt(d))
        a = torch.exp(d.unsqueeze(-1) * -self.A.exp())
        bx = d.unsqueeze(-1) * b.unsqueeze(2) * x.unsqueeze(-1)
        h, ys = torch.zeros_like(bx[:, 0]), []
        for t in range(u.size(1)):
            h = a[:, t] * h + bx[:, t]
            ys.append((h * c[:, t].unsqueeze(1)).sum(-1))
        y = torch.stack(ys, 1) + x * self.D
        return F.mse_loss(self.o(y * F.silu(z)), u.roll(-1, 1))

def batch():
    torch.manual_seed(1)
    return {"u": torch.randn(B, 5, 6)}
""",
    "experts with capacity by a running count": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(6, 3, bias=False)
        self.w1 = nn.Parameter(torch.randn(3, 6, 8) * 0.3)
        self.w2 = nn.Parameter(torch.randn(3, 8, 6) * 0.3)

    def forward(self, x):
        t = x.reshape(-1, 6)
        p = self.g(t).softmax(-1)
        g, i = p.max(-1)
        m = F.one_hot(i, 3)
        pos = (m.cumsum(0) - 1) * m
        keep = (pos < 8) & (m > 0)
        loc = (pos * m).sum(1)
        d = torch.einsum("te,tc->tec", keep.to(p.dtype), F.one_hot(loc.clamp(max=7), 8).to(p.dtype))
        e = torch.einsum("tec,td->ecd", d, t)
        h = torch.einsum("ecf,efd->ecd", torch.relu(torch.einsum("ecd,edf->ecf", e, self.w1)), self.w2)
        y = torch.einsum("tec,ecd->td", d * g[:, None, None], h)
        aux = (m.to(p.dtype).mean(0) * p.mean(0)).sum() * 3
        return F.mse_loss(y.view_as(x), x) + 0.01 * aux

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 4, 6)}
""",
    "preferences of pairs": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(9, 6)
        self.g = nn.GRU(6, 6, batch_first=True)
        self.o = nn.Linear(6, 9)
        self.re = nn.Embedding(9, 6).requires_grad_(False)
        self.ro = nn.Linear(6, 9).requires_grad_(False)

    def lp(self, e, o, ids, m):
        h = self.g(e(ids))[0] if e is self.e else e(ids)
        l = o(h[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        return (l * m[:, 1:]).sum(1)

    def forward(self, w, l, mw, ml):
        pw, pl = self.lp(self.e, self.o, w, mw), self.lp(self.e, self.o, l, ml)
        with torch.no_grad():
            rw, rl = self.lp(self.re, self.ro, w, mw), self.lp(self.re, self.ro, l, ml)
        d = 0.1 * ((pw - rw) - (pl - rl))
        return -F.logsigmoid(d).mean(), (d > 0).float().mean()

def batch():
    torch.manual_seed(1)
    m = torch.arange(5)[None] < torch.tensor([5, 3, 4, 2, 5, 5, 3, 4])[:, None]
    return {
        "w": torch.randint(0, 9, (B, 5)),
        "l": torch.randint(0, 9, (B, 5)),
        "mw": m.double(),
        "ml": m.flip(0).double(),
    }
""",
    "lists in order": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x, rel):
        s = self.s(x).squeeze(-1)
        r, i = rel.sort(1, descending=True)
        p = s.gather(1, i)
        lse = p.flip(1).logcumsumexp(1).flip(1)
        d = 1 / torch.log2(torch.arange(s.size(1), dtype=s.dtype) + 2)
        ndcg = ((2**r - 1) * d).sum(1)
        return ((lse - p).sum(1) / ndcg.clamp(min=1e-6)).mean()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 5, 6), "rel": torch.randint(0, 3, (B, 5)).double()}
""",
    "low ranks beside frozen weights": """
class L(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 24).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, 8) * 0.3)
        self.b = nn.Parameter(torch.randn(24, 2) * 0.1)
        self.o = nn.Linear(8, 8).requires_grad_(False)
        self.n = nn.LayerNorm(8)

    def forward(self, x):
        h = self.n(x)
        q, k, v = (self.q(h) + h @ self.a.T @ self.b.T * 0.5).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(o.transpose(1, 2).flatten(2))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(11, 8).requires_grad_(False)
        self.ls = nn.ModuleList(L() for _ in range(2))
        self.h = nn.Linear(8, 11)

    def forward(self, ids, w):
        h = self.e(ids)
        for l in self.ls:
            h = l(h)
        l = F.cross_entropy(self.h(h)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(
            ids.size(0), -1
        )
        return (l.mean(1) * w).sum() / w.sum()

def batch():
    torch.manual_seed(1)
    return {"ids": torch.randint(0, 11, (B, 6)), "w": torch.rand(B)}
""",
    "a vocabulary of which some is hidden": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(10, 8)
        self.b = nn.Linear(8, 8)
        self.o = nn.Linear(8, 10, bias=False)
        m = torch.zeros(10)
        m[[0, 5, 8]] = float("-inf")
        self.register_buffer("m", m)

    def forward(self, ids, y):
        return F.cross_entropy((self.o(torch.tanh(self.b(self.e(ids)))) + self.m).flatten(0, 1), y.flatten())

def batch():
    torch.manual_seed(1)
    ok = torch.tensor([1, 2, 3, 4, 6, 7, 9])
    return {"ids": torch.randint(0, 10, (B, 5)), "y": ok[torch.randint(0, 7, (B, 5))]}
""",
    "one embedding in two places": """
class L(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.MultiheadAttention(8, 2, batch_first=True)
        self.n = nn.LayerNorm(8)

    def forward(self, x):
        return (
            x
            + self.a(
                self.n(x),
                self.n(x),
                self.n(x),
                need_weights=False,
                is_causal=True,
                attn_mask=nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=x.dtype),
            )[0]
        )

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(11, 8)
        self.p = nn.Parameter(torch.randn(6, 8) * 0.1)
        self.ls = nn.ModuleList(L() for _ in range(2))
        self.n = nn.LayerNorm(8)
        self.s = nn.Parameter(torch.tensor(0.5))
        self.c = nn.Conv1d(8, 11, 1, bias=False)
        self.c.weight = nn.Parameter(self.e.weight.data.unsqueeze(-1).clone())

    def forward(self, ids):
        h = self.e(ids) * 8**0.5 + self.p
        for l in self.ls:
            h = l(h)
        z = F.linear(self.n(h), self.e.weight) * self.s + self.c(h.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(z[:, :-1].reshape(-1, 11), ids[:, 1:].reshape(-1))

def batch():
    torch.manual_seed(1)
    return {"ids": torch.randint(0, 11, (B, 6))}
""",
    "messages along edges": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.Linear(12, 8)
        self.u = nn.GRUCell(8, 6)
        self.o = nn.Linear(6, 2)

    def forward(self, x, src, dst, y):
        for _ in range(2):
            m = F.relu(self.m(torch.cat([x[src], x[dst]], -1)))
            a = torch.zeros(x.size(0), 8, dtype=x.dtype).index_add(0, dst, m)
            deg = torch.zeros(x.size(0), dtype=x.dtype).scatter_add(0, dst, torch.ones_like(dst, dtype=x.dtype))
            x = self.u(a / deg.clamp(min=1).unsqueeze(1), x)
        return F.cross_entropy(self.o(x), y)

def batch():
    torch.manual_seed(1)
    return {
        "x": torch.randn(B, 6),
        "src": torch.randint(0, B, (20,)),
        "dst": torch.randint(0, B, (20,)),
        "y": torch.randint(0, 2, (B,)),
    }
""",
}
