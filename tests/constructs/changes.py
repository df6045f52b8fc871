"""In-place writes: to activations behind autograd's back, to buffers from several places, to parameters in forward."""

from __future__ import annotations

from tests.constructs.catalog import Construct


def _write(name: str, forward: str, **more: object) -> Construct:
    return Construct(name, "write", forward, **more)  # type: ignore[arg-type]


WRITES = (
    _write("clamp_ under no_grad", "h = self.l$i(h)\nwith torch.no_grad():\n    h.clamp_(-0.3, 0.3)",
           init="self.l$i = nn.Linear(D, D)"),
    _write("mul_ under no_grad", "h = h + 0\nwith torch.no_grad():\n    h.mul_(0.5)"),
    _write("copy_ under no_grad", "h = h + 0\nwith torch.no_grad():\n    h.copy_(h.round())"),
    _write("a column zeroed under no_grad", "h = h + 0\nwith torch.no_grad():\n    h[:, 0].zero_()"),
    _write("a row written under no_grad", "h = h + 0\nwith torch.no_grad():\n    h[0] = 1.0"),
    _write("masked_fill_ under no_grad", "h = h + 0\nwith torch.no_grad():\n    h.masked_fill_(h > 0.2, 0.2)"),
    _write("add_ under no_grad of what has gradients",
           "h = h + 0\nwith torch.no_grad():\n    h.add_(self.w$i)", init="self.w$i = nn.Parameter(torch.rand(D))"),
    _write("written through .data", "h = h + 0\nh.data.mul_(2)"),
    _write(".data assigned", "h = h + 0\nh.data = h.data.clamp(-0.2, 0.2)"),
    _write("written through detach", "h = h + 0\nh.detach().clamp_(-0.2, 0.2)"),
    _write("written through detach of a view", "h = h + 0\nh[:, 1:].detach().neg_()"),
    _write("a view written under no_grad after its base was read",
           "h = h * 2\nr$i = h.sum(1, keepdim=True)\nwith torch.no_grad():\n    h.view(-1).mul_(0.5)\nh = h + r$i"),
    _write("a view written with gradients", "h = h + 0\nh[:, 0].mul_(3)", must_run=True),
    _write("a slice assigned with gradients", "h = h + 0\nh[:, : D // 2] = h[:, : D // 2] * 2", must_run=True),
    _write("masked_fill_ with gradients", "h = h + 0\nh.masked_fill_(h < 0, 0.1)", must_run=True),
    _write("add_ to a flat view", "h = h + 0\nh.view(-1).add_(1)"),
    _write("detach_ in place", "g$i = h * 0.5\ng$i.detach_()\nh = h + g$i"),
    _write("inference_mode", "with torch.inference_mode():\n    g$i = h.sign()\nh = h + g$i.clone() * 0.1"),
    _write("a parameter used in inference_mode",
           "with torch.inference_mode():\n    g$i = self.l$i(h)\nh = torch.tanh(h + g$i.clone())",
           init="self.l$i = nn.Linear(D, D)"),
    _write("a parameter used under no_grad", "with torch.no_grad():\n    g$i = self.l$i(h)\nh = h + g$i",
           init="self.l$i = nn.Linear(D, D)", must_run=True),
    _write("enable_grad inside of no_grad", """
with torch.no_grad():
    g$i = self.l$i(h)
    with torch.enable_grad():
        g$i = torch.tanh(self.k$i(g$i))
    g2$i = g$i * 2
h = h + g$i + g2$i
""", init="self.l$i, self.k$i = nn.Linear(D, D), nn.Linear(D, D)"),
    _write("set_grad_enabled by a flag", """
with torch.set_grad_enabled(False):
    g$i = self.l$i(h)
h = h + g$i
""", init="self.l$i = nn.Linear(D, D)"),
    _write("set_grad_enabled switched", """
torch.set_grad_enabled(False)
g$i = self.l$i(h)
torch.set_grad_enabled(True)
h = h * g$i
""", init="self.l$i = nn.Linear(D, D)"),
    _write("a method under no_grad", "h = h + frozen$i(self.l$i, h)", init="self.l$i = nn.Linear(D, D)", above="""
@torch.no_grad()
def frozen$i(layer, h):
    return layer(h)
"""),
    _write("what no_grad returns is a view of a parameter", """
with torch.no_grad():
    w$i = self.l$i.weight.t()
h = torch.tanh(h @ w$i)
""", init="self.l$i = nn.Linear(D, D)"),
    _write("straight-through by detach", "h = h + (h.sign() - h).detach()", must_run=True),
    _write("out= under no_grad", """
with torch.no_grad():
    g$i = torch.empty_like(h)
    torch.mul(h, 2, out=g$i)
h = h + g$i
"""),
    _write("an accumulator written in a loop", """
g$i = torch.zeros_like(h)
for k in range(3):
    g$i += h * k
h = g$i * 0.3
""", must_run=True),
    _write("index_put_ with gradients", "h = h + 0\nh[:, [0, 2]] = h[:, [1, 3]] * 2"),
    _write("index_add_ with gradients", "h = h.index_add(1, torch.tensor([0, 1]), h[:, 2:4])"),
    _write("scatter_ with gradients", "h = h.clone().scatter_(1, h.argmax(1, keepdim=True), 0.5)"),
    _write("a new tensor filled row by row", """
g$i = torch.empty_like(h)
g$i[:, 0] = h[:, 1]
g$i[:, 1:] = h[:, :-1]
h = g$i
"""),
    _write("an input written in place", "x$i.mul_(2)\nh = h + x$i", inputs={"x$i": "torch.rand(B, D)"}),
    _write("an input written under no_grad", "with torch.no_grad():\n    x$i.clamp_(min=0.5)\nh = h + x$i",
           inputs={"x$i": "torch.rand(B, D)"}),
    _write("written twice, once with and once without gradients", """
h = h * 1.0
h.mul_(2)
with torch.no_grad():
    h.sub_(h.mean(1, keepdim=True))
h = torch.tanh(h)
"""),
    _write("a chunk written under no_grad", """
h = h + 0
a$i, b$i = h.split([2, D - 2], 1)
with torch.no_grad():
    a$i.add_(1)
h = h * 0.5
"""),
    _write("resized by a graph break of gradients", "h = h.detach().requires_grad_(True) * 1.0 + h"),
    _write("written through .data after it was saved for backward",
           "s$i = torch.sigmoid(h)\nh = s$i * s$i\ns$i.data.mul_(0.5)"),
    _write("the operand of a matmul written through .data", "a$i = h * 1.5\nh = self.l$i(a$i)\na$i.data.zero_()",
           init="self.l$i = nn.Linear(D, D)"),
    _write("written through .data in a loop",
           "a$i = h * 1.0\nfor k in range(3):\n    h = h + torch.tanh(a$i) * a$i\n    a$i.data.mul_(0.5)"),
    _write("a parameter's view through .data", "w$i = self.w$i * 1.0\nh = h * w$i\nw$i.data[0] = 3.0",
           init="self.w$i = nn.Parameter(torch.rand(D))"),
    _write("a view of a transposed view written", "h = h + 0\nh.t()[1:].mul_(2)\nh = h * 1.0"),
    _write("a diagonal written",
           "g$i = torch.zeros(B, D, D, dtype=h.dtype)\ng$i.diagonal(dim1=1, dim2=2).add_(h)\nh = g$i.sum(1)"),
    _write("two views of one, one written", "h = h + 0\na$i, b$i = h[:, :2], h[:, 1:]\na$i.mul_(2)\n"
           "h = torch.cat([b$i, h[:, :1]], 1)"),
    _write("two views of one, one written under no_grad",
           "h = h + 0\na$i, b$i = h[:, :2], h[:, 1:]\nwith torch.no_grad():\n    a$i.mul_(2)\n"
           "h = torch.cat([b$i, h[:, :1]], 1)"),
    _write("written through an alias kept in a list", "h = h + 0\nkept$i = [h]\nkept$i[0].add_(1)\nh = h * 1.0"),
    _write("written through an alias on self",
           "h = h + 0\nself.a$i = h\nself.a$i.mul_(2)\nh = h * 1.0\nself.a$i = None"),
    _write("set_ in place", "g$i = torch.empty(0, dtype=h.dtype)\ng$i.set_(h.detach())\nh = h + g$i"),
    _write("written by numpy", "g$i = torch.ones(D, dtype=h.dtype)\ng$i.numpy()[0] = 3\nh = h * g$i"),
    _write("a new leaf within forward",
           "a$i = h.detach().requires_grad_()\nh = h + torch.tanh(a$i)"),
    _write("an expanded tensor's base written",
           "a$i = self.w$i * 1.0\ne$i = a$i.expand(B, D)\na$i.add_(1)\nh = h * e$i",
           init="self.w$i = nn.Parameter(torch.rand(D))"),
    _write("clip by where under no_grad with a parameter's gradient",
           "s$i = self.w$i.abs()\nwith torch.no_grad():\n    s$i.clamp_(min=0.3)\nh = h / s$i",
           init="self.w$i = nn.Parameter(torch.rand(D))"),
    _write("requires_grad_(False) on a copy", "g$i = h.detach().requires_grad_(False)\nh = h * (1 + g$i)"),
)  # fmt: skip


def _buffer(name: str, init: str, forward: str, late: str = "", **more: object) -> Construct:
    return Construct(name, "buffer", forward, init=init, late=late, **more)  # type: ignore[arg-type]


_ZEROS = 'self.register_buffer("s$i", torch.zeros(D))'

BUFFERS = (
    _buffer("a running mean, read after", _ZEROS,
            "with torch.no_grad():\n    self.s$i.mul_(0.9).add_(h.mean(0), alpha=0.1)\nh = h - self.s$i"),
    _buffer("a running mean, read before", _ZEROS,
            "h = h - self.s$i\nwith torch.no_grad():\n    self.s$i.lerp_(h.mean(0), 0.3)"),
    _buffer("read before and after", _ZEROS,
            "h = h - self.s$i\nwith torch.no_grad():\n    self.s$i.add_(h.sum(0))\nh = h + 0.1 * self.s$i"),
    _buffer("updated at two places", _ZEROS,
            "with torch.no_grad():\n    self.s$i.add_(h.mean(0))\nh = h * 2 - self.s$i",
            "with torch.no_grad():\n    self.s$i.mul_(0.5).add_(h.mean(0))"),
    _buffer("assigned", _ZEROS, "self.s$i = 0.9 * self.s$i + 0.1 * h.detach().mean(0)\nh = h - self.s$i"),
    _buffer("assigned, never read", _ZEROS, "self.s$i = h.detach().amax(0)"),
    _buffer("added to without no_grad, detached", _ZEROS, "self.s$i += h.detach().abs().mean(0)\nh = h - self.s$i"),
    _buffer("copied to through .data", _ZEROS, "self.s$i.data.copy_(h.mean(0))\nh = h + self.s$i.detach()"),
    _buffer("counter in a buffer", 'self.register_buffer("s$i", torch.tensor(0))',
            "self.s$i += 1\nh = h / self.s$i"),
    _buffer("counter in a buffer, never read", 'self.register_buffer("s$i", torch.tensor(0))', "self.s$i.add_(1)"),
    _buffer("zeroed at the end", _ZEROS,
            "with torch.no_grad():\n    self.s$i.add_(h.mean(0))", "h = h + self.s$i\nself.s$i.zero_()"),
    _buffer("zeroed at the start", _ZEROS,
            "self.s$i.zero_()\nwith torch.no_grad():\n    self.s$i.add_(h.mean(0))\nh = h - self.s$i"),
    _buffer("filled with a number", _ZEROS, "h = h + self.s$i\nself.s$i.fill_(0.25)"),
    _buffer("not persistent", 'self.register_buffer("s$i", torch.zeros(D), persistent=False)',
            "h = h - self.s$i\nwith torch.no_grad():\n    self.s$i.add_(h.mean(0))"),
    _buffer("a running maximum", _ZEROS,
            "with torch.no_grad():\n    torch.maximum(self.s$i, h.abs().amax(0), out=self.s$i)\n"
            "h = h / (1 + self.s$i)"),
    _buffer("power iteration", """
self.w$i = nn.Parameter(torch.randn(D, D) * 0.4)
self.register_buffer("u$i", F.normalize(torch.ones(D), dim=0))
""", """
with torch.no_grad():
    v$i = F.normalize(self.u$i @ self.w$i, dim=0)
    self.u$i.copy_(F.normalize(self.w$i @ v$i, dim=0))
h = F.linear(h, self.w$i / torch.dot(self.u$i.clone(), self.w$i @ v$i))
"""),
    _buffer("a queue of earlier samples", 'self.register_buffer("s$i", torch.zeros(2 * B, D))', """
s$i = self.s$i.clone()
h = h + 0.1 * (h @ s$i.t()).softmax(1) @ s$i
with torch.no_grad():
    self.s$i.copy_(torch.cat([h, self.s$i[:-B]]))
"""),
    _buffer("part of it written", 'self.register_buffer("s$i", torch.zeros(3, D))',
            "with torch.no_grad():\n    self.s$i[1] = h.mean(0)\n    self.s$i[2:] += 1\nh = h + self.s$i.sum(0)"),
    _buffer("counts by class", 'self.register_buffer("s$i", torch.ones(C))',
            "with torch.no_grad():\n    self.s$i.index_add_(0, k$i, torch.ones(B).double())\n"
            "h = h / self.s$i[k$i][:, None]", inputs={"k$i": "torch.randint(C, (B,))"}),
    _buffer("centres by class", 'self.register_buffer("s$i", torch.zeros(C, D))', """
extra = extra + (h - self.s$i[k$i]).square().mean()
with torch.no_grad():
    hot$i = F.one_hot(k$i, C).to(h.dtype)
    self.s$i.lerp_(hot$i.t() @ h, 0.1)
""", inputs={"k$i": "torch.randint(C, (B,))"}),
    _buffer("teacher weights", """
self.w$i = nn.Parameter(torch.randn(D, D) * 0.3)
self.register_buffer("s$i", self.w$i.detach().clone())
""", "with torch.no_grad():\n    self.s$i.lerp_(self.w$i, 0.1)\nh = h @ self.w$i + h @ self.s$i"),
    _buffer("a flag in a buffer", """
self.register_buffer("on$i", torch.tensor(False))
self.register_buffer("s$i", torch.zeros(D))
""", """
with torch.no_grad():
    self.s$i.copy_(torch.where(self.on$i, self.s$i, h.mean(0)))
    self.on$i.fill_(True)
h = h - self.s$i
"""),
    _buffer("one buffer of two modules", """
self.p$i, self.q$i = nn.Module(), nn.Module()
self.p$i.register_buffer("s", torch.zeros(D))
self.q$i.register_buffer("s", self.p$i.s)
""", "with torch.no_grad():\n    self.p$i.s.add_(h.mean(0))\nh = h - self.q$i.s"),
    _buffer("a running variance by hand", _ZEROS,
            "with torch.no_grad():\n    self.s$i.lerp_(h.var(0), 0.1)\nh = h / (self.s$i + 0.1).sqrt()"),
    _buffer("batch norm", "self.n$i = nn.BatchNorm1d(D)", "h = self.n$i(h)", must_run=True),
    _buffer("batch norm by cumulative means", "self.n$i = nn.BatchNorm1d(D, momentum=None)", "h = self.n$i(h)"),
    _buffer("batch norm called twice", "self.n$i = nn.BatchNorm1d(D)", "h = self.n$i(h) + self.n$i(2 * h)"),
    _buffer("batch norm frozen in training", "self.n$i = nn.BatchNorm1d(D).eval()", "h = self.n$i(h)"),
    _buffer("a buffer that depends on the last step's loss", _ZEROS,
            "h = h * (1 + 0.01 * self.s$i)\nself.s$i.copy_(h.detach().square().sum(0))"),
    _buffer("a buffer updated in a loop", _ZEROS, """
for k in range(3):
    h = torch.tanh(h + self.s$i)
    with torch.no_grad():
        self.s$i.add_(h.mean(0), alpha=0.1)
"""),
    _buffer("a view of a buffer kept beside it", """
self.register_buffer("s$i", torch.zeros(D))
self.v$i = self.s$i[:2]
""", "with torch.no_grad():\n    self.s$i.add_(h.mean(0))\nh = h + self.s$i.sum()"),
    _buffer("balanced by what was counted", """
self.register_buffer("bias$i", torch.zeros(D))
self.register_buffer("load$i", torch.zeros(D), persistent=False)
""", """
with torch.no_grad():
    self.load$i.add_(F.one_hot((h + self.bias$i).argmax(1), D).to(h.dtype).sum(0))
h = h + self.bias$i
""", "with torch.no_grad():\n    self.bias$i.add_(0.01 * torch.sign(self.load$i.mean() - self.load$i))\n"
     "    self.load$i.zero_()"),
    _buffer("a running mean assigned in the model, never read", _ZEROS,
            "self.s$i = 0.9 * self.s$i + 0.1 * h.detach().mean(0)"),
    _buffer("assigned in the layer and read late", _ZEROS, "self.s$i = h.detach().mean(0)", "h = h - self.s$i"),
    _buffer("assigned twice", _ZEROS, "self.s$i = self.s$i + h.detach().mean(0)\nh = h - self.s$i\n"
            "self.s$i = self.s$i * 0.5"),
    _buffer("assigned, then written", _ZEROS, "self.s$i = self.s$i + 1\nself.s$i.mul_(h.detach().mean(0))\n"
            "h = h - self.s$i"),
    _buffer("written, then assigned", _ZEROS, "self.s$i.add_(1)\nself.s$i = self.s$i * h.detach().mean(0)\n"
            "h = h - self.s$i"),
    _buffer("assigned another shape", _ZEROS, "h = h + self.s$i.sum()\nself.s$i = h.detach()"),
    _buffer("assigned None at first", 'self.register_buffer("s$i", None)',
            "if self.s$i is not None:\n    h = h - self.s$i\nself.s$i = h.detach().mean(0)"),
    _buffer("assigned an input", _ZEROS, "h = h - self.s$i\nself.s$i = v$i", inputs={"v$i": "torch.rand(D)"}),
    _buffer("two buffers swapped", _ZEROS + '\nself.register_buffer("t$i", torch.ones(D))',
            "h = h - self.s$i\nself.s$i, self.t$i = self.t$i, self.s$i + h.detach().mean(0)"),
    _buffer("copied from another", _ZEROS + '\nself.register_buffer("t$i", torch.ones(D))',
            "self.t$i.copy_(self.s$i)\nself.s$i.add_(h.detach().mean(0))\nh = h - self.t$i"),
    _buffer("made by register_buffer in forward", _ZEROS,
            'self.register_buffer("s$i", h.detach().mean(0))\nh = h - self.s$i'),
    _buffer("assigned through setattr", _ZEROS,
            'setattr(self, "s$i", self.s$i * 0.5 + h.detach().sum(0))\nh = h - self.s$i'),
    _buffer("written in backward of what reads it", _ZEROS,
            "h = h * (1 + self.s$i)\nself.s$i.data.add_(h.detach().mean(0))"),
    _buffer("rolled", 'self.register_buffer("s$i", torch.zeros(4, D))',
            "self.s$i = torch.cat([self.s$i[1:], h.detach().mean(0, keepdim=True)])\nh = h - self.s$i.mean(0)"),
    _buffer("an integer index into a ring",
            'self.register_buffer("s$i", torch.zeros(4, D))\nself.register_buffer("n$i", torch.tensor(0))',
            "h = h - self.s$i.mean(0)\nwith torch.no_grad():\n"
            "    self.s$i.index_copy_(0, self.n$i.view(1) % 4, h.mean(0, keepdim=True))\n    self.n$i.add_(1)"),
    _buffer("a view of it written", 'self.register_buffer("s$i", torch.zeros(2, D))',
            "with torch.no_grad():\n    self.s$i.view(-1)[:D].add_(h.mean(0))\nh = h - self.s$i[0]"),
    _buffer("read by another module's forward", _ZEROS + """
class Reader(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.owner = [owner]
    def forward(self, h):
        return h - self.owner[0].s$i
self.r$i = Reader(self)
""", "with torch.no_grad():\n    self.s$i.add_(h.mean(0))\nh = self.r$i(h)"),
)  # fmt: skip


def _parameter(
    name: str, forward: str, late: str = "", init: str = "self.l$i = nn.Linear(D, D)", must_run: bool = True
) -> Construct:
    return Construct(name, "parameter", forward, init=init, late=late, must_run=must_run)


_USE = "\nh = torch.tanh(self.l$i(h))"

PARAMETERS = (
    _parameter("clamped through .data", "self.l$i.weight.data.clamp_(-0.1, 0.1)" + _USE),
    _parameter("clamped under no_grad", "with torch.no_grad():\n    self.l$i.weight.clamp_(-0.1, 0.1)" + _USE),
    _parameter("normalised under no_grad",
               "with torch.no_grad():\n    self.l$i.weight.copy_(F.normalize(self.l$i.weight, dim=1))" + _USE),
    _parameter("normalised along the other dim",
               "with torch.no_grad():\n    self.l$i.weight.div_(self.l$i.weight.norm(dim=0, keepdim=True))" + _USE),
    _parameter("its .data assigned", "self.l$i.weight.data = F.normalize(self.l$i.weight.data, dim=1)" + _USE),
    _parameter("masked before forward", "h = torch.tanh(self.l$i(h))", init="""
self.l$i = nn.Linear(D, D)
self.register_buffer("mask$i", (torch.rand(D, D) > 0.5).double())
def prune$i(module, args):
    with torch.no_grad():
        module.weight.mul_(self.mask$i)
self.l$i.register_forward_pre_hook(prune$i)
"""),
    _parameter("changed after its use", "h = torch.tanh(self.l$i(h))",
               "with torch.no_grad():\n    self.l$i.bias.mul_(0.9)"),
    _parameter("changed after its use, before backward reads it", "h = torch.tanh(self.l$i(h))",
               "self.l$i.weight.data.mul_(0.9)", must_run=False),
    _parameter("a number clamped, as CLIP does", "self.t$i.data.clamp_(max=0.5)\nh = h * self.t$i.exp()",
               init="self.t$i = nn.Parameter(torch.tensor(0.7))"),
    _parameter("centred under no_grad",
               "with torch.no_grad():\n    self.l$i.bias.sub_(self.l$i.bias.mean())" + _USE),
    _parameter("a row zeroed", "with torch.no_grad():\n    self.l$i.weight[0].zero_()" + _USE),
    _parameter("pulled towards another", "with torch.no_grad():\n    self.k$i.weight.lerp_(self.l$i.weight, 0.1)\n"
               "h = torch.tanh(self.k$i(self.l$i(h)))", init="self.l$i, self.k$i = nn.Linear(D, D), nn.Linear(D, D)"),
    _parameter("a frozen teacher that follows", "with torch.no_grad():\n    self.k$i.weight.mul_(0.9).add_("
               "self.l$i.weight, alpha=0.1)\nh = torch.tanh(self.l$i(h)) - self.k$i(h).detach()",
               init="self.l$i, self.k$i = nn.Linear(D, D), nn.Linear(D, D).requires_grad_(False)"),
    _parameter("written from activations", "with torch.no_grad():\n    self.l$i.bias.add_(h.mean(0))" + _USE),
    _parameter("given the columns of another",
               "self.l$i.weight.data.copy_(self.k$i.weight.data.t())\nh = torch.tanh(self.l$i(h) + self.k$i(h))",
               init="self.l$i, self.k$i = nn.Linear(D, D), nn.Linear(D, D)"),
    _parameter("exchanged with another", "with torch.no_grad():\n    held = self.l$i.weight.clone()\n"
               "    self.l$i.weight.copy_(self.k$i.weight)\n    self.k$i.weight.copy_(held)\n"
               "h = torch.tanh(self.l$i(h) + self.k$i(h))",
               init="self.l$i, self.k$i = nn.Linear(D, D), nn.Linear(D, D)"),
    _parameter("written twice", "with torch.no_grad():\n    self.l$i.weight.mul_(0.9)\n"
               "    self.l$i.weight[:, :3].clamp_(-0.2, 0.2)" + _USE),
    _parameter("written in a module that shares it", "self.k$i.weight.data.clamp_(-0.2, 0.2)" + _USE,
               init="self.l$i, self.k$i = nn.Linear(D, D), nn.Linear(D, D)\nself.k$i.weight = self.l$i.weight"),
    _parameter("a counter that is no buffer", "self.t$i += 1\nh = h / self.t$i",
               init="self.t$i = nn.Parameter(torch.ones(()), requires_grad=False)"),
    _parameter("a module's, from outside", "self.enter$i.weight.data.div_(self.enter$i.weight.data.norm())\n"
               "h = self.enter$i(h)", init="self.enter$i = nn.Linear(D, D)"),
    _parameter("replaced by a new one",
               "self.l$i.weight = nn.Parameter(self.l$i.weight.detach().clamp(-0.1, 0.1))" + _USE,
               must_run=False),
    Construct("an embedding with max_norm", "parameter", "h = h + self.e$i(ids$i)", must_run=True,
              init="self.e$i = nn.Embedding(7, D, max_norm=1.0)", inputs={"ids$i": "torch.randint(7, (B,))"}),
    Construct("an embedding with max_norm and a padding row", "parameter", "h = h + self.e$i(ids$i)", must_run=True,
              init="self.e$i = nn.Embedding(7, D, padding_idx=0, max_norm=0.5)",
              inputs={"ids$i": "torch.randint(7, (B,))"}),
)  # fmt: skip
