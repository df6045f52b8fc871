"""The errors of a running program. They stand alone: the runtime imports torch and nothing of autopar."""

from __future__ import annotations


class ProgramError(ValueError):
    """A program, its inputs or its weights do not fit together; says what was expected and what was found."""


class WorldError(ProgramError):
    """The processes that run are not the mesh that the program was emitted for."""


class CollectiveError(RuntimeError):
    """A collective did not come to its end, as when another rank died or hangs; says which, where, and what to do."""
