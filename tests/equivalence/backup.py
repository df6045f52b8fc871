"""Synchronous steps without their last ranks, on one device and on ranks of which some are late in stated steps.

On one device such a step is one on the samples of those that take part: nothing here knows of arrivals.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.program import load_source
from tests.equivalence.algorithms import OPTIMIZERS, Tensors

PATIENCE_S = 60.0


class MeanOfSquares(nn.Module):
    """A loss that no count divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.second(torch.tanh(self.first(x))) - y) ** 2).mean()


class MeanOfWeighted(MeanOfSquares):
    """One that is divided by what follows from the inputs of all ranks."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = y.abs().sum(1)
        return (((self.second(torch.tanh(self.first(x))) - y) ** 2).sum(1) * weight).sum() / weight.sum()


def trained_alone(
    model: nn.Module, batches: Sequence[Tensors], num_copies: int, late: Sequence[Sequence[int]], optimizer: str
) -> tuple[list[float], Tensors]:
    """The loss of each step and the weights after the last. late: the copies that a step goes without."""
    held, losses = OPTIMIZERS[optimizer](model.parameters()), []
    for batch, without in zip(batches, late, strict=True):
        taking_part = [number for number in range(num_copies) if number not in without]
        held.zero_grad()
        output = model(**{k: torch.cat([x.chunk(num_copies)[n] for n in taking_part]) for k, x in batch.items()})
        loss = output if isinstance(output, Tensor) else output["loss"]
        loss.backward()
        held.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def await_file(path: Path) -> None:
    """Until another rank has made it."""
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < until, f"expected {path.name}: the others do not go on without this rank"
        time.sleep(1e-3)


def delay_passes(built: Any, until: Path) -> None:
    """In the next step: when its passes begin, which in the first steps is after ranks have compared their batches."""
    train = type(built)._train

    def late(microbatches: Any) -> Any:
        del built.__dict__["_train"]
        await_file(until)
        return train(built, microbatches)

    built.__dict__["_train"] = late


def trained_on_ranks(
    rank: int, world: int, source: str, state: Tensors, batches: list[Tensors], optimizer: str,
    late: list[list[int]], folder: str,
) -> Any:  # fmt: skip
    """On one rank: the loss of each step, the weights after the last, and the loss that a call returns then. A rank
    that is late in a step begins it, or its passes, when another one has ended it."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    held, losses = OPTIMIZERS[optimizer](built.parameters()), []
    for number, (batch, without) in enumerate(zip(batches, late, strict=True)):
        ended = Path(folder) / f"step_{number}"
        if rank in without and number < 2:
            delay_passes(built, ended)
        elif rank in without:
            await_file(ended)
        held.zero_grad()
        losses.append(built.train_step(**batch).item())
        ended.touch()
        held.step()
    with pytest.raises(rt.ProgramError, match="under backup"):
        built.compile()
    with torch.no_grad():
        output = built(**batches[0])
    called = output if isinstance(output, Tensor) else output["loss"]
    return losses, built.full_state_dict(), called.item()


def lost_on_rank(rank: int, world: int, source: str, state: Tensors, batches: list[Tensors], folder: str) -> Any:
    """On one rank: the steps that were made, and the error that the others get of the last one, who stops after two."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program, timeout_s=2.0)
    built.init_from(state, broadcast=False)
    try:
        for number, batch in enumerate(batches):
            if rank == world - 1 and number == 2:
                for other in range(world - 1):
                    await_file(Path(folder) / f"lost_{other}")
                return number, ""
            built.train_step(**batch)
    except rt.CollectiveError as error:
        (Path(folder) / f"lost_{rank}").touch()
        return number, str(error)
    return len(batches), ""


def watched_on_rank(rank: int, world: int, source: str, state: Tensors, batches: list[Tensors], folder: str) -> Any:
    """On one rank: what was due after each step, where the last rank sees a signal in its second step and is late in
    the third."""
    from autopar import runtime as rt

    built, due = rt.build(load_source(source).Program), []
    built.init_from(state, broadcast=False)
    watch = rt.Watch(built, every=100, signals=())
    for number, batch in enumerate(batches):
        is_last, ended = rank == world - 1, Path(folder) / f"watched_{number}"
        if is_last and number == 1:
            watch._came = True
        if is_last and number == 2:
            await_file(ended)
        built.train_step(**batch)
        due.append(tuple(watch.after(number + 1, len(batches) + 1)))
        ended.touch()
        if due[-1][1]:
            break
    built.unite_copies()
    return due
