"""How a plan meets its memory: how parameters are stored (ZeRO 0 to 3), and which blocks are computed again."""

from autopar.zero.copied import copied_blocks
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
    "Modules",
    "Recomputable",
    "copied_blocks",
    "joined",
    "ladders",
    "pinned_modules",
    "priced_levels",
    "recomputable",
    "selective_levels",
    "storage_options",
]
