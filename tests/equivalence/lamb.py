"""LAMB (You et al., 2020, algorithm 2) over DTensor parameters: an ordinary torch optimizer, as users write it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """Adam's update, scaled for each parameter by ‖weight‖ / ‖update‖.

    A norm is that of the whole parameter: `norm()` of a DTensor sums over its shards, whatever they are.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"], state["mean"], state["square"] = 0, torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        (first, second), gradient = group["betas"], parameter.grad
        state["mean"].mul_(first).add_(gradient, alpha=1 - first)
        state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        mean = state["mean"] / (1 - first ** state["step"])
        square = state["square"] / (1 - second ** state["step"])
        update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * parameter
        weight_norm, update_norm = parameter.norm(), update.norm()
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        parameter.sub_(group["lr"] * ratio * update)
