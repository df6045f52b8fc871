"""Which cached keys a query sees, by its position: of layers of full and of sliding attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.errors import PlanError

FULL, SLIDING = "full_attention", "sliding_attention"


def masks_of(config: Any, positions: Tensor, length: int, dtype: torch.dtype) -> Any:
    """Of each kind of layer (batch, 1, steps, length), or the one of all: true, or 0, for the keys up to a query's own
    position, of sliding layers for the last `config.sliding_window` of them.

    positions: (batch, steps). dtype: the model's, of masks that are added to scores.
    """
    keys = torch.arange(length, device=positions.device)[None, None, None]
    queries = positions[:, None, :, None]
    seen, kinds = {FULL: keys <= queries}, kinds_of(config)
    if SLIDING in kinds:
        seen[SLIDING] = seen[FULL] & (keys > queries - config.sliding_window)
    if config._attn_implementation == "eager":  # which adds its mask to scores
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=positions.device)
        seen = {kind: torch.where(mask, torch.zeros_like(hidden), hidden) for kind, mask in seen.items()}
    wanted = {kind: seen[kind] for kind in dict.fromkeys(kinds)}
    return wanted if len(wanted) > 1 else next(iter(wanted.values()))


def kinds_of(config: Any) -> tuple[str, ...]:
    """Of each layer, which keys its queries see. Raises PlanError for another kind than all before, or a window."""
    found = getattr(config, "layer_types", None)
    if found is None:
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        found = [FULL if window is None else SLIDING] * config.num_hidden_layers
    own = set(getattr(config, "attention_layers", ())) - {"global"}  # GPT-Neo's, which see less than their masks say
    others = sorted({*found, *own} - {FULL, SLIDING})
    if others:
        raise PlanError(
            f"expected layers of full or sliding attention, found {', '.join(others)}, whose state is no cache of keys "
            "and values by position; serve the model by its own framework"
        )
    return tuple(found)
