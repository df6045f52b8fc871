"""Without options that break more soft constraints than must be, the cheapest placements of a template are the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar import Mesh, SearchBudget, planning
from autopar.errors import InfeasibleError
from autopar.families import Family, ShortPlace, Template
from autopar.intraop import Placements
from autopar.ir.graph import Graph
from autopar.request import Request
from tests.equivalence.adaptive import traced
from tests.oracles.frozen.cases import graph

IN_NODE = 4
TEMPLATES = [
    ("llama", Template(dp=4, tp=2, zero=3, sequence_parallel=True)),
    ("llama", Template(dp=2, tp=4, zero=1, microbatches=2)),
    ("gpt", Template(dp=8, zero=2)),
    ("experts", Template(dp=4, ep=2, zero=3)),
    ("experts", Template(dp=2, tp=2, ep=2, zero=1, sequence_parallel=True)),
]


@cache
def _graph(model: str) -> Graph:
    return traced() if model == "experts" else graph(model)


def _place(model: str, template: Template) -> ShortPlace:
    mesh = Mesh("h100", nodes=template.dp * template.tp // IN_NODE, devices_per_node=IN_NODE)
    request = Request(mesh, "train", "adamw", None, (), SearchBudget(4.0))
    return replace(Family(_graph(model), None, request).place(template), strictly=True)


def _num_options(placements: Placements) -> int:
    return sum(len(variable.options) for variable in placements.built.variables)


@pytest.mark.parametrize(("model", "template"), TEMPLATES, ids=str)
def test_the_cheapest_choice_is_the_same(model: str, template: Template) -> None:
    place = _place(model, template)
    strict, every = place.placements, replace(place, strictly=False).placements
    assert _num_options(strict) < _num_options(every)
    found, known = (one.unlimited(10.0, 0, 0.0) for one in (strict, every))
    assert found.stop_reason == known.stop_reason == "optimal"
    broken = known.cost // planning.SOFT_PENALTY_NS * planning.SOFT_PENALTY_NS
    assert found.cost == known.cost - broken
    assert every.choice_of(strict.placed(strict.draft, strict.graph, found.choice)) is not None


def test_where_they_do_not_go_together_all_options_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    place = _place(*TEMPLATES[0])
    monkeypatch.setattr(planning, "SOFT_PENALTY_NS", 0)
    assert _num_options(place.placements) == _num_options(replace(place, strictly=False).placements)


def test_where_none_are_left_all_options_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    place = _place(*TEMPLATES[0])
    whole = _num_options(replace(place, strictly=False).placements)
    given = ShortPlace.placements_with

    def refused(place: ShortPlace, keep: dict[str, object], strictly: bool = False) -> Placements:
        if strictly:
            raise InfeasibleError("expected a strategy, found none")
        return given(place, {})

    monkeypatch.setattr(ShortPlace, "placements_with", refused)
    assert _num_options(place.placements) == whole
