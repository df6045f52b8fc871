"""Routings are data: what is no distribution is refused, and what is written is read again."""

from __future__ import annotations

import json

import pytest

import autopar
from autopar.errors import PlanError
from autopar.ir.routing import Routing

LAYERS = {"layers.0.mlp": [3, 1, 0, 4], "layers.1.mlp": [1.5, 1, 1, 1]}
ALL = [Routing.balanced(), Routing.power_law(1.2), Routing.histogram([5, 1, 2]), Routing.histogram(LAYERS)]


@pytest.mark.parametrize("routing", ALL, ids=str)
def test_text_and_json_are_read_again(routing: Routing) -> None:
    assert Routing.parse(routing.text) == routing
    assert Routing.from_json(json.loads(json.dumps(routing.to_json()))) == routing
    assert hash(Routing.parse(routing.text)) == hash(routing)
    assert autopar.Routing is Routing


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Routing.power_law(-1), "exponent"),
        (lambda: Routing.power_law(float("nan")), "exponent"),
        (lambda: Routing.power_law("1"), "exponent"),  # type: ignore[arg-type]
        (lambda: Routing.histogram([]), "not all 0"),
        (lambda: Routing.histogram([0, 0]), "not all 0"),
        (lambda: Routing.histogram([1, -1]), "not all 0"),
        (lambda: Routing.histogram([1, float("inf")]), "not all 0"),
        (lambda: Routing.histogram({}), "found none"),
        (lambda: Routing.histogram({"a": ["x"]}), "found 'x'"),  # type: ignore[list-item]
        (lambda: Routing.histogram(5), "by expert"),  # type: ignore[arg-type]
        (lambda: Routing.parse("zipf:1"), "power_law:1.2"),
        (lambda: Routing.parse("power_law:x"), "power_law:1.2"),
        (lambda: Routing.read("/nowhere/counts.json"), "counts.json"),
    ],
)
def test_what_is_no_distribution_is_refused(make, told) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match=told):
        make()


def test_counts_are_found_by_module_path() -> None:
    layers = Routing.histogram(LAYERS)
    assert layers.of_layer("layers.0.mlp") == (3, 1, 0, 4)
    assert layers.of_layer("layers.1.mlp.experts") == (1.5, 1, 1, 1)  # a module in the one that was measured
    assert layers.of_layer("layers.1") == (1.5, 1, 1, 1)  # the one around it
    assert layers.of_layer("layers.10.mlp") is None
    assert layers.of_layer("") is None  # two are inside
    assert Routing.histogram([1, 2]).of_layer("anything") == (1, 2)


def test_a_file_of_counts(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "own.json").write_text(json.dumps({"counts": LAYERS, "tokens": 8}))
    (tmp_path / "bare.json").write_text("[4, 2]")
    assert Routing.histogram(tmp_path / "own.json") == Routing.histogram(LAYERS)
    assert Routing.read(tmp_path / "bare.json") == Routing.histogram([4, 2])
    (tmp_path / "odd.json").write_text('{"counts": 3}')
    with pytest.raises(PlanError, match="by expert"):
        Routing.read(tmp_path / "odd.json")
