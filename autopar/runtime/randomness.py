"""Random numbers that ranks draw alike or apart, as placements ask, without touching torch's own generators.

Each draw has a seed of its own, a hash of (base seed, step, stage, microbatch, draw within the pass, coordinates on
the axes that split the tensor). Ranks that differ on other axes alone draw the same. In exact mode every rank draws
for the whole tensor, from one generator that starts at the base seed and is never seeded again, and keeps its part:
on a CPU these are, bit for bit, the numbers that the single-device model draws after `torch.manual_seed`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis
from autopar.runtime.placement import local_slices, parse_placement

State = dict[torch.device, Tensor]
Position = tuple[
    tuple[int, int], int, State
]  # stage and microbatch, the next draw, the states of exact mode's generators


@dataclass(slots=True)
class _Stream:
    seed: int = 0
    step: int = -1
    place: tuple[int, int] = (0, 0)  # stage and microbatch
    draw: int = 0
    exact: bool = False
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)  # of exact mode

    def generator(self, device: torch.device) -> torch.Generator:
        """Exact mode's generator on a device."""
        if device not in self.generators:
            self.generators[device] = torch.Generator(device=device).manual_seed(self.seed)
        return self.generators[device]

    def next_draw(self) -> int:
        number, self.draw = self.draw, self.draw + 1
        return number


_stream = _Stream()


def seed_dropout(seed: int) -> None:
    """Starts all random numbers of programs anew, as `torch.manual_seed` does for a single-device model.

    Equal seeds on all ranks are what makes equal masks equal. The seed is 0 where none is set.
    """
    _stream.seed, _stream.step, _stream.draw = seed, -1, 0
    _stream.generators.clear()


def stream_position() -> tuple[int, int]:
    """The seed and the step that the stream of masks is at, for a checkpoint."""
    return _stream.seed, _stream.step


def restore_stream(seed: int, step: int) -> None:
    """Sets the stream to where `stream_position` found it."""
    _stream.seed, _stream.step, _stream.draw = seed, step, 0


def set_exact_dropout(exact: bool) -> None:
    """Makes every rank draw whole masks and keep its part (slow; to compare with one device), or stops it.

    To compare: `set_exact_dropout(True)` and `seed_dropout(s)` on every rank; `torch.manual_seed(s)` for the
    single-device model on a CPU. Then all draws of all steps are equal bit for bit: dropout of every kind, attention's,
    and noise. With microbatches, the single device takes the same microbatches in turn. What the loss does not
    depend on draws nothing here, and GPUs draw inside fused kernels: there, compare under `reference_dropout`.
    """
    _stream.exact = exact
    _stream.generators.clear()


def begin_step() -> None:
    """Moves the stream on to the next step."""
    _stream.step += 1
    begin_pass(0, 0)


def begin_pass(stage: int, microbatch: int) -> None:
    """Moves the stream to the forward pass of a microbatch in a stage."""
    _stream.place, _stream.draw = (stage, microbatch), 0


def is_exact() -> bool:
    """Whether every rank draws what a single device draws."""
    return _stream.exact


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
    if p == 1:
        return torch.zeros_like(like, dtype=torch.bool)
    if not _stream.exact:
        return _draw(like, p, _key(tuple((axis.name, axis.index) for axis in axes)))
    if shape is None or placement is None:
        raise ProgramError("exact dropout needs the shape and the placement of the whole tensor")
    whole = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    whole.bernoulli_(1 - p, generator=_stream.generator(like.device))
    return _own_part(whole, like, axes, placement).bool()


def _own_part(whole: Tensor, like: Tensor, axes: Sequence[Axis], placement: str) -> Tensor:
    """`axes` are those that shard, outermost first: one for each S of the placement."""
    shards = tuple(kind for kind in parse_placement(placement, len(placement.split())) if kind.is_shard)
    part = whole[local_slices(whole.shape, shards, axes)]
    if part.shape != like.shape:
        raise ProgramError(f"exact dropout: the mask's part is {tuple(part.shape)}, the tensor {tuple(like.shape)}")
    return part


def _key(place: object) -> int:
    """The seed of the next draw in the given place."""
    key = f"{_stream.seed}/{_stream.step}/{_stream.place}/{_stream.next_draw()}/{place}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def _draw(like: Tensor, p: float, seed: int) -> Tensor:
    generator = torch.Generator(device=like.device).manual_seed(seed)
    return torch.empty(like.shape, dtype=torch.bool, device=like.device).bernoulli_(1 - p, generator=generator)


def draw(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs an operator that draws from torch's own generator, so that all ranks draw the same: noise, `rand_like`, …

    Its tensors must be whole on every rank. Torch's generators are left as they were.
    """
    held = _global_state()
    if _stream.exact:
        _set_global_state({device: _stream.generator(device).get_state() for device in held})
    else:
        _seed_global(_key(()), held)
    try:
        result = operator(*args, **kwargs)
        if _stream.exact:
            for device, state in _global_state().items():
                _stream.generator(device).set_state(state)
    finally:
        _set_global_state(held)
    return result


def _global_state() -> State:
    """The states of torch's own generators: the CPU's, and the current GPU's where there is one in use."""
    found = {torch.device("cpu"): torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        device = torch.device("cuda", torch.cuda.current_device())
        found[device] = torch.cuda.get_rng_state(device)
    return found


def _set_global_state(states: State) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


def _seed_global(seed: int, devices: State) -> None:
    torch.default_generator.manual_seed(seed)
    if len(devices) > 1:
        torch.cuda.manual_seed(seed)


@contextmanager
def reference_dropout(seed: int = 0) -> Iterator[None]:
    """A single-device model inside draws the masks of `F.dropout` that exact mode draws, on any device."""
    seed_dropout(seed)
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
    if p == 1:
        return apply_mask(input, torch.zeros_like(input, dtype=torch.bool), p)
    noise = torch.empty_like(input)  # drawn in the order of the input's memory, as torch and programs do
    return apply_mask(input, noise.bernoulli_(1 - p, generator=_stream.generator(input.device)).bool(), p)


def apply_mask(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """x / (1 − p) where the mask keeps it, zero elsewhere; rounded as torch's CPU dropout does."""
    made: Tensor = _Masked.apply(x, mask, p)  # type: ignore[no-untyped-call] # torch's
    return made


class _Masked(torch.autograd.Function):
    """A product with the scaled mask, which is made again for the gradient: a byte an element is kept, not a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.p = p
        return masked(x, mask, p)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return masked(gradient, mask, ctx.p), None, None


def masked(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """The product with the scaled mask, of which autograd knows nothing."""
    return x * _factor(mask, x.dtype, p)


def _factor(mask: Tensor, dtype: torch.dtype, p: float) -> Tensor:
    return mask.to(dtype) if p == 1 else mask.to(dtype).div_(1 - p)


def position() -> Position:
    """Where the stream of draws is within a step."""
    return (
        _stream.place,
        _stream.draw,
        {device: generator.get_state() for device, generator in _stream.generators.items()},
    )


def go_to(position: Position) -> None:
    """Sets the stream back, or forth; a generator of exact mode that did not draw there starts anew."""
    _stream.place, _stream.draw, states = position
    for device in set(_stream.generators) - set(states):
        del _stream.generators[device]
    for device, state in states.items():
        _stream.generator(device).set_state(state)
