"""The tensors of safetensors files, by name: a file, several with an index, or the folder that holds either."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.errors import ProgramError

READ_BYTES = 4 << 20
"""A slice is read in pieces of at most this size, so that what is read ahead of its place is small."""
MAPPED_BYTES = 8 << 20
"""After so many bytes a file is opened anew: pages of a mapped file that were read count as the process's memory."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
"""What files call a dtype."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

INDEX_END = ".safetensors.index.json"
PREFERRED = "model.safetensors"
"""Where a folder holds several sets of weights, such as Mistral's, `transformers` reads this one."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file, as its header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorFiles:
    """The tensors below a path, of which slices are read. Raises ProgramError for what is no whole set of weights."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tensors: dict[str, FileTensor] = {}
        self._open: tuple[Path, Any] | None = None
        self._mapped = 0
        main = _main_file(self.path)
        listed = _listed(main) if main.name.endswith(INDEX_END) else {main: None}
        for file, names in listed.items():
            self.tensors |= self._described(file, names)

    @property
    def folder(self) -> Path:
        """Where the files lie, and such as a config beside them."""
        return self.path if self.path.is_dir() else self.path.parent

    def close(self) -> None:
        """Lets go of the file that was read last."""
        self._open = None

    def read(self, name: str, region: Sequence[slice]) -> Tensor:
        """A slice of a tensor, as a tensor of its own."""
        file = self._file(self.tensors[name].file)
        self._mapped += _bytes_touched(self.tensors[name], region)
        found = file.get_slice(name)[tuple(region)] if region else file.get_tensor(name)
        assert isinstance(found, Tensor), "asked for as torch's"
        return found

    def _file(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path or self._mapped > MAPPED_BYTES:
            self._open, self._mapped = None, 0
            self._open = path, opened(path)
        return self._open[1]

    def _described(self, path: Path, names: Sequence[str] | None) -> dict[str, FileTensor]:
        file = self._file(path)
        have = list(file.keys())
        lacking = sorted(set(names or ()) - set(have))
        if lacking:
            raise ProgramError(
                f"expected {', '.join(lacking[:5])} in {path}, as the index beside it says, found other tensors; "
                "the file is of another checkpoint: fetch them together again"
            )
        found = {}
        for name in have if names is None else names:
            part = file.get_slice(name)
            dtype = DTYPES.get(part.get_dtype())
            if dtype is None:
                known = ", ".join(sorted(DTYPES))
                raise ProgramError(f"{path}: expected a dtype among {known}, found {part.get_dtype()} of {name}")
            found[name] = FileTensor(path, tuple(part.get_shape()), dtype)
        return found


def opened(path: Path) -> Any:
    """A file whose tensors can be read in slices. Raises ProgramError for one that is missing, cut off or no such."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ProgramError(
            "expected the package safetensors, to read and write Hugging Face's files, found none; pip install "
            "safetensors"
        ) from None
    if not path.is_file():
        raise ProgramError(f"expected the file {path}, found none; fetch or write the whole checkpoint again")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ProgramError(
            f"expected a whole safetensors file in {path}, found one that cannot be read ({error}); fetch or write it "
            "again"
        ) from None


def pieces(region: Sequence[slice], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """A region cut along its first dim into pieces of at most READ_BYTES, and at least of one row."""
    if not region:
        yield ()
        return
    first, *rest = region
    row_bytes = itemsize * math.prod(s.stop - s.start for s in rest)
    rows = max(1, READ_BYTES // max(row_bytes, 1))
    for start in range(first.start, first.stop, rows):
        yield (slice(start, min(start + rows, first.stop)), *rest)


def _bytes_touched(tensor: FileTensor, region: Sequence[slice]) -> int:
    """Of the mapped file: rows are read whole, pages being as they are."""
    rows = region[0].stop - region[0].start if region else 1
    return rows * math.prod(tensor.shape[1:]) * tensor.dtype.itemsize


def _main_file(path: Path) -> Path:
    """The file to begin with: the one of all tensors, or the index of several."""
    if path.is_file():
        return path
    found = [item for item in sorted(path.glob("*.safetensors*")) if item.name.endswith((INDEX_END, ".safetensors"))]
    preferred = [item for item in found if item.name in (PREFERRED, PREFERRED.removesuffix(".safetensors") + INDEX_END)]
    indexes = [item for item in found if item.name.endswith(INDEX_END)]
    for choice in (preferred, indexes, found):
        if len(choice) == 1:
            return choice[0]
    what = ", ".join(item.name for item in found[:5]) or ("no such file" if path.is_dir() else "no such folder")
    raise ProgramError(
        f"expected model.safetensors, or model{INDEX_END} with its files, in {path}, found {what}; give the folder "
        "that save_pretrained wrote, or the file or index itself"
    )


def _listed(index: Path) -> dict[Path, list[str]]:
    """The files that an index names, with the tensors in each."""
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in where.items()]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ProgramError(
            f"expected {index} to say in weight_map which file holds each tensor, found {error!r}; fetch it again"
        ) from None
    found: dict[Path, list[str]] = {}
    for name, file in pairs:
        if Path(file).name != file:
            raise ProgramError(f"expected files beside {index}, found {file!r} for {name}")
        found.setdefault(index.parent / file, []).append(name)
    return found
