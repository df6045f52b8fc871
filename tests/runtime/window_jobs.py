"""Attention over windows on the ranks of a test: what each gives, and what it sends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.lowering.halo import chunk
from autopar.runtime.lowering.window import window_attention
from autopar.runtime.mesh import Axis


def of_part(rank: int, world: int, window: int, ring: bool, whole: dict[str, Tensor]) -> dict[str, Any]:
    """The result and the gradients of this rank's part of the sequence, with the bytes that it sent."""
    axis, length = Axis("cp", world, rank, torch.distributed.group.WORLD, True), whole["query"].size(2)
    rows = slice(*chunk(length, world, rank))
    sides = [whole[name][:, :, rows].clone().requires_grad_() for name in ("query", "key", "value")]
    sinks = whole["sinks"].clone().requires_grad_() if "sinks" in whole else None
    learned = sides if sinks is None else [*sides, sinks]
    documents = whole.get("documents")
    with comm.count_bytes() as counts:
        made = window_attention(*sides, window, None, length, axis, documents=documents, sinks=sinks, ring=ring)
        forward = sum(counts.values())
        gradients = torch.autograd.grad(made, learned, whole["gradient"][:, :, rows])
    return {"made": made.detach(), "gradients": gradients, "bytes": (forward, sum(counts.values()) - forward)}
