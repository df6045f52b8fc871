"""Parameters and blocks used in odd ways, numbers of all kinds, and results in all shapes."""

PROGRAMS = {
    "an encoder called three times": """
class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.ls = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x):
        for l in self.ls:
            x = x + l(x)
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(6, 8)
        self.e = Enc()
        self.o = nn.Linear(16, 3)

    def forward(self, a, b, y):
        u, v = self.e(self.i(a)), self.e(self.i(b))
        w = self.e(self.i(a + b)).detach()
        return F.cross_entropy(self.o(torch.cat([(u - v).abs(), u * v], 1)), y) + F.mse_loss(u + v, w)

def batch():
    torch.manual_seed(1)
    return {"a": torch.randn(B, 6), "b": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "averages of weights, read in forward": """
class L(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.register_buffer("ema", torch.zeros(8, 8))

    def forward(self, x):
        with torch.no_grad():
            self.ema.lerp_(self.f.weight, 0.1)
        return x + torch.tanh(self.f(x)) + 0.1 * x @ self.ema

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(6, 8)
        self.ls = nn.ModuleList(L() for _ in range(3))
        self.o = nn.Linear(8, 3)

    def forward(self, a, y):
        h = self.i(a)
        for l in self.ls:
            h = l(h)
        reg = sum(l.f.weight.square().mean() for l in self.ls)
        return F.cross_entropy(self.o(h), y) + 0.01 * reg

def batch():
    torch.manual_seed(1)
    return {"a": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "weights of a block read before it and after it": """
class L(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.g = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return x + self.g(torch.tanh(self.f(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(6, 8)
        self.ls = nn.ModuleList(L() for _ in range(4))
        self.o = nn.Linear(8, 3)

    def forward(self, a, y):
        h = self.i(a)
        h = h + F.linear(h, self.ls[2].f.weight)
        h = self.ls[1](self.ls[0](h))
        h = h * self.ls[3].f.bias + F.linear(h, self.ls[0].g.weight.t(), self.ls[3].f.bias)
        h = self.ls[3](self.ls[2](h))
        return F.cross_entropy(self.o(h), y) + self.ls[1].f.weight.norm() + self.ls[2].g.weight.abs().sum() * 0.01

def batch():
    torch.manual_seed(1)
    return {"a": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "layers as views of one parameter": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6 * 8 + 8 + 8 * 3 + 3) * 0.3)

    def forward(self, x, y):
        w1, b1, w2, b2 = self.w.split([48, 8, 24, 3])
        h = torch.tanh(F.linear(x, w1.view(8, 6), b1))
        return F.cross_entropy(F.linear(h, w2.view(3, 8), b2), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "a norm by power iterations, of a module called twice": """
from torch.nn.utils.parametrizations import spectral_norm

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = spectral_norm(nn.Linear(6, 8))
        self.b = spectral_norm(nn.Linear(8, 8), n_power_iterations=2)
        self.o = nn.Linear(8, 3)

    def forward(self, x, y):
        h = torch.relu(self.a(x))
        return F.cross_entropy(self.o(self.b(self.b(h)).mean(1)), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 5, 6), "y": torch.randint(0, 3, (B,))}
""",
    "weights under three norms": """
import torch.nn.utils.parametrizations as P

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = P.weight_norm(nn.Linear(6, 8))
        self.b = P.spectral_norm(nn.Conv1d(8, 8, 3, padding=1))
        self.c = P.orthogonal(nn.Linear(8, 8))
        self.d = nn.Linear(8, 6)
        self.d.weight = nn.Parameter(self.d.weight.detach())

    def forward(self, x):
        h = self.a(x).tanh()
        h = self.b(h.transpose(1, 2)).transpose(1, 2)
        h = self.c(h)
        r = F.linear(h, self.a.weight.t())
        return F.mse_loss(r, x) + self.d(h).square().mean()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 5, 6)}
""",
    "an ensemble, stacked": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ms = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x, y):
        w = torch.stack([m.weight for m in self.ms])
        b = torch.stack([m.bias for m in self.ms])
        z = torch.baddbmm(b.unsqueeze(1), x.expand(3, *x.shape), w.transpose(1, 2))
        p = z.softmax(-1).mean(0)
        return F.nll_loss(p.log(), y) + z.std(0).mean() * 0.1

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "checkpoints inside": """
from torch.utils.checkpoint import checkpoint

class Blk(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 8)
        self.n = nn.LayerNorm(8)

    def forward(self, x, scale=1.0):
        return x + self.b(F.gelu(self.a(self.n(x)))) * scale

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(6, 8)
        self.ls = nn.ModuleList(Blk() for _ in range(3))
        self.o = nn.Linear(8, 4)

    def forward(self, x, y=None):
        h = self.i(x)
        for i, l in enumerate(self.ls):
            h = checkpoint(l, h, scale=1.0 / (i + 1), use_reentrant=False) if i != 1 else l(h)
        return F.cross_entropy(self.o(h).flatten(0, 1), y.flatten(), ignore_index=3)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 5, 6), "y": torch.randint(0, 4, (B, 5))}
""",
    "lazy modules": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.LazyLinear(8)
        self.n = nn.LazyBatchNorm1d()
        self.b = nn.LazyLinear(3)
        self(torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))

    def forward(self, x, y):
        return F.cross_entropy(self.b(F.relu(self.n(self.a(x)))), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "nested results": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x, y):
        z = self.a(x)
        p = z.argmax(1)
        return {
            "loss": F.cross_entropy(z, y),
            "aux": {"pred": p, "right": [p == y, (p == y).sum()]},
            "top": torch.topk(z, 2).indices,
        }

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "phases of complex numbers": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))
        self.o = nn.Linear(4, 3)

    def forward(self, x, y):
        z = torch.fft.fft(x, norm="ortho") @ self.w
        z = z * torch.exp(1j * z.abs()) + (0.5 - 2j)
        z = (2j - z) / (1 + 1j)
        return F.cross_entropy(self.o(z.abs()), y) + (z.real * z.imag).mean()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
    "products of spectra": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3, 4, dtype=torch.cdouble) * 0.3)
        self.c = nn.Conv1d(3, 3, 1)
        self.o = nn.Linear(3, 1)

    def forward(self, x, y):
        f = torch.fft.rfft(x)
        o = torch.zeros_like(f)
        o[:, :, :4] = torch.einsum("bix,iox->box", f[:, :, :4], self.w)
        h = F.gelu(torch.fft.irfft(o, n=x.size(-1)) + self.c(x))
        h = self.o(h.transpose(1, 2)).squeeze(-1)
        return ((h - y).norm(dim=1) / y.norm(dim=1)).mean()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 3, 12), "y": torch.randn(B, 12)}
""",
    "two players": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
        self.d = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, x, z):
        f = self.g(z)
        dl = F.softplus(self.d(f.detach())).mean() + F.softplus(-self.d(x)).mean()
        ps = [p.detach() for p in self.d.parameters()]
        h = F.leaky_relu(F.linear(f, ps[0], ps[1]), 0.2)
        gl = F.softplus(-F.linear(h, ps[2], ps[3])).mean()
        return dl + gl

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "z": torch.randn(B, 3)}
""",
    "clipped ratios of standardised advantages": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Linear(6, 8)
        self.p = nn.Linear(8, 3)
        self.v = nn.Linear(8, 1)

    def forward(self, obs, act, old, adv, ret):
        h = torch.tanh(self.b(obs))
        d = torch.distributions.Categorical(logits=self.p(h))
        r = (d.log_prob(act) - old).exp()
        a = (adv - adv.mean()) / (adv.std() + 1e-8)
        pg = torch.max(-a * r, -a * r.clamp(0.8, 1.2)).mean()
        v = self.v(h).squeeze(-1)
        return pg + 0.5 * F.mse_loss(v, ret) - 0.01 * d.entropy().mean()

def batch():
    torch.manual_seed(1)
    return {
        "obs": torch.randn(B, 6),
        "act": torch.randint(0, 3, (B,)),
        "old": torch.randn(B) * 0.1 - 1,
        "adv": torch.randn(B),
        "ret": torch.randn(B),
    }
""",
    "a flow and its determinant": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.eye(6) + 0.1 * torch.randn(6, 6))
        self.s = nn.Linear(3, 6)
        self.p = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        z = x @ self.w
        a, b = z.chunk(2, 1)
        s, t = self.s(a).chunk(2, 1)
        b = b * torch.sigmoid(s + 2) + t
        z = torch.cat([a, b], 1) * self.p.exp()
        ld = F.logsigmoid(s + 2).sum(1) + torch.linalg.slogdet(self.w)[1] + self.p.sum()
        return (0.5 * z.square().sum(1) - ld).mean() / math.log(2)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6)}
""",
    "a margin of angles": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 8)
        self.w = nn.Parameter(torch.randn(7, 8))

    def forward(self, x, y):
        c = F.linear(F.normalize(self.f(x)), F.normalize(self.w)).clamp(-1 + 1e-6, 1 - 1e-6)
        th = torch.acos(c)
        one = torch.zeros_like(c).scatter_(1, y.view(-1, 1), 1.0)
        z = torch.cos(th + 0.3 * one) * 8
        return F.cross_entropy(z, y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 7, (B,))}
""",
    "choices passed straight through": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 5)
        self.w = nn.Parameter(torch.randn(5, 4))
        self.o = nn.Linear(4, 3)

    def forward(self, x, g, y):
        z = self.a(x)
        p = ((z + g) / 0.7).softmax(-1)
        hard = torch.zeros_like(p).scatter_(-1, p.topk(2, -1).indices, 0.5)
        s = hard - p.detach() + p
        return F.cross_entropy(self.o(s @ self.w), y) + (p.mean(0) * p.mean(0).log()).sum()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "g": torch.randn(B, 5), "y": torch.randint(0, 3, (B,))}
""",
    "tasks weighed by uncertainty, of which some lack labels": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Linear(6, 8)
        self.h = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 1)})
        self.s = nn.Parameter(torch.zeros(2))

    def forward(self, x, y, r):
        h = F.mish(self.t(x))
        la = F.cross_entropy(self.h["a"](h), y, ignore_index=-1)
        ok = ~r.isnan()
        e = (self.h["b"](h).squeeze(-1) - r.nan_to_num())[ok]
        lb = F.huber_loss(e, torch.zeros_like(e), delta=0.5)
        return (torch.stack([la, lb]) * (-self.s).exp() + self.s).sum()

def batch():
    torch.manual_seed(1)
    r = torch.randn(B)
    r[[0, 1, 2, 6]] = float("nan")
    return {"x": torch.randn(B, 6), "y": torch.tensor([0, -1, -1, -1, 2, 1, -1, 0]), "r": r}
""",
    "batch norms of two kinds": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.n = nn.BatchNorm1d(8, momentum=None)
        self.m = nn.BatchNorm1d(8).eval()
        self.o = nn.Linear(8, 3)

    def forward(self, x, y):
        h = self.n(self.a(x))
        h = F.batch_norm(h, self.m.running_mean, self.m.running_var, self.m.weight, self.m.bias, training=False)
        return F.cross_entropy(self.o(F.hardswish(h)), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.randint(0, 3, (B,))}
""",
}
