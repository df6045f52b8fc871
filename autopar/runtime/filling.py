"""Batches of fewer rows than were planned for, filled up with rows that count for nothing (`Program.FILLING`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.declare import Pipeline, Program

Declared = type[Program] | type[Pipeline]


def filled_up(programs: Sequence[Declared], values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The inputs with as many rows as the next larger program takes; None where none does, or they fit one.

    values: by name, None for those that this rank does without. What is filled in is the first program's to say.
    """
    filling = programs[0].FILLING
    if not filling or any(_missing(program, filling, values) == 0 for program in programs):
        return None
    found = [(missing, program) for program in programs if (missing := _missing(program, filling, values)) is not None]
    if not found:
        return None
    missing = min(number for number, _ in found)
    return {name: _filled(x, missing, filling[name]) if name in filling else x for name, x in values.items()}


def _missing(program: Declared, filling: Mapping[str, Any], values: Mapping[str, Any]) -> int | None:
    """How many rows the inputs lack, equally, of those that a program takes; None where they do not go with it."""
    taken = {spec.name: tuple(spec.shape) for spec in program.INPUTS}
    lacking = set()
    for name, x in values.items():
        if not isinstance(x, Tensor):
            continue
        shape, wanted = tuple(x.shape), taken[name]
        if len(shape) != len(wanted) or (name in filling and not shape[:1] > (0,)):
            return None
        if shape[1:] != wanted[1:] or (name not in filling and shape != wanted):
            return None
        lacking |= {wanted[0] - shape[0]} if name in filling else set()
    return lacking.pop() if len(lacking) == 1 and min(lacking) >= 0 else None


def _filled(x: Any, missing: int, fill: float | None) -> Any:
    if not isinstance(x, Tensor):
        return x
    shape = (missing, *x.shape[1:])
    return torch.cat([x, x[:1].expand(shape) if fill is None else x.new_full(shape, fill)])
