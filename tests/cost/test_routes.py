"""Tables of redistributions that are remembered take no more than so many bytes."""

from __future__ import annotations

from autopar.cost.routes import KnownRoutes, Routes
from autopar.ir.mesh import make_axes
from autopar.ir.placement import R, S
from autopar.profiler import load_profile

AXES = make_axes(("a", "b"), (2, 2))


def _asked(known: KnownRoutes, length: int) -> Routes:
    """A table that has found something."""
    found = known.of((length, 8), (4, 4), AXES, 8, load_profile("h100"), True)
    assert found.route((S(0), R), (R, R)) is not None
    return known.of((length, 8), (4, 4), AXES, 8, load_profile("h100"), True)  # which counts that


def test_those_that_were_asked_for_last_are_kept() -> None:
    known = KnownRoutes(1 << 30)
    first = _asked(known, 8)
    assert _asked(known, 8) is first and known.num_bytes == first.num_bytes > 0
    known = KnownRoutes(3 * first.num_bytes)
    tables = {length: _asked(known, length) for length in (8, 16, 24)}
    assert _asked(known, 8) is tables[8]
    _asked(known, 32)
    assert len(known) == 3 and known.num_bytes <= known.most_bytes
    assert _asked(known, 8) is tables[8], "it was asked for since"
    assert _asked(known, 16) is not tables[16], "it was the first to go"


def test_one_is_kept_however_large_it_is() -> None:
    known = KnownRoutes(1)
    assert _asked(known, 8) is _asked(known, 8)
    _asked(known, 16)
    assert len(known) == 1
