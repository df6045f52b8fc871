"""Cuts a chain of layers into stages on submeshes (Alpa's inter-operator pass)."""

from autopar.interop.dp import ChosenStage, StageChoice, StageKind, StageSearch, best_stages
from autopar.interop.schedules import in_flight

__all__ = ["ChosenStage", "StageChoice", "StageKind", "StageSearch", "best_stages", "in_flight"]
