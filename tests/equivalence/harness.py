"""Runs an emitted program on gloo ranks and the model on one device, and compares loss, gradients and weights.

Tolerances: loss 1e-5 relative; each gradient 1e-4 (norm of the difference over the larger of that gradient's norm
and 1e-4 of the global norm, since some gradients are zero in exact arithmetic); weights after three SGD-momentum
steps 1e-4, after three AdamW steps (eps 1e-6) 1e-3, on the like scale (biases start at zero); clipped norm 1e-4.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from autopar.program import load_source

Tensors = dict[str, torch.Tensor]
_OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-6),
}


def run_rank(rank: int, world: int, source: str, state: Tensors, batch: Tensors, optimizers: tuple[str, ...]) -> Any:
    """On one rank: first step's loss, gradients, clip norm and bytes; then three steps of each optimizer."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    with rt.count_bytes() as counted:
        loss = built.train_step(**batch)
    gradients = built.full_gradients()
    norm = built.clip_grad_norm_(0.5)
    weights = {}
    for name in optimizers:
        built.init_from(state, broadcast=False)
        optimizer = _OPTIMIZERS[name](built.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            built.train_step(**batch)
            optimizer.step()
        weights[name] = built.full_state_dict()
    sent = Counter[str]()
    for key, size in counted.items():
        sent[key[0] if isinstance(key, tuple) else key] += size
    return (loss, gradients, norm, weights, dict(sent)) if rank == 0 else (loss, None, norm, None, dict(sent))


def run_single(model: nn.Module, batch: Tensors, optimizers: tuple[str, ...]) -> Any:
    """The same on one device, on the model itself (left as it was)."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    loss = _loss(model, batch)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    weights = {}
    for name in optimizers:
        model.load_state_dict(state)
        optimizer = _OPTIMIZERS[name](model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            _loss(model, batch).backward()
            optimizer.step()
        weights[name] = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.load_state_dict(state)
    model.zero_grad()
    return loss.detach(), gradients, norm, weights


def _loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output["loss"]


def differences(single: Any, sharded: Any) -> list[str]:
    """What is out of tolerance, one line each; empty when the program equals the model."""
    loss, gradients, norm, weights = single
    other_loss, other_gradients, other_norm, other_weights, _ = sharded
    found = []
    if abs(loss - other_loss) > 1e-5 * abs(loss):
        found.append(f"loss {loss.item()} against {other_loss.item()}")
    if abs(norm - other_norm) > 1e-4 * abs(norm):
        found.append(f"gradient norm {norm.item()} against {float(other_norm)}")
    if set(gradients) - set(other_gradients):
        found.append(f"no gradients for {sorted(set(gradients) - set(other_gradients))[:5]}")
    total = torch.stack([g.norm() for g in gradients.values()]).norm()
    for name in set(gradients) & set(other_gradients):
        scale = max(gradients[name].norm(), 1e-4 * total)
        error = (gradients[name] - other_gradients[name]).norm() / scale
        if not error <= 1e-4:
            found.append(f"gradient of {name}: relative difference {error.item():.2e}")
    for optimizer, tolerance in (("sgd", 1e-4), ("adamw", 1e-3)):
        everything = torch.stack([w.norm() for w in weights[optimizer].values()]).norm() if optimizer in weights else 0
        for name, value in weights.get(optimizer, {}).items():
            scale = max(value.norm(), 1e-4 * everything)
            error = (value - other_weights[optimizer][name]).norm() / scale
            if not error <= tolerance:
                found.append(f"{name} after three {optimizer} steps: relative difference {error.item():.2e}")
    return found
