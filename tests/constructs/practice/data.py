"""Graphs, images and numbers of odd kinds: scattered, sampled, in bits, of several types, of no elements."""

PROGRAMS = {
    "attention along edges": """
class Gat(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(6, 8, bias=False)
        self.a, self.b = (nn.Parameter(torch.randn(2, 4) * 0.3) for _ in range(2))
        self.o = nn.Linear(8, 6)

    def forward(self, x, src, dst):
        h = self.w(x).view(-1, 2, 4)
        e = F.leaky_relu((h * self.a).sum(-1)[src] + (h * self.b).sum(-1)[dst], 0.2)
        top = torch.full((x.size(0), 2), -torch.inf, dtype=x.dtype)
        top = top.scatter_reduce(0, dst[:, None].expand_as(e), e.detach(), "amax", include_self=True)
        w = (e - top[dst]).exp()
        total = torch.zeros(x.size(0), 2, dtype=x.dtype).index_add_(0, dst, w)
        w = w / total[dst].clamp(min=1e-12)
        out = torch.zeros_like(h).index_add_(0, dst, w[..., None] * h[src])
        return x + F.elu(self.o(out.flatten(1)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.ModuleList([Gat(), Gat()])
        self.o = nn.Linear(6, 3)

    def forward(self, x, src, dst, graph, y):
        for g in self.g:
            x = g(x, src, dst)
        n = torch.zeros(4, dtype=x.dtype).index_add(0, graph, torch.ones(x.size(0), dtype=x.dtype))
        pooled = torch.zeros(4, 6, dtype=x.dtype).index_add(0, graph, x) / n.clamp(min=1)[:, None]
        best = torch.zeros(4, 6, dtype=x.dtype).index_reduce(0, graph, x, "amax", include_self=False)
        return F.cross_entropy(self.o(pooled + best), y)

def batch():
    torch.manual_seed(1)
    return {
        "x": torch.randn(10, 6),
        "src": torch.randint(0, 10, (24,)),
        "dst": torch.randint(0, 10, (24,)),
        "graph": torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3, 3]),
        "y": torch.randint(0, 3, (4,)),
    }
""",
    "a normalised adjacency": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.eps = nn.Parameter(torch.zeros(()))

    def forward(self, x, adj, keep, y):
        a = adj + torch.eye(adj.size(0), dtype=adj.dtype)
        d = a.sum(1).rsqrt()
        a = d[:, None] * a * d
        h = (a @ self.a(x)).relu() * (1 + self.eps)
        z = a @ self.b(h)
        lap = (z.T @ (torch.diag(a.sum(1)) - a) @ z).trace()
        return F.cross_entropy(z[keep], y[keep]) + 1e-3 * lap

def batch():
    torch.manual_seed(1)
    adj = (torch.rand(9, 9) < 0.3).double().triu(1)
    return {
        "x": torch.randn(9, 6),
        "adj": adj + adj.T,
        "keep": torch.tensor([0, 2, 3, 7]),
        "y": torch.randint(0, 3, (9,)),
    }
""",
    "offsets that are sampled": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.off, self.w, self.v = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(2, 4, 1), nn.Conv2d(2, 3, 1)
        self.o = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        n, _, h, w = x.shape
        gy, gx = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        grid = torch.stack([gx, gy], -1).to(x.dtype)
        off = self.off(x).view(n, 4, 2, h, w).permute(0, 1, 3, 4, 2).tanh() * 0.3
        v = self.v(x).repeat_interleave(4, 0)
        s = F.grid_sample(v, (grid + off).flatten(0, 1), mode="bilinear", align_corners=True)
        s = s.view(n, 4, 3, h, w)
        a = self.w(x).softmax(1)[:, :, None]
        return F.mse_loss(self.o((s * a).sum(1)), x.flip(-1))

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 2, 4, 5)}
""",
    "colours along rays": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(18, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, o, d, u, rgb):
        t = torch.linspace(0.1, 1.0, 5, dtype=o.dtype) + u * 0.1
        p = o[:, None] + d[:, None] * t[..., None]
        enc = torch.cat([f(p * 2.0**k * math.pi) for k in range(3) for f in (torch.sin, torch.cos)], -1)
        out = self.f(enc)
        sigma, c = F.softplus(out[..., 0]), out[..., 1:].sigmoid()
        gap = torch.cat([t.diff(dim=1), torch.full_like(t[:, :1], 1e10)], 1)
        a = 1 - torch.exp(-sigma * gap)
        trans = torch.cumprod(torch.cat([torch.ones_like(a[:, :1]), 1 - a + 1e-10], 1), 1)[:, :-1]
        w = a * trans
        shown = (w[..., None] * c).sum(1) + (1 - w.sum(1, keepdim=True))
        return F.mse_loss(shown, rgb) + 0.01 * (w * (w + 1e-6).log()).sum(1).mean()

def batch():
    torch.manual_seed(1)
    return {"o": torch.randn(B, 3), "d": F.normalize(torch.randn(B, 3), dim=1), "u": torch.rand(B, 5),
            "rgb": torch.rand(B, 3)}
""",
    "ids hashed by their bits": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.es = nn.ModuleList(nn.Embedding(7, 4, padding_idx=0) for _ in range(2))
        self.bits = nn.Linear(8, 4, bias=False)
        self.o = nn.Linear(12, 2)

    def forward(self, ids, flags, y):
        h1 = ((ids * 2654435761) ^ (ids >> 3)) % 7
        h2 = ((ids << 2) + (ids & 5) | 1).remainder(7)
        e = torch.cat([self.es[0](h1), self.es[1](h2)], -1).sum(1)
        b = (flags[:, None] >> torch.arange(8)) & 1
        m = torch.bitwise_xor(b, b.roll(1, 1)).bool() & ~(ids[:, :1] == 0)
        z = self.o(torch.cat([e, self.bits(m.to(e.dtype))], 1))
        return F.cross_entropy(z, y.long())

def batch():
    torch.manual_seed(1)
    return {"ids": torch.randint(0, 100, (B, 4)), "flags": torch.randint(0, 255, (B,)), "y": torch.rand(B) < 0.5}
""",
    "inputs that lie in odd ways": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, *, x, pairs, scale, on, opts):
        h = self.a(x.mT) + self.a(opts["bias"])[:, None]
        h = h * scale if on is None else h * scale * on
        h = torch.cat([h, self.a(pairs[0]) - self.a(pairs[1])], 1)
        return F.cross_entropy(self.o(h.mean(1)), opts["y"])

def batch():
    torch.manual_seed(1)
    return {
        "x": torch.randn(4, 6, B).permute(2, 1, 0),
        "pairs": (torch.randn(B, 1, 6).expand(B, 3, 6), torch.randn(B, 6, 3).mT),
        "scale": torch.tensor(0.7),
        "on": None,
        "opts": {"bias": torch.randn(B, 6)[:, ::1], "y": torch.randint(0, 3, (2 * B,))[::2]},
    }
""",
    "writes into views of views": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Linear(6, 8), nn.Linear(8, 3)
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x, y):
        h = self.a(x)
        c = h.clone()
        c[:, ::2].mul_(2).add_(self.w)
        c.view(-1, 2, 4)[:, 1].mul_(0.5)
        c.t()[3:5] += h.t()[:2]
        first, rest = c[:, :3], c[:, 3:]
        rest[:, 1:3] -= first[:, :2].detach()
        first.copy_(first.flip(1))
        out = torch.empty_like(c)
        out[:, :4], out[:, 4:] = c[:, 4:], c[:, :4]
        out[y == 1] = 0
        out.masked_fill_((y == 2)[:, None], 0.5)
        z = self.o(out)
        z.diagonal()[:2].add_(1)
        return F.cross_entropy(z, y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "results written where asked": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("last", torch.zeros(8))
        self.register_buffer("hist", torch.zeros(4, 8))
        self.register_buffer("ptr", torch.zeros((), dtype=torch.long))

    def forward(self, x, y):
        h = self.a(x).relu()
        with torch.no_grad():
            torch.mean(h, 0, out=self.last)
            self.hist[self.ptr] = self.last
            self.ptr.copy_((self.ptr + 1) % 4)
        g = (self.hist.mean(0) * 0.1).sigmoid()
        return F.cross_entropy(self.o(h * g), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "types beside each other": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8).float()
        self.b = nn.Linear(8, 8)
        self.o = nn.Linear(8, 3).float()
        self.g = nn.Parameter(torch.tensor(1.5, dtype=torch.float32))
        self.register_buffer("s", torch.arange(8, dtype=torch.int32))

    def forward(self, x, y):
        h = self.a(x.float())
        h = self.b(h.double()) * self.g + self.s
        h = torch.where(h > 2, h, torch.tensor(0.5, dtype=torch.float32))
        z = self.o(h.float()) + h.sum(1, keepdim=True).half().float() * 0
        return F.cross_entropy(z.double(), y) + (h.float() ** 2).mean()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "lower precision inside": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.o = nn.Linear(6, 8).float(), nn.LayerNorm(8).float(), nn.Linear(8, 3).float()

    def forward(self, x, y):
        x = x.float()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            h = self.n(self.a(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = (h * 2).relu()
            with torch.autocast("cpu", enabled=False):
                z = self.o(z.float())
        return F.cross_entropy(z, y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "nothing in some places": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Linear(6, 8), nn.Linear(8, 3)
        self.none = nn.Parameter(torch.randn(0, 8))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x, extra, y):
        h = torch.cat([self.a(x), self.none, F.linear(extra, self.a.weight)])
        h = h + self.empty.sum() + self.none.sum(0)
        z = self.o(h)
        return F.cross_entropy(z, y) + (z[:0].sum() + self.none.square().sum())

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "extra": torch.randn(0, 6), "y": torch.randint(0, 3, (B,))}
""",
    "paths by the shape of what comes": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.few, self.many, self.o = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, y, mask=None):
        f = self.few if x.size(1) < 4 else self.many
        h = f(x)
        if x.shape[0] % 2 == 0:
            h = h.reshape(2, -1, *h.shape[1:]).flip(0).flatten(0, 1)
        w = torch.ones(h.shape[:2], dtype=h.dtype) if mask is None else mask
        h = (h * w[..., None]).sum(1) / len(x)
        return F.cross_entropy(self.o(h), y, reduction="sum") / y.numel()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 5, 6), "y": torch.randint(0, 3, (B,))}
""",
    "several heads, some of which nobody trains": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Linear(6, 8)
        self.heads = nn.ModuleDict({k: nn.Linear(8, n) for k, n in (("a", 3), ("b", 1), ("unused", 4))})
        self.aux = nn.Linear(8, 2)
        self.tau = nn.Parameter(torch.tensor(0.1))

    def forward(self, x, a, b, w):
        h = self.t(x).relu()
        with torch.no_grad():
            seen = self.aux(h).softmax(1)
        la = F.cross_entropy(self.heads["a"](h) / self.tau.exp(), a, weight=h.new_tensor([1.0, 2.0, 0.5]))
        lb = F.binary_cross_entropy_with_logits(self.heads["b"](h).squeeze(1), b, weight=w)
        return {"loss": la + 0.3 * lb, "a": la.detach(), "b": lb.detach(), "seen": seen.mean(0)}

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "a": torch.randint(0, 3, (B,)), "b": (torch.rand(B) < 0.5).double(),
            "w": torch.rand(B)}
""",
    "means of segments, whose number is known": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.o = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, seg, y):
        h = self.e(x)
        one = F.one_hot(seg, 3).to(h.dtype)
        n = one.sum(1).clamp(min=1)
        m = torch.einsum("btd,bts->bsd", h, one) / n[..., None]
        back = m.gather(1, seg[..., None].expand(-1, -1, 8))
        var = torch.zeros_like(m).scatter_add(1, seg[..., None].expand_as(h), (h - back).square()) / n[..., None]
        z = self.o((h - back) / (var.gather(1, seg[..., None].expand_as(h)) + 1e-3).sqrt())
        return F.cross_entropy(z.flatten(0, 1), y.flatten())

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 5, 6), "seg": torch.randint(0, 3, (B, 5)).sort(1).values,
            "y": torch.randint(0, 3, (B, 5))}
""",
    "spectra in two dims, and their phases": """
class Fno(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 4, 4, 2, 2, 2) * 0.2)
        self.c = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        f = torch.fft.rfft2(x, norm="ortho")
        w = torch.view_as_complex(self.w)
        o = torch.zeros(*f.shape, dtype=f.dtype)
        o[..., :2, :2] = torch.einsum("bixy,ioxy->boxy", f[..., :2, :2], w[0])
        o[..., -2:, :2] = torch.einsum("bixy,ioxy->boxy", f[..., -2:, :2], w[1])
        return F.gelu(torch.fft.irfft2(o, s=x.shape[-2:], norm="ortho") + self.c(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.ls, self.o = nn.Conv2d(3, 4, 1), nn.Sequential(Fno(), Fno()), nn.Conv2d(4, 1, 1)

    def forward(self, x, y):
        gy, gx = torch.meshgrid(torch.linspace(0, 1, 4), torch.linspace(0, 1, 5), indexing="ij")
        g = torch.stack([gx, gy]).to(x.dtype).expand(x.size(0), -1, -1, -1)
        z = self.o(self.ls(self.i(torch.cat([x, g], 1)))).squeeze(1)
        ph = torch.angle(torch.fft.fft(z + 2.0)).cos().mean()
        return (torch.linalg.vector_norm(z - y, dim=(1, 2)) / y.flatten(1).norm(dim=1)).mean() + 0.1 * ph

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 1, 4, 5), "y": torch.randn(B, 4, 5)}
""",
    "pairs of the batch, without those of one kind": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.proxy = nn.Parameter(torch.randn(3, 4))

    def forward(self, x, y):
        z = F.normalize(self.q(x), dim=1)
        s = z @ z.T
        same = y[:, None] == y[None]
        same.fill_diagonal_(False)
        other = y[:, None] != y[None]
        pos = torch.log1p((torch.exp(-2 * (s - 0.5)) * same).sum(1)) / 2
        neg = torch.log1p((torch.exp(5 * (s - 0.5)) * other).sum(1)) / 5
        p = F.normalize(self.proxy, dim=1)
        d = torch.cdist(z, p).square()
        nca = F.cross_entropy(-d, y)
        hard = s.masked_fill(~other, -torch.inf).amax(1)
        return (pos + neg).mean() + nca + F.softplus(hard).mean()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])}
""",
}
