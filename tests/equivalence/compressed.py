"""On gloo ranks: sums in fewer bits, by themselves and in programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.program import load_source


def summed_on_ranks(rank: int, world: int, kind: str, amount: float, shapes: list[tuple[int, ...]], steps: int) -> Any:
    """In each step: what is applied, the exact sum, and what is left out in all; of the first, the bytes sent."""
    from autopar import runtime as rt
    from autopar.runtime.compressing import CompressedSum

    (axis,) = rt.make_rank_mesh({"dp": world}).axes
    compressed, generator = CompressedSum(kind, amount), torch.Generator().manual_seed(rank)
    found, sent = [], {}
    for number in range(steps):
        own = [torch.randn(shape, generator=generator) for shape in shapes]
        exact = [one.clone() for one in own]
        for tensor in exact:
            torch.distributed.all_reduce(tensor)
        with rt.count_bytes() as counted:
            compressed.sum_(own, axis, "gradients")
        sent = {kind: size for (kind, _), size in counted.items()} if number == 0 else sent
        found.append((own, exact))
    left = [tensor.clone() for tensor in compressed._left.values()]
    return found, left, sent


def trained_in_fewer_bits(
    rank: int, world: int, source: str, state: dict[str, Tensor], batch: dict[str, Tensor], steps: int
) -> Any:  # fmt: skip
    """The loss of each step, the weights, and the bytes of the first step."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    optimizer, losses = torch.optim.SGD(built.parameters(), lr=0.03, momentum=0.9), []
    with rt.count_bytes() as counted:
        built.train_step(**batch)
    optimizer.zero_grad()
    for _ in range(steps):
        losses.append(built.train_step(**batch).item())
        optimizer.step()
        optimizer.zero_grad()
    sent: dict[str, int] = {}
    for (kind, _), size in counted.items():
        sent[kind] = sent.get(kind, 0) + size
    own = {name: parameter.to_local().detach().clone() for name, parameter in built.named_parameters()}
    return losses, own, sent


def first_gradients(rank: int, world: int, source: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
    """The loss and all gradients of one step."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    rt.seed_dropout(5)
    return built.train_step(**batch), built.full_gradients()
