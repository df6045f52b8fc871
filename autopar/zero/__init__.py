"""How a plan meets its memory: how parameters are stored (ZeRO 0 to 3), and which blocks are computed again."""

from autopar.zero.copied import copied_blocks
from autopar.zero.in_bits import (
    KeptIn,
    in_bits,
    in_eight_bits,
    rungs_in_bits,
    rungs_in_eight_bits,
    that_run,
    with_in_bits,
)
from autopar.zero.recomputation import (
    KINDS,
    KINDS_TEXT,
    Groups,
    Modules,
    Recomputable,
    joined,
    ladders,
    pinned_modules,
    priced_levels,
    recomputable,
)
from autopar.zero.selective import selective_levels
from autopar.zero.storage import storage_options

__all__ = [
    "KINDS",
    "KINDS_TEXT",
    "Groups",
    "KeptIn",
    "Modules",
    "Recomputable",
    "copied_blocks",
    "in_bits",
    "in_eight_bits",
    "joined",
    "ladders",
    "pinned_modules",
    "priced_levels",
    "recomputable",
    "rungs_in_bits",
    "rungs_in_eight_bits",
    "selective_levels",
    "storage_options",
    "that_run",
    "with_in_bits",
]
