"""Batches of several numbers of rows under one plan: short ones filled up, others as shapes of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from autopar.adapters.building import WantedPlan
from autopar.adapters.samples import num_rows, with_rows
from autopar.errors import PlanError

_IGNORED = {"labels": -100}
"""What models of transformers leave out of their losses."""


def in_rows(
    asked: WantedPlan, model: nn.Module, inputs: Mapping[str, Any], rows: Sequence[int], shapes: Sequence[Any]
) -> tuple[str, str]:
    """Source and plan of a program for `inputs`, and for these with other numbers of rows.

    Fewer rows are filled up with such as labels leave out, where that computes the same; else each number is a shape,
    for which the plan must hold. Raises PlanError where neither can be.
    """
    more = [with_rows(inputs, count) for count in rows if count > num_rows(inputs)]
    fewer = [with_rows(inputs, count) for count in rows if count < num_rows(inputs)]
    if not fewer or "labels" not in inputs:
        return asked.planned(model, inputs, [*more, *fewer, *shapes])
    try:
        return asked.planned(model, inputs, [*more, *shapes], _IGNORED)
    except PlanError as error:
        return _by_shape(asked, model, inputs, [*more, *fewer, *shapes], error)


def _by_shape(
    asked: WantedPlan, model: nn.Module, inputs: Mapping[str, Any], shapes: Sequence[Any], not_filled: PlanError
) -> tuple[str, str]:
    try:
        return asked.planned(model, inputs, shapes)
    except PlanError as error:
        raise PlanError(
            f"expected to run the short last batch too, found that it can be neither filled up ({not_filled}) nor run "
            f"by itself ({error}). Leave it out (dataloader_drop_last=True), or take a batch that divides the data"
        ) from error
