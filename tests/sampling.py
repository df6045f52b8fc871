"""Products of models and plans: the suite runs a sample in which every value appears, `pytest --whole` runs all.

A test says so itself: `@pytest.mark.sampled` keeps, of all combinations of its parameters, few in which each value of
each parameter appears; `sampled(times=2)` as few in which each appears twice, beside different values of the others;
`sampled(together=2)` those in which each value meets each value of every other parameter; `always=("gpt-tp",)` keeps
those of these names before it chooses others. `sampled(only=("gpt-tp",))` keeps those of these names and no others,
whose mechanisms they, or other tests, have between them. Of choices that are a dict or a dataclass, as a template's
are, each option, and each two options that some case has together, appears: {"dp": 2} is left out beside
{"dp": 2, "zero": 3}. `@pytest.mark.whole`, on a test or on one of its cases, is for what others in the suite show too:
it runs with `--whole` alone, or when it is asked for by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

Row = Mapping[str, Hashable]


def sample(rows: Sequence[Row], times: int = 1, together: int = 1, always: Collection[int] = ()) -> list[int]:
    """Positions of rows in which every value, or every `together` values of different parameters, that occur at all
    occur `times` times, or as often as in all rows. The same rows give the same sample: the row with most that is
    still wanted is next, of such rows one whose values are the least used, of those the first."""
    parts = [[*combinations(sorted(row.items()), together)] for row in rows]
    wanted = {part: min(times, count) for part, count in Counter(part for own in parts for part in own).items()}
    used: Counter[Hashable] = Counter()
    left, kept = dict.fromkeys(range(len(rows))), []

    def rank(at: int) -> tuple[bool, int, int, int]:
        gain = sum(wanted[part] > 0 for part in parts[at])
        return at not in always, -gain, sum(used[value] for value in rows[at].items()), at

    while any(wanted.values()) or set(always) & set(left):
        best = min(left, key=rank)
        del left[best]
        kept.append(best)
        used.update(rows[best].items())
        wanted |= {part: max(0, wanted[part] - 1) for part in parts[best]}
    return sorted(kept)


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What a sample of each marked test's items does without, and what only the whole has."""
    tests: dict[str, list[pytest.Item]] = {}
    items = list(items)
    alone = {item for item in items if item.get_closest_marker("whole")}
    for item in items:
        if item not in alone and item.get_closest_marker("sampled"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return alone.union(*map(_rest, tests.values()))


def others(items: Sequence[pytest.Item], names: Collection[str]) -> list[pytest.Item]:
    """Items of a test whose cases have other names. Raises ValueError where no case has one of the names."""
    ids = [item.callspec.id for item in items]  # type: ignore[attr-defined]
    if unknown := sorted({*names} - {*ids}):
        raise ValueError(f"expected cases of {items[0].nodeid.partition('[')[0]} as `only`, found {unknown}")
    return [item for item, name in zip(items, ids, strict=True) if name not in names]


def row_of_values(parameters: Mapping[str, Any]) -> Row:
    """A case by its parameters."""
    return {name: repr(value) for name, value in parameters.items()}


def row(parameters: Mapping[str, Any]) -> Row:
    """A case by its parameters: of each that consists of options, by these, and by each two of them."""
    found: dict[str, Hashable] = {}
    for name, value in parameters.items():
        options = _options(value)
        own = {f"{name}.{option}": repr(chosen) for option, chosen in options.items()} or {name: repr(value)}
        pairs = combinations(sorted(own.items()), 2)
        found |= own | {f"{first} {second}": (one, other) for (first, one), (second, other) in pairs}
    return found


def _options(value: Any) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    return vars(value) if is_dataclass(value) and not isinstance(value, type) else {}


def _rest(items: list[pytest.Item]) -> list[pytest.Item]:
    marker = items[0].get_closest_marker("sampled")
    choices = dict(marker.kwargs) if marker else {}
    written = row if choices.get("together", 1) == 1 else row_of_values
    rows = [written(item.callspec.params) for item in items]  # type: ignore[attr-defined]
    if "only" in choices:
        return others(items, choices["only"])
    named = choices.pop("always", ())
    always = {number for number, item in enumerate(items) if item.callspec.id in named}  # type: ignore[attr-defined]
    kept = set(sample(rows, **choices, always=always))
    return [item for number, item in enumerate(items) if number not in kept]
