"""Reads what checkpoints hold as pickles, and nothing else: a folder from somebody else runs no code.

`.metadata` is torch.distributed.checkpoint's own pickle; other objects (schedules, step counts) are read as
`torch.load(weights_only=True)` does.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from autopar.runtime.errors import ProgramError

_CHECKPOINT = "torch.distributed.checkpoint"
_KNOWN = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    *(
        (f"{_CHECKPOINT}.metadata", name)
        for name in (
            "_MEM_FORMAT_ENCODING",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _KNOWN or isinstance(found, torch.dtype):
            return super().find_class(module, name)
        raise ProgramError(f"expected a checkpoint's own metadata, found {module}.{name}")


def read_metadata(file: IO[bytes], path: Path) -> Metadata:
    """A checkpoint's metadata. Raises ProgramError where the file holds, or would call, anything else."""
    try:
        found = _Unpickler(file).load()
    except ProgramError as error:
        raise ProgramError(f"{path}: {error}; it was not written by save_checkpoint, and is not read") from None
    except Exception as error:  # pickle raises whatever the bytes lead to
        raise ProgramError(f"{path}: expected a checkpoint's metadata, found {error}") from error
    if not isinstance(found, Metadata):
        raise ProgramError(f"{path}: expected a checkpoint's metadata, found {type(found).__name__}")
    return found


def unpickled(data: BytesIO, name: str) -> Any:
    """Plain data and tensors. Raises ProgramError for anything else."""
    try:
        return torch.load(data, weights_only=True)
    except pickle.UnpicklingError as error:
        text = " ".join(str(error).split())
        raise ProgramError(
            f"expected plain data (numbers, strings, tensors, lists, dicts) in the state of {name}, found something "
            "that a checkpoint does not keep, since reading it could run code. Let its state_dict return plain data, "
            f"or name its class in torch.serialization.add_safe_globals before saving and loading. "
            f"torch says: {text[:300]}"
        ) from error


class SafeReader(FileSystemReader):
    """torch's reader of a folder, which unpickles with care."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata."""
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            found = read_metadata(file, path)
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found
