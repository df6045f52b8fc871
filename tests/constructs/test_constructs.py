"""Models with constructs whose meaning tracing may drop: equal to the eager model under every plan, or refused.

Many more: python -m tests.constructs.run --cases 1000 --gloo 100
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.constructs import cases, check
from tests.constructs.cases import Case, case_of, code, shrunk
from tests.constructs.check import CRASHED, EQUAL, REFUSED, WRONG, Record, Verdict, differences
from tests.constructs.models import CONSTRUCTS, Model, Used, random_model
from tests.constructs.run import Summary, tell

SEED, CASES = 3_000, 18
MOST_REFUSED = 0.65
READ_ONLY = [key for key, construct in CONSTRUCTS.items() if construct.kind != "name"]


@pytest.mark.sweep
@pytest.mark.timeout(900)  # models that take half a minute of a core, and more where others want it
def test_models_with_constructs_equal_the_eager_model_or_are_refused() -> None:
    """Refusing everything would not do: whatever gives no reason to refuse it runs, and at least a third of all."""
    summary = tell(cases.cases(SEED), CASES, "threads", None)
    text = "\n".join(summary.lines())
    assert not summary.failed, text
    assert summary.refused_share <= MOST_REFUSED, text


@pytest.mark.sweep
def test_every_construct_is_of_a_model_that_runs() -> None:
    """The catalogue would shrink silently otherwise: models that do not run alone are no cases."""
    names = [key for key in CONSTRUCTS if key not in READ_ONLY][::32]
    for key in (*READ_ONLY, *names):
        place = "loss" if CONSTRUCTS[key].is_loss else "layer"
        check.eager(Model((Used(key, place, 0),)))


@pytest.mark.sampled
@pytest.mark.parametrize("place", ["first", "layer"])
@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("buffer: copied from another", EQUAL),
        ("write: written by numpy", REFUSED),
        ("function: a function with state that counts", REFUSED),
        ("function: whose backward alone reads a class attribute that was set later", REFUSED),
        ("function: a global tensor in backward", REFUSED),
    ],
)
def test_constructs_that_two_runs_in_one_process_may_not_tell(key: str, kind: str, place: str) -> None:
    verdict = Case(Model((Used(key, place, 0),)), "dp").verdict()
    assert verdict.kind == kind, verdict.text
    assert kind == EQUAL or verdict.names_a_line


@pytest.mark.parametrize(
    ("name", "plan", "kind"),
    [
        ("the convolution over samples", "stages", REFUSED),
        ("convolved over samples and columns", "microbatches", REFUSED),
        ("the largest of three samples", "samples", REFUSED),
        ("padded convolution of one", "stages", REFUSED),
        ("groups normalised over samples", "stages", REFUSED),
        ("instances normalised over samples", "microbatches", REFUSED),
        ("scaled up over samples", "samples", EQUAL),
        ("groups of samples normalised", "stages", EQUAL),
        ("samples as groups of channels", "microbatches", EQUAL),
        ("squeezed of all dims of one", "samples", EQUAL),
        ("squeezed of named dims", "samples", EQUAL),
        ("a bag of samples", "dp", EQUAL),
    ],
)
def test_what_ranks_exchange_inside_of_an_operator_microbatches_cannot(name: str, plan: str, kind: str) -> None:
    """Borders of images and statistics were taken of each microbatch alone, where the batch is a spatial dim."""
    verdict = Case(Model((Used(f"shape: {name}", "layer", 0),)), plan).verdict()
    assert verdict.kind == kind, verdict.text


def test_a_seed_gives_the_same_case_again() -> None:
    assert case_of(5) == case_of(5)
    assert len({random_model(seed).source for seed in range(20)}) > 15


def test_a_case_is_replayed_from_its_script() -> None:
    case = Case(Model((Used("part: a layer used twice", "layer", 0),)), "dp")
    text = code(case, Verdict(WRONG, "a fault"))
    results: list[str] = []
    exec(compile(text, "<replay>", "exec"), {"print": results.append})
    assert results == [EQUAL]


def test_what_fails_is_made_small() -> None:
    """To the one construct that matters, plan and sizes as usual."""
    used = ("part: tied weights", "hook: an activation's gradient scaled", "part: layer norm")
    model = Model(tuple(Used(key, "layer", number) for number, key in enumerate(used)), batch=6, width=7)

    class Failing(Case):
        def verdict(self, run: object = None) -> Verdict:
            return Verdict(WRONG if any(one.what.kind == "hook" for one in self.model.used) else EQUAL)

    small = shrunk(Failing(model, "stages"), WRONG)
    assert [one.construct for one in small.model.used] == [used[1]]
    assert (small.plan, small.model.batch, small.model.width) == ("dp", 8, 8)


def _record() -> Record:
    step = (torch.tensor(1.0), {"w": torch.ones(3), "b": torch.zeros(2)}, torch.tensor(2.0))
    return Record((step, step), {"w": torch.ones(3), "s": torch.tensor(4)})


def _with_step(loss: float = 1.0, norm: float = 2.0, **gradients: torch.Tensor) -> Record:
    found = {"w": torch.ones(3), "b": torch.zeros(2), **gradients}
    return replace(_record(), steps=(_record().steps[0], (torch.tensor(loss), found, torch.tensor(norm))))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (_with_step(loss=1.001), "step 2: loss"),
        (_with_step(norm=2.001), "step 2: gradient norm"),
        (_with_step(w=torch.tensor([1.0, 1.0, 1.001])), "step 2: gradient of w"),
        (_with_step(w=torch.ones(1, 3)), "step 2: gradient of w"),
        (_with_step(v=torch.ones(1)), "step 2: gradient of v is there"),
        (replace(_record(), state={"w": torch.ones(3), "s": torch.tensor(5)}), "s is [5.0]"),
        (replace(_record(), state={"w": torch.ones(3)}), "s is not there"),
        (replace(_record(), state={"w": torch.ones(3) * torch.nan, "s": torch.tensor(4)}), "w is"),
    ],
)
def test_each_difference_is_seen(found: Record, says: str) -> None:
    assert differences(_record(), [_record(), _record()]) == []
    assert says in "\n".join(differences(_record(), [found, found]))


def test_ranks_that_disagree_are_seen() -> None:
    assert differences(_record(), [_record(), _with_step(loss=1.0001)]) == ["step 2: ranks disagree about the loss"]


def test_a_missing_gradient_that_is_zero_is_no_difference() -> None:
    """A program may leave out what is never computed."""
    first = {"w": torch.ones(3)}
    found = Record(tuple((loss, first, norm) for loss, _, norm in _record().steps), _record().state)
    assert differences(_record(), [found]) == []


def test_a_summary_fails_by_what_is_wrong_crashed_or_refused_without_need() -> None:
    plain = Case(Model((Used("part: layer norm", "layer", 0),)), "dp", "1")
    odd = Case(Model((Used("python: a counter that warms up", "layer", 0),)), "dp", "2")
    for case, kind, fails in (
        (plain, EQUAL, False), (plain, WRONG, True), (plain, CRASHED, True), (plain, REFUSED, True),
        (odd, REFUSED, False),
    ):  # fmt: skip
        summary = Summary()
        summary.add(case, Verdict(kind, "TraceError: model.py:3 …"))
        assert summary.failed is fails
    assert summary.refused_share == 1 and summary.without_line == 0
