"""Training with parameters, gradients and optimizer state on the host, on gloo ranks: jobs, and what they are held
against."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.program import load_source
from autopar.runtime.host_link import mapped_addresses
from benchmarks.accuracy.lifetimes import live_storages, track
from benchmarks.accuracy.memory import own_shard


class Trained(NamedTuple):
    """Losses, norms and whole weights after some steps; bytes at the peak of the last one but for its update; bytes on
    the host; bytes of the optimizer's state that are not there."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    peak_bytes: int
    host_bytes: int
    other_state_bytes: int


def train(
    rank: int, world: int, source: str, state: dict[str, Tensor], batch: dict[str, Tensor], steps: int,
    optimizer: str = "AdamW", clip: float | None = 1.0,
) -> Trained:  # fmt: skip
    """A few steps of torch's optimizer of that name, on one rank."""
    from autopar import runtime as rt

    before = live_storages()
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    made = getattr(torch.optim, optimizer)(built.parameters(), lr=1e-2)
    is_staged = built.num_stages > 1
    shard = batch if is_staged else own_shard(built, batch)
    del batch, state
    losses, norms, peak = [], [], 0
    for step in range(steps):
        made.zero_grad()
        addresses = {*before, *mapped_addresses(), *_states_on_host(built, made)}

        def work() -> None:
            loss = built.train_step(**shard) if isinstance(shard, dict) else built.train_step(*shard, local=True)
            losses.append(loss.item())
            if clip is not None:
                norms.append(built.clip_grad_norm_(clip).item())

        if step == steps - 1:
            # what the step itself maps on the host is there, too, when it ends
            peak = track(work, _Unmapped(addresses)).peak_bytes
        else:
            work()
        made.step()
    on_host = [item for item in built.stored_parameters.values() if item.is_on_host]
    held = sum(item.local.nbytes + _nbytes(item.tensor.grad) for item in on_host)
    held += sum(_state_bytes(made, item.tensor) for item in on_host)
    others = [item for item in built.stored_parameters.values() if not item.is_on_host]
    rest = sum(_state_bytes(made, item.tensor) for item in others)
    return Trained(losses, norms, built.full_state_dict(), peak, held, rest)


class _Unmapped(frozenset[int]):
    """Addresses that are left out, and all that are mapped by then."""

    def __contains__(self, address: object) -> bool:
        return super().__contains__(address) or address in mapped_addresses()

    def __iter__(self) -> Any:
        return iter({*super().__iter__(), *mapped_addresses()})


def _states_on_host(built: Any, optimizer: Any) -> set[int]:
    tensors = [item.tensor for item in built.stored_parameters.values() if item.is_on_host]
    found = (x for tensor in tensors for x in optimizer.state.get(tensor, {}).values() if isinstance(x, Tensor))
    return {_local(x).data_ptr() for x in found}


def _state_bytes(optimizer: Any, tensor: Tensor) -> int:
    kept = optimizer.state.get(tensor, {}).values()
    return sum(_local(x).nbytes for x in kept if isinstance(x, Tensor))


def _nbytes(x: Tensor | None) -> int:
    return 0 if x is None else _local(x).nbytes


def _local(x: Tensor) -> Tensor:
    found: Tensor = x.to_local() if hasattr(x, "to_local") else x  # type: ignore[operator] # DTensor's
    return found


def accumulate(
    rank: int, world: int, source: str, state: dict[str, Tensor], batch: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of two steps together, with one that is held from before, then SGD."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        built.train_step(**batch)
        first = [p.grad.to_local().clone() for p in built.parameters() if p.grad is not None]
        held = [p.grad for p in built.parameters() if p.grad is not None]
        built.train_step(**batch)
        assert all(torch.equal(a.to_local(), 2 * b) for a, b in zip(held, first, strict=True))
        optimizer.step()
        optimizer.zero_grad()
    return built.full_state_dict()


def save_and_load(
    rank: int, world: int, sources: list[str], state: dict[str, Tensor], batch: dict[str, Tensor], folder: str
) -> list[float]:
    """Two steps under the first plan, a checkpoint, two more under the second: losses."""
    from autopar import runtime as rt

    losses: list[float] = []
    for number, source in enumerate(sources):
        built = rt.build(load_source(source).Program)
        built.init_from(state, broadcast=False)
        optimizer = torch.optim.AdamW(built.parameters(), lr=1e-2)
        start = rt.load_checkpoint(folder, built, optimizer)
        assert start == (2 if number else 0)
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(built.train_step(**batch).item())
            optimizer.step()
        rt.save_checkpoint(folder, built, optimizer, step=start + 2)
    built.save_safetensors(f"{folder}/files")
    again = rt.build(load_source(sources[0]).Program)
    again.load_safetensors(f"{folder}/files")
    whole, expected = again.full_state_dict(), built.full_state_dict()
    assert all(torch.equal(weight, whole[name]) for name, weight in expected.items())
    return losses


def step_whole(rank: int, world: int, source: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> str:
    """What an optimizer that looks at whole parameters says of those on the host."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    optimizer = torch.optim.Adafactor(built.parameters(), lr=1e-2)
    built.train_step(**batch)
    try:
        optimizer.step()
    except rt.ProgramError as error:
        return str(error)
    return ""
