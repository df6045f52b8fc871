"""An optimizer of a script's own steps the rank's parameters, or nothing is trained and nobody is told."""

from __future__ import annotations

from typing import Any

from autopar.runtime import ProgramError, Rank


def check_optimizer(optimizer: Any, rank: Rank, remedy: str) -> None:
    """Raises ProgramError where an optimizer has parameters that are none of the rank's: those of the model as it was
    given, say, which has no weights any more and gets no gradients. remedy: where to take them from."""
    own = {id(parameter) for parameter in rank.parameters()}
    others = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) not in own
    ]
    if others:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in others[:3])
        raise ProgramError(
            f"expected an optimizer of the rank's parameters, found {len(others)} that are none of them, the first of "
            f"shape {shapes}, such as the model had before it was planned; {remedy}"
        )
