"""Ways of training: hooks, functions with gradients of their own, adapters, chance, buffers that follow."""

PROGRAMS = {
    "a gradient turned round": """
class Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.by * g, None

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.c, self.d = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x, y, where):
        h = self.f(x)
        return F.cross_entropy(self.c(h), y) + F.cross_entropy(self.d(Turn.apply(h, 0.3)), where)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,)), "where": torch.randint(0, 2, (B,))}
""",
    "signs that pass gradients": """
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.abs() <= 1)

class Bin(nn.Linear):
    def forward(self, x):
        return F.linear(Sign.apply(x), Sign.apply(self.weight) * self.weight.abs().mean(1, keepdim=True), self.bias)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b, self.o = nn.Linear(6, 8), nn.BatchNorm1d(8), Bin(8, 8), nn.Linear(8, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.o(self.b(self.n(self.a(x)))), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "numbers rounded to steps that are learned": """
def rounded(x):
    return x + (x.round() - x).detach()

class Q(nn.Module):
    def __init__(self, bits):
        super().__init__()
        self.s = nn.Parameter(torch.tensor(0.2))
        self.lo, self.hi = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def forward(self, x):
        g = 1 / math.sqrt(x[0].numel() * self.hi)
        s = self.s * g + (self.s * (1 - g)).detach()
        return rounded((x / s).clamp(self.lo, self.hi)) * s

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.qa, self.qw = Q(4), Q(3)

    def forward(self, x, y):
        h = F.linear(self.qa(x), self.qw(self.a.weight), self.a.bias)
        return F.cross_entropy(F.linear(self.qa(F.relu(h)), self.qw(self.b.weight)), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "ranges that follow what is seen": """
class Watch(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("lo", torch.tensor(0.0))
        self.register_buffer("hi", torch.tensor(0.0))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        with torch.no_grad():
            lo, hi = torch.aminmax(x)
            self.lo.copy_(torch.where(self.seen == 0, lo, torch.minimum(self.lo * 0.9, lo)))
            self.hi.copy_(torch.where(self.seen == 0, hi, torch.maximum(self.hi * 0.9, hi)))
            self.seen += 1
        s = ((self.hi - self.lo) / 15).clamp(min=1e-6)
        q = ((x - self.lo) / s).round().clamp(0, 15) * s + self.lo
        return x + (q - x).detach()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.w = nn.Linear(6, 8), nn.Linear(8, 3), nn.ModuleList([Watch(), Watch()])

    def forward(self, x, y):
        return F.cross_entropy(self.b(self.w[1](self.a(self.w[0](x)).relu())), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "layers skipped by a drawn number that is given": """
class L(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU())
        self.g = nn.Parameter(torch.full((8,), 1e-1))

    def forward(self, x, keep):
        return x + self.g * self.f(x) * keep.view(-1, *[1] * (x.dim() - 1)) / 0.8

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.o = nn.Linear(6, 8), nn.Linear(8, 3)
        self.ls = nn.ModuleList(L() for _ in range(3))

    def forward(self, x, u, y):
        h = self.i(x)
        for n, l in enumerate(self.ls):
            h = l(h, (u[:, n] < 0.8).to(h.dtype))
        return F.cross_entropy(self.o(h.mean(1)), y, label_smoothing=0.1)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 5, 6), "u": torch.rand(B, 3), "y": torch.randint(0, 3, (B,))}
""",
    "weights made by a network": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6 * 4 + 4))
        self.task = nn.Embedding(2, 3)
        self.o = nn.Linear(4, 3)

    def forward(self, x, task, y):
        p = self.h(self.task(task))
        w, b = p[:, :24].view(-1, 4, 6), p[:, 24:]
        z = torch.baddbmm(b[:, :, None], w, x[:, :, None]).squeeze(2)
        shared = self.h(self.task.weight.mean(0))
        z = z + F.linear(x, shared[:24].view(4, 6), shared[24:])
        return F.cross_entropy(self.o(z.tanh()), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "task": torch.randint(0, 2, (B,)), "y": torch.randint(0, 3, (B,))}
""",
    "magnitudes and directions of low ranks": """
class Dora(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.base = nn.Linear(i, o).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, i) * 0.3)
        self.b = nn.Parameter(torch.randn(o, 2) * 0.1)
        self.m = nn.Parameter(self.base.weight.norm(dim=1))

    def forward(self, x):
        w = self.base.weight + self.b @ self.a
        scale = self.m / w.norm(dim=1).detach()
        return F.linear(x, w * scale[:, None], self.base.bias)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Sequential(Dora(6, 8), nn.GELU(), Dora(8, 8))
        self.pre = nn.Parameter(torch.randn(2, 6) * 0.2)
        self.o = nn.Linear(8, 3)
        for p in self.o.parameters():
            p.requires_grad = False

    def forward(self, x, y):
        x = torch.cat([self.pre.expand(x.size(0), -1, -1), x], 1)
        return F.cross_entropy(self.o(self.l(x)[:, 2:].mean(1)), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 4, 6), "y": torch.randint(0, 3, (B,))}
""",
    "the same weights of many modules": """
class Cell(nn.Module):
    def __init__(self, emb, norm):
        super().__init__()
        self.emb, self.norm, self.f = emb, norm, nn.Linear(8, 8)

    def forward(self, h):
        return h + self.f(self.norm(h)) @ self.emb.weight.T.softmax(1) @ self.emb.weight

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, n = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.cs = nn.ModuleList(Cell(self.e, n) for _ in range(3))
        self.cs[2].f = self.cs[0].f
        self.cs[1].f.bias = self.cs[0].f.bias

    def forward(self, ids):
        h = self.e(ids)
        for c in [*self.cs, self.cs[1]]:
            h = c(h)
        return F.cross_entropy(F.linear(h, self.e.weight)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

def batch():
    torch.manual_seed(1)
    return {"ids": torch.randint(0, 9, (B, 5))}
""",
    "a norm by running statistics": """
class Renorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))
        self.register_buffer("mean", torch.zeros(n))
        self.register_buffer("std", torch.ones(n))
        self.register_buffer("steps", torch.tensor(0.0))

    def forward(self, x):
        m, s = x.mean((0, 1)), x.std((0, 1), unbiased=False) + 1e-3
        with torch.no_grad():
            r = (s / self.std).clamp(0.5, 2)
            d = ((m - self.mean) / self.std).clamp(-1, 1)
            warm = (self.steps / 2).clamp(max=1)
            r, d = 1 + warm * (r - 1), warm * d
        y = (x - m) / s * r + d
        with torch.no_grad():
            self.mean += 0.3 * (m - self.mean)
            self.std += 0.3 * (s - self.std)
            self.steps.add_(1)
        return y * self.w + self.b

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.o = nn.Linear(6, 8), Renorm(8), nn.Linear(8, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.o(F.elu(self.n(self.a(x)))).transpose(1, 2), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 4, 6), "y": torch.randint(0, 3, (B, 4))}
""",
    "biases that balance experts": """
class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(8, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, 8, 8) * 0.3) for _ in range(2))
        self.register_buffer("bias", torch.zeros(4))
        self.shared = nn.Linear(8, 8)

    def forward(self, x):
        t = x.flatten(0, 1)
        s = self.g(t).sigmoid()
        i = (s + self.bias).topk(2, -1).indices
        w = s.gather(1, i)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(t)
        for e in range(4):
            m = (i == e).to(t.dtype)
            out = out + (m * w).sum(1, keepdim=True) * (F.silu(t @ self.up[e]) @ self.down[e])
        load = F.one_hot(i, 4).sum((0, 1))
        with torch.no_grad():
            self.bias += 0.1 * torch.sign(load.sum() / 4 - load)
        return x + self.shared(x) + out.view_as(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.ls, self.o = nn.Embedding(9, 8), nn.ModuleList([Moe(), Moe()]), nn.Linear(8, 9)

    def forward(self, ids):
        h = self.e(ids)
        for l in self.ls:
            h = l(h)
        return F.cross_entropy(self.o(h)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

def batch():
    torch.manual_seed(1)
    return {"ids": torch.randint(0, 9, (B, 5))}
""",
    "hooks on what comes out": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.o = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.b.register_forward_hook(lambda m, i, o: o * 0.5 + i[0])
        self.b.register_forward_pre_hook(lambda m, i: (i[0].tanh(),))
        self.o.weight.register_hook(lambda g: g.clamp(-0.05, 0.05))

    def forward(self, x, y):
        h = self.a(x)
        h.register_hook(lambda g: g * 2)
        return F.cross_entropy(self.o(self.b(h)), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "noise of steps, weighed by it": """
class Res(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.c = nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 3, padding=1)
        self.t = nn.Linear(8, 8)

    def forward(self, x, t):
        a, b = self.t(F.silu(t))[:, :, None].chunk(2, 1)
        return x + self.c(F.silu(self.n(x) * (1 + a) + b))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.o = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.r = nn.ModuleList(Res() for _ in range(2))
        self.te = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
        beta = torch.linspace(1e-2, 0.2, 10)
        self.register_buffer("ab", torch.cumprod(1 - beta, 0))
        self.register_buffer("null", torch.zeros(8))
        self.y = nn.Embedding(4, 8)

    def forward(self, x, t, eps, y, drop):
        ab = self.ab[t][:, None, None]
        xt = ab.sqrt() * x + (1 - ab).sqrt() * eps
        f = (-math.log(1e4) * torch.arange(4) / 4).exp()
        ang = t[:, None] * f
        e = self.te(torch.cat([ang.cos(), ang.sin()], 1).to(x.dtype))
        e = e + torch.where(drop[:, None], self.null, self.y(y))
        h = self.i(xt)
        for r in self.r:
            h = r(h, e)
        out, v = self.o(h).chunk(2, 1)
        snr = ab / (1 - ab)
        w = torch.minimum(snr, torch.full_like(snr, 5.0)) / snr
        kl = 0.5 * (v.exp() - 1 - v).mean((1, 2))
        return ((out - eps).square() * w).mean() + 1e-2 * kl.mean()

def batch():
    torch.manual_seed(1)
    return {
        "x": torch.randn(B, 2, 6),
        "t": torch.randint(0, 10, (B,)),
        "eps": torch.randn(B, 2, 6),
        "y": torch.randint(0, 4, (B,)),
        "drop": torch.rand(B) < 0.3,
    }
""",
    "a mixture of densities": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.Linear(6, 8)
        self.pi, self.mu, self.ls = nn.Linear(8, 3), nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x, y):
        h = self.h(x).tanh()
        mu, sd = self.mu(h).view(-1, 3, 2), F.softplus(self.ls(h)).view(-1, 3, 2) + 1e-3
        d = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=self.pi(h), validate_args=False),
            torch.distributions.Independent(torch.distributions.Normal(mu, sd, validate_args=False), 1),
            validate_args=False,
        )
        return -d.log_prob(y).mean()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randn(B, 2)}
""",
    "votes that agree": """
def squash(s):
    n = s.square().sum(-1, keepdim=True)
    return n / (1 + n) * s / (n + 1e-8).sqrt()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, 2, 4) * 0.4)
        self.r = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x, y):
        u = squash(x.view(-1, 4, 2))
        v = torch.einsum("bip,cipd->bcid", u, self.w)
        b = v.new_zeros(v.shape[:-1])
        for n in range(3):
            c = b.softmax(1)
            s = squash((c[..., None] * v).sum(2))
            if n < 2:
                b = b + (v.detach() * s[:, :, None]).sum(-1)
        length = s.norm(dim=-1)
        t = F.one_hot(y, 3)
        l = t * F.relu(0.9 - length).square() + 0.5 * (1 - t) * F.relu(length - 0.1).square()
        rec = self.r((s * t[..., None]).flatten(1))
        return l.sum(1).mean() + 0.05 * F.mse_loss(rec, x)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 8), "y": torch.randint(0, 3, (B,))}
""",
    "answers looked up among memories": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.k1, self.k2 = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))
        self.v = nn.EmbeddingBag(16, 6, mode="sum")
        self.q, self.o = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, y):
        q1, q2 = self.q(x).chunk(2, -1)
        s1, i1 = (q1 @ self.k1.T).topk(2, -1)
        s2, i2 = (q2 @ self.k2.T).topk(2, -1)
        s = (s1[:, :, None] + s2[:, None]).flatten(1)
        i = (i1[:, :, None] * 4 + i2[:, None]).flatten(1)
        s, j = s.topk(3, 1)
        h = self.v(i.gather(1, j), per_sample_weights=s.softmax(1))
        return F.cross_entropy(self.o(h + x), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "ranks made soft": """
def neural_sort(s, tau):
    n = s.size(1)
    b = (s[:, :, None] - s[:, None]).abs().sum(2)
    scale = (n + 1 - 2 * torch.arange(1, n + 1)).to(s.dtype)
    return ((scale[None, :, None] * s[:, None] - b[:, None]) / tau).softmax(-1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x, rel):
        s = self.s(x).squeeze(-1)
        p = neural_sort(s, 0.7)
        for _ in range(3):
            p = p / p.sum(1, keepdim=True)
            p = p / p.sum(2, keepdim=True)
        gain = (p @ (2**rel - 1)[..., None]).squeeze(-1)
        disc = 1 / torch.log2(torch.arange(s.size(1)) + 2.0)
        ideal = ((2 ** rel.sort(1, descending=True).values - 1) * disc).sum(1)
        d = s[:, :, None] - s[:, None]
        pairs = (rel[:, :, None] > rel[:, None]).to(s.dtype)
        pair = (F.softplus(-d) * pairs).sum((1, 2)) / pairs.sum((1, 2)).clamp(min=1)
        return (1 - (gain * disc).sum(1) / ideal.clamp(min=1e-6)).mean() + pair.mean()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 5, 6), "rel": torch.randint(0, 3, (B, 5)).double()}
""",
}
