"""Python's collector of cycles, at rest while plans are searched; and caches of methods, which leave it none."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


@contextmanager
def without_collector() -> Iterator[None]:
    """Many small objects and few cycles: the collector would go through all that torch has loaded, for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def cached_method(method: Method) -> Method:
    """As `functools.cache`, of a method: what it returned is kept by its object, and goes when that goes.

    A cache of a bound method, kept by the object, would be a cycle: all that a search has made would wait for the
    collector, which then goes through all of it.
    """
    place = f"_known_{method.__name__}"

    @wraps(method)
    def cached(self: Any, *given: Any) -> Any:
        known = vars(self).setdefault(place, {})
        if given not in known:
            known[given] = method(self, *given)
        return known[given]

    return cast(Method, cached)
