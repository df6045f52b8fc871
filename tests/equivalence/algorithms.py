"""Training algorithms of several copies of a model, on one device: what programs under `algorithm=` must equal.

Each copy has its rows of the batch and its own optimizer. Written from the algorithms' definitions, with whole tensors:
nothing here knows of ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from autopar.program import load_source

Tensors = dict[str, Tensor]
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-6),
}


def trained_alone(
    model: nn.Module, batches: list[Tensors], num_copies: int, algorithm: str, optimizer: str, period: int = 1,
    after: int = 0, ignored: int | None = None, saved_after: int | None = None, microbatches: int = 1,
    norm: float | None = None,
) -> tuple[list[float], Tensors]:  # fmt: skip
    """The loss of each step and the weights after the last, of the mean of all copies. algorithm: "local_sgd",
    "adasum" or "sum"; ignored: labels of the next token that do not count; saved_after: the step after which a
    checkpoint is saved; microbatches: a copy has its rows of each. norm: to which gradients are clipped."""
    copies = [copy.deepcopy(model) for _ in range(num_copies)]
    optimizers = [OPTIMIZERS[optimizer](one.parameters()) for one in copies]
    losses, apart = [], 0
    for number, batch in enumerate(batches):
        if algorithm == "local_sgd" and apart == period:
            _mean([list(one.parameters()) for one in copies])
            apart = 0
        parts = [
            {k: torch.cat([one.chunk(num_copies)[index] for one in x.chunk(microbatches)]) for k, x in batch.items()}
            for index in range(num_copies)
        ]
        counts = [1.0 if ignored is None else float((one["labels"][:, 1:] != ignored).sum()) for one in parts]
        total = 0.0
        for one, held, part, count in zip(copies, optimizers, parts, counts, strict=True):
            held.zero_grad()
            loss = _loss(one, part) * (count / sum(counts))
            (loss * num_copies).backward()
            total += loss.item()
        losses.append(total)
        gradients = [[p.grad for p in one.parameters() if p.grad is not None] for one in copies]
        if algorithm == "sum" or (algorithm == "local_sgd" and number < after):
            _mean(gradients)
        elif algorithm == "adasum":
            for tensors in zip(*gradients, strict=True):
                total_gradient = _adasum([x.clone() for x in tensors])
                for own in tensors:
                    own.copy_(total_gradient)
        else:
            apart += 1
        for one, held in zip(copies, optimizers, strict=True):
            if norm is not None:
                nn.utils.clip_grad_norm_(one.parameters(), norm)
            held.step()
        if number == saved_after:
            _mean([list(one.parameters()) for one in copies])
            _mean([_kept(held) for held in optimizers])
            apart = 0
    _mean([list(one.parameters()) for one in copies])
    return losses, {name: p.detach().clone() for name, p in copies[0].named_parameters()}


def _kept(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()]


def _loss(model: nn.Module, batch: Tensors) -> Tensor:
    output = model(**batch)
    return output if isinstance(output, Tensor) else output["loss"]


@torch.no_grad()
def _mean(rows: list[list[Tensor]]) -> None:
    for tensors in zip(*rows, strict=True):
        mean = torch.stack([x.detach() for x in tensors]).mean(0)
        for own in tensors:
            own.copy_(mean)


def _adasum(tensors: list[Tensor]) -> Tensor:
    """Two by two (Maleki et al. 2021, section 3)."""
    if len(tensors) == 1:
        return tensors[0]
    half = len(tensors) // 2
    a, b = _adasum(tensors[:half]), _adasum(tensors[half:])
    both = (a.double() * b.double()).sum()
    own, other = (a.double() ** 2).sum(), (b.double() ** 2).sum()
    first = 1 - both / (2 * own) if own else torch.tensor(1.0)
    second = 1 - both / (2 * other) if other else torch.tensor(1.0)
    return (first * a + second * b).to(a.dtype)


def trained_on_ranks(
    rank: int, world: int, source: str, state: Tensors, batches: list[Tensors], optimizer: str, folder: str = "",
    saved_after: int | None = None, norm: float | None = None,
) -> Any:  # fmt: skip
    """On one rank: the loss of each step, and the weights after the last. folder: where a checkpoint is saved after a
    step, from which a program that is built anew goes on."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    held, losses = OPTIMIZERS[optimizer](built.parameters()), []
    for number, batch in enumerate(batches):
        held.zero_grad()
        losses.append(built.train_step(**batch).item())
        if norm is not None:
            built.clip_grad_norm_(norm)
        held.step()
        if number == saved_after:
            rt.save_checkpoint(folder, built, held, step=number)
            built = rt.build(load_source(source).Program)
            held = OPTIMIZERS[optimizer](built.parameters())
            rt.load_checkpoint(folder, built, held)
    weights = built.full_state_dict()
    return losses, weights if rank == 0 else None


def refused_on_rank(rank: int, world: int, source: str, batch: Tensors) -> list[str]:
    """On one rank: what is refused, of optimizers of whole parameters and of updates that nothing tells of."""
    from autopar import runtime as rt

    built, told = rt.build(load_source(source).Program), []
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.fill_(0.01)
    for make in (
        lambda: torch.optim.Muon([p for p in built.parameters() if p.dim() == 2]),
        lambda: torch.optim.LBFGS(built.parameters()),
    ):
        built.train_step(**batch)
        try:
            made = make()
            made.step(lambda: 0.0) if isinstance(made, torch.optim.LBFGS) else made.step()
        except rt.ProgramError as error:
            told.append(str(error))
    for parameter in built.parameters():
        parameter.data.add_(1.0)
    try:
        built.train_step(**batch)
    except rt.ProgramError as error:
        told.append(str(error))
    return told


def farthest(single: Tensors, other: Tensors) -> float:
    """The largest relative difference of a weight, on the scale of all."""
    total = torch.stack([w.norm() for w in single.values()]).norm()
    return max(((w - other[name]).norm() / max(w.norm(), 1e-3 * total)).item() for name, w in single.items())
