"""The program for evaluation, of models that do something else in that mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from autopar.adapters.building import WantedPlan
from autopar.adapters.rows import in_rows
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.pipeline import verify


def evaluation_source(
    asked: WantedPlan, model: nn.Module, inputs: dict[str, Any], rows: Sequence[int], shapes: Sequence[Any],
    training: tuple[str, str],
) -> tuple[str, str]:  # fmt: skip
    """Its source, which is the training program's where the model computes the same in both modes; or "", and why.

    training: that program's source, and its plan. Of a template, one is made again for the model in evaluation mode; a
    plan that was found or given is for training.
    """
    source, text = training
    model.eval()
    try:
        if _is_same(Plan.from_json(text), model, inputs):
            return source, ""
        if isinstance(asked.plan, Mapping):
            return in_rows(asked, model, inputs, rows, shapes)[0], ""
    finally:
        model.train()
    return "", (
        "expected a program for evaluation, found a plan for training alone, of a model that computes something else "
        "in evaluation mode (dropout, batch norm). Give arguments of template_plan as plan=, of which one is made for "
        "evaluation too, or evaluate the saved model in one process"
    )


def _is_same(plan: Plan, model: nn.Module, inputs: Any) -> bool:
    """Whether the plan is for this graph."""
    try:
        verify(plan, model, inputs)
    except AutoparError:
        return False
    return True
