"""All processes that run, whatever part they have in the program: what they tell each other, and send, over gloo.

It is a group beside torch's own, which is the program's: processes that no program has room for are in it too. Tensors
are those of the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined] # torch lists no exports

from autopar.runtime.errors import CollectiveError

_TAG = 7


class HostWire:
    """rank, size: of this process among all, which share the store; None for one alone."""

    def __init__(self, store: Store | None, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._group: Any = None
        if store is not None:
            self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))

    def gather(self, value: Any) -> list[Any]:
        """What each process has, on all of them: plain data. Raises CollectiveError."""
        if self._group is None:
            return [value]
        own = _written(value)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._together(self._group.allgather([lengths], [torch.tensor([own.numel()])]))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        every = [torch.empty_like(padded) for _ in range(self.size)]
        self._together(self._group.allgather([every], [padded]))
        return [_read(one[: int(length)]) for one, length in zip(every, lengths, strict=True)]

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> dict[int, Tensor]:
        """Sends bytes to some, and receives so many from others: flat uint8 tensors. Both ends must know of it."""
        found = {source: torch.empty(count, dtype=torch.uint8) for source, count in incoming.items() if count}
        if self._group is None:
            return found
        works = [self._group.recv([into], source, _TAG) for source, into in sorted(found.items())]
        works += [self._group.send([own], to, _TAG) for to, own in sorted(outgoing.items()) if own.numel()]
        for work in works:
            self._together(work)
        return found

    def _together(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            text = " ".join(str(error).split())[:300]
            raise CollectiveError(
                f"process {self.rank} of {self.size}: what processes tell each other did not come to its end. Most "
                f"likely one of them ended, or did not answer within {self._timeout_s:g} s; torchrun starts them "
                f"anew. torch says: {text}"
            ) from error


def _written(value: Any) -> Tensor:
    data = BytesIO()
    torch.save(value, data)
    return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)


def _read(data: Tensor) -> Any:
    return torch.load(BytesIO(data.numpy().tobytes()), weights_only=True)
