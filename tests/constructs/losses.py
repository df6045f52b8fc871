"""Losses that are more than a mean over samples, and parts of models around them."""

from __future__ import annotations

from tests.constructs.catalog import Construct


def _loss(name: str, loss: str, inputs: dict[str, str] | None = None, **more: object) -> Construct:
    return Construct(name, "loss", loss=loss, inputs=inputs or {}, places=("model",), **more)  # type: ignore[arg-type]


_MASK = {"mask": "torch.rand(B) > 0.4"}
_WEIGHT = {"weight": "torch.rand(B) + 0.1"}
_EACH = "each = F.cross_entropy(z, y, reduction='none')\n"
_HOT = "p = z.softmax(1)\nt = F.one_hot(y, C).to(z.dtype)\n"

LOSSES = (
    _loss("a sum", "loss = F.cross_entropy(z, y, reduction='sum')", must_run=True),
    _loss("a sum divided by the batch", "loss = F.cross_entropy(z, y, reduction='sum') / z.shape[0]", must_run=True),
    _loss("a weighted mean", _EACH + "loss = (each * weight).sum() / weight.sum()", _WEIGHT),
    _loss("a masked mean", _EACH + "loss = (each * mask).sum() / mask.sum().clamp(min=1)", _MASK),
    _loss("a mean over a boolean index", _EACH + "loss = each[mask].mean()", _MASK),
    _loss("cross-entropy of a boolean index", "loss = F.cross_entropy(z[mask], y[mask])", _MASK),
    _loss("masked_select", _EACH + "loss = torch.masked_select(each, mask).mean()", _MASK),
    _loss("ignored targets", "loss = F.cross_entropy(z, torch.where(mask, y, -100), ignore_index=-100)", _MASK),
    _loss("weights by class", "loss = F.cross_entropy(z, y, weight=torch.linspace(0.5, 2, C, dtype=z.dtype))"),
    _loss("weights by class as an input", "loss = F.cross_entropy(z, y, weight=by_class)",
          {"by_class": "torch.rand(C) + 0.1"}),
    _loss("label smoothing", "loss = F.cross_entropy(z, y, label_smoothing=0.1)", must_run=True),
    _loss("soft targets", "loss = F.cross_entropy(z, F.one_hot(y, C).to(z.dtype) * 0.9 + 0.02)"),
    _loss("dice", _HOT + "loss = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)"),
    _loss("dice by class", _HOT + "loss = (1 - (2 * (p * t).sum(0) + 1) / (p.sum(0) + t.sum(0) + 1)).mean()"),
    _loss("dice by sample", _HOT + "loss = (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()"),
    _loss("overlap", _HOT + "i = (p * t).sum()\nloss = 1 - i / (p.sum() + t.sum() - i)"),
    _loss("a cosine", "loss = 1 - F.cosine_similarity(z, F.one_hot(y, C).to(z.dtype)).mean()"),
    _loss("a cosine over the batch", "loss = 1 - F.cosine_similarity(z.flatten(), z.roll(1, 1).flatten(), dim=0)"),
    _loss("cosine embedding", "loss = F.cosine_embedding_loss(z, z.flip(1), torch.where(y > 1, 1.0, -1.0))"),
    _loss("contrastive", "q = F.normalize(h, dim=1)\nloss = F.cross_entropy(q @ q.t() / 0.5, "
          "torch.arange(len(q), device=q.device))"),
    _loss("triplets", """
d = torch.cdist(z, z)
same = y[:, None] == y[None]
far = d.masked_fill(~same, -1e9).max(1).values
near = d.masked_fill(same, 1e9).min(1).values.clamp(max=5)
loss = F.relu(far - near + 0.3).mean() + z.square().mean()
"""),
    _loss("the hardest three", _EACH + "loss = each.topk(3).values.mean()"),
    _loss("a median", "loss = (z - z.median(0).values).abs().mean()"),
    _loss("sorted samples", "loss = (z.sort(0).values - torch.linspace(-1, 1, len(z), dtype=z.dtype)[:, None])"
          ".square().mean()"),
    _loss("a variance over the batch", "loss = F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + z.square().mean()"),
    _loss("decorrelation", "c = z - z.mean(0)\nloss = (c.t() @ c / (len(z) - 1)).square().sum() + z.mean()"),
    _loss("logsumexp over the batch", "loss = z.logsumexp(0).mean() + z.square().mean()"),
    _loss("binary with positive weights", "loss = F.binary_cross_entropy_with_logits(z, F.one_hot(y, C).to(z.dtype), "
          "pos_weight=torch.linspace(1, 3, C, dtype=z.dtype))"),
    _loss("binary of probabilities", "loss = F.binary_cross_entropy(z.sigmoid(), F.one_hot(y, C).to(z.dtype))"),
    _loss("KL divergence by the batch", "loss = F.kl_div(z.log_softmax(1), z.roll(1, 1).detach().softmax(1), "
          "reduction='batchmean')"),
    _loss("gaussian", "loss = F.gaussian_nll_loss(z[:, :2], z[:, 2:4].detach(), z[:, :2].exp())"),
    _loss("huber", "loss = F.huber_loss(z, F.one_hot(y, C).to(z.dtype))"),
    _loss("smooth l1 summed", "loss = F.smooth_l1_loss(z, F.one_hot(y, C).to(z.dtype), reduction='sum')"),
    _loss("focal", _EACH + "loss = ((1 - (-each).exp()).square() * each).mean()"),
    _loss("multi margin", "loss = F.multi_margin_loss(z, y)"),
    _loss("hinge by label", "loss = F.hinge_embedding_loss(z, torch.where(F.one_hot(y, C) > 0, 1.0, -1.0))"),
    _loss("a mean of means by row", "loss = (F.softplus(z) * cells).sum(1).div(cells.sum(1).clamp(min=1)).mean()",
          {"cells": "(torch.rand(B, C) > 0.3).double()"}),
    _loss("a mean over all cells of a mask", "loss = (F.softplus(z) * cells).sum() / cells.sum()",
          {"cells": "(torch.rand(B, C) > 0.3).double()"}),
    _loss("a ratio of two means", "loss = z.square().mean() / (1 + h.square().mean())"),
    _loss("a product of two means", "loss = z.square().mean() * (1 + h.square().mean())"),
    _loss("a root of a mean", "loss = (z - 1).square().mean().sqrt()"),
    _loss("a norm over the batch", "loss = torch.linalg.vector_norm(z) + z.norm(p=1)"),
    _loss("the square of a mean", "loss = F.cross_entropy(z, y) ** 2"),
    _loss("an exponential of a mean", "loss = F.cross_entropy(z, y).exp()"),
    _loss("flooding", "loss = (F.cross_entropy(z, y) - 1.2).abs() + 1.2"),
    _loss("the larger of two", "loss = torch.maximum(F.cross_entropy(z, y), z.square().mean())"),
    _loss("the largest sample", _EACH + "loss = each.max()"),
    _loss("scaled by its own value", "loss = F.cross_entropy(z, y)\nloss = loss / loss.detach()"),
    _loss("two losses balanced by values", "a, b = F.cross_entropy(z, y), z.square().mean()\n"
          "loss = a + b * (a / b).detach()"),
    _loss("several terms", "loss = F.cross_entropy(z, y) + 0.1 * z.square().mean() + 0.01 * h.abs().sum() / len(h)",
          must_run=True),
    _loss("sums and means together", "loss = F.cross_entropy(z, y) + 0.01 * h.square().sum()"),
    _loss("weights decayed in the loss", "loss = F.cross_entropy(z, y) + 0.01 * sum(p.square().sum() "
          "for p in self.parameters())"),
    _loss("a bound on a parameter", "loss = F.cross_entropy(z, y) + F.relu(self.head.weight.norm() - 0.1)"),
    _loss("distillation", "loss = F.cross_entropy(z, y) + F.mse_loss(z, teacher)", {"teacher": "torch.randn(B, C)"}),
    _loss("weights made from the batch", _EACH + "w = (-each.detach()).softmax(0)\nloss = (each * w).sum()"),
    _loss("counts made from labels", _EACH + "n = torch.bincount(y, minlength=C).to(z.dtype)\n"
          "loss = (each / n[y]).sum()"),
    _loss("frequencies made from labels", _EACH + "n = F.one_hot(y, C).to(z.dtype).mean(0)\n"
          "loss = (each / (n[y] + 0.1)).mean()"),
    _loss("standardised targets", "t = (target - target.mean()) / (target.std() + 1e-3)\nloss = F.mse_loss(z, t)",
          {"target": "torch.randn(B, C)"}),
    _loss("batch-wise softmax", "loss = -(z.log_softmax(0) * F.one_hot(y, C)).sum() / len(z)"),
    _loss("CTC", "lp = z.log_softmax(1)[:, None].expand(-1, 2, -1)\nloss = F.ctc_loss(lp, torch.tensor([[1], [2]]), "
          "torch.tensor([len(z)] * 2), torch.tensor([1, 1]))"),
    _loss("a loop over samples", "loss = sum(F.cross_entropy(z[k : k + 1], y[k : k + 1]) "
          "for k in range(len(z))) / len(z)"),
    _loss("a loop over classes", "loss = sum((z[:, k] - (y == k).to(z.dtype)).square().mean() for k in range(C))"),
    _loss("an index of each target", "loss = -z.log_softmax(1)[torch.arange(len(z)), y].mean()"),
    _loss("gathered targets", "loss = -z.log_softmax(1).gather(1, y[:, None]).mean()", must_run=True),
    _loss("a mean without the first sample", "loss = F.cross_entropy(z[1:], y[1:])"),
    _loss("pairs of neighbours", "loss = (z[1:] - z[:-1]).square().mean() + z.square().mean()"),
    _loss("halves of the batch", "a, b = z.chunk(2)\nloss = F.mse_loss(a, b) + z.mean()"),
    _loss("an expectation by nanmean", "loss = torch.where(mask[:, None], z, torch.nan).square().nanmean()", _MASK),
)  # fmt: skip


def _output(name: str, returns: str, loss: str = "", above: str = "", **more: object) -> Construct:
    return Construct(name, "output", loss=loss, returns=returns, above=above, places=("model",), **more)  # type: ignore[arg-type]


_AUX = "loss = F.cross_entropy(z, y)\naux = z.square().mean()\n"

OUTPUTS = (
    _output("a dict with the loss", "return {'loss': loss, 'z': z}", must_run=True),
    _output("a dict with another scalar first", "return {'aux': aux, 'loss': loss}", _AUX),
    _output("a tuple with the loss first", "return loss, z"),
    _output("a tuple with the loss last", "return z, loss"),
    _output("a dataclass", "return Out(loss=loss, logits=z)", above="""
import dataclasses
@dataclasses.dataclass
class Out:
    loss: torch.Tensor
    logits: torch.Tensor
"""),
    _output("a named tuple", "return Out(z, loss)", above="""
import collections
Out = collections.namedtuple("Out", "logits loss")
"""),
    _output("a loss with one element", "return loss[None]"),
    _output("a dict with a detached scalar", "return {'loss': loss, 'seen': loss.detach() * 2}"),
    _output("a loss that is clamped", "return loss.clamp(max=100.0)"),
    Construct("a loss function", "output", returns="return z", loss_fn="F.cross_entropy", places=("model",),
              must_run=True),
    Construct("a loss module", "output", returns="return z", loss_fn="nn.CrossEntropyLoss()", places=("model",),
              must_run=True),
    Construct("a loss module with weights by class", "output", returns="return z", places=("model",),
              loss_fn="nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, C))"),
    Construct("a loss module with parameters", "output", returns="return z", loss_fn="Learned()", places=("model",),
              above="""
class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.eye(C))
    def forward(self, z, t):
        return F.cross_entropy(z @ self.w, t)
"""),
    Construct("a loss module that counts in a buffer", "output", returns="return z", loss_fn="Counting()",
              places=("model",), above="""
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, z, t):
        self.seen += 1
        return F.cross_entropy(z, t) / self.seen
"""),
    Construct("a loss module that averages", "output", returns="return z", loss_fn="Averaging()", places=("model",),
              above="""
class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(C))
    def forward(self, z, t):
        with torch.no_grad():
            self.mean.lerp_(z.mean(0), 0.1)
        return F.cross_entropy(z - self.mean, t)
"""),
    Construct("a loss function of a dict", "output", returns="return {'z': z, 'h': h}", places=("model",),
              loss_fn="lambda out, y: F.cross_entropy(out['z'], y) + out['h'].square().mean()"),
)  # fmt: skip


def _part(name: str, init: str, forward: str, **more: object) -> Construct:
    return Construct(name, "part", forward, init=init, **more)  # type: ignore[arg-type]


_TWO = "self.l$i = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))"
_CHECKPOINT = "from torch.utils import checkpoint as ck"

PARTS = (
    _part("a frozen layer", "self.l$i = nn.Linear(D, D).requires_grad_(False)", "h = torch.tanh(self.l$i(h))",
          must_run=True),
    _part("a frozen bias", "self.l$i = nn.Linear(D, D)\nself.l$i.bias.requires_grad_(False)", "h = self.l$i(h)",
          must_run=True),
    _part("a layer that nothing uses", "self.l$i = nn.Linear(D, D)", "pass", must_run=True),
    _part("a layer used twice", "self.l$i = nn.Linear(D, D)", "h = self.l$i(torch.tanh(self.l$i(h)))", must_run=True),
    _part("tied weights", "self.l$i, self.k$i = nn.Linear(D, D), nn.Linear(D, D)\nself.k$i.weight = self.l$i.weight",
          "h = self.k$i(torch.tanh(self.l$i(h)))", must_run=True),
    _part("a weight and its transpose", "self.l$i = nn.Linear(D, D)",
          "h = torch.tanh(self.l$i(h)) @ self.l$i.weight", must_run=True),
    _part("one module under two names", "self.l$i = nn.Linear(D, D)\nself.k$i = self.l$i", "h = self.k$i(self.l$i(h))",
          must_run=True),
    _part("modules in a list and one by one", "self.a$i = nn.Linear(D, D)\nself.all$i = nn.ModuleList([self.a$i])",
          "h = self.all$i[0](h) + self.a$i(h)", must_run=True),
    _part("parameters in a list", "self.p$i = nn.ParameterList(nn.Parameter(torch.rand(D)) for _ in range(3))",
          "for p in self.p$i:\n    h = h * p + p", must_run=True),
    _part("checkpoint, reentrant", _TWO, "h = ck.checkpoint(self.l$i, h, use_reentrant=True)", above=_CHECKPOINT),
    _part("checkpoint, not reentrant", _TWO, "h = ck.checkpoint(self.l$i, h, use_reentrant=False)", above=_CHECKPOINT),
    _part("checkpoint of a function", _TWO, "h = ck.checkpoint(lambda v: self.l$i(v) * 2, h, use_reentrant=False)",
          above=_CHECKPOINT),
    _part("checkpoint in sequence", _TWO, "h = ck.checkpoint_sequential(self.l$i, 2, h, use_reentrant=False)",
          above=_CHECKPOINT),
    _part("checkpoint, then a statistic under no_grad", _TWO + "\nself.register_buffer('s$i', torch.zeros(()))", """
h = ck.checkpoint(self.l$i, h, use_reentrant=True)
with torch.no_grad():
    self.s$i += h.abs().mean()
""", above=_CHECKPOINT),
    _part("dropout", "self.d$i = nn.Dropout(0.3)", "h = self.d$i(h)", random=True),
    _part("dropout as a function", "pass", "h = F.dropout(h, 0.2, self.training)", random=True),
    _part("dropout of nothing", "self.d$i = nn.Dropout(0.0)", "h = self.d$i(h)", must_run=True),
    _part("layer norm", "self.n$i = nn.LayerNorm(D)", "h = self.n$i(h)", must_run=True),
    _part("group norm", "self.n$i = nn.GroupNorm(1, D)", "h = self.n$i(h)"),
    _part("attention over the batch", "self.q$i = nn.Linear(D, D)",
          "h = h + F.scaled_dot_product_attention(self.q$i(h)[None], h[None], h[None])[0]"),
    _part("gradients asked for in forward", "self.l$i = nn.Linear(D, 1)", """
v$i = h.detach().requires_grad_(True)
(g$i,) = torch.autograd.grad(torch.tanh(self.l$i(v$i)).sum(), v$i, create_graph=True)
extra = extra + g$i.norm(dim=1).mean()
"""),
    _part("functional_call", "self.l$i = nn.Linear(D, D)",
          "h = torch.func.functional_call(self.l$i, {'weight': self.l$i.weight * 2, 'bias': self.l$i.bias}, h)"),
    _part("vmap", "self.l$i = nn.Linear(D, D)", "h = torch.vmap(lambda r: torch.tanh(self.l$i.weight @ r))(h)"),
    _part("autocast inside", "self.l$i = nn.Linear(D, D)",
          "with torch.autocast('cpu', enabled=False):\n    h = torch.tanh(self.l$i(h))"),
    _part("a complex transform", "pass", "h = torch.fft.ifft(torch.fft.fft(h) * 0.5).real"),
    _part("a sparse buffer", "self.register_buffer('a$i', torch.eye(B).to_sparse())",
          "h = h + torch.sparse.mm(self.a$i, h)"),
    _part("torch.cond", "pass", "h = torch.cond(h.sum() > 0, lambda v: v * 2, lambda v: v - 1, (h,))"),
    _part("a recurrence", "self.r$i = nn.GRU(D, D, batch_first=True)", "h = self.r$i(h[:, None])[0][:, 0]"),
    _part("a scripted function", "pass", "h = scripted$i(h)", above="""
@torch.jit.ignore
def scripted$i(h):
    return h * 2
"""),
    _part("an embedding with a padding row", "self.e$i = nn.Embedding(7, D, padding_idx=0)", "h = h + self.e$i(ids$i)",
          inputs={"ids$i": "torch.randint(7, (B,))"}, must_run=True),
    _part("an embedding scaled by frequency", "self.e$i = nn.Embedding(7, D, scale_grad_by_freq=True)",
          "h = h + self.e$i(ids$i)", inputs={"ids$i": "torch.randint(7, (B,))"}),
    _part("a mean over the batch with gradients", "pass", "h = h - h.mean(0)"),
    _part("a loop that ends by a value", "pass", """
k$i = 0
while h.detach().abs().sum() * 0 + k$i < 2:
    h = torch.tanh(h)
    k$i += 1
"""),
    _part("new parameters of a meta-layer", "self.g$i = nn.Linear(D, D * D)",
          "w$i = self.g$i(h.mean(0)).view(D, D)\nh = torch.tanh(h @ w$i)"),
    _part("detached halves", "pass", "h = torch.cat([h[:, :2].detach(), h[:, 2:]], 1)", must_run=True),
    _part("stop-gradient of half of the batch", "pass", "h = torch.cat([h[: B // 2].detach(), h[B // 2 :]])"),
    _part("a permutation of the batch", "pass", "h = h + 0.3 * h.flip(0)"),
    _part("a deepcopied layer", "self.l$i = nn.Linear(D, D)\nself.k$i = copy.deepcopy(self.l$i)",
          "h = self.k$i(self.l$i(h))", above="import copy", must_run=True),
)  # fmt: skip
