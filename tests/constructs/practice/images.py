"""Images: convolutions of all kinds, samplers, windows, and losses over pixels and boxes."""

PROGRAMS = {
    "depthwise, dilated, transposed and shuffled": """
class Blk(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.dw = nn.Conv2d(i, i, 3, padding=2, dilation=2, groups=i)
        self.pw = nn.Conv2d(i, o, 1)
        self.n = nn.GroupNorm(2, o)

    def forward(self, x):
        return F.silu(self.n(self.pw(self.dw(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Blk(3, 4), Blk(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.c = Blk(8, 12)
        self.ps = nn.PixelShuffle(2)
        self.o = nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")

    def forward(self, x, y):
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        u = self.up(b)
        h = self.ps(self.c(torch.cat([a, u], 1)))
        h = F.interpolate(self.o(h), size=x.shape[-2:], mode="bilinear", align_corners=False, antialias=True)
        return F.l1_loss(h, y) + 0.1 * (1 - F.cosine_similarity(h.flatten(1), y.flatten(1)).mean())

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 3, 8, 8), "y": torch.randn(B, 3, 8, 8)}
""",
    "a sampler that turns images": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 6))
        self.l[-1].weight.data.mul_(0.1)
        self.l[-1].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0.0]))
        self.c = nn.Conv2d(1, 2, 3)
        self.f = nn.Linear(72, 4)

    def forward(self, x, y):
        t = self.l(x).view(-1, 2, 3)
        g = F.affine_grid(t, x.size(), align_corners=False)
        x = F.grid_sample(x, g, align_corners=False, padding_mode="border")
        return F.nll_loss(F.log_softmax(self.f(self.c(x).flatten(1)), 1), y, reduction="sum") / 3

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 1, 8, 8), "y": torch.randint(0, 4, (B,))}
""",
    "samples mixed by a permutation": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 5),
        )

    def forward(self, x, y, perm, lam):
        x = lam * x + (1 - lam) * x[perm]
        z = self.n(x)
        return lam * F.cross_entropy(z, y, label_smoothing=0.1) + (1 - lam) * F.cross_entropy(
            z, y[perm], label_smoothing=0.1
        )

def batch():
    torch.manual_seed(1)
    return {
        "x": torch.randn(B, 3, 6, 6),
        "y": torch.randint(0, 5, (B,)),
        "perm": torch.randperm(B),
        "lam": torch.tensor(0.3),
    }
""",
    "patches exchanged": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
        )

    def forward(self, x, y):
        x = x.clone()
        x[:, :, 1:4, 2:5] = x.flip(0)[:, :, 1:4, 2:5]
        t = F.one_hot(y, 5).to(x.dtype)
        t = t * 0.75 + t.flip(0) * 0.25
        return F.cross_entropy(self.n(x), t)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 3, 6, 6), "y": torch.randint(0, 5, (B,))}
""",
    "focal loss by positives, and dice": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.ELU(), nn.Conv2d(4, 1, 1)
        )

    def forward(self, x, m):
        z = self.c(x)
        p = z.sigmoid()
        ce = F.binary_cross_entropy_with_logits(z, m, reduction="none")
        pt = p * m + (1 - p) * (1 - m)
        f = (ce * (1 - pt) ** 2).sum() / m.sum().clamp(min=1)
        i = (p * m).sum((1, 2, 3))
        d = 1 - (2 * i + 1) / (p.sum((1, 2, 3)) + m.sum((1, 2, 3)) + 1)
        return f + d.mean()

def batch():
    torch.manual_seed(1)
    m = (torch.rand(B, 1, 6, 6) < 0.2).double()
    m[5:] = 0
    return {"x": torch.randn(B, 3, 6, 6), "m": m}
""",
    "shifted windows": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Conv2d(3, 8, 2, stride=2)
        self.q = nn.Linear(8, 24)
        self.p = nn.Linear(8, 8)
        self.b = nn.Parameter(torch.randn(2, 9) * 0.1)
        self.o = nn.Linear(8, 4)
        c = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        r = (c[:, :, None] - c[:, None]).permute(1, 2, 0) + 1
        self.register_buffer("idx", r[..., 0] * 3 + r[..., 1])

    def forward(self, x, y):
        h = self.e(x).permute(0, 2, 3, 1)
        s = torch.roll(h, (-1, -1), (1, 2))
        b, hh, w, c = s.shape
        t = s.view(b, hh // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        q, k, v = self.q(t).view(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        a = q @ k.transpose(-2, -1) / 2 + self.b[:, self.idx.view(-1)].view(2, 4, 4)
        o = (a.softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, c)
        o = self.p(o).view(b, hh // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, hh, w, c)
        h = h + torch.roll(o, (1, 1), (1, 2))
        return F.cross_entropy(self.o(h.mean((1, 2))), y)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 3, 8, 8), "y": torch.randint(0, 4, (B,))}
""",
    "a convolution that remembers": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Conv2d(5, 12, 3, padding=1)
        self.o = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        h = c = x.new_zeros(x.size(0), 3, *x.shape[-2:])
        l = 0
        for t in range(x.size(1) - 1):
            i, f, g, o = self.g(torch.cat([x[:, t], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            l = l + F.smooth_l1_loss(self.o(h), x[:, t + 1])
        return l / (x.size(1) - 1)

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 4, 2, 4, 4)}
""",
    "noise of a drawn step": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
        self.i = nn.Conv2d(2, 8, 3, padding=1)
        self.n = nn.GroupNorm(4, 8)
        self.q = nn.Conv1d(8, 24, 1)
        self.o = nn.Conv2d(8, 2, 3, padding=1)
        self.register_buffer("ab", torch.linspace(0.99, 0.01, 10).cumprod(0))

    def forward(self, x, noise, t):
        a = self.ab[t].view(-1, 1, 1, 1)
        z = a.sqrt() * x + (1 - a).sqrt() * noise
        f = torch.exp(-math.log(10000) * torch.arange(4, dtype=x.dtype) / 4)
        e = t[:, None] * f
        e = self.t(torch.cat([e.sin(), e.cos()], -1))
        h = F.silu(self.n(self.i(z)) + e[:, :, None, None])
        b, c, hh, w = h.shape
        q, k, v = self.q(h.flatten(2)).chunk(3, 1)
        at = (q.transpose(1, 2) @ k / c**0.5).softmax(-1)
        h = h + (v @ at.transpose(1, 2)).view(b, c, hh, w)
        w_ = (a / (1 - a)).clamp(max=5).flatten()
        return ((self.o(h) - noise) ** 2).mean((1, 2, 3)).mul(w_).mean()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 2, 4, 4), "noise": torch.randn(B, 2, 4, 4), "t": torch.randint(0, 10, (B,))}
""",
    "queries matched with boxes": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Parameter(torch.randn(5, 8))
        self.i = nn.Linear(6, 8)
        self.a = nn.MultiheadAttention(8, 2, batch_first=True)
        self.b = nn.Linear(8, 4)
        self.c = nn.Linear(8, 3)

    def forward(self, x, boxes, y):
        m = self.i(x)
        q = self.q.unsqueeze(0).repeat(x.size(0), 1, 1)
        h, w = self.a(q, m, m)
        b = self.b(h).sigmoid()
        z = self.c(h)
        cost = torch.cdist(b, boxes, p=1) - z.softmax(-1).gather(2, y[:, None].expand(-1, 5, -1))
        i = cost.detach().argmin(1)
        bb = b.gather(1, i[..., None].expand(-1, -1, 4))
        t = torch.full((x.size(0), 5), 2).scatter(1, i, y)
        return F.l1_loss(bb, boxes, reduction="sum") / boxes.size(0) + F.cross_entropy(
            z.transpose(1, 2), t, weight=torch.tensor([1.0, 1.0, 0.1], dtype=x.dtype)
        )

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(B, 7, 6), "boxes": torch.rand(B, 2, 4), "y": torch.randint(0, 2, (B, 2))}
""",
}
