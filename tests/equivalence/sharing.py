"""A job for ranks that share a batch: a step of which each is given its own rows alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.program import load_source


def loss_of_own_rows(
    rank: int, world: int, source: str, state: Any, batch: Mapping[str, Tensor], count: int, shares: tuple[int, ...]
) -> float:
    """Of a step in which this rank is given its rows of each microbatch, and no others."""
    from autopar import runtime as rt

    def own(x: Tensor) -> Tensor:
        unit = len(x) // count // sum(shares)
        return torch.cat([part.split([unit * share for share in shares])[rank] for part in x.chunk(count)])

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    return float(built.train_step(**{name: own(x) for name, x in batch.items()}, local=True))
