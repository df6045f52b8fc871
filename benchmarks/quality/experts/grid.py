"""The grid: what people write down of a configuration, and all of them that a row's devices and batch allow.

dp × tp × pp = devices, tp 1 to 16, pp 1 to 32 in powers of two; microbatches: every number that divides a batch
among dp; ZeRO 0 to 3 where dp > 1, among all of dp or, where dp reaches beyond a node, among those of a node (hsdp);
sequence parallel where tp > 1; recomputation of nothing, of what is cheap, of attention, of all; schedules with 1 chunk
a submesh, or with 2, 4 and 8. Layers need not divide: they are shared out as `template_plan` does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from autopar.ir.schedule import PLAIN, SCHEDULES
from autopar.zero import KINDS

TENSOR = (1, 2, 4, 8, 16)
PIPELINE = (1, 2, 4, 8, 16, 32)
CHUNKS = (2, 4, 8)


@dataclass(frozen=True)
class Placed:
    """What placements depend on."""

    dp: int = 1
    tp: int = 1
    microbatches: int = 1
    zero: int = 0
    hsdp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    context: str = "gather"
    ep: int = 1
    exchange: str = "flat"
    exchange_chunks: int = 1


@dataclass(frozen=True)
class Expert:
    """A configuration: placements, and how stages run them."""

    placed: Placed
    pp: int = 1
    schedule: str = PLAIN
    chunks: int = 1
    recompute: str = "none"

    def __str__(self) -> str:
        own, given = (
            {f.name: getattr(what, f.name) for f in fields(what) if getattr(what, f.name) != f.default}
            for what in (self, self.placed)
        )
        own.pop("placed")
        return ", ".join(f"{name}={value}" for name, value in (given | own).items())

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks


def placements_of(devices: int, sequences: int, pp: int, per_node: int = 8) -> Iterator[Placed]:
    """All that stages of so many of the devices may have."""
    for tp in TENSOR:
        dp = devices // pp // tp
        if dp < 1 or sequences % dp:
            continue
        counts = [count for count in range(1, sequences // dp + 1) if sequences // dp % count == 0]
        for count in counts:
            inner = per_node // tp
            for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                for hsdp in (1, inner) if zero and 1 < inner < dp and dp % inner == 0 else (1,):
                    for split in (False, True) if tp > 1 else (False,):
                        yield Placed(dp, tp, count, zero, hsdp, split)


def ways_of(placed: Placed, pp: int, layers: int, schedules: Sequence[str]) -> Iterator[Expert]:
    """How stages may run them."""
    for name in schedules if pp > 1 else (PLAIN,):
        row = SCHEDULES[name]
        if pp > 1 and not row.takes(placed.microbatches, pp):
            continue
        for chunks in CHUNKS if row.has_chunks and pp > 1 else (1,):
            if pp * chunks > layers:
                continue
            for again in KINDS if not (row.splits_backward and pp > 1) else KINDS[:1]:
                yield Expert(placed, pp, name, chunks, again)
