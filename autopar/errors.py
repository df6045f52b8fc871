"""The errors that autopar raises. Each says what was expected, what was found, where, and the remedy."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of every error that autopar raises for its users."""


class TraceError(AutoparError, ValueError):
    """The model cannot be captured as one graph; names the user's source line."""


class TraceFileError(AutoparError, ValueError):
    """A profiler's trace cannot be read, or is that of another program than the plan's."""


class RuleError(AutoparError, ValueError):
    """A sharding rule is ill-formed, or does not fit the operator it is registered for."""


class PlacementError(AutoparError, ValueError):
    """A placement or redistribution is not well typed; names the node and its source line."""


class PlanError(AutoparError, ValueError):
    """A plan is malformed, or belongs to another model, mesh or version; names the difference."""


class MeshError(AutoparError, ValueError):
    """A mesh cannot be built, or does not match the processes that run."""


class ProfileError(AutoparError, ValueError):
    """A cost profile is unknown or malformed."""


class InfeasibleError(AutoparError, ValueError):
    """No plan satisfies the constraints; for memory, names the smallest limit that can be met.

    smallest_bytes: that limit, in bytes a device; None when memory is not the reason.
    """

    def __init__(self, message: str, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class InternalError(AutoparError, RuntimeError):
    """autopar itself tripped: says what it was doing, at which node and source line, and what it tripped over."""
