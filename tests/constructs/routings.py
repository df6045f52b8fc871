"""Ways to route tokens to experts, alike and unlike those that are known as such, in a small mixture of experts."""

from __future__ import annotations

from tests.constructs.written import Written, written

TEXT = """\
import math
import torch
import torch.nn.functional as F
import transformers.integrations.moe
from torch import nn

B, T, D, C, E, K, M = 4, 6, 8, 24, 4, 2, 8
gmm = torch.ops.transformers.grouped_mm_fallback

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.router = nn.Linear(D, E, bias=False)
        self.up = nn.Parameter(torch.randn(E, D, 2 * M) / 3)
        self.down = nn.Parameter(torch.randn(E, M, D) / 3)
        self.up_bias = nn.Parameter(torch.randn(E, 2 * M) / 3)
        self.down_bias = nn.Parameter(torch.randn(E, D) / 3)
        self.shared = nn.Linear(D, D)
        {init}

    def forward(self, h, extra):
        x = self.norm(h).reshape(-1, D)
        logits = self.router(x)
        {route}
        flat = {flat}
        ids, order = torch.sort(flat)
        ends = torch.cumsum(torch.histc(ids.float(), bins=E, min=0, max=E - 1), 0, dtype=torch.int32)
        rows = x[{take}]
        rows = gmm(rows, {up}, ends){bias}
        {activate}
        {down}
        rows = rows * {weights}[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0), device=order.device)
        rows = rows[back]
        {merge}
        h = h + y.view_as(h)
        {post}
        return h, extra

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(C, D)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(D, C)

    def forward(self, x, y):
        extra = 0.0
        h = self.token(x)
        for layer in self.layers:
            h, extra = layer(h, extra)
        z = self.head(h)
        return F.cross_entropy(z.flatten(0, 1), y.flatten()) + extra

def batch():
    torch.manual_seed(1)
    x, y = torch.randint(C, (B, T)), torch.randint(C, (B, T))
    return {'x': x, 'y': y}

def loss_fn():
    return None
"""
PLAIN = {
    "init": "pass",
    "route": ("w, top = logits.softmax(-1).topk(K, -1)\nw = w / w.sum(-1, keepdim=True)"),
    "flat": "top.reshape(-1)",
    "take": "order // K",
    "up": "self.up",
    "bias": "",
    "activate": ("a, b = rows.chunk(2, -1)\nrows = F.silu(a) * b"),
    "down": "rows = gmm(rows, self.down, ends)",
    "weights": "w.reshape(-1)",
    "merge": "y = rows.view(-1, K, D).sum(1)",
    "post": "pass",
}


def _with(name: str, **lines: str) -> Written:
    return written(f"routing: {name}", TEXT, PLAIN | lines)


CASES = (
    _with("plain"),
    _with("sigmoid gates", route=("s = logits.sigmoid()\nw, top = s.topk(K, -1)")),
    _with("softmax after topk", route=("w, top = logits.topk(K, -1)\nw = w.softmax(-1)")),
    _with(
        "balanced by a bias",
        init="self.register_buffer('bias', torch.tensor([0.1, -0.1, 0.0, 0.05]))",
        route=("s = logits.sigmoid()\ntop = (s + self.bias).topk(K, -1)[1]\nw = s.gather(1, top)"),
    ),
    _with(
        "balanced bias updated",
        init="self.register_buffer('bias', torch.zeros(E))",
        route=(
            "s = logits.sigmoid()\n"
            "top = (s + self.bias).topk(K, -1)[1]\n"
            "w = s.gather(1, top)\n"
            "with torch.no_grad():\n"
            "    n = torch.histc(top.flatten().float(), bins=E, min=0, max=E - 1)\n"
            "    self.bias.add_(0.1 * torch.sign(n.mean() - n))"
        ),
    ),
    _with(
        "grouped topk",
        route=(
            "s = logits.sigmoid()\n"
            "g = s.view(-1, 2, E // 2).max(-1)[0].topk(1, -1)[1]\n"
            "m = torch.zeros(s.size(0), 2).to(s).scatter(1, g, 1.0)\n"
            "m = m.unsqueeze(-1).expand(-1, 2, E // 2).reshape(-1, E)\n"
            "w, top = (s * m).topk(K, -1)"
        ),
    ),
    _with(
        "aux loss",
        post=(
            "p = logits.softmax(-1)\n"
            "f = F.one_hot(top, E).double().sum(1).mean(0)\n"
            "extra = extra + E * (p.mean(0) * f).sum() * 0.1"
        ),
    ),
    _with("z loss", post="extra = extra + logits.logsumexp(-1).square().mean() * 0.1"),
    _with("shared expert", post="h = h + self.shared(x).view_as(h)"),
    _with("gated shared", post="h = h + (self.shared(x) * logits[:, :1].sigmoid()).view_as(h)"),
    _with("biases", bias=" + self.up_bias[ids]", down="rows = gmm(rows, self.down, ends) + self.down_bias[ids]"),
    _with("up bias", bias=" + self.up_bias[ids]"),
    _with("down bias", down="rows = gmm(rows, self.down, ends) + self.down_bias[ids]"),
    _with("down bias of the other order", down="rows = gmm(rows, self.down, ends) + self.down_bias[flat]"),
    _with("down bias scaled", down="rows = torch.add(gmm(rows, self.down, ends), self.down_bias[ids], alpha=2)"),
    _with("bias of all", down="rows = gmm(rows, self.down, ends) + self.down_bias.sum(0)"),
    _with(
        "choice-major",
        flat="top.t().reshape(-1)",
        take="order % x.size(0)",
        weights="w.t().reshape(-1)",
        merge="y = rows.view(K, -1, D).sum(0)",
    ),
    _with(
        "choice-major wrong weights",
        flat="top.t().reshape(-1)",
        take="order % x.size(0)",
        merge="y = rows.view(K, -1, D).sum(0)",
    ),
    _with(
        "weights twice", down=("rows = gmm(rows, self.down, ends)\nrows = rows * w.reshape(-1)[order].unsqueeze(-1)")
    ),
    _with(
        "weights before",
        activate=("a, b = rows.chunk(2, -1)\nrows = F.silu(a) * b * w.reshape(-1)[order].unsqueeze(-1)"),
    ),
    _with("mean over choices", merge="y = rows.view(-1, K, D).mean(1)"),
    _with("max over choices", merge="y = rows.view(-1, K, D).max(1)[0]"),
    _with("sum keepdim", merge="y = rows.view(-1, K, D).sum(1, keepdim=True)"),
    _with("sum of width", merge="y = rows.view(-1, K, D).sum(2, keepdim=True).expand(-1, -1, D).sum(1)"),
    _with("same row for all choices", take="order // K * 1"),
    _with("shifted rows", take="(order // K + 1) % x.size(0)"),
    _with("normed hidden", activate=("a, b = rows.chunk(2, -1)\nrows = F.normalize(F.silu(a) * b, dim=-1)")),
    _with(
        "centred hidden over rows",
        activate=("a, b = rows.chunk(2, -1)\nrows = F.silu(a) * b\nrows = rows - rows.mean(0)"),
    ),
    _with("normed after", down="rows = F.layer_norm(gmm(rows, self.down, ends), (D,))"),
    _with(
        "clamped gate",
        activate=("a, b = rows.chunk(2, -1)\nrows = F.silu(a.clamp(max=0.5)) * (b.clamp(-0.5, 0.5) + 1)"),
    ),
    _with(
        "paired gate",
        activate=("a, b = rows[..., ::2], rows[..., 1::2]\nrows = a * torch.sigmoid(1.702 * a) * (b + 1)"),
    ),
    _with("swapped gate", activate=("b, a = rows.chunk(2, -1)\nrows = F.silu(a) * b")),
    _with("overlapping parts", activate=("a, b = rows[..., :M], rows[..., M - 2: 2 * M - 2]\nrows = F.silu(a) * b")),
    _with("one half only", activate="rows = F.gelu(rows[..., :M])"),
    _with("the other half", activate="rows = F.gelu(rows[..., M:])"),
    _with("halves added, whole read", activate=("a, b = rows.chunk(2, -1)\nrows = a + b.flip(-1)")),
    _with("residual in experts", activate=("a, b = rows.chunk(2, -1)\nrows = F.silu(a) * b + x[order // K]")),
    _with(
        "hidden scaled by column",
        activate=("a, b = rows.chunk(2, -1)\nrows = F.silu(a) * b * torch.linspace(0.5, 1, M).to(a)"),
    ),
    _with(
        "hidden scaled by expert", activate=("a, b = rows.chunk(2, -1)\nrows = F.silu(a) * b * (1 + ids.unsqueeze(-1))")
    ),
    _with("sorted descending", flat="(E - 1 - top).reshape(-1)"),
    _with("ids as if fewer", flat="(top // 2).reshape(-1)"),
    _with("ids out of range", flat="top.masked_fill(w < 0.45, E).reshape(-1)"),
    _with("ids below range", flat="top.masked_fill(w < 0.45, -1).reshape(-1)"),
    _with(
        "dropped weights",
        route=("w, top = logits.softmax(-1).topk(K, -1)\nw = w / w.sum(-1, keepdim=True)\nw = w * (w > 0.45)"),
    ),
    _with(
        "capacity",
        route=(
            "w, top = logits.softmax(-1).topk(K, -1)\n"
            "w = w / w.sum(-1, keepdim=True)\n"
            "n = F.one_hot(top, E).flatten(0, 1).cumsum(0).view(-1, K, E)\n"
            "w = w * (n.gather(2, top.unsqueeze(-1)).squeeze(-1) <= 8)"
        ),
    ),
    _with(
        "hash routing",
        route=(
            "top = torch.stack([(x[:, 0] > 0).long(), 2 + (x[:, 1] > 0).long()], 1)\nw = torch.ones_like(top).to(x) / 2"
        ),
    ),
    _with(
        "one choice",
        route="w, top = logits.softmax(-1).topk(1, -1)",
        take="order // 1",
        merge="y = rows.view(-1, 1, D).sum(1)",
    ),
    _with(
        "all choices",
        route="w, top = logits.softmax(-1).topk(E, -1)",
        take="order // E",
        merge="y = rows.view(-1, E, D).sum(1)",
    ),
    _with(
        "the same expert twice",
        route=(
            "w, top = logits.softmax(-1).topk(K, -1)\nw = w / w.sum(-1, keepdim=True)\ntop = top[:, :1].expand(-1, K)"
        ),
    ),
    _with(
        "all to one",
        route=("w, top = logits.softmax(-1).topk(K, -1)\nw = w / w.sum(-1, keepdim=True)\ntop = torch.zeros_like(top)"),
    ),
    _with("tied experts", up="self.down.transpose(1, 2).repeat(1, 1, 2)"),
    _with("normed weights of experts", up="F.normalize(self.up, dim=1)"),
    _with("experts shifted", up="self.up.roll(1, 0)"),
    _with("rows read elsewhere", merge=("y = rows.view(-1, K, D).sum(1)\nextra = extra + rows.square().mean()")),
    _with(
        "hidden read elsewhere",
        activate=("a, b = rows.chunk(2, -1)\nrows = F.silu(a) * b\nextra = extra + rows.square().mean() * 0.1"),
    ),
    _with(
        "counts in a buffer",
        init="self.register_buffer('n', torch.zeros(E))",
        post=("with torch.no_grad():\n    self.n.add_(torch.histc(ids.float(), bins=E, min=0, max=E - 1))"),
    ),
    _with(
        "gates detached",
        route=("w, top = logits.softmax(-1).topk(K, -1)\nw = w / w.sum(-1, keepdim=True)\nw = w.detach()"),
    ),
    _with(
        "noise of none",
        route=("w, top = logits.softmax(-1).topk(K, -1)\nw = w / w.sum(-1, keepdim=True)\nw = w + 0 * logits.std()"),
    ),
    _with(
        "experts with dropout of none",
        activate=("a, b = rows.chunk(2, -1)\nrows = F.dropout(F.silu(a) * b, 0.0, True)"),
    ),
    _with("scaled output", merge="y = rows.view(-1, K, D).sum(1) * 2.5"),
    _with("sum in float32", merge="y = rows.view(-1, K, D).sum(1, dtype=torch.float32).to(x)"),
    _with("gates over the batch", route="w, top = (logits.softmax(0)).topk(K, -1)"),
    _with(
        "logits centred over the batch",
        route=(
            "logits = logits - logits.mean(0)\nw, top = logits.softmax(-1).topk(K, -1)\nw = w / w.sum(-1, keepdim=True)"
        ),
    ),
    _with(
        "routed by the sequence",
        route=(
            "logits = self.router(h.mean(1)).repeat_interleave(h.size(1), 0)\n"
            "w, top = logits.softmax(-1).topk(K, -1)\n"
            "w = w / w.sum(-1, keepdim=True)"
        ),
    ),
    _with(
        "routed by position",
        route=(
            "logits = logits + torch.arange(x.size(0), device=x.device)[:, None] % 3 * 0.1\n"
            "w, top = logits.softmax(-1).topk(K, -1)\n"
            "w = w / w.sum(-1, keepdim=True)"
        ),
    ),
)
