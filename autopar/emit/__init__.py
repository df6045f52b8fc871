"""Writes a graph and its plan as one readable PyTorch program, and the script that trains it."""

from autopar.emit.program import emit
from autopar.emit.training import StepFigures, script, script_name

__all__ = ["StepFigures", "emit", "script", "script_name"]
