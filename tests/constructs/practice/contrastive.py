"""Losses over the whole batch, teachers that follow, codebooks and queues."""

PROGRAMS = {
    "the right one among the batch, both ways": """
class Tower(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.a = nn.Linear(i, 16)
        self.b = nn.Linear(16, 8)

    def forward(self, x):
        return F.normalize(self.b(F.gelu(self.a(x))), dim=-1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = Tower(6)
        self.k = Tower(5)
        self.t = nn.Parameter(torch.tensor(1.3))

    def forward(self, *, a, b):
        q, k = self.q(a), self.k(b)
        s = q @ k.T * self.t.exp().clamp(max=10)
        y = torch.arange(s.size(0), device=s.device)
        return (F.cross_entropy(s, y) + F.cross_entropy(s.T, y)) / 2

def batch():
    torch.manual_seed(1)
    return {"a": torch.randn(B, 6), "b": torch.randn(B, 5)}
""",
    "every pair of the batch by a sigmoid": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(6, 8)
        self.k = nn.Linear(6, 8, bias=False)
        self.t = nn.Parameter(torch.tensor(1.3))
        self.b = nn.Parameter(torch.tensor(-2.0))

    def forward(self, a, b):
        q, k = F.normalize(self.q(a), dim=-1), F.normalize(self.k(b), dim=-1)
        s = q @ k.T * self.t.exp() + self.b
        y = 2 * torch.eye(s.size(0), dtype=s.dtype) - torch.ones_like(s)
        return -F.logsigmoid(y * s).sum() / s.size(0)

def batch():
    torch.manual_seed(1)
    return {"a": torch.randn(B, 6), "b": torch.randn(B, 6)}
""",
    "two views beside each other, itself hidden": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, a, b):
        z = F.normalize(torch.cat([self.q(a), self.q(b)]), dim=1)
        n = a.size(0)
        s = z @ z.T / 0.5
        s = s.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        y = torch.cat([torch.arange(n) + n, torch.arange(n)])
        return F.cross_entropy(s, y)

def batch():
    torch.manual_seed(1)
    return {"a": torch.randn(B, 6), "b": torch.randn(B, 6)}
""",
    "a teacher that follows, without negatives": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.on = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.ta = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        for p, q in zip(self.on.parameters(), self.ta.parameters()):
            q.data.copy_(p.data)
            q.requires_grad_(False)
        self.pred = nn.Linear(8, 8)

    def forward(self, a, b):
        with torch.no_grad():
            for p, q in zip(self.on.parameters(), self.ta.parameters()):
                q.mul_(0.9).add_(p, alpha=0.1)
            ta, tb = self.ta(a), self.ta(b)
        pa, pb = self.pred(self.on(a)), self.pred(self.on(b))
        return (2 - 2 * F.cosine_similarity(pa, tb.detach(), dim=-1)).mean() + (
            2 - 2 * F.cosine_similarity(pb, ta.detach(), dim=-1)
        ).mean()

def batch():
    torch.manual_seed(1)
    return {"a": torch.randn(B, 6), "b": torch.randn(B, 6)}
""",
    "variance and covariance of the batch": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(6, 8)

    def forward(self, a, b):
        a, b = self.q(a), self.q(b)

        def v(z):
            return F.relu(1 - torch.sqrt(z.var(0) + 1e-4)).mean()

        def c(z):
            z = z - z.mean(0)
            m = z.T @ z / (z.size(0) - 1)
            return (m.flatten()[:-1].view(7, 9)[:, 1:].flatten() ** 2).sum() / 8

        return 25 * F.mse_loss(a, b) + 25 * (v(a) + v(b)) + c(a) + c(b)

def batch():
    torch.manual_seed(1)
    return {"a": torch.randn(B, 6), "b": torch.randn(B, 6)}
""",
    "cross-correlation of two views": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(6, 8)
        self.bn = nn.BatchNorm1d(8, affine=False)

    def forward(self, a, b):
        c = self.bn(self.q(a)).T @ self.bn(self.q(b))
        c.div_(a.size(0))
        on = torch.diagonal(c).add_(-1).pow_(2).sum()
        off = (c - torch.diag(torch.diag(c))).pow(2).sum()
        return on + 0.005 * off

def batch():
    torch.manual_seed(1)
    return {"a": torch.randn(B, 6), "b": torch.randn(B, 6)}
""",
    "the hardest of the batch": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x, y):
        z = self.q(x)
        d = torch.cdist(z, z)
        same = y[:, None] == y[None]
        pos = d.masked_fill(~same, 0).max(1).values
        neg = d.masked_fill(same, 1e9).min(1).values
        return F.relu(pos - neg + 0.3).mean()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])}
""",
    "means over uneven numbers of positives": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(6, 4)

    def forward(self, x, y):
        z = F.normalize(self.q(x), dim=1)
        s = z @ z.T / 0.1
        s = s - s.max(1, keepdim=True).values.detach()
        m = torch.eq(y.view(-1, 1), y.view(1, -1)).to(z.dtype)
        o = 1 - torch.eye(z.size(0), dtype=z.dtype)
        m = m * o
        lp = s - ((s.exp() * o).sum(1, keepdim=True)).log()
        n = m.sum(1)
        per = (m * lp).sum(1) / n.clamp(min=1)
        return -(per * (n > 0)).sum() / (n > 0).sum()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6), "y": torch.tensor([0, 1, 2, 0, 1, 2, 0, 3])}
""",
    "a queue of negatives": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(6, 4)
        self.k = nn.Linear(6, 4).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 16), dim=0))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            k = F.normalize(self.k(b), dim=1)
        pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        l = F.cross_entropy(torch.cat([pos, neg], 1) / 0.2, torch.zeros(a.size(0), dtype=torch.long))
        with torch.no_grad():
            i = (self.ptr + torch.arange(a.size(0))) % 16
            self.queue[:, i] = k.T
            self.ptr.copy_((self.ptr + a.size(0)) % 16)
        return l

def batch():
    torch.manual_seed(1)
    return {"a": torch.randn(B, 6), "b": torch.randn(B, 6)}
""",
    "a centred teacher of several crops": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = nn.Linear(6, 5)
        self.t = nn.Linear(6, 5).requires_grad_(False)
        self.register_buffer("c", torch.zeros(1, 5))

    def forward(self, views):
        with torch.no_grad():
            t = self.t(views[:, :2])
            soft = F.softmax((t - self.c) / 0.04, -1)
        s = F.log_softmax(self.s(views) / 0.1, -1)
        total, n = 0, 0
        for i in range(2):
            for j in range(views.size(1)):
                if i == j:
                    continue
                total = total + (-soft[:, i] * s[:, j]).sum(-1).mean()
                n += 1
        self.c = self.c * 0.9 + t.mean((0, 1)).unsqueeze(0) * 0.1
        return total / n

def batch():
    torch.manual_seed(1)
    return {"views": torch.randn(B, 4, 6)}
""",
    "a codebook that is averaged": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Linear(6, 4)
        self.d = nn.Linear(4, 6)
        self.register_buffer("code", torch.randn(5, 4))
        self.register_buffer("n", torch.ones(5))
        self.register_buffer("avg", torch.randn(5, 4))

    def forward(self, x):
        z = self.e(x)
        dist = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.code.T + self.code.pow(2).sum(1)
        i = dist.argmin(1)
        one = F.one_hot(i, 5).to(z.dtype)
        q = one @ self.code
        with torch.no_grad():
            self.n.mul_(0.9).add_(one.sum(0), alpha=0.1)
            self.avg.mul_(0.9).add_(one.T @ z, alpha=0.1)
            n = self.n.sum()
            w = (self.n + 1e-5) / (n + 5e-5) * n
            self.code.copy_(self.avg / w[:, None])
        commit = F.mse_loss(z, q.detach())
        q = z + (q - z).detach()
        p = one.mean(0)
        return F.mse_loss(self.d(q), x) + 0.25 * commit, torch.exp(-(p * (p + 1e-10).log()).sum())

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 6)}
""",
    "a codebook that is learned": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Conv1d(3, 4, 3, padding=1)
        self.d = nn.ConvTranspose1d(4, 3, 3, padding=1)
        self.code = nn.Embedding(7, 4)

    def forward(self, x):
        z = self.e(x).permute(0, 2, 1).contiguous()
        f = z.view(-1, 4)
        i = torch.cdist(f, self.code.weight).argmin(1)
        q = self.code(i).view(z.shape)
        l = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        q = z + (q - z).detach()
        return {"loss": l + F.mse_loss(self.d(q.permute(0, 2, 1)), x), "idx": i}

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 3, 10)}
""",
}
