"""Python's collector of cycles, at rest while plans are searched."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Many small objects and few cycles: the collector would go through all that torch has loaded, for nothing.

    What is left afterwards counts as old, so that the next full collection looks for cycles in it, and not one at once.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _let_age()
            gc.enable()


def _let_age() -> None:
    """All that is there goes to the oldest generation, unless the caller keeps something frozen, which would thaw."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
