"""Writes weights to safetensors files, each rank its own slices at their places, whole or not at all.

The files are laid out before anything is written, so no rank gathers what others have. They get their names when all
ranks have written, the index last: until then the folder holds no weights for anyone who reads it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from autopar.runtime import agreement
from autopar.runtime.errors import ProgramError
from autopar.runtime.state import ProgramState
from autopar.runtime.weights.files import DTYPE_NAMES, INDEX_END, pieces
from autopar.runtime.weights.loading import wanted_shapes
from autopar.runtime.weights.naming import Layout, in_layout
from autopar.runtime.weights.own import OwnSlice, own_slices
from autopar.runtime.weights.parts import FilePart, Region, inside, overlap, row_order

PART_END = ".part"
SHARD_BYTES = 5_000_000_000
"""What `save_pretrained` puts into a file at most has been this for years; hubs and readers know it."""


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor of a file: where its bytes begin in it, after the header."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class WeightFile:
    """A file, with its tensors by name."""

    name: str = ""
    tensors: dict[str, WrittenTensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Without the header."""
        return sum(item.num_bytes for item in self.tensors.values())

    def header(self) -> bytes:
        """As the format has it: the length of what follows, then each tensor's dtype, shape and place."""
        told: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for key, item in self.tensors.items():
            place = [item.start, item.start + item.num_bytes]
            told[key] = {"dtype": DTYPE_NAMES[item.dtype], "shape": list(item.shape), "data_offsets": place}
        text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # so that what follows is aligned
        return len(text).to_bytes(8, "little") + text


def in_files(state: ProgramState, known: Mapping[str, list[FilePart]], layout: Layout) -> dict[str, list[FilePart]]:
    """Where each tensor of the model lies in the files: as is known of it, else as the layout has it."""
    layout.check()
    shapes = wanted_shapes(state)
    return {name: known.get(name) or in_layout(name, shape, layout) for name, shape in shapes.items()}


def save(
    state: ProgramState, num_ranks: int, rank_number: int, folder: str | Path, parts: Mapping[str, list[FilePart]],
    *, dtype: torch.dtype | None, max_shard_bytes: int,
) -> Path:  # fmt: skip
    """Writes all parameters and persistent buffers; floating-point ones as `dtype`, where it is given.

    parts: where each tensor lies in the files. Raises ProgramError on all
    ranks where the folder has weights already, or cannot be written; what was begun is taken away.
    """
    folder = Path(folder)
    shards = plan_shards(state, parts, dtype, max_shard_bytes)
    is_first = rank_number == 0
    agreement.together(lambda: _begin(folder, shards) if is_first else None, num_ranks)
    try:
        written = agreement.together(lambda: _write_own(state, folder, shards, parts), num_ranks)
        _check_whole(sum(agreement.gathered(written, num_ranks) or [written]), shards)
        agreement.together(lambda: _publish(folder, shards) if is_first else None, num_ranks)
    except ProgramError:
        if is_first:
            _take_away(folder)
        raise
    return folder


def plan_shards(
    state: ProgramState, parts: Mapping[str, list[FilePart]], dtype: torch.dtype | None, max_shard_bytes: int
) -> list[WeightFile]:
    """Files of at most so many bytes, or of one tensor that is larger; the tensors in the model's order."""
    _check_asked(dtype, max_shard_bytes)
    _check_each_once(parts)
    keys: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in wanted_shapes(state):
        own = state.dtypes[name]
        used = dtype if dtype is not None and own.is_floating_point else own
        if used not in DTYPE_NAMES:
            raise ProgramError(f"expected a dtype that safetensors files hold, found {used} of {name}; give dtype=")
        for part in parts[name]:
            if keys.setdefault(part.key, (part.shape, used)) != (part.shape, used):
                raise ProgramError(f"expected one dtype for all that goes to {part.key}, found another of {name}")
    shards = [WeightFile()]
    filled = 0
    for key, (shape, used) in keys.items():
        size = math.prod(shape) * used.itemsize
        if shards[-1].tensors and filled + size > max_shard_bytes:
            shards.append(WeightFile())
            filled = 0
        shards[-1].tensors[key] = WrittenTensor(shape, used, 0)
        filled += size
    return [_placed(shard, number, len(shards)) for number, shard in enumerate(shards, 1)]


def _check_asked(dtype: object, max_shard_bytes: int) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ProgramError(
            f"expected dtype as a floating-point type of torch's, such as torch.bfloat16, found {dtype!r}; weights "
            "would not be the same in another"
        )
    if max_shard_bytes < 1:
        raise ProgramError(f"expected max_shard_bytes from 1 up, found {max_shard_bytes}")


def _check_each_once(parts: Mapping[str, list[FilePart]]) -> None:
    """Raises ProgramError where a tensor of the files would come from more, or less, than its elements."""
    found: dict[str, int] = {}
    sources: dict[str, list[str]] = {}
    shapes = {}
    for name, own in parts.items():
        for part in own:
            found[part.key] = found.get(part.key, 0) + math.prod(s.stop - s.start for s in part.target)
            sources.setdefault(part.key, []).append(name)
            shapes[part.key] = part.shape
    for key, count in found.items():
        if count != math.prod(shapes[key]):
            raise ProgramError(
                f"expected one place in the files for each tensor, found {', '.join(sources[key][:5])} in {key} "
                f"{shapes[key]}; rename= has to tell them apart"
            )


def _placed(shard: WeightFile, number: int, count: int) -> WeightFile:
    """With a name, and places for the tensors: the widest dtypes first, so that each is aligned."""
    placed = WeightFile("model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors")
    start = 0
    for key, item in sorted(shard.tensors.items(), key=lambda pair: -pair[1].dtype.itemsize):
        placed.tensors[key] = WrittenTensor(item.shape, item.dtype, start)
        start += item.num_bytes
    return placed


def _begin(folder: Path, shards: list[WeightFile]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = [name for name in ("model.safetensors", f"model{INDEX_END}") if (folder / name).exists()]
        if there:
            raise ProgramError(
                f"expected a folder without weights, found {there[0]} in {folder}; give another folder, or remove them"
            )
        _take_away(folder)  # of a save that was interrupted
        for shard in shards:
            with open(folder / (shard.name + PART_END), "wb") as file:
                head = shard.header()
                file.write(head)
                file.truncate(len(head) + shard.num_bytes)
    except OSError as error:
        raise ProgramError(f"expected to write weights to {folder}, found {error}") from None


def _take_away(folder: Path) -> None:
    for leftover in folder.glob(f"model*.safetensors{PART_END}"):
        leftover.unlink()


@torch.no_grad()
def _write_own(state: ProgramState, folder: Path, shards: list[WeightFile], parts: Mapping[str, list[FilePart]]) -> int:
    """Writes what this rank speaks for, and returns the number of its bytes."""
    where = {key: shard for shard in shards for key in shard.tensors}
    shapes = wanted_shapes(state)
    open_files: dict[str, int] = {}
    total = 0
    try:
        for own in own_slices(state):
            if not own.is_first or own.name not in shapes:
                continue
            for part in parts[own.name]:
                shard = where[part.key]
                if shard.name not in open_files:
                    open_files[shard.name] = os.open(folder / (shard.name + PART_END), os.O_WRONLY)
                total += _write_part(open_files[shard.name], shard, part, own)
        for file in open_files.values():
            os.fsync(file)
    except OSError as error:
        raise ProgramError(f"expected to write weights to {folder}, found {error}") from None
    finally:
        for file in open_files.values():
            os.close(file)
    return total


def _write_part(file: int, shard: WeightFile, part: FilePart, own: OwnSlice) -> int:
    both = overlap(own.region, part.target)
    item, begin = shard.tensors[part.key], len(shard.header())
    total = 0
    for region in pieces(both, item.dtype.itemsize) if both is not None else ():
        values = own.values[inside(region, own.region)] if region else own.values
        there = part.file_region(region)
        flat = values.to(item.dtype).cpu().reshape([s.stop - s.start for s in there])
        for spot, rows in _in_file_order(there, flat, part.paired):
            total += _write_region(file, begin + item.start, item, spot, rows)
    return total


def _in_file_order(there: Region, values: Tensor, paired: int) -> Iterator[tuple[Region, Tensor]]:
    """The region as it is; row by row where the file has rows in another order."""
    if not paired:
        yield there, values
        return
    order = row_order(paired).tolist()
    for index, row in enumerate(values, there[0].start):
        place = index - index % len(order) + order[index % len(order)]
        yield (slice(place, place + 1), *there[1:]), row.unsqueeze(0)


def _write_region(file: int, begin: int, item: WrittenTensor, region: Region, values: Tensor) -> int:
    """Writes each run of elements that lie one after the other in the file."""
    run, depth = 1, len(region)
    while depth:  # whole dims at the end, and the range of the one before them, are one run
        depth -= 1
        run *= region[depth].stop - region[depth].start
        if run < math.prod(item.shape[depth:]):
            break
    lengths = [s.stop - s.start for s in region[:depth]]
    data = memoryview(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    size = run * item.dtype.itemsize
    for count in range(math.prod(lengths)):
        index, rest = [0] * len(region), count
        for dim in reversed(range(depth)):
            rest, index[dim] = divmod(rest, lengths[dim])
        position = 0
        for dim, spot in enumerate(region):
            position = position * item.shape[dim] + spot.start + index[dim]
        _write_all(file, data[count * size : (count + 1) * size], begin + position * item.dtype.itemsize)
    return len(data)


def _write_all(file: int, data: memoryview, position: int) -> None:
    while data:
        done = os.pwrite(file, data, position)
        data, position = data[done:], position + done


def _check_whole(written: int, shards: list[WeightFile]) -> None:
    expected = sum(shard.num_bytes for shard in shards)
    if written != expected:
        raise ProgramError(f"expected to write {expected} bytes of weights, each once, found {written} written")


def _publish(folder: Path, shards: list[WeightFile]) -> None:
    try:
        for shard in shards:
            os.replace(folder / (shard.name + PART_END), folder / shard.name)
        if len(shards) > 1:
            total = sum(shard.num_bytes for shard in shards)
            files = {key: shard.name for shard in shards for key in shard.tensors}
            index = folder / f"model{INDEX_END}"
            part = index.with_name(index.name + PART_END)
            text = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
            part.write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
            os.replace(part, index)
    except OSError as error:
        raise ProgramError(f"expected to write weights to {folder}, found {error}") from None
