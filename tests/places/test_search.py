"""The search over places of one stage: how long it looks, and what it leaves out."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from autopar.clock import Clock
from autopar.ir.tried import Tried
from autopar.places import PlaceSearch
from autopar.planning import Place
from autopar.profiler import load_profile
from autopar.request import Request, SearchBudget
from autopar.trace import find_blocks
from tests.oracles.frozen.cases import PROFILES
from tests.pipeline.test_limits import autopar, graph

MESH = autopar.Mesh(PROFILES["h100"], devices_per_node=2)


def _searched(seconds: float, than_ns: float | None, limit: int | None = None) -> tuple[list[Any], list[Tried]]:
    model, rows = _model(), list[Tried]()
    request = Request(MESH, "train", "adamw", limit, (), SearchBudget(proposals=0, substitutions=False))
    profile = load_profile(MESH.profile)
    search = PlaceSearch(
        model, find_blocks(model), request, profile, Clock.of(seconds), rows.append, None, than_ns, than_ns is not None
    )
    return search.run(), rows


@cache
def _model() -> Any:
    return graph(2)


def test_beside_a_plan_that_is_known_it_ends_when_its_work_is_done_and_says_so() -> None:
    found, rows = _searched(0.0, 1e12)
    assert not found
    assert [(row.setting, row.infeasible) for row in rows] == [
        ("place", "the work that there is for one stage was done")
    ]


def test_where_none_is_known_it_goes_on_until_there_is_one() -> None:
    found, rows = _searched(0.0, None)
    assert found
    assert all(row.setting is None for row in rows)


def test_what_cannot_fit_is_refused_without_a_plan_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least that placements take with all computed again says so; a plan was looked for under four limits."""
    fitted, fit = list[int](), Place.fit

    def noted(self: Place, *given: Any) -> Any:
        fitted.append(self.part.microbatches)
        return fit(self, *given)

    monkeypatch.setattr(Place, "fit", noted)
    _, rows = _searched(10.0, None, limit=1_000_000)
    assert not fitted
    assert all("whatever is computed again" in (row.infeasible or "") for row in rows if row.mesh)
    assert rows
