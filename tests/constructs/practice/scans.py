"""Scans, mixers and recurrences: what stands in for attention, and what stands beside it."""

PROGRAMS = {
    "keys and values that fade": """
class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.Parameter(torch.rand(3, 8))
        self.w = nn.Parameter(torch.rand(8))
        self.u = nn.Parameter(torch.randn(8))
        self.k, self.v, self.r, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x):
        last = F.pad(x, (0, 0, 1, -1))
        xk, xv, xr = (x * m + last * (1 - m) for m in self.m)
        k, v, r = self.k(xk), self.v(xv), torch.sigmoid(self.r(xr))
        a = b = torch.zeros_like(k[:, 0])
        p = torch.full_like(a, -1e30)
        out = []
        for t in range(x.size(1)):
            q = torch.maximum(p, self.u + k[:, t])
            e, f = (p - q).exp(), (self.u + k[:, t] - q).exp()
            out.append((e * a + f * v[:, t]) / (e * b + f))
            w = p - self.w.exp()
            q = torch.maximum(w, k[:, t])
            e, f = (w - q).exp(), (k[:, t] - q).exp()
            a, b, p = e * a + f * v[:, t], e * b + f, q
        return x + self.o(r * torch.stack(out, 1))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(11, 8)
        self.ls = nn.ModuleList(Mix() for _ in range(2))
        self.n = nn.LayerNorm(8)

    def forward(self, ids):
        h = self.e(ids)
        for l in self.ls:
            h = l(h)
        z = self.n(h) @ self.e.weight.T
        return F.cross_entropy(z[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

def batch():
    torch.manual_seed(1)
    return {"ids": torch.randint(0, 11, (B, 6))}
""",
    "a scan by doubling": """
def scan(a, b):
    step = 1
    while step < a.size(1):
        b = b + a * F.pad(b, (0, 0, step, 0))[:, : b.size(1)]
        a = a * F.pad(a, (0, 0, step, 0), value=1.0)[:, : a.size(1)]
        step *= 2
    return b

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(6, 16)
        self.a = nn.Parameter(torch.rand(8) + 0.5)
        self.g = nn.Linear(6, 8)
        self.o = nn.Linear(8, 6)

    def forward(self, x):
        r, i = self.i(x).chunk(2, -1)
        log_a = -8.0 * torch.sigmoid(r) * F.softplus(self.a)
        a = log_a.exp()
        h = scan(a, torch.sqrt((1 - (2 * log_a).exp()).clamp(min=1e-6)) * i)
        return F.smooth_l1_loss(self.o(h * F.gelu(self.g(x))), x.flip(1))

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 7, 6)}
""",
    "a decay matrix of sums of logs": """
def segsum(x):
    t = x.size(-1)
    x = x[..., None].expand(*x.shape, t).masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(-1), 0)
    return x.cumsum(-2).masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), -torch.inf)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(6, 2 * 4 + 2 * 3 + 2)
        self.log_a = nn.Parameter(torch.rand(2))
        self.bias = nn.Parameter(torch.randn(2))
        self.skip = nn.Parameter(torch.ones(2))
        self.n = nn.RMSNorm(8)
        self.o = nn.Linear(8, 6)

    def forward(self, u):
        x, b, c, dt = self.i(u).split([8, 3, 3, 2], -1)
        dt = F.softplus(dt + self.bias)
        x = x.unflatten(-1, (2, 4))
        a = (-self.log_a.exp() * dt).view(u.size(0), 2, -1, 2)
        xd = (x * dt[..., None]).view(u.size(0), 2, -1, 2, 4)
        b, c = (v.view(u.size(0), 2, -1, 3) for v in (b, c))
        a = a.permute(0, 3, 1, 2)
        cum = a.cumsum(-1)
        y = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, segsum(a).exp(), xd)
        states = torch.einsum("bcln,bhcl,bclhp->bchpn", b, (cum[..., -1:] - cum).exp(), xd)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        between = segsum(F.pad(cum[..., -1], (1, 0))).exp()
        states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
        y = y + torch.einsum("bcln,bchpn,bhcl->bclhp", c, states, cum.exp())
        y = y.flatten(1, 2) + x * self.skip[:, None]
        return F.mse_loss(self.o(self.n(y.flatten(2))), u.roll(-1, 1))

def batch():
    torch.manual_seed(1)
    return {"u": torch.randn(B, 6, 6)}
""",
    "kernels as long as the sequence": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(6) - 3)
        self.c = nn.Parameter(torch.randn(6, 4, 2) * 0.5)
        self.re = nn.Parameter(torch.log(0.5 * torch.ones(6, 4)))
        self.im = nn.Parameter(math.pi * torch.arange(4.0).repeat(6, 1))
        self.d = nn.Parameter(torch.randn(6))
        self.o = nn.Conv1d(6, 12, 1)

    def forward(self, u):
        n = u.size(-1)
        a = -self.re.exp() + 1j * self.im
        dta = a * self.log_dt.exp()[:, None]
        c = torch.view_as_complex(self.c) * (dta.exp() - 1) / a
        k = 2 * torch.einsum("hn,hnl->hl", c, (dta[..., None] * torch.arange(n)).exp()).real
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * n) * torch.fft.rfft(k, n=2 * n), n=2 * n)[..., :n]
        y = F.glu(self.o(F.gelu(y + u * self.d[:, None])), 1)
        return (y - u.roll(1, -1)).square().mean()

def batch():
    torch.manual_seed(1)
    return {"u": torch.randn(B, 6, 9)}
""",
    "a rule that overwrites what is stored": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 24)
        self.beta = nn.Linear(6, 2)
        self.o = nn.Linear(8, 6)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (2, 3, 4)).unbind(-2)
        k, beta = F.normalize(k, dim=-1), self.beta(x).sigmoid()
        s = x.new_zeros(x.size(0), 2, 4, 4)
        out = torch.empty_like(v)
        for t in range(x.size(1)):
            old = (s * k[:, t, :, :, None]).sum(-2)
            s = s + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - old))[..., None, :]
            out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], s)
        return F.mse_loss(self.o(out.flatten(2)), x)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 5, 6)}
""",
    "sequences packed by length": """
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.GRU(6, 5, batch_first=True)
        self.o = nn.Linear(5, 3)

    def forward(self, x, lens, y):
        p = pack_padded_sequence(x, lens, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.r(p)[0], batch_first=True)
        return F.cross_entropy(self.o(h.sum(1) / lens[:, None]), y)

def batch():
    torch.manual_seed(1)
    return {
        "x": torch.randn(B, 6, 6),
        "lens": torch.tensor([6, 3, 2, 5, 1, 4, 6, 2]),
        "y": torch.randint(0, 3, (B,)),
    }
""",
    "cells that hold on to their state": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(6, 8)
        self.c = nn.LSTMCell(8, 8)
        self.z = nn.Dropout(0.0)
        self.h0 = nn.Parameter(torch.zeros(8))
        self.c0 = nn.Parameter(torch.zeros(8))
        self.o = nn.Linear(8, 6)

    def forward(self, x, keep):
        h, c = (s.expand(x.size(0), -1) for s in (self.h0, self.c0))
        loss = 0.0
        for t in range(x.size(1) - 1):
            nh, nc = self.c(self.z(self.i(x[:, t])), (h, c))
            m = keep[:, t, None]
            h, c = torch.where(m, nh, h), torch.where(m, nc, c)
            loss = loss + ((self.o(h) - x[:, t + 1]).pow(2).mean(1) * keep[:, t + 1]).sum()
        return loss / keep[:, 1:].sum()

def batch():
    torch.manual_seed(1)
    keep = torch.arange(5)[None] < torch.tensor([5, 3, 4, 2, 5, 5, 3, 4])[:, None]
    return {"x": torch.randn(B, 5, 6), "keep": keep}
""",
    "the score of a chain of labels": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(9, 6)
        self.r = nn.LSTM(6, 4, batch_first=True, bidirectional=True)
        self.o = nn.Linear(8, 4)
        self.t = nn.Parameter(torch.randn(4, 4) * 0.3)
        self.s = nn.Parameter(torch.randn(4) * 0.3)

    def forward(self, ids, tags, mask):
        z = self.o(self.r(self.e(ids))[0])
        gold = self.s[tags[:, 0]] + z[:, 0].gather(1, tags[:, :1]).squeeze(1)
        a = self.s + z[:, 0]
        for t in range(1, ids.size(1)):
            step = self.t[tags[:, t - 1], tags[:, t]] + z[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
            gold = gold + step * mask[:, t]
            new = torch.logsumexp(a[:, :, None] + self.t + z[:, t, None], 1)
            a = torch.where(mask[:, t, None], new, a)
        return (a.logsumexp(1) - gold).mean()

def batch():
    torch.manual_seed(1)
    mask = torch.arange(5)[None] < torch.tensor([5, 3, 4, 2, 5, 5, 3, 4])[:, None]
    return {"ids": torch.randint(0, 9, (B, 5)), "tags": torch.randint(0, 4, (B, 5)), "mask": mask}
""",
    "tokens mixed by transforms": """
class L(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.m = nn.LayerNorm(8), nn.LayerNorm(8)
        self.f = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    def forward(self, x):
        x = self.n(x + torch.fft.fft2(x, dim=(1, 2)).real * 0.2)
        return self.m(x + self.f(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(9, 8)
        self.ls = nn.Sequential(L(), L())
        self.o = nn.Linear(8, 3)

    def forward(self, ids, y):
        return F.cross_entropy(self.o(self.ls(self.e(ids)).amax(1)), y)

def batch():
    torch.manual_seed(1)
    return {"ids": torch.randint(0, 9, (B, 5)), "y": torch.randint(0, 3, (B,))}
""",
    "features turned and summed": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(6, 16)
        self.v = nn.Linear(6, 8)
        self.register_buffer("w", torch.linalg.qr(torch.randn(4, 4))[0] * 2)
        self.o = nn.Linear(8, 6)

    def phi(self, x):
        p = x @ self.w
        return (p - x.square().sum(-1, keepdim=True) / 2 - p.amax((-1, -2), keepdim=True).detach()).exp() + 1e-4

    def forward(self, x):
        q, k = self.qk(x).unflatten(-1, (2, 2, 4)).movedim(2, 0).transpose(2, 3)
        v = self.v(x).unflatten(-1, (2, 4)).transpose(1, 2)
        q, k = self.phi(q), self.phi(k)
        s = torch.einsum("bhtk,bhtv->bhtkv", k, v).cumsum(2)
        num = torch.einsum("bhtk,bhtkv->bhtv", q, s)
        den = (q * k.cumsum(2)).sum(-1, keepdim=True)
        return F.l1_loss(self.o((num / den).transpose(1, 2).reshape(*x.shape[:2], -1)), x)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 5, 6)}
""",
    "turns of pairs as complex numbers": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(9, 8)
        self.q = nn.Linear(8, 8, bias=False)
        self.kv = nn.Linear(8, 8, bias=False)
        f = torch.outer(torch.arange(6.0), 1 / 100 ** (torch.arange(0, 4, 2) / 4))
        self.register_buffer("turn", torch.polar(torch.ones_like(f), f), persistent=False)
        self.o = nn.Linear(8, 9)

    def rot(self, x):
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * self.turn[: x.size(1), None]).flatten(-2)

    def forward(self, ids):
        h = self.e(ids)
        q = self.rot(self.q(h).unflatten(-1, (2, 4)))
        k, v = self.kv(h).unflatten(-1, (2, 1, 4)).unbind(2)
        k, v = self.rot(k).expand(-1, -1, 2, -1), v.repeat_interleave(2, 2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        s = (q @ k.mT / 2).masked_fill(torch.ones(ids.size(1), ids.size(1), dtype=torch.bool).triu(1), -torch.inf)
        h = h + (s.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.o(h)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

def batch():
    torch.manual_seed(1)
    return {"ids": torch.randint(0, 9, (B, 6))}
""",
}
