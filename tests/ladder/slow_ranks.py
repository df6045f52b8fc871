"""What ranks run that take a stated while for each row."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from autopar import runtime as rt
from autopar.program import load_source


def own_seconds(
    rank: int, world: int, source: str, rows: Sequence[int], row_s: Sequence[float], steps: int
) -> tuple[list[list[float]], list[float]]:  # fmt: skip
    """By step: the own seconds of each rank, and those of the step, where rank r takes `row_s[r]` for each of its rows
    beside what it computes."""
    built = rt.build(load_source(source).Program)
    for parameter in built.parameters():
        torch.nn.init.constant_(parameter, 0.02)  # equal on all ranks; of the numbers nothing is asked
    (spec,) = {spec.shape: spec for spec in built.programs[0].INPUTS if spec.dtype.is_floating_point}.values()
    batch = {
        one.name: torch.zeros(one.shape, dtype=one.dtype) if one.name != spec.name else torch.ones(one.shape)
        for one in built.programs[0].INPUTS
    }
    own, found, spent = rt.OwnTime(built), list[list[float]](), list[float]()
    for _ in range(steps):
        own.restart()
        began = time.perf_counter()
        time.sleep(rows[rank] * row_s[rank])
        built.train_step(**batch)
        spent.append(time.perf_counter() - began)
        every = own.by_rank()
        assert every is not None
        found.append(every)
    own.end()
    return found, spent
