"""Ranks that would not train the same thing say so before they do, and which ranks they are.

Compared are the program's code and the versions around it when it is built, weights that each rank brings itself, and
the global batch in the first steps: an unseeded shuffle is the most common mistake of all.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.declare import Parameters, Pipeline, Program
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis, RankMesh
from autopar.runtime.placement import AxisType, local_slices, parse_placement
from autopar.runtime.state import StoredBuffer
from autopar.runtime.stored import StoredParameter

Prepared = TypeVar("Prepared")
Shared = TypeVar("Shared")

CHECKED_STEPS = 2
"""Steps in which batches are compared. More would cost an exchange of some bytes each; a shuffle shows in the first."""
_SAMPLES = 1 << 14  # elements of a tensor that are looked at


def check_equal(what: str, own: Mapping[str, str], num_ranks: int, remedy: str) -> None:
    """Raises ProgramError, on all ranks, for an item that ranks have unequal. own: digests by name, of what it has."""
    every = gathered(dict(own), num_ranks)
    for name in dict.fromkeys(name for found in every for name in found):
        ranks: dict[str, list[int]] = {}
        for rank, found in enumerate(every):
            if name in found:
                ranks.setdefault(found[name], []).append(rank)
        if len(ranks) > 1:
            (_, usual), *others = sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1]))
            told = "; ".join(
                f"another on rank {', '.join(map(str, found))}{_shown(name, key)}" for key, found in others
            )
            raise ProgramError(
                f"expected {what} to be equal on all ranks, found {name} of rank {usual[0]}, {told}. {remedy}"
            )


def together(prepare: Callable[[], Prepared], num_ranks: int) -> Prepared:
    """What `prepare` returns. Where it raises ProgramError on a rank, all raise one: none waits for that rank."""
    try:
        found, own = prepare(), None
    except ProgramError as error:
        found, own = None, error
    refusals = gathered(None if own is None else str(own), num_ranks)
    if own is not None:
        raise own
    for rank, told in enumerate(refusals):
        if told is not None:
            raise ProgramError(f"rank {rank} refused: {told}")
    return cast(Prepared, found)


def gathered(own: Shared, num_ranks: int) -> list[Shared]:
    """What each rank has, on all of them; nothing where the ranks of the program do not run together."""
    if num_ranks < 2 or not dist.is_initialized() or dist.get_world_size() != num_ranks:
        return []
    assert dist.group.WORLD is not None, "asked for where ranks run together"
    return comm.gather_objects(own, dist.group.WORLD)


def _shown(name: str, digest: str) -> str:
    """Versions are shown as they are; digests tell nobody anything."""
    return f" ({digest})" if " " in name else ""


def tensor_digest(x: Tensor) -> str:
    """Of shape, dtype and evenly spaced elements."""
    flat = x.detach().reshape(-1)
    taken = flat[:: max(1, flat.numel() // _SAMPLES)].cpu()
    bits = taken.contiguous().view(torch.uint8) if taken.numel() else taken
    text = f"{tuple(x.shape)} {x.dtype}".encode()
    return hashlib.sha256(text + bits.numpy().tobytes()).hexdigest()[:16]


def check_batch(values: Mapping[str, Any], local: bool, declared: type[Program] | None, mesh: RankMesh) -> None:
    """That each input is equal on the ranks that give it, or if `local` on those that give the same part of it.

    declared: a program of one stage, whose inputs say which part that is.
    """
    own = {name: x for name, x in values.items() if isinstance(x, Tensor)}
    if local:
        placed = {spec.name: spec for spec in declared.INPUTS} if declared is not None else {}
        own = {
            part_name(name, spec.shape, parse_placement(spec.placement, len(mesh.axes)), mesh.batch_axes): own[name]
            for name, spec in placed.items()
            if name in own
        }
    remedy = (
        "Give the same global batch on every rank (seed what shuffles alike), or this rank's part of it with local=True"
    )
    digests = {name: tensor_digest(x) for name, x in own.items()}
    check_equal("the batch", {"the value of local": str(local)} | digests, mesh.size, remedy)


def check_stored(stored: Iterable[StoredParameter | StoredBuffer], num_ranks: int) -> None:
    """That ranks hold the same values of what they store alike, however these came there."""
    own = {part_name(x.name, x.declared.shape, x.types, x.mesh.axes): tensor_digest(x.local) for x in stored}
    check_equal("parameters and buffers", own, num_ranks, "Set them alike on all ranks, or load them (init_from)")


def part_name(name: str, shape: Sequence[int], types: Sequence[AxisType], axes: Sequence[Axis]) -> str:
    """The name of a tensor, or of the part that this rank has of it, such as w[0:4, :]."""
    parts = local_slices(shape, types, axes)
    texts = [
        ":" if part == slice(0, size) else f"{part.start}:{part.stop}" for part, size in zip(parts, shape, strict=True)
    ]
    return f"{name}[{','.join(texts)}]" if any(kind.is_shard for kind in types) else name


def check_weights(tensors: Mapping[str, Tensor], num_ranks: int) -> None:
    """That ranks begin with equal weights."""
    own = {name: tensor_digest(x) for name, x in tensors.items() if not x.is_meta}
    check_equal("the weights", own, num_ranks, "Seed them alike, or let the first rank's be taken (broadcast=True)")


def check_program(program: type[Program] | type[Pipeline], num_ranks: int) -> None:
    """That ranks run the same program on the same versions."""
    own = {
        "program.py": _digest(_code_of(program)),
        "torch's version": torch.__version__,
        "Python's version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "autopar.runtime": _runtime_digest(),
    }
    check_equal("the program", own, num_ranks, "Give every rank the same files and the same environment")


def _digest(parts: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "backslashreplace")).hexdigest()[:16]


@cache
def _runtime_digest() -> str:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _code_of(program: type) -> Iterator[str]:
    """What its module's classes say and do."""
    namespace = vars(sys.modules[program.__module__]) if program.__module__ in sys.modules else {"Program": program}
    for name, kind in sorted({**namespace, "Program": program}.items()):
        if (
            isinstance(kind, type)
            and issubclass(kind, (Parameters, Pipeline))
            and kind.__module__ == program.__module__
        ):
            yield name
            for key, value in sorted(vars(kind).items()):
                yield from _text(key, value)


def _text(key: str, value: Any) -> Iterator[str]:
    function: Callable[..., Any] | None = getattr(value, "__wrapped__", value)
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        yield key
        yield from _code(code)
    elif key.isupper() and key not in ("STAGES", "OTHERS"):  # each is read by itself
        yield f"{key} {value!r}"


def _code(code: CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames}"
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _code(value)
        else:
            yield repr(value)
