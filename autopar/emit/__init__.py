"""Writes a graph and its plan as one readable PyTorch program, and the script that trains it."""

from autopar.emit.program import emit
from autopar.emit.training import script

__all__ = ["emit", "script"]
