"""When processes that run tests look for garbage."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """What torch and graphs consist of stays, and looking at it again and again took a sixth of the time."""
    gc.set_threshold(50_000, 20, 50)
