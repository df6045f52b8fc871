"""A few kinds of models; `python -m tests.random_programs.kinds` runs all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.random_programs.cases import Case, StagedCase, outcome
from tests.random_programs.kinds.judge import SIZES, judged
from tests.random_programs.kinds.practice import MODELS, practice_subject
from tests.random_programs.kinds.row import row, subject_of
from tests.random_programs.kinds.table import GROUPS, KINDS
from tests.random_programs.plans import random_plan
from tests.random_programs.staged import random_staged_plan

SAMPLE = [random.Random(f"kinds {group}").choice(rows).name for group, rows in GROUPS.items()]


@pytest.mark.sweep
@pytest.mark.parametrize("name", SAMPLE)
def test_a_kind_of_each_group(name: str) -> None:
    found = list(judged(KINDS[name], 1, 1, 0))
    assert [text for _, text in found if text] == []


@pytest.mark.parametrize(
    ("kind", "seed", "name"),
    [("constants", 1, "5"), ("constants", 3, "1"), ("put", 1, "4"), ("index_put_ acc dim2", 1, "13")],
)
def test_stages_that_make_what_nobody_reads(kind: str, seed: int, name: str) -> None:
    """Bytes were said of conversions of constants that no rank runs, since nothing in the stage reads them; operators
    of that kind, to be computed again by themselves, were no Python."""
    subject = subject_of(KINDS[kind], seed)
    name = f"{kind} {seed} staged {name}"
    choices = random_staged_plan(subject.graph, random.Random(name))
    assert choices is not None and any(len(stages) > 1 for stages in choices.members.values())
    assert outcome(StagedCase(subject, choices, name)) == ""


def test_ranks_run_operators_again_at_the_same_time() -> None:
    """What one rank kept of its input shared that input's memory, other ranks had zeros of their own: they asked for
    another run at other times, and met in other collectives."""
    model = "practice: keys and values that fade"
    subject, rng = practice_subject(MODELS[model], 2), random.Random(f"{model} 2 plan 2")
    choices = random_plan(subject.graph, rng.choice(SIZES), rng)
    assert choices is not None and "ls.0.exp_7()" in choices.recompute
    assert outcome(Case(subject, replace(choices, recompute=("ls.0.exp_7()",)))) == ""


def test_names_are_unique() -> None:
    assert len(KINDS) == sum(map(len, GROUPS.values()))


@pytest.mark.parametrize(("forward", "what"), [("h = h @ nothing", "does not run"), ("h = h / 0.0", "no finite")])
def test_rows_that_show_nothing_are_wrong(forward: str, what: str) -> None:
    (found,) = judged(row("faulty", forward), 1, 1, 1)
    assert what in found[1]
