"""PipeDream on one device, written out from its paper, and on ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from autopar.program import load_source
from benchmarks.accuracy.lifetimes import live_storages, track

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
}
Batches = Sequence[Mapping[str, Tensor]]


def trained_alone(
    model: nn.Module, batches: Batches, stage_of: Mapping[str, int], microbatches: int, optimizer: str
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of steps, and the weights after them. stage_of: of each parameter.

    On stage s of P, microbatch m of a step is computed with the weights after max(0, m + 1 - (P - s)) of the step's
    updates, forward and backward; its gradient updates the latest ones.
    """
    model, count = deepcopy(model), max(stage_of.values()) + 1
    latest, losses = dict(model.named_parameters()), list[float]()
    update = OPTIMIZERS[optimizer](latest.values())
    for batch in batches:
        known, found = [_copied(latest)], list[Tensor]()
        for number, part in enumerate(_parts(batch, microbatches)):
            read = {n: known[max(0, number + 1 - (count - stage_of[n]))][n].requires_grad_() for n in latest}
            loss = _loss(functional_call(model, read, (), dict(part)))
            found.append(loss.detach())
            gradients = torch.autograd.grad(loss, list(read.values()))
            for parameter, gradient in zip(latest.values(), gradients, strict=True):
                parameter.grad = gradient
            update.step()
            known.append(_copied(latest))
        losses.append(torch.stack(found).mean().item())
    return losses, {name: parameter.detach() for name, parameter in latest.items()}


def trained_together(
    model: nn.Module, batches: Batches, microbatches: int, optimizer: str
) -> tuple[list[float], dict[str, Tensor]]:
    """The same with one version of the weights: each microbatch after the update by the one before."""
    return trained_alone(model, batches, {name: 0 for name, _ in model.named_parameters()}, microbatches, optimizer)


def trained_on_ranks(
    rank: int, world: int, source: str, state: Mapping[str, Tensor], batches: Batches, optimizer: str
) -> Any:
    """A program's losses, and its weights."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    built.update_with(OPTIMIZERS[optimizer](built.parameters()))
    losses = [built.train_step(**batch).item() for batch in batches]
    return losses, built.full_state_dict()


def peak_on_rank(rank: int, world: int, source: str, state: Mapping[str, Tensor], batch: dict[str, Tensor]) -> int:
    """The most memory that a rank takes in its second step."""
    from autopar import runtime as rt

    before = live_storages()
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    built.update_with(torch.optim.AdamW(built.parameters(), lr=1e-4))
    built.train_step(**batch)
    return track(lambda: built.train_step(**batch), before).peak_bytes


def refused_on_rank(rank: int, world: int, source: str, batch: Mapping[str, Tensor]) -> list[str]:
    """What a rank says of steps without an optimizer, of others' optimizers, and of hooks."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    for parameter in built.parameters():
        nn.init.zeros_(parameter)
    own, told = list(built.parameters()), list[str]()
    muon = torch.optim.Adafactor(own)
    hooked = lambda: (own[0].register_hook(lambda gradient: None), built.train_step(**batch))  # noqa: E731 # a row
    for act in (
        lambda: built.train_step(**batch), lambda: built.update_with(torch.optim.SGD(own[1:], lr=0.1)),
        lambda: built.update_with(muon), lambda: (built.update_with(torch.optim.SGD(own, lr=0.1)), hooked()),
        built.compile,
    ):  # fmt: skip
        try:
            act()
        except rt.ProgramError as error:
            told.append(str(error))
    return told


def _parts(batch: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    cut = {name: value.chunk(count) for name, value in batch.items()}
    return [{name: values[number] for name, values in cut.items()} for number in range(count)]


def _copied(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _loss(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output["loss"]
    return found
