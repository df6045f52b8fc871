"""Autograd functions and hooks: gradients that are not what the operators' own would be."""

from __future__ import annotations

from tests.constructs.catalog import Construct


def _function(name: str, body: str, forward: str = "h = F$i.apply(h)", **more: object) -> Construct:
    lines = "\n".join(f"    {line}" if line else "" for line in body.strip("\n").splitlines())
    return Construct(name, "function", forward, f"class F$i(torch.autograd.Function):\n{lines}", **more)  # type: ignore[arg-type]


FUNCTIONS = (
    _function("gradient reversal", """
@staticmethod
def forward(ctx, x, factor):
    ctx.factor = factor
    return x.view_as(x)
@staticmethod
def backward(ctx, g):
    return -ctx.factor * g, None
""", "h = h + torch.tanh(F$i.apply(h, 0.7))"),
    _function("straight-through sign", """
@staticmethod
def forward(ctx, x):
    ctx.save_for_backward(x)
    return x.sign()
@staticmethod
def backward(ctx, g):
    (x,) = ctx.saved_tensors
    return g * (x.abs() <= 0.5)
"""),
    _function("straight-through round", """
@staticmethod
def forward(ctx, x):
    return (x * 4).round() / 4
@staticmethod
def backward(ctx, g):
    return g
"""),
    _function("gradient clamp", """
@staticmethod
def forward(ctx, x, low, high):
    ctx.bounds = (low, high)
    return x.clone()
@staticmethod
def backward(ctx, g):
    return g.clamp(*ctx.bounds), None, None
""", "h = F$i.apply(h, -0.01, 0.01)"),
    _function("identity that returns its input", """
@staticmethod
def forward(ctx, x):
    return x
@staticmethod
def backward(ctx, g):
    return 3 * g
"""),
    _function("scaled gradient by setup_context", """
@staticmethod
def forward(x, scale):
    return x * 1.0
@staticmethod
def setup_context(ctx, inputs, output):
    ctx.scale = inputs[1]
@staticmethod
def backward(ctx, g):
    return g * ctx.scale, None
""", "h = F$i.apply(h, 0.25)"),
    _function("affine with a weight of its own", """
@staticmethod
def forward(ctx, x, weight, bias):
    ctx.save_for_backward(x, weight)
    return x @ weight.t() + bias
@staticmethod
def backward(ctx, g):
    x, weight = ctx.saved_tensors
    return g @ weight, 2 * g.t() @ x, g.sum(0)
""", "h = torch.tanh(F$i.apply(h, self.w$i, self.b$i))", init="""
self.w$i = nn.Parameter(torch.randn(D, D) * 0.3)
self.b$i = nn.Parameter(torch.zeros(D))
"""),
    _function("two outputs", """
@staticmethod
def forward(ctx, x):
    ctx.save_for_backward(x)
    return x.clamp(min=0), x.clamp(max=0)
@staticmethod
def backward(ctx, up, down):
    (x,) = ctx.saved_tensors
    return up * 0.9 + down * 0.2
""", "p$i, q$i = F$i.apply(h)\nh = p$i - 2 * q$i"),
    _function("an output that is not differentiable", """
@staticmethod
def forward(ctx, x):
    index = x.argmax(1)
    ctx.mark_non_differentiable(index)
    ctx.shape = x.shape
    return x * 2, index
@staticmethod
def backward(ctx, g, _):
    return g / 2
""", "h, k$i = F$i.apply(h)\nh = h + F.one_hot(k$i, D) * 0.1"),
    _function("needs_input_grad asked", """
@staticmethod
def forward(ctx, x, w):
    ctx.save_for_backward(x, w)
    return x * w
@staticmethod
def backward(ctx, g):
    x, w = ctx.saved_tensors
    gx = g * w if ctx.needs_input_grad[0] else None
    gw = (g * x).sum(0) * 0.5 if ctx.needs_input_grad[1] else None
    return gx, gw
""", "h = F$i.apply(h, self.w$i)", init="self.w$i = nn.Parameter(torch.rand(D) + 0.5)"),
    _function("gradients not materialised", """
@staticmethod
def forward(ctx, x):
    ctx.set_materialize_grads(False)
    return x * 1.5, x * 0.5
@staticmethod
def backward(ctx, g, unused):
    assert unused is None
    return g * 7
""", "h, _ = F$i.apply(h)"),
    _function("backward that is once differentiable", """
@staticmethod
def forward(ctx, x):
    y = torch.sigmoid(x)
    ctx.save_for_backward(y)
    return y
@staticmethod
@torch.autograd.function.once_differentiable
def backward(ctx, g):
    (y,) = ctx.saved_tensors
    return g * y
"""),
    _function("backward that divides by the batch", """
@staticmethod
def forward(ctx, x):
    ctx.n = x.shape[0]
    return x * 1.0
@staticmethod
def backward(ctx, g):
    return g * 10 / ctx.n
"""),
    _function("backward that couples samples", """
@staticmethod
def forward(ctx, x):
    return x - x.mean(0)
@staticmethod
def backward(ctx, g):
    return g / (g.norm() + 0.1)
"""),
    _function("forward that couples the width", """
@staticmethod
def forward(ctx, x):
    y = x.softmax(1)
    ctx.save_for_backward(y)
    return y * x.shape[1]
@staticmethod
def backward(ctx, g):
    (y,) = ctx.saved_tensors
    return (g - g.mean(1, keepdim=True)) * y
"""),
    _function("a scalar of the batch", """
@staticmethod
def forward(ctx, x):
    ctx.save_for_backward(x)
    return x.square().mean()
@staticmethod
def backward(ctx, g):
    (x,) = ctx.saved_tensors
    return g * x.sign() / x.shape[0]
""", "extra = extra + F$i.apply(h)"),
    _function("other widths in and out", """
@staticmethod
def forward(ctx, x):
    return torch.cat([x, -x], 1)
@staticmethod
def backward(ctx, g):
    a, b = g.chunk(2, 1)
    return a - 0.5 * b
""", "h = F$i.apply(h)[:, :D]"),
    _function("numbers, strings and None as arguments", """
@staticmethod
def forward(ctx, x, how, bias, times=2):
    ctx.how = how
    return x * times if bias is None else x + bias
@staticmethod
def backward(ctx, g):
    return (g.clamp(-0.1, 0.1) if ctx.how == "clip" else g), None, None, None
""", "h = F$i.apply(h, 'clip', None, 3)"),
    _function("called twice", """
@staticmethod
def forward(ctx, x, k):
    ctx.k = k
    return x.relu()
@staticmethod
def backward(ctx, g):
    return g * ctx.k, None
""", "h = F$i.apply(h, 0.5) - F$i.apply(-h, 0.25)"),
    _function("marks its input dirty", """
@staticmethod
def forward(ctx, x):
    ctx.mark_dirty(x)
    return x.mul_(2)
@staticmethod
def backward(ctx, g):
    return g * 5
""", "h = F$i.apply(h * 1.0)"),
    _function("integer inputs", """
@staticmethod
def forward(ctx, x, ids):
    ctx.save_for_backward(ids)
    return x * (1 + ids[:, None] % 2)
@staticmethod
def backward(ctx, g):
    (ids,) = ctx.saved_tensors
    return g * (1 + ids[:, None]), None
""", "h = F$i.apply(h, ids$i)", inputs={"ids$i": "torch.randint(4, (B,))"}),
    _function("whose gradient is the true one", """
@staticmethod
def forward(ctx, x):
    y = x * x.sigmoid()
    ctx.save_for_backward(x)
    return y
@staticmethod
def backward(ctx, g):
    (x,) = ctx.saved_tensors
    s = x.sigmoid()
    return g * s * (1 + x * (1 - s))
"""),
    _function("that a module wraps", """
@staticmethod
def forward(ctx, x, alpha):
    ctx.save_for_backward(x, alpha)
    return torch.where(x > 0, x, alpha * x)
@staticmethod
def backward(ctx, g):
    x, alpha = ctx.saved_tensors
    return torch.where(x > 0, g, 0.3 * g), (g * x).clamp(max=0).sum().view_as(alpha)
""", "h = self.act$i(h)", init="""
class Act(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.1))
    def forward(self, x):
        return F$i.apply(x, self.alpha)
self.act$i = Act()
"""),
    _function("inside of no_grad", """
@staticmethod
def forward(ctx, x):
    return x.round()
@staticmethod
def backward(ctx, g):
    return g * 100
""", "with torch.no_grad():\n    r$i = F$i.apply(h)\nh = h + r$i"),
    Construct("a function inside of a function", "function", "h = F$i.apply(h)", """
class G$i(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, g):
        return g * 3
class F$i(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return G$i.apply(x) + 1
    @staticmethod
    def backward(ctx, g):
        return G$i.apply(g)
"""),
    _function("reads a class attribute that was set later", """
scale = 1.0
@staticmethod
def forward(ctx, x):
    return x * F$i.scale
@staticmethod
def backward(ctx, g):
    return g * F$i.scale
""", init="F$i.scale = 3.0"),
    _function("whose backward alone reads a class attribute that was set later", """
scale = 1.0
@staticmethod
def forward(ctx, x):
    return x.clone()
@staticmethod
def backward(ctx, g):
    return g * F$i.scale
""", init="F$i.scale = 3.0"),
    _function("that finds a class attribute set later through ctx", """
bits = 8
@staticmethod
def forward(ctx, x):
    return (x * 2 ** F$i.bits).round() / 2 ** F$i.bits
@staticmethod
def backward(ctx, g):
    return g * type(ctx)._forward_cls.bits
""", init="F$i.bits = 3"),
    Construct("reads a global that was set later", "function", "h = F$i.apply(h)", """
FACTOR$i = {"f": 1.0}
LEVEL$i = 1.0
class F$i(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        return g * FACTOR$i["f"] * LEVEL$i
def set$i():
    global LEVEL$i
    LEVEL$i = 0.5
""", 'set$i()\nFACTOR$i["f"] = 4.0'),
    Construct("asks a module's attribute that was set later", "function", "h = F$i.apply(h)", """
class Config$i:
    low = -1.0
class F$i(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(Config$i.low, 0.3)
    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0] > Config$i.low)
""", "Config$i.low = -0.2"),
    Construct("a global tensor in backward", "function", "h = F$i.apply(h)", """
T$i = torch.ones(D, dtype=torch.float64)
class F$i(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        return g * T$i
""", "T$i.mul_(0.5)"),
    Construct("a function of a module's buffer", "function", "h = F$i.apply(h, self.m$i)\nself.m$i.mul_(0.5)", """
class F$i(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        ctx.m = m.clone()
        return x * m
    @staticmethod
    def backward(ctx, g):
        return g * ctx.m * 2, None
""", 'self.register_buffer("m$i", torch.ones(D))'),
    Construct("a function defined in forward", "function", """
outer$i = self.factor$i
class F$i(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        return g * outer$i
h = F$i.apply(h)
""", init="self.factor$i = 0.25"),
    Construct("a function with state that counts", "function", "h = F$i.apply(h)", """
class F$i(torch.autograd.Function):
    calls = 0
    @staticmethod
    def forward(ctx, x):
        F$i.calls += 1
        return x / F$i.calls
    @staticmethod
    def backward(ctx, g):
        return g / F$i.calls
"""),
    Construct("an aliased apply", "function", "h = ste$i(h)", """
class F$i(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.floor()
    @staticmethod
    def backward(ctx, g):
        return g * 0.5
ste$i = F$i.apply
"""),
)  # fmt: skip


def _hook(name: str, forward: str, init: str = "", **more: object) -> Construct:
    return Construct(name, "hook", forward, init=init, **more)  # type: ignore[arg-type]


HOOKS = (
    _hook("an activation's gradient scaled", "h = h * 1.0\nh.register_hook(lambda g: g * 0.5)"),
    _hook("an activation's gradient clamped", "h = torch.tanh(h)\nh.register_hook(lambda g: g.clamp(-0.01, 0.01))"),
    _hook("an activation's gradient divided by its norm", "h = h + 0\nh.register_hook(lambda g: g / (g.norm() + 1))"),
    _hook("a hook that only looks", "h.register_hook(lambda g: None)"),
    _hook("a hook where gradients are needed", "if h.requires_grad:\n    h.register_hook(lambda g: 2 * g)"),
    _hook("a hook on a view", "v$i = h[:, : D // 2]\nv$i.register_hook(lambda g: g * 4)\n"
          "h = torch.cat([v$i, h[:, D // 2 :]], 1)"),
    _hook("two hooks on one activation", "h = h * 1.5\nh.register_hook(lambda g: g + 0.001)\n"
          "h.register_hook(lambda g: g * 2)"),
    _hook("a hook that is taken away", "t$i = h.register_hook(lambda g: g * 9)\nt$i.remove()"),
    _hook("retained gradients that nobody reads", "h.retain_grad() if h.requires_grad else None", must_run=True),
    _hook("a parameter's gradient masked", "h = h @ self.w$i", """
self.w$i = nn.Parameter(torch.randn(D, D) * 0.3)
mask$i = (torch.arange(D) % 2).double()
self.w$i.register_hook(lambda g: g * mask$i)
"""),
    _hook("a parameter's gradient scaled", "h = self.l$i(h)", """
self.l$i = nn.Linear(D, D)
for p in self.l$i.parameters():
    p.register_hook(lambda g: g * 0.1)
"""),
    _hook("a parameter's gradient divided by its norm", "h = self.l$i(h)", """
self.l$i = nn.Linear(D, D)
self.l$i.weight.register_hook(lambda g: g / (1 + g.norm()))
"""),
    _hook("a hook after gradients are added", "h = self.l$i(h)", """
self.l$i = nn.Linear(D, D)
def halve$i(p):
    p.grad.mul_(0.5)
self.l$i.weight.register_post_accumulate_grad_hook(halve$i)
"""),
    _hook("a forward hook that changes the output", "h = self.l$i(h)", """
self.l$i = nn.Linear(D, D)
self.l$i.register_forward_hook(lambda module, args, out: out * 2)
"""),
    _hook("a hook before forward that changes the input", "h = self.l$i(h)", """
self.l$i = nn.Linear(D, D)
self.l$i.register_forward_pre_hook(lambda module, args: (args[0].clamp(-0.3, 0.3),))
"""),
    _hook("a forward hook with keywords", "h = self.l$i(input=h)", """
self.l$i = nn.Linear(D, D)
self.l$i.register_forward_hook(lambda module, args, kwargs, out: out + kwargs["input"], with_kwargs=True)
"""),
    _hook("a forward hook that keeps a feature", "h = self.l$i(h)\nh = h + self.kept$i['f']", """
self.l$i = nn.Linear(D, D)
self.kept$i = {}
def keep$i(module, args, out):
    self.kept$i["f"] = out.tanh()
self.l$i.register_forward_hook(keep$i)
"""),
    _hook("a module's backward hook", "h = self.l$i(h)", """
self.l$i = nn.Linear(D, D)
self.l$i.register_full_backward_hook(lambda module, gin, gout: (gin[0] * 0.5,))
"""),
    _hook("a module's hook before backward", "h = torch.tanh(self.l$i(h))", """
self.l$i = nn.Linear(D, D)
self.l$i.register_full_backward_pre_hook(lambda module, gout: (gout[0] * 2,))
"""),
    _hook("a module's backward hook that only looks", "h = self.l$i(h)", """
self.l$i = nn.Linear(D, D)
self.l$i.register_full_backward_hook(lambda module, gin, gout: None)
"""),
    _hook("a backward hook that writes a buffer", "h = h * 1.0\nh.register_hook(self.look$i)", """
self.register_buffer("seen$i", torch.zeros(()))
def look$i(g):
    self.seen$i.copy_(g.detach().abs().sum())
self.look$i = look$i
"""),
    _hook("a hook by a wrapped forward", "h = self.l$i(h)", """
self.l$i = nn.Linear(D, D)
inner$i = self.l$i.forward
self.l$i.forward = lambda x: inner$i(x) * 0.5
"""),
    _hook("weight_norm", "h = self.l$i(h)", "self.l$i = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))",
          must_run=True),
    _hook("weight_norm of old", "h = self.l$i(h)", "self.l$i = old_weight_norm(nn.Linear(D, D))",
          above="from torch.nn.utils import weight_norm as old_weight_norm\n"
          "import warnings\nwarnings.filterwarnings('ignore', category=FutureWarning)"),
    _hook("spectral_norm", "h = self.l$i(h)", "self.l$i = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))"),
    _hook("spectral_norm of old", "h = self.l$i(h)", "self.l$i = nn.utils.spectral_norm(nn.Linear(D, D))"),
    _hook("a parametrization of one's own", "h = self.l$i(h)", """
class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).t()
self.l$i = nn.Linear(D, D)
nn.utils.parametrize.register_parametrization(self.l$i, "weight", Symmetric())
"""),
    _hook("a hook on a node of autograd", "h = h * 2.0\nif h.grad_fn is not None:\n"
          "    h.grad_fn.register_hook(lambda gin, gout: (gin[0] * 0.5, *gin[1:]))"),
    _hook("a hook before a node of autograd", "h = torch.tanh(h)\nif h.grad_fn is not None:\n"
          "    h.grad_fn.register_prehook(lambda gout: (gout[0] * 0.5,))"),
    _hook("a hook that scales and writes a buffer", "h = h * 1.0\nh.register_hook(self.look$i)", """
self.register_buffer("seen$i", torch.zeros(D))
def look$i(g):
    self.seen$i.lerp_(g.detach().sum(0), 0.1)
    return g / (1 + self.seen$i.abs())
self.look$i = look$i
"""),
    _hook("a hook that scales and appends to a list", "h = h * 1.0\nh.register_hook(self.look$i)\n"
          "h = h / (1 + len(self.norms$i))", """
self.norms$i = []
def look$i(g):
    self.norms$i.append(g.norm())
    return g * 0.5
self.look$i = look$i
"""),
    _hook("a hook that writes its gradient in place", "h = h * 1.0\nh.register_hook(lambda g: g.mul_(0.5))"),
    _hook("a hook that writes its gradient and returns nothing",
          "h = torch.tanh(h)\nh.register_hook(lambda g: None if g.clamp_(-0.01, 0.01) is None else None)"),
    _hook("a hook that reads an activation", "a$i = h.detach()\nh = h * 1.5\nh.register_hook(lambda g: g * a$i)"),
    _hook("a hook that reads what is written later",
          "a$i = [1.0]\nh = h * 1.5\nh.register_hook(lambda g: g * a$i[0])\na$i[0] = 0.2"),
    _hook("a hook that reads a buffer", "h = h * 1.5\nh.register_hook(lambda g: g * self.m$i)\nself.m$i.mul_(0.5)",
          'self.register_buffer("m$i", torch.ones(D))'),
    _hook("a hook on a parameter in forward",
          "if self.l$i.weight.requires_grad:\n    self.l$i.weight.register_hook(lambda g: g * 0.5)\nh = self.l$i(h)",
          "self.l$i = nn.Linear(D, D)"),
    _hook("a hook after gradients are added that masks", "h = self.l$i(h)", """
self.l$i = nn.Linear(D, D)
self.register_buffer("keep$i", (torch.arange(D) % 2).double())
def mask$i(p):
    p.grad = p.grad * self.keep$i
self.l$i.weight.register_post_accumulate_grad_hook(mask$i)
"""),
    _hook("hooks of saved tensors", """
with torch.autograd.graph.saved_tensors_hooks(lambda x: x.float(), lambda x: x.double() * 1.5):
    h = torch.tanh(h * h)
"""),
    _hook("a hook of several tensors", """
a$i, b$i = h * 1.0, h * 2.0
if h.requires_grad:
    torch.autograd.graph.register_multi_grad_hook((a$i, b$i), lambda grads: self.seen$i.copy_(grads[0].sum(0)))
h = a$i + b$i
""", 'self.register_buffer("seen$i", torch.zeros(D))'),
    _hook("a forward hook of all modules of the model", "h = self.l$i(h)", """
self.l$i = nn.Sequential(nn.Linear(D, D), nn.Tanh())
for m in self.l$i.modules():
    m.register_forward_hook(lambda module, args, out: out + 0.1)
"""),
    _hook("a forward hook that counts its calls", "h = self.l$i(h)", """
self.l$i = nn.Linear(D, D)
def count$i(module, args, out):
    module.calls = getattr(module, "calls", 0) + 1
    return out / module.calls
self.l$i.register_forward_hook(count$i)
"""),
    _hook("a pruned weight", "h = self.l$i(h)", """
self.l$i = nn.Linear(D, D)
torch.nn.utils.prune.l1_unstructured(self.l$i, "weight", amount=0.4)
""", above="import torch.nn.utils.prune"),
)  # fmt: skip
