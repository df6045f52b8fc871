"""What the user says of where checkpoints go, and of what starting anew takes."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import PlanError


@dataclass(frozen=True)
class StateStore:
    """Where checkpoints go: bytes a second that a node writes and reads, and what starting anew takes besides
    (processes, communicators, the first step's kernels)."""

    write_bytes_s: float = 2e9
    read_bytes_s: float = 4e9
    restart_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf") or (name != "restart_s" and value == 0):
                raise PlanError(f"expected {name} as a number above 0, found {value!r}")
