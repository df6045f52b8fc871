"""A hundred changed plans and profiles; `python -m tests.sent_files.run` changes thousands."""

from __future__ import annotations

import itertools
import json
from functools import partial

import pytest

from tests.sent_files.bases import plans, profiles
from tests.sent_files.check import KEPT, check_profile, outcome, plan_faults
from tests.sent_files.mutations import CANARY
from tests.sent_files.run import FINE, case, names

CASES = 60


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_changed_files_are_refused_or_as_good() -> None:
    wrong = {name: found for name in itertools.islice(names(seed=7), CASES) if (found := case(name)[1]) not in FINE}
    assert not wrong, next(iter(wrong.items()))


@pytest.mark.sweep
@pytest.mark.parametrize("name", plans())
def test_what_is_changed_is_good_itself(name: str) -> None:
    assert outcome(partial(plan_faults, plans()[name]), plans()[name].text) == KEPT


@pytest.mark.sweep
@pytest.mark.parametrize("name", profiles())
def test_profiles_that_are_changed_are_good_themselves(name: str) -> None:
    assert outcome(partial(check_profile, plans()["one stage"]), profiles()[name]) == KEPT


def test_the_searched_plan_has_all_that_a_search_reports() -> None:
    data = json.loads(plans()["searched"].text)
    assert data["substitutions"] and data["search"]["tried"] and {"rewriting", "refinement"} <= data["search"].keys()


def test_what_runs_is_noticed() -> None:
    def runs(path: object) -> str:
        open(CANARY, "w").close()
        return KEPT

    assert outcome(runs, "") == "code of the file was run"


def test_other_errors_are_noticed() -> None:
    assert "ZeroDivisionError" in outcome(lambda path: str(1 // 0), "")
