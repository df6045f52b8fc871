"""Writes a graph and its plan as one readable PyTorch program."""

from autopar.emit.program import emit

__all__ = ["emit"]
