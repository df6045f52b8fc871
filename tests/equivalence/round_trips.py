"""What ranks make of a state dict: a job of the pool."""

from __future__ import annotations

from typing import Any

import torch

from autopar.program import load_source


def round_trip(rank: int, world: int, source: str, state: dict[str, torch.Tensor]) -> Any:
    """What the rank makes of a state dict, and the experts that it has."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.load_full_state_dict(state)
    shards = {name: p.to_local().detach() for name, p in built.named_parameters() if "by_load" in name}
    return built.full_state_dict(), shards
