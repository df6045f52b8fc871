"""Random masks that ranks draw alike or apart, as placements ask, without touching torch's own generators.

Each draw has a seed of its own, a hash of (base seed, step, draw within the step, coordinates on the axes
that split the tensor). Ranks that differ on other axes alone draw the same. In exact mode every rank draws
the mask of the whole tensor and keeps its part, so that a run can be compared with one device bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis
from autopar.runtime.placement import local_size, parse_placement


@dataclass(slots=True)
class _Stream:
    seed: int = 0
    step: int = -1
    draw: int = 0
    exact: bool = False


_stream = _Stream()


def seed_dropout(seed: int) -> None:
    """Starts the stream of masks anew; equal seeds on all ranks are what makes equal masks equal."""
    _stream.seed, _stream.step, _stream.draw = seed, -1, 0


def stream_position() -> tuple[int, int]:
    """The seed and the step that the stream of masks is at, for a checkpoint."""
    return _stream.seed, _stream.step


def restore_stream(seed: int, step: int) -> None:
    """Sets the stream to where `stream_position` found it."""
    _stream.seed, _stream.step, _stream.draw = seed, step, 0


def set_exact_dropout(exact: bool) -> None:
    """Makes every rank draw whole masks and keep its part (slow; to compare with one device), or stops it."""
    _stream.exact = exact


def begin_step() -> None:
    """Moves the stream on to the next step."""
    _stream.step += 1
    _stream.draw = 0


def keep_mask(
    like: Tensor,
    p: float,
    axes: Sequence[Axis],
    shape: Sequence[int] | None = None,
    placement: str | None = None,
) -> Tensor:
    """A bool mask of the shape of `like` whose elements are kept with probability 1 − p.

    `shape` and `placement` say what the whole tensor is and how the mesh of `axes` cuts it, in exact mode.
    """
    draw, _stream.draw = _stream.draw, _stream.draw + 1
    if not _stream.exact:
        return _draw(like.shape, p, like.device, draw, tuple((axis.name, axis.index) for axis in axes))
    if shape is None or placement is None:
        raise ProgramError("exact dropout needs the shape and the placement of the whole tensor")
    whole = _draw(tuple(shape), p, like.device, draw, ())
    return _own_part(whole, like, axes, placement)


def _own_part(whole: Tensor, like: Tensor, axes: Sequence[Axis], placement: str) -> Tensor:
    """`axes` are those that shard, outermost first: one for each S of the placement."""
    shards = [kind for kind in parse_placement(placement, len(placement.split())) if kind.is_shard]
    for kind, axis in zip(shards, axes, strict=True):
        chunk = -(-whole.size(kind.dim) // axis.size)
        start = min(axis.index * chunk, whole.size(kind.dim))
        whole = whole.narrow(kind.dim, start, local_size(whole.size(kind.dim), axis))
    if whole.shape != like.shape:
        raise ProgramError(
            f"exact dropout: the mask's part is {tuple(whole.shape)}, the tensor {tuple(like.shape)}; exact "
            "masks are for programs of one microbatch"
        )
    return whole


def _draw(shape: Sequence[int], p: float, device: torch.device, draw: int, place: object) -> Tensor:
    key = f"{_stream.seed}/{_stream.step}/{draw}/{place}".encode()
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.empty(tuple(shape), dtype=torch.bool, device=device).bernoulli_(1 - p, generator=generator)


@contextmanager
def reference_dropout(seed: int = 0) -> Iterator[None]:
    """One step of a single-device model inside draws the masks that exact mode draws, in the same order."""
    seed_dropout(seed)
    begin_step()
    with _ReferenceDropout():
        yield


class _ReferenceDropout(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.nn.functional.dropout:
            return func(*args, **(kwargs or {}))
        return _reference(*args, **(kwargs or {}))


def _reference(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    draw, _stream.draw = _stream.draw, _stream.draw + 1
    return apply_mask(input, _draw(input.shape, p, input.device, draw, ()), p)


def apply_mask(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """x / (1 − p) where the mask keeps it, zero elsewhere."""
    return x * (mask * (0.0 if p == 1 else 1 / (1 - p))).to(x.dtype)


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a block without saving what it computes, and again in the backward pass, with the same masks."""
    return checkpoint(function, *args, use_reentrant=False, context_fn=_replay)


def _replay() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    start = _stream.draw
    return _draw_from(None), _draw_from(start)


@contextmanager
def _draw_from(start: int | None) -> Iterator[None]:
    held = _stream.draw
    if start is not None:
        _stream.draw = start
    try:
        yield
    finally:
        if start is not None:
            _stream.draw = held
