"""The same jobs on gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.constructs.check import WORLD
from tests.constructs.models import loaded
from tests.rank_pool import pool


def run_on_gloo(job: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Runs a job of `check` on processes, which have the model's module then."""
    ranks = pool(WORLD)
    if not ranks.is_running:
        ranks.run(_ready)  # with time of its own: processes start slowly on a busy machine
    name, source, program, state, _, exact = args
    return ranks.run(_on_process, job.__name__, name, source, (program, state, exact))


def _ready(rank: int, world: int) -> None:
    """A job that only imports what the others need."""


def _on_process(rank: int, world: int, job: str, name: str, source: str, rest: tuple[Any, ...]) -> Any:
    """Inputs are made there: some are of classes that the model's module defines."""
    from tests.constructs import check

    module = loaded(name, source)
    program, state, exact = rest
    return getattr(check, job)(rank, name, source, program, state, check._batch(module), exact)
