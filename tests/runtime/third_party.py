"""Optimizers as people publish them, in their habits: `p.data`, `.item()` branches, norms, views, foreach lists, steps
counted in groups, closures, dicts by parameter. None knows of shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Made = Callable[[list[Tensor]], Any]


class Plain(Optimizer):
    """What most of them share: options in groups, and a loop over parameters that have a gradient."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.update(p, group)
        return loss

    def update(self, p: Tensor, group: Any) -> None:
        raise NotImplementedError


class Lamb(Plain):
    def update(self, p: Tensor, group: Any) -> None:
        grad, state = p.grad.data, self.state[p]
        if len(state) == 0:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p.data)
            state["exp_avg_sq"] = torch.zeros_like(p.data)
        state["step"] += 1
        state["exp_avg"].mul_(0.9).add_(grad, alpha=0.1)
        state["exp_avg_sq"].mul_(0.999).addcmul_(grad, grad, value=0.001)
        update = state["exp_avg"] / state["exp_avg_sq"].sqrt().add(1e-6) + 0.01 * p.data
        weight, moved = p.data.pow(2).sum().sqrt().clamp(0, 10), update.pow(2).sum().sqrt()
        trust = 1.0 if weight == 0 or moved == 0 else (weight / moved).item()
        p.data.add_(update, alpha=-group["lr"] * trust)


class LambOfGroups(Optimizer):
    """Counts in its group, and clips by the norm of all gradients, as NVIDIA's does."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.sqrt(sum(grad.pow(2).sum() for grad in every))
        clip = torch.where(norm > 0.5, norm / 0.5, torch.ones_like(norm))
        for group in self.param_groups:
            group["step"] += 1
            correction = 1 - 0.9 ** group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad / clip, alpha=0.1)
                ratio = p.norm() / momentum.norm().clamp(min=1e-9)
                p.add_(momentum / correction * ratio, alpha=-group["lr"])


class Lars(Plain):
    def update(self, p: Tensor, group: Any) -> None:
        grad = p.grad
        if p.ndim > 1:
            weight, update = torch.norm(p), torch.norm(grad)
            one = torch.ones_like(weight)
            grad = grad.mul(torch.where(weight > 0.0, torch.where(update > 0, 0.02 * weight / update, one), one))
        if "mu" not in self.state[p]:
            self.state[p]["mu"] = torch.zeros_like(p)
        mu = self.state[p]["mu"]
        mu.mul_(0.9).add_(grad)
        p.add_(mu, alpha=-group["lr"])


class Lion(Plain):
    def update(self, p: Tensor, group: Any) -> None:
        p.data.mul_(1 - group["lr"] * 0.1)
        if not self.state[p]:
            self.state[p]["exp_avg"] = torch.zeros_like(p)
        exp_avg = self.state[p]["exp_avg"]
        update = exp_avg.clone().mul_(0.9).add(p.grad, alpha=0.1).sign_()
        p.add_(update, alpha=-group["lr"])
        exp_avg.mul_(0.99).add_(p.grad, alpha=0.01)


class Shampoo(Plain):
    def update(self, p: Tensor, group: Any) -> None:
        state, grad, order = self.state[p], p.grad.clone(), p.grad.ndimension()
        if len(state) == 0:
            state["step"] = 0
            for dim, size in enumerate(grad.size()):
                state[f"precond_{dim}"] = 1e-2 * torch.eye(size, dtype=p.dtype)
                state[f"inv_precond_{dim}"] = torch.zeros(size, size, dtype=p.dtype)
        for dim, size in enumerate(grad.size()):
            precond, inverse = state[f"precond_{dim}"], state[f"inv_precond_{dim}"]
            grad = grad.transpose_(0, dim).contiguous()
            transposed = grad.size()
            grad = grad.view(size, -1)
            precond.add_(grad @ grad.t())
            if state["step"] % 2 == 0:
                values, vectors = torch.linalg.eigh(precond)
                inverse.copy_(vectors @ torch.diag(values.clamp(min=1e-6).pow(-1 / max(order, 1))) @ vectors.t())
            grad = (inverse @ grad).view(transposed)
            grad = grad.transpose_(0, dim).contiguous()
        state["step"] += 1
        p.data.add_(grad, alpha=-group["lr"])


class Soap(Plain):
    """Adam in the eigenbasis of Shampoo's statistics, which are in lists."""

    def update(self, p: Tensor, group: Any) -> None:
        state, grad = self.state[p], p.grad
        if "step" not in state:
            state["step"] = 0
            of_rows = [torch.linspace(1, 2, n, dtype=p.dtype) for n in grad.shape] if grad.dim() == 2 else []
            state["GG"] = [torch.diag(values) for values in of_rows]  # of no equal eigenvalues, whose vectors are any
            state["Q"] = None
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
        state["step"] += 1
        for k, statistics in enumerate(state["GG"]):
            statistics.lerp_(torch.tensordot(grad, grad, dims=[[1 - k], [1 - k]]), 0.1)
        if state["Q"] is None:
            state["Q"] = [torch.linalg.eigh(item)[1] for item in state["GG"]]
        elif state["step"] % 2 == 0:
            state["Q"] = [torch.linalg.qr(s @ q)[0] for s, q in zip(state["GG"], state["Q"], strict=True)]
        turned = state["Q"][0].t() @ grad @ state["Q"][1] if state["Q"] else grad
        state["exp_avg"].lerp_(turned, 0.1)
        state["exp_avg_sq"].lerp_(turned.square(), 0.05)
        step = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(1e-6)
        p.add_(state["Q"][0] @ step @ state["Q"][1].t() if state["Q"] else step, alpha=-group["lr"])


class AdafactorOfFairseq(Plain):
    def update(self, p: Tensor, group: Any) -> None:
        grad, state, shape = p.grad.data, self.state[p], p.grad.shape
        factored = len(shape) >= 2
        if len(state) == 0:
            state["step"], state["RMS"] = 0, 0
            if factored:
                state["row"], state["col"] = grad.new_zeros(shape[:-1]), grad.new_zeros(shape[:-2] + shape[-1:])
            else:
                state["sq"] = torch.zeros_like(grad)
        state["step"] += 1
        state["RMS"] = (p.data.norm(2) / (p.data.numel() ** 0.5)).item()
        rate, beta = max(1e-3, state["RMS"]) * min(1e-2, 1 / math.sqrt(state["step"])), 1 - state["step"] ** -0.8
        update = grad**2 + 1e-30
        if factored:
            state["row"].mul_(beta).add_(update.mean(dim=-1), alpha=1 - beta)
            state["col"].mul_(beta).add_(update.mean(dim=-2), alpha=1 - beta)
            row = (state["row"] / state["row"].mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = torch.mul(row, state["col"].unsqueeze(-2).rsqrt()).mul_(grad)
        else:
            update = state["sq"].mul_(beta).add_(update, alpha=1 - beta).rsqrt().mul_(grad)
        update.div_((update.norm(2) / (update.numel() ** 0.5) / 1.0).clamp_(min=1.0)).mul_(rate)
        p.data.copy_(p.data - update)


def orthogonal(matrix: Tensor) -> Tensor:
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if matrix.size(0) > matrix.size(1) else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


class MuonOfKeller(Plain):
    """Of matrices; what else there is in another group is Adam's."""

    def __init__(self, params: list[Tensor], lr: float = 1e-2) -> None:
        matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
        Optimizer.__init__(
            self, [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}], {"lr": lr}
        )

    def update(self, p: Tensor, group: Any) -> None:
        state = self.state[p]
        if group["use_muon"]:
            momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
            momentum.lerp_(p.grad, 0.05)
            update = orthogonal(p.grad.lerp(momentum, 0.95))
            p.mul_(1 - group["lr"] * 0.1)
            p.add_(update.reshape(p.shape), alpha=-group["lr"] * max(1, p.size(-2) / p.size(-1)) ** 0.5)
        else:
            state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            p.add_(state["exp_avg"], alpha=-group["lr"])


class MuonOfMoonlight(Plain):
    """Which parameters are matrices is said in the state, before the first step."""

    def __init__(self, params: list[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        for p in params:
            self.state[p]["use_muon"] = p.ndim == 2

    def update(self, p: Tensor, group: Any) -> None:
        state = self.state[p]
        if "buffer" not in state:
            state["buffer"] = torch.zeros_like(p.grad)
        state["buffer"].mul_(0.95).add_(p.grad)
        if state["use_muon"]:
            p.data.add_(orthogonal(state["buffer"]), alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))
        else:
            p.data.add_(state["buffer"], alpha=-0.1 * group["lr"])


class MuonOfHeads(Plain):
    """Orthogonal by heads of rows, where they divide."""

    def update(self, p: Tensor, group: Any) -> None:
        grad = p.grad
        if p.ndim == 2 and p.size(0) % 4 == 0:
            grad = torch.stack([orthogonal(part) for part in grad.view(4, -1, p.size(1)).unbind(0)]).view_as(p)
        p.add_(grad, alpha=-group["lr"])


class AdamMini(Optimizer):
    """One second moment for a row of a matrix, for a whole vector; names by parameter in a dict of its own."""

    def __init__(self, params: list[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.kinds = {p: "rows" if p.ndim == 2 else "all" for p in params}
        self.numbers = {id(p) for p in params if p.ndim == 2}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                by_row = self.kinds[p] == "rows"
                assert by_row == (id(p) in self.numbers)
                square = p.grad.pow(2).mean(dim=1, keepdim=True) if by_row else p.grad.pow(2).mean()
                state["m"] = torch.lerp(state.get("m", torch.zeros_like(p)), p.grad, 0.1)
                state["vmean"] = 0.9 * state.get("vmean", torch.zeros_like(square)) + 0.1 * square
                p.sub_(state["m"] / (state["vmean"].sqrt() + 1e-6), alpha=group["lr"])


class Prodigy(Optimizer):
    """Its step size is found from sums over all parameters."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-2, "k": 0, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]
        d, numerator, denominator = first["d"], first["numerator"] * 0.9, 0.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "s" not in state:
                    state["s"], state["p0"] = torch.zeros_like(p.data), p.detach().clone()
                    state["exp_avg"] = torch.zeros_like(p.data)
                numerator += d * torch.dot(p.grad.flatten(), (state["p0"] - p.data).flatten()).item()
                state["exp_avg"].mul_(0.9).add_(p.grad, alpha=d * 0.1)
                state["s"].mul_(0.9).add_(p.grad, alpha=d)
                denominator += state["s"].abs().sum().item()
        d = max(d, numerator / denominator, d * 1.1) if denominator else d
        for group in self.param_groups:
            group["numerator"], group["d"], group["k"] = numerator, d, group["k"] + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(self.state[p]["exp_avg"], alpha=-d)


class Sam(Optimizer):
    """Two gradients a step: that of the weights moved by the gradient over the norm of all."""

    def __init__(self, params: Any, rho: float = 0.05, lr: float = 1e-2) -> None:
        super().__init__(params, {"rho": rho, "lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        loss = closure()
        self.second_step()
        return loss

    def _grad_norm(self) -> Tensor:
        device = self.param_groups[0]["params"][0].device
        every = [p.grad.norm(p=2).to(device) for g in self.param_groups for p in g["params"] if p.grad is not None]
        return torch.norm(torch.stack(every), p=2)


class Lookahead(Optimizer):
    """Around another one; the slow weights are in its state."""

    def __init__(self, base: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.base, self.k, self.alpha = base, k, alpha
        super().__init__([{**group} for group in base.param_groups], {"lr": 0.0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if "slow" not in self.state[p]:
                    self.state[p]["slow"] = p.clone().detach()
        self.count += 1
        if self.count % self.k == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p]["slow"]
                    slow.add_(p.data - slow, alpha=self.alpha)
                    p.data.copy_(slow)
        return loss


class Centralized(torch.optim.AdamW):
    """A known optimizer, whose subclass looks at whole rows."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.dim() > 1:
                    p.grad.data.sub_(p.grad.data.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))
        return super().step(closure)


class Majority(Plain):
    """The sign that most elements of a column have."""

    def update(self, p: Tensor, group: Any) -> None:
        vote = p.grad.sign().sum(0, keepdim=True).sign() if p.dim() else p.grad.sign()
        p.add_(vote.expand_as(p), alpha=-group["lr"])


class Clipping(torch.optim.SGD):
    """Clips by the norm of all gradients before it steps."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.5)
        return super().step(closure)


class UnitwiseClipping(Plain):
    """Adaptive gradient clipping, by rows."""

    def update(self, p: Tensor, group: Any) -> None:
        norm = lambda x: x.norm() if x.dim() < 2 else x.norm(dim=1, keepdim=True)  # noqa: E731
        most, now = norm(p).clamp(min=1e-3) * 0.1, norm(p.grad)
        p.add_(torch.where(now > most, p.grad * (most / now.clamp(min=1e-6)), p.grad), alpha=-group["lr"])


class Foreach(Optimizer):
    """All parameters at once, with the norm of each."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        grads = [p.grad for p in params]
        norms = torch._foreach_add(torch._foreach_norm(grads), 1e-6)
        torch._foreach_add_(params, torch._foreach_div(grads, norms), alpha=-self.param_groups[0]["lr"])


class ScheduleFree(Plain):
    """Keeps two sequences, and evaluates at their mean."""

    def update(self, p: Tensor, group: Any) -> None:
        state = self.state[p]
        if "z" not in state:
            state["z"], state["k"] = p.detach().clone(), 0
        state["k"] += 1
        p.lerp_(state["z"], 1 / (state["k"] + 1))
        p.add_(p.grad, alpha=-0.1 * group["lr"] * p.norm().item())
        state["z"].sub_(p.grad, alpha=group["lr"])

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - 1 / 0.9)


class Langevin(Plain):
    """Draws noise."""

    def update(self, p: Tensor, group: Any) -> None:
        p.add_(p.grad + 0.1 * torch.randn_like(p), alpha=-group["lr"])


class Adasum(Plain):
    """The gradient of this step and the last one, added as far as they are orthogonal."""

    def update(self, p: Tensor, group: Any) -> None:
        before = self.state[p].get("before")
        grad = p.grad
        if before is not None:
            inner = torch.dot(grad.reshape(-1), before.reshape(-1))
            a = 1 - inner / (2 * grad.norm() ** 2 + 1e-9)
            b = 1 - inner / (2 * before.norm() ** 2 + 1e-9)
            grad = a * grad + b * before
        self.state[p]["before"] = p.grad
        p.add_(grad, alpha=-group["lr"])


class Quantized(Plain):
    """Momentum in eight bits, with a scale a tensor; through numpy."""

    def update(self, p: Tensor, group: Any) -> None:
        state = self.state[p]
        momentum = state["q"].to(p.dtype) * state["scale"] if "q" in state else torch.zeros_like(p)
        momentum = 0.9 * momentum + torch.from_numpy(p.grad.cpu().numpy().copy())
        state["scale"] = momentum.abs().max() / 127 + 1e-12
        state["q"] = (momentum / state["scale"]).round().to(torch.int8)
        p.add_(momentum, alpha=-group["lr"])


def grouped(kind: type[Optimizer]) -> Made:
    """Two groups of different options, as people split what decays."""

    def made(params: list[Tensor]) -> Optimizer:
        small = [p for p in params if p.dim() < 2]
        return kind([{"params": [p for p in params if p.dim() > 1]}, {"params": small, "lr": 5e-3}])

    return made


KINDS: dict[str, Made] = {
    "lamb": grouped(Lamb),
    "lamb of groups": LambOfGroups,
    "lars": grouped(Lars),
    "lion": Lion,
    "shampoo": grouped(Shampoo),
    "soap": Soap,
    "adafactor": AdafactorOfFairseq,
    "torch adafactor": torch.optim.Adafactor,
    "muon": MuonOfKeller,
    "muon of state": MuonOfMoonlight,
    "muon of heads": MuonOfHeads,
    "adam-mini": AdamMini,
    "prodigy": Prodigy,
    "sam": Sam,
    "lookahead": lambda params: Lookahead(torch.optim.AdamW(params, lr=1e-2)),
    "lookahead of lamb": lambda params: Lookahead(Lamb(params)),
    "centralized": Centralized,
    "majority": Majority,
    "clipping": lambda params: Clipping(params, lr=0.1),
    "unitwise clipping": UnitwiseClipping,
    "foreach": Foreach,
    "schedule-free": ScheduleFree,
    "langevin": Langevin,
    "adasum": Adasum,
    "quantized": Quantized,
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
}
