"""Lines that look along positions, masks and positions of attention, and losses over positions, in a small decoder."""

from __future__ import annotations

from dataclasses import replace

from tests.constructs.written import Written, written

TEXT = """\
import math
import torch
import torch.nn.functional as F
from torch import nn

B, T, D, C, H = 2, 16, 16, 24, 4

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)
        {init}

    def mixed(self, q, k, v):
        {attend}

    def forward(self, h, extra):
        q, k, v = (a.view(h.size(0), h.size(1), H, -1).transpose(1, 2) for a in self.qkv(self.norm(h)).chunk(3, -1))
        h = h + self.out(self.mixed(q, k, v).transpose(1, 2).reshape(h.shape))
        {forward}
        h = h + self.down(F.gelu(self.up(h)))
        return h, extra

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(C, D)
        self.position = nn.Embedding(T, D)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(D, C)
        {init_model}

    def forward(self, x, y):
        extra = 0.0
        h = self.token(x) + self.position(torch.arange(x.size(1), device=x.device))
        {first}
        for layer in self.layers:
            h, extra = layer(h, extra)
        {last}
        z = self.head(h)
        {loss}
        return loss + extra

def batch():
    torch.manual_seed(1)
    x, y = torch.randint(C, (B, T)), torch.randint(C, (B, T))
    {batch}
    return {'x': x, 'y': y}

def loss_fn():
    return None
"""
PLAIN = {
    "init": "pass",
    "attend": "return F.scaled_dot_product_attention(q, k, v, is_causal=True)",
    "forward": "pass",
    "init_model": "pass",
    "first": "pass",
    "last": "pass",
    "loss": "loss = F.cross_entropy(z.flatten(0, 1), y.flatten())",
    "batch": "pass",
}


def _with(name: str, **lines: str) -> Written:
    return written(f"position: {name}", TEXT, PLAIN | lines)


CASES = (
    _with("plain"),
    _with("full", attend="return F.scaled_dot_product_attention(q, k, v)"),
    _with("token shift", forward="h = h + F.pad(h, (0, 0, 1, -1)).sin()"),
    _with("token shift by cat", forward="h = h + torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1).sin()"),
    _with("roll", forward="h = h + h.roll(1, 1).sin()"),
    _with("flip", forward="h = h + h.flip(1).sin()"),
    _with("cumsum", forward="h = h + h.cumsum(1).tanh()"),
    _with("cumulative mean", forward="h = h + h.cumsum(1) / torch.arange(1, h.size(1) + 1).to(h)[:, None]"),
    _with(
        "causal conv",
        init="self.conv = nn.Conv1d(D, D, 3, groups=D)",
        forward="h = h + self.conv(F.pad(h.transpose(1, 2), (2, 0))).transpose(1, 2)",
    ),
    _with(
        "same conv",
        init="self.conv = nn.Conv1d(D, D, 3, padding=1)",
        forward="h = h + self.conv(h.transpose(1, 2)).transpose(1, 2)",
    ),
    _with("mean over positions", forward="h = h + h.mean(1, keepdim=True).tanh()"),
    _with("max over positions", forward="h = h + h.max(1, keepdim=True)[0].tanh()"),
    _with("last position", forward="h = h + h[:, -1:].tanh()"),
    _with("first position", forward="h = h + h[:, :1].tanh()"),
    _with("normalised over positions", forward="h = h + F.normalize(h, dim=1)"),
    _with("softmax over positions", forward="h = h * h.softmax(1) * T"),
    _with("sorted positions", forward="h = h + h.sort(1)[0].tanh()"),
    _with("pairs of positions", forward="h = h + h.view(h.size(0), -1, 2, D).mean(2).repeat_interleave(2, 1)"),
    _with("halves of positions", forward=("a, b = h.chunk(2, 1)\nh = h + torch.cat([b, a], 1).sin()")),
    _with("every other position", forward="h = h + h[:, ::2].repeat_interleave(2, 1).sin()"),
    _with("pooled positions", forward="h = h + F.avg_pool1d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2)"),
    _with("recurrent", init="self.rnn = nn.GRU(D, D, batch_first=True)", forward="h = h + self.rnn(h)[0]"),
    _with("position numbers", forward="h = h + torch.arange(h.size(1), device=h.device)[None, :, None] / T"),
    _with("position numbers by size", forward="h = h * (1 + torch.linspace(0, 1, h.shape[1]).to(h)[None, :, None])"),
    _with("positions by cumsum of ones", forward="h = h + torch.ones_like(h[..., :1]).cumsum(1) / T"),
    _with("length as a number", forward="h = h / math.sqrt(h.size(1)) + h"),
    _with(
        "batch norm over time",
        forward="h = h + F.batch_norm(h.transpose(1, 2), None, None, training=True).transpose(1, 2)",
    ),
    _with("group norm over time", forward="h = h + F.group_norm(h.transpose(1, 2), 4).transpose(1, 2)"),
    _with("layer norm over time and width", forward="h = h + F.layer_norm(h, h.shape[1:])"),
    _with("spectrum", forward="h = h + torch.fft.rfft(h, dim=1).abs().mean(1, keepdim=True)"),
    _with("mixer", init="self.mix = nn.Linear(T, T)", forward="h = h + self.mix(h.transpose(1, 2)).transpose(1, 2)"),
    _with("triangular mix", forward="h = h + torch.tril(torch.ones(T, T).to(h)) @ h / T"),
    _with(
        "scores by hand",
        forward=(
            "s = (h @ h.transpose(1, 2)) / 4\n"
            "s = s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float('-inf'))\n"
            "h = h + s.softmax(-1) @ h"
        ),
    ),
    _with("difference of neighbours", forward="extra = extra + h.diff(dim=1).square().mean()"),
    _with("smooth over time", forward="extra = extra + (h[:, 1:] - h[:, :-1]).square().mean()"),
    _with("a sum of squares", forward="extra = extra + h.square().sum() / h.numel()"),
    _with("entropy of positions", forward="extra = extra - (h.softmax(1) * h.log_softmax(1)).sum(1).mean()"),
    _with("a router's z loss", forward="extra = extra + torch.logsumexp(h, -1).square().mean()"),
    _with("topk positions", forward="h = h + h.topk(2, 1)[0].mean(1, keepdim=True)"),
    _with("flattened tokens", forward="h = (h.flatten(0, 1) * 2).view(h.shape)"),
    _with("flattened norm", forward="h = h + self.norm(h.reshape(-1, D)).view_as(h)"),
    _with("tokens transposed", forward="h = h.transpose(0, 1).contiguous().sin().transpose(0, 1) + h"),
    _with("seq first flatten", forward="h = h + h.transpose(0, 1).reshape(-1, D).cos().view(T, -1, D).transpose(0, 1)"),
    _with(
        "running mean of tokens",
        init="self.register_buffer('mean', torch.zeros(D))",
        forward=("with torch.no_grad():\n    self.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)\nh = h - self.mean"),
    ),
    _with("dropped positions", forward="h = F.dropout1d(h, 0.0, True)"),
    _with(
        "a gated recurrence by loop",
        forward=(
            "s = torch.zeros_like(h[:, 0])\n"
            "found = []\n"
            "for t in range(h.size(1)):\n"
            "    s = 0.5 * s + h[:, t]\n"
            "    found.append(s)\n"
            "h = h + torch.stack(found, 1).tanh()"
        ),
    ),
    _with("scaled", attend="return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)"),
    _with(
        "bool mask",
        attend=(
            "m = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()\n"
            "return F.scaled_dot_product_attention(q, k, v, attn_mask=m)"
        ),
    ),
    _with(
        "float mask",
        attend=(
            "m = torch.full((q.size(2), k.size(2)), float('-inf'), device=q.device, dtype=q.dtype).triu(1)\n"
            "return F.scaled_dot_product_attention(q, k, v, attn_mask=m)"
        ),
    ),
    _with(
        "window mask",
        attend=(
            "i = torch.arange(q.size(2))\n"
            "m = (i[:, None] >= i[None]) & (i[:, None] - i[None] < 4)\n"
            "return F.scaled_dot_product_attention(q, k, v, attn_mask=m)"
        ),
    ),
    _with(
        "window both sides",
        attend=(
            "i = torch.arange(q.size(2))\n"
            "m = (i[:, None] - i[None]).abs() < 4\n"
            "return F.scaled_dot_product_attention(q, k, v, attn_mask=m)"
        ),
    ),
    _with(
        "chunked mask",
        attend=(
            "i = torch.arange(q.size(2))\n"
            "m = (i[:, None] >= i[None]) & (i[:, None] // 4 == i[None] // 4)\n"
            "return F.scaled_dot_product_attention(q, k, v, attn_mask=m)"
        ),
    ),
    _with(
        "prefix mask",
        attend=(
            "i = torch.arange(q.size(2))\n"
            "m = (i[:, None] >= i[None]) | (i[None] < 5)\n"
            "return F.scaled_dot_product_attention(q, k, v, attn_mask=m)"
        ),
    ),
    _with(
        "anti-causal mask",
        attend=(
            "i = torch.arange(q.size(2))\n"
            "return F.scaled_dot_product_attention(q, k, v, attn_mask=i[:, None] <= i[None])"
        ),
    ),
    _with(
        "alibi",
        attend=(
            "i = torch.arange(q.size(2))\n"
            "b = -(i[:, None] - i[None]).abs()[None] * torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None].to(q)\n"
            "b = b.masked_fill(i[:, None] < i[None], float('-inf'))\n"
            "return F.scaled_dot_product_attention(q, k, v, attn_mask=b)"
        ),
    ),
    _with(
        "learned bias",
        init="self.bias = nn.Parameter(torch.randn(H, T, T) / 9)",
        attend="return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)",
    ),
    _with(
        "relative bias",
        init="self.rel = nn.Embedding(2 * T, H)",
        attend=(
            "i = torch.arange(q.size(2))\n"
            "b = self.rel(i[None] - i[:, None] + T).permute(2, 0, 1)[None]\n"
            "return F.scaled_dot_product_attention(q, k, v, attn_mask=b)"
        ),
    ),
    _with(
        "relative causal bias",
        init="self.rel = nn.Embedding(2 * T, H)",
        attend=(
            "i = torch.arange(q.size(2))\n"
            "b = self.rel(i[None] - i[:, None] + T).permute(2, 0, 1)[None]\n"
            "b = b.masked_fill(i[:, None] < i[None], float('-inf'))\n"
            "return F.scaled_dot_product_attention(q, k, v, attn_mask=b)"
        ),
    ),
    _with("cross to first half", attend="return F.scaled_dot_product_attention(q, k[:, :, :8], v[:, :, :8])"),
    _with(
        "causal shorter keys",
        attend="return F.scaled_dot_product_attention(q, k[:, :, :8], v[:, :, :8], is_causal=True)",
    ),
    _with(
        "causal shorter queries",
        attend=("a = F.scaled_dot_product_attention(q[:, :, :8], k, v, is_causal=True)\nreturn torch.cat([a, a], 2)"),
    ),
    _with(
        "sink",
        init="self.sink = nn.Parameter(torch.randn(1, H, 1, 4))",
        attend=(
            "k = torch.cat([self.sink.expand(k.size(0), -1, -1, -1), k], 2)\n"
            "v = torch.cat([torch.zeros_like(v[:, :, :1]), v], 2)\n"
            "m = torch.ones(T, T + 1, dtype=torch.bool).tril(1)\n"
            "return F.scaled_dot_product_attention(q, k, v, attn_mask=m)"
        ),
    ),
    _with(
        "keys normalised over time",
        attend="return F.scaled_dot_product_attention(q, k - k.mean(2, keepdim=True), v, is_causal=True)",
    ),
    _with(
        "gqa", attend="return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)"
    ),
    _with(
        "mqa expand",
        attend="return F.scaled_dot_product_attention(q, k[:, :1].expand_as(q), v[:, :1].expand_as(q), is_causal=True)",
    ),
    _with(
        "rotary",
        attend=(
            "t = torch.arange(q.size(2)).to(q)[:, None] * torch.tensor([1.0, 0.1]).to(q)\n"
            "c, s = t.cos(), t.sin()\n"
            "r = lambda x: torch.cat([x[..., :2] * c - x[..., 2:] * s, x[..., 2:] * c + x[..., :2] * s], -1)\n"
            "return F.scaled_dot_product_attention(r(q), r(k), v, is_causal=True)"
        ),
    ),
    _with(
        "rotary complex",
        attend=(
            "t = torch.arange(q.size(2)).to(q)[:, None] * torch.tensor([1.0, 0.1]).to(q)\n"
            "w = torch.polar(torch.ones_like(t), t)\n"
            "c = lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())\n"
            "r = lambda x: torch.view_as_real(c(x) * w).flatten(-2)\n"
            "return F.scaled_dot_product_attention(r(q), r(k), v, is_causal=True)"
        ),
    ),
    _with(
        "3d attention",
        attend=(
            "f = lambda x: x.flatten(0, 1)\n"
            "return F.scaled_dot_product_attention(f(q), f(k), f(v), is_causal=True).view(q.shape)"
        ),
    ),
    _with(
        "seq-split heads mixed",
        init="self.mix = nn.Parameter(torch.eye(H) + 0.1)",
        attend=(
            "a = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
            "return torch.einsum('hg,bgtd->bhtd', self.mix, a)"
        ),
    ),
    _with(
        "two attentions differ",
        attend=(
            "a = F.scaled_dot_product_attention(q[:, :2], k[:, :2], v[:, :2], is_causal=True)\n"
            "b = F.scaled_dot_product_attention(q[:, 2:], k[:, 2:], v[:, 2:])\n"
            "return torch.cat([a, b], 1)"
        ),
    ),
    _with(
        "differential attention",
        attend=(
            "a = F.scaled_dot_product_attention(q[..., :2], k[..., :2], v, is_causal=True)\n"
            "b = F.scaled_dot_product_attention(q[..., 2:], k[..., 2:], v, is_causal=True)\n"
            "return a - 0.5 * b"
        ),
    ),
    _with(
        "packed mask by input",
        init="self.register_buffer('m', torch.block_diag(torch.ones(5, 5), torch.ones(11, 11)).bool().tril())",
        attend="return F.scaled_dot_product_attention(q, k, v, attn_mask=self.m)",
    ),
    _with("cls pooled", loss="loss = F.cross_entropy(z[:, 0], y[:, 0])"),
    _with("last pooled", loss="loss = F.cross_entropy(z[:, -1], y[:, 0])"),
    _with("mean pooled", loss="loss = F.cross_entropy(z.mean(1), y[:, 0])"),
    _with("shifted labels", loss="loss = F.cross_entropy(z[:, :-1].flatten(0, 1), x[:, 1:].flatten())"),
    _with(
        "ignored labels",
        loss="loss = F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=-100)",
        batch="y[:, ::3] = -100",
    ),
    _with(
        "uneven ignored",
        loss="loss = F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=-100)",
        batch="y[:, 9:] = -100",
    ),
    _with("all of a rank ignored", loss="loss = F.cross_entropy(z.transpose(1, 2), y)", batch="y[:, 8:] = -100"),
    _with(
        "masked mean of rows",
        loss=(
            "m = (y >= 0).to(z)\n"
            "l = F.cross_entropy(z.transpose(1, 2), y, reduction='none')\n"
            "loss = ((l * m).sum(1) / m.sum(1)).mean()"
        ),
        batch="y[0, 9:] = -100",
    ),
    _with("summed", loss="loss = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction='sum') / y.numel()"),
    _with(
        "label of each row", loss="loss = F.cross_entropy(z.sum(1), y[:, 0]) + F.cross_entropy(z.transpose(1, 2), y)"
    ),
    _with(
        "two shifts",
        loss=(
            "loss = F.cross_entropy(z[:, :-1].flatten(0, 1), x[:, 1:].flatten())\n"
            "loss = loss + F.cross_entropy(z[:, :-2].flatten(0, 1), x[:, 2:].flatten())"
        ),
    ),
    _with(
        "padding by input",
        first=("p = (x != 0)\nh = h * p.unsqueeze(-1)"),
        loss="loss = (F.cross_entropy(z.transpose(1, 2), y, reduction='none') * p).sum() / p.sum()",
    ),
    _with("positions by cumsum of mask", first=("p = ((x != 0).cumsum(1) - 1).clamp(min=0)\nh = h + self.position(p)")),
    _with(
        "a token prepended",
        init_model="self.cls = nn.Parameter(torch.randn(1, 1, D))",
        first="h = torch.cat([self.cls.expand(h.size(0), -1, -1), h[:, :-1]], 1)",
    ),
    _with(
        "a token prepended, longer",
        init_model="self.cls = nn.Parameter(torch.randn(1, 1, D))",
        first="h = torch.cat([self.cls.expand(h.size(0), -1, -1), h], 1)",
        loss="loss = F.cross_entropy(z[:, 1:].flatten(0, 1), y.flatten())",
    ),
    _with(
        "patches merged",
        last="h = h.view(h.size(0), -1, 2, D).sum(2)",
        loss="loss = F.cross_entropy(z.flatten(0, 1), y[:, ::2].flatten())",
    ),
    _with("positions permuted", first="h = h[:, torch.arange(T).flip(0)]"),
    _with(
        "random masks",
        loss="loss = F.cross_entropy(z.flatten(0, 1), y.flatten()) + z.logsumexp(-1).square().mean() * 1e-2",
    ),
    _with(
        "contrast of ends", loss="loss = (z[:, 0] - z[:, -1]).square().mean() + F.cross_entropy(z.transpose(1, 2), y)"
    ),
    _with(
        "accuracy kept",
        loss=(
            "acc = (z.argmax(-1) == y).float().mean()\n"
            "loss = F.cross_entropy(z.transpose(1, 2), y) * (1 + acc.detach())"
        ),
    ),
    _with(
        "a table of positions",
        init_model="self.table = nn.Parameter(torch.randn(1, T, D) / 9)",
        first="h = h + self.table",
    ),
    _with(
        "a longer table",
        init_model="self.table = nn.Parameter(torch.randn(2 * T, D) / 9)",
        first="h = h + self.table[: h.size(1)]",
    ),
    _with(
        "by hand under a buffer",
        init="self.register_buffer('seen', torch.ones(2 * T, 2 * T, dtype=torch.bool).tril()[None, None])",
        attend=(
            "w = q @ k.transpose(-1, -2) / 2\n"
            "w = torch.where(self.seen[:, :, : q.size(2), : k.size(2)], w, torch.finfo(w.dtype).min)\n"
            "return w.softmax(-1) @ v"
        ),
    ),
    _with("by hand without a mask", attend="return (q @ k.transpose(-1, -2)).softmax(-1) @ v"),
    _with(
        "by hand of batches of matrices",
        attend=(
            "f = lambda x: x.flatten(0, 1)\n"
            "b = torch.arange(T).to(q).view(1, 1, T).expand(B * H, 1, T) / T\n"
            "w = torch.baddbmm(b, f(q), f(k).transpose(1, 2), beta=1.0, alpha=0.5).view(B, H, T, T)\n"
            "w = w.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float('-inf')).softmax(-1)\n"
            "return torch.bmm(w.view(B * H, T, T), f(v)).view(q.shape)"
        ),
    ),
    _with(
        "by hand of einsums",
        attend=(
            "w = torch.einsum('bhqd,bhkd->bhqk', q, k) / 2\n"
            "w = w.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float('-inf')).softmax(-1)\n"
            "return torch.einsum('bhqk,bhkd->bqhd', w, v).transpose(1, 2)"
        ),
    ),
    _with("by hand, keys first", attend="return (k @ q.transpose(-1, -2)).softmax(-2).transpose(-1, -2) @ v"),
    _with("by hand over queries", attend="return (q @ k.transpose(-1, -2)).softmax(-2) @ v"),
    _with(
        "by hand with a learned bias",
        init="self.bias = nn.Parameter(torch.randn(H, T, T) / 9)",
        attend="return (q @ k.transpose(-1, -2) + self.bias).softmax(-1) @ v",
    ),
    _with(
        "by hand with a sink",
        init="self.sink = nn.Parameter(torch.randn(H))",
        attend=(
            "w = 5 * torch.tanh(q @ k.transpose(-1, -2) / 5)\n"
            "w = w + torch.full((T, T), float('-inf')).to(w).triu(1)\n"
            "w = torch.cat([w, self.sink.view(1, H, 1, 1).expand(B, -1, T, 1)], -1)\n"
            "return (w - w.max(-1, keepdim=True)[0]).softmax(-1)[..., :-1] @ v"
        ),
    ),
    _with(
        "by hand with heads that talk",
        init="self.mix = nn.Linear(H, H)",
        attend=(
            "w = self.mix((q @ k.transpose(-1, -2)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)\n"
            "return torch.einsum('hg,bgqk->bhqk', self.mix.weight, w.softmax(-1)) @ v"
        ),
    ),
    _with(
        "by hand without a softmax",
        attend=("w = (q @ k.transpose(-1, -2)).sigmoid().tril()\nreturn w @ v / w.sum(-1, keepdim=True)"),
    ),
    _with(
        "by hand to the first half",
        attend="return (q @ k[:, :, : T // 2].transpose(-1, -2)).softmax(-1) @ v[:, :, : T // 2]",
    ),
    _with("linear attention", attend="return q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)"),
    replace(
        _with(
            "by hand with dropped weights",
            attend=(
                "w = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float('-inf'))\n"
                "return F.dropout(w.softmax(-1), 0.3) @ v"
            ),
        ),
        is_random=True,
    ),
    replace(
        _with("flattened and dropped", forward="h = h + F.dropout(h.view(-1, D), 0.3).view(h.shape).sin()"),
        is_random=True,
    ),
    _with(
        "flattened products",
        init="self.matrix, self.bias = nn.Parameter(torch.randn(D, D) / 4), nn.Parameter(torch.randn(D))",
        forward=(
            "a = torch.addmm(self.bias, h.view(-1, h.size(-1)), self.matrix)\n"
            "h = h + torch.mm(a.relu(), self.matrix).view(h.shape)"
        ),
    ),
    _with(
        "queries of flattened rows",
        init="self.matrix, self.bias = nn.Parameter(torch.eye(8) + 0.1), nn.Parameter(torch.randn(8))",
        attend=(
            "q = torch.addmm(self.bias[:4], q.reshape(-1, 4), self.matrix[:4, :4]).view(q.shape)\n"
            "return F.scaled_dot_product_attention(q, k, v, is_causal=True)"
        ),
    ),
    _with(
        "flattened mean of squares",
        forward="x = h.reshape(-1, D).tanh()\nextra = extra + x.square().mean() + x.amax()\nh = h + x.view(h.shape)",
    ),
    _with("flattened maximum", forward="x = h.reshape(-1, D).tanh()\nh = h + (x - x.amax(0)).view(h.shape)"),
    _with("flattened sum of rows", forward="x = h.reshape(-1, D).tanh()\nh = h + (x * x.sum(0).sin()).view(h.shape)"),
    _with(
        "flattened batch norm",
        forward="h = h + F.batch_norm(h.reshape(-1, D), None, None, training=True).view(h.shape)",
    ),
    _with(
        "flattened and numbered",
        forward="x = h.flatten(0, 1) * torch.arange(B * T).to(h)[:, None] / T\nh = h + x.unflatten(0, (B, T)).sin()",
    ),
    _with("flattened and reversed", forward="h = h + h.flatten(0, 1)[torch.arange(B * T).flip(0)].view(h.shape).sin()"),
    _with("flattened cumsum", forward="h = h + h.flatten(0, 1).cumsum(0).view(h.shape).tanh()"),
    _with("flattened softmax", forward="h = h + h.flatten(0, 1).softmax(0).view(h.shape) * T"),
    _with("flattened softmax of each", forward="h = h + h.flatten(0, 1).softmax(1).view(h.shape) * T"),
    _with(
        "flattened in heads",
        forward="x = h.flatten(0, 1).view(-1, H, D // H).transpose(1, 2).softmax(-1)\nh = h + x.reshape(h.shape)",
    ),
    _with(
        "flattened and joined",
        forward=(
            "x = h.flatten(0, 1)\n"
            "a, b = torch.cat([x, x.sin()], 1).split(D, 1)\n"
            "h = h + (a * b + x.topk(2, 1)[0].sum(1, keepdim=True).expand(-1, D)).view(h.shape).tanh()"
        ),
    ),
    _with("viewed with other samples", forward="h = h + h.flatten(0, 1).sin().view(2 * B, T // 2, D).view(h.shape)"),
    _with(
        "positions of other samples",
        forward="x = h.flatten(0, 1).sin().view(2 * B, T // 2, D)\nh = h + x.softmax(1).view(h.shape)",
    ),
    _with(
        "flattened to the end",
        last="h = self.layers[0].norm(h.flatten(0, 1))",
        loss="loss = F.cross_entropy(z, y.flatten())",
    ),
    _with(
        "flattened losses of each",
        loss=(
            "l = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction='none', ignore_index=-100)\n"
            "loss = (l.view(y.shape) * torch.arange(T).to(l)).sum() / (y >= 0).sum()"
        ),
        batch="y[:, ::3] = -100",
    ),
    _with(
        "flattened losses, weighed",
        loss=(
            "l = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction='none')\n"
            "w = (x.flatten() % 3).to(l)\n"
            "loss = (l * w).sum() / w.sum()"
        ),
    ),
)
