"""Loads a rank's slices from files: everything is checked on all ranks before anything is changed on one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from autopar.runtime import agreement
from autopar.runtime.errors import ProgramError
from autopar.runtime.state import ProgramState
from autopar.runtime.weights.files import DTYPE_NAMES, TensorFiles, pieces
from autopar.runtime.weights.naming import Layout, Resolved, resolve
from autopar.runtime.weights.own import OwnSlice, own_slices
from autopar.runtime.weights.parts import FilePart, Region, inside, overlap, row_order


@dataclass(slots=True)
class LoadedWeights:
    """What was loaded, and what was not as the program has it. `print` shows it in a line or a few."""

    path: Path
    num_tensors: int = 0
    read_bytes: int = 0  # on this rank
    converted: Counter[tuple[str, str]] = field(default_factory=Counter)  # tensors, by dtype in the files and here
    missing: list[str] = field(default_factory=list)  # left as they were
    ignored: list[str] = field(default_factory=list)  # in the files alone

    def __str__(self) -> str:
        lines = [f"loaded {self.num_tensors} tensors from {self.path}"]
        lines += [f"{count} of them converted from {a} to {b}" for (a, b), count in sorted(self.converted.items())]
        lines += [f"not in the files, left as they were: {_few(self.missing)}"] if self.missing else []
        lines += [f"in the files alone: {_few(self.ignored)}"] if self.ignored else []
        return "; ".join(lines)


def load(
    state: ProgramState, num_ranks: int, path: str | Path, layout: Layout, *, strict: bool, convert: bool
) -> tuple[LoadedWeights, dict[str, list[FilePart]]]:
    """Loads the files' tensors, and returns what happened and where each tensor of the model lies in the files.

    Raises ProgramError on all ranks, with nothing changed, for tensors that are missing, unexpected (unless not
    `strict`), of another shape, or of a dtype that does not hold the files' values (unless `convert`). Where reading
    fails later, as by a disk, every weight is NaN on all ranks, as before anything is loaded.
    """
    files, found = agreement.together(lambda: _checked(state, Path(path), layout, strict, convert), num_ranks)
    told = LoadedWeights(Path(path), len(found.parts), missing=found.missing, ignored=found.unexpected)
    told.converted = _conversions(state, files, found)
    try:
        told.read_bytes = agreement.together(lambda: _read_all(state, files, found), num_ranks)
    except ProgramError:
        unset(state)
        raise
    finally:
        files.close()
    return told, found.parts


def _checked(
    state: ProgramState, path: Path, layout: Layout, strict: bool, convert: bool
) -> tuple[TensorFiles, Resolved]:
    layout.check()
    files = TensorFiles(path)
    if layout.head_dim is None:
        layout = replace(layout, head_dim=head_dim_beside(files.folder))
    shapes = {name: tensor.shape for name, tensor in files.tensors.items()}
    found = resolve(wanted_shapes(state), state.tied, shapes, layout)
    stated = state.initial()  # by the program: parameters of a loss, which are none of the model's
    found.missing = [name for name in found.missing if name not in stated]
    problems = list(_problems(state, files, found, strict, convert))
    if problems:
        raise ProgramError(f"the weights in {path} do not belong to this program; {'; '.join(problems)}")
    for name, parts in found.parts.items():  # what the files say of it: how many experts they stack
        found.parts[name] = [replace(part, shape=files.tensors[part.key].shape) for part in parts]
    _check_copies(state, files, found)
    return files, found


def _problems(
    state: ProgramState, files: TensorFiles, found: Resolved, strict: bool, convert: bool
) -> Iterator[str]:  # fmt: skip
    if found.missing and (strict or not found.parts):
        hint = ' (they have Meta\'s names: layout="meta")' if "tok_embeddings.weight" in files.tensors else ""
        yield f"missing in the files: {_few(found.missing)}{hint}; rename= says how the files call them, strict=False "\
            "leaves them as they are"  # fmt: skip
    if found.unexpected and strict:
        yield f"unexpected in the files: {_few(found.unexpected)}; strict=False leaves them"
    wrong = [
        f"{name}: expected {part.shape}, found {files.tensors[part.key].shape} of {part.key}"
        for name, parts in found.parts.items()
        for part in parts
        if not _is_like(part.shape, files.tensors[part.key].shape)
    ]
    if wrong:
        yield f"other shape: {_few(wrong)}; is the config the same that the model was built with?"
    unheld = [] if convert else [
        f"{name}: expected {_plain(here)}, found {_plain(there)}"
        for name, here, there in _dtypes(state, files, found)
        if not holds(here, there)
    ]  # fmt: skip
    if unheld:
        yield f"other dtype: {_few(unheld)}; convert=True rounds them, or plan with the files' dtype"


def _is_like(expected: Iterable[int], found: tuple[int, ...]) -> bool:
    sizes = tuple(expected)
    return len(sizes) == len(found) and all(size in (-1, there) for size, there in zip(sizes, found, strict=True))


def wanted_shapes(state: ProgramState) -> dict[str, tuple[int, ...]]:
    """The model's parameters and persistent buffers, on any rank."""
    return {name: tuple(shape) for name, shape in state.packings.shapes.items() if name in state.dtypes}


def _dtypes(state: ProgramState, files: TensorFiles, found: Resolved) -> Iterator[tuple[str, torch.dtype, torch.dtype]]:
    """Each tensor's dtype here and in the files."""
    here = state.dtypes
    for name, parts in found.parts.items():
        for there in {files.tensors[part.key].dtype for part in parts}:
            yield name, here[name], there


def _conversions(state: ProgramState, files: TensorFiles, found: Resolved) -> Counter[tuple[str, str]]:
    pairs = ((_plain(there), _plain(here)) for _, here, there in _dtypes(state, files, found) if here != there)
    return Counter(pairs)


def holds(wider: torch.dtype, other: torch.dtype) -> bool:
    """Whether each value of the other dtype is one of this, so that a conversion changes none."""
    if wider == other or other == torch.bool:
        return True
    if wider.is_complex != other.is_complex or wider.is_floating_point != other.is_floating_point:
        return False
    if wider.is_floating_point:
        a, b = torch.finfo(wider), torch.finfo(other)
        return a.eps <= b.eps and a.max >= b.max and a.tiny * a.eps <= b.tiny * b.eps
    if wider.is_complex:
        return wider.itemsize >= other.itemsize
    return torch.iinfo(wider).max >= torch.iinfo(other).max and torch.iinfo(wider).min <= torch.iinfo(other).min


def _check_copies(state: ProgramState, files: TensorFiles, found: Resolved) -> None:
    """A tied tensor that the files have under both names must be the same in both."""
    for own in own_slices(state):
        for part, other in zip(found.parts.get(own.name, ()), found.copies.get(own.name, ()), strict=False):
            if part.key == other.key:
                continue
            for region in _regions(own, part):
                one, two = (read_region(files, p, region) for p in (part, other))
                if not torch.equal(one, two):
                    raise ProgramError(
                        f"expected {part.key} and {other.key} of {files.path} to be equal, since the model ties them, "
                        "found other values; plan with a model that does not (tie_word_embeddings=False)"
                    )


@torch.no_grad()
def _read_all(state: ProgramState, files: TensorFiles, found: Resolved) -> int:
    """Copies each slice to its place. Returns the bytes that were read."""
    total = 0
    stated = {name: value for name, value in state.initial().items() if name not in found.parts}
    for own in own_slices(state):
        if own.name in stated:
            own.values.copy_(stated[own.name][own.region])
        for part in found.parts.get(own.name, ()):
            for region in _regions(own, part):
                values = read_region(files, part, region)
                total += values.nbytes
                place = own.values[inside(region, own.region)] if region else own.values
                place.copy_(values.reshape(place.shape))
    return total


def _regions(own: OwnSlice, part: FilePart) -> Iterator[Region]:
    """What this rank wants of a part, in pieces."""
    both = overlap(own.region, part.target)
    if both is not None:
        yield from pieces(both, own.values.element_size())


def read_region(files: TensorFiles, part: FilePart, region: Region) -> Tensor:
    """The elements at a region of the model's tensor. Rows that change places within a head are read by whole heads."""
    there = part.file_region(region)
    try:
        if part.head == 1:
            return files.read(part.key, there)
        rows = there[0]
        heads = slice(rows.start // part.head * part.head, -(-rows.stop // part.head) * part.head)
        values = files.read(part.key, (heads, *there[1:]))
        order = row_order(part.paired)
        ordered = values.reshape(-1, part.head, *values.shape[1:])[:, order].reshape(values.shape)
        return ordered[rows.start - heads.start : rows.stop - heads.start]
    except (OSError, RuntimeError) as error:
        raise ProgramError(f"expected to read {part.key} of {files.path}, found {error!r}; fetch it again") from None


@torch.no_grad()
def unset(state: ProgramState) -> None:
    """Makes all weights NaN, as before anything is loaded."""
    for stored in state.persistent().values():
        if stored.local.is_floating_point() or stored.local.is_complex():
            stored.local.fill_(float("nan"))


def head_dim_beside(folder: Path) -> int | None:
    """The length of a head, as a config beside the weights tells it: Hugging Face's, or Meta's params."""
    for name in ("config.json", "params.json"):
        try:
            told = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(told, dict):
            told = told.get("text_config", told)
            if isinstance(told.get("head_dim"), int):
                return int(told["head_dim"])
            width, heads = (
                told.get("hidden_size", told.get("dim")),
                told.get("num_attention_heads", told.get("n_heads")),
            )
            if isinstance(width, int) and isinstance(heads, int) and heads:
                return width // heads
    return None


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.") if dtype in DTYPE_NAMES else str(dtype)


def _few(items: list[str]) -> str:
    return ", ".join(items[:8]) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
