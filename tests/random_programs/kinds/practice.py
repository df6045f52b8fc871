"""Whole models as they are written in practice (`constructs.practice`), under random plans."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tests.constructs import practice
from tests.constructs.models import loaded
from tests.constructs.written import Written
from tests.random_programs import cases
from tests.random_programs.check import Subject

MODELS = {model.what: model for model in practice.CASES if "float()" not in model.source}
"""Those in float64, which is compared to 1e-9."""


class PracticeSubject(Subject):
    """One of them, with its batch; sizes are its own."""

    @cached_property
    def module(self) -> Any:
        """Made in float64."""
        written = Written("", self.program.source)
        return loaded(written.name, written.source)

    @cached_property
    def model(self) -> nn.Module:
        """With the weights of seed 0."""
        torch.set_default_dtype(torch.float64)
        try:
            torch.manual_seed(0)
            made: nn.Module = self.module.Model()
            return made
        finally:
            torch.set_default_dtype(torch.float32)

    @property
    def batch(self) -> dict[str, Any]:  # type: ignore[override]
        """Anew at each call: some models write into it."""
        return copy.deepcopy(self._batch)

    @cached_property
    def _batch(self) -> dict[str, Any]:
        torch.set_default_dtype(torch.float64)
        try:
            found: dict[str, Any] = self.module.batch()
            return found
        finally:
            torch.set_default_dtype(torch.float32)

    def loss_of(self, found: Any) -> Tensor:
        """Of a dict, what is called so."""
        loss: Tensor = found["loss"] if isinstance(found, dict) else super().loss_of(found)
        return loss


def practice_subject(model: Written, seed: int) -> PracticeSubject:
    """seed: of how keys are gathered, and whether gradients are added up (`check.Subject`)."""
    return PracticeSubject(cases.Written(model.source, (), False, seed))  # type: ignore[arg-type]
