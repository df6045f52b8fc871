"""Samples of products: every value appears, as often as is asked for, and whoever names a test gets it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sampling import Row, others, row, sample


@dataclass(frozen=True)
class TwoOptions:
    dp: int
    tp: int


def rows(*sizes: int) -> list[Row]:
    return [dict(zip("abc", numbers, strict=False)) for numbers in product(*map(range, sizes))]


@pytest.mark.parametrize(("sizes", "times"), [((13, 11), 1), ((13, 11), 2), ((4, 15), 2), ((2, 17), 1), ((3, 3, 5), 1)])
def test_every_value_appears_as_often_as_asked_and_few_rows_are_needed(sizes: tuple[int, ...], times: int) -> None:
    kept = [rows(*sizes)[at] for at in sample(rows(*sizes), times)]
    counts = Counter(value for row in kept for value in row.items())
    assert len(counts) == sum(sizes) and min(counts.values()) >= times
    assert len(kept) == max(sizes) * times
    for name, size in zip("abc", sizes, strict=False):
        assert max(counts[name, value] for value in range(size)) <= -(-len(kept) // size) + 1, "well spread"


def test_every_pair_of_values_meets() -> None:
    kept = [rows(4, 3, 5)[at] for at in sample(rows(4, 3, 5), together=2)]
    for names, number in (("ab", 12), ("ac", 20), ("bc", 15)):
        assert len({tuple(row[name] for name in names) for row in kept}) == number
    assert 20 <= len(kept) < 30  # of 60


def test_what_is_no_product_stays_whole() -> None:
    """Rows that are listed by hand each have a value of their own; one row alone is its own sample."""
    listed = [{"a": number, "b": number} for number in range(7)]
    assert sample(listed) == [*range(7)]
    assert sample([{"a": 3}]) == [0] and sample([]) == []


def test_choices_that_others_have_beside_further_ones_are_left_out() -> None:
    """Not where a model, or two options together, would appear no more."""
    choices: list[tuple[str, dict[str, object]]] = [
        ("gpt", {"dp": 2}),
        ("gpt", {"dp": 2, "zero": 3}),
        ("llama", {"dp": 2}),
        ("gpt", {"tp": 2}),
        ("gpt", {"dp": 2, "tp": 2}),
        ("gpt", {"dp": 2, "zero": 1}),
        ("gpt", {}),
    ]
    kept = sample([row({"model": name, "choices": chosen}) for name, chosen in choices])
    assert [choices[at] for at in kept] == [choices[at] for at in (1, 2, 4, 5, 6)]
    layouts = [SimpleNamespace(x=1), TwoOptions(2, 3), TwoOptions(2, 4), TwoOptions(1, 4), TwoOptions(2, 3)]
    assert sample([row({"layout": one}) for one in layouts]) == [0, 1, 2, 3]


def test_what_is_named_is_kept_and_counts() -> None:
    found = sample(rows(6, 6), always=(1, 2))
    assert {1, 2} <= set(found) and len(found) == 7


def test_cases_of_other_names_are_left_out_and_names_that_no_case_has_are_a_fault() -> None:
    items: list[Any] = [
        SimpleNamespace(nodeid=f"a.py::test[{name}]", callspec=SimpleNamespace(id=name)) for name in ("dp", "tp", "pp")
    ]
    assert others(items, ("tp",)) == [items[0], items[2]]
    with pytest.raises(ValueError, match=r"cases of a\.py::test as `only`, found \['ep'\]"):
        others(items, ("tp", "ep"))


def test_samples_are_the_same_each_time() -> None:
    assert sample(rows(13, 11), 2) == sample(rows(13, 11), 2)
