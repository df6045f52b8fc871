"""Lines along positions, and families of models, where sequences are split, ways of routing where ranks share experts,
and models as they are written in practice: equal, or refused.

All of them in all plans: python -m tests.constructs.listed
"""

from __future__ import annotations

import pytest

from tests.constructs.check import EQUAL, REFUSED, judged
from tests.constructs.listed import LISTED, in_turn
from tests.constructs.written import Written


@pytest.mark.sweep
@pytest.mark.parametrize(("model", "plan"), in_turn(), ids=lambda value: getattr(value, "what", value))
def test_each_equals_the_eager_model_or_is_refused(model: Written, plan: str) -> None:
    verdict = judged(model, plan)
    assert verdict.kind in (EQUAL, REFUSED), verdict.text


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("position: packed mask by input", "ring"),
        ("routing: paired gate", "exchange in chunks"),
        # weights that a teacher reads of a block before it runs were gathered twice as often as foretold
        ("practice: a teacher that follows, without negatives", "zero3"),
    ],
)
def test_these_run(name: str, plan: str) -> None:
    (model,) = [model for models in LISTED.values() for model in models if model.what == name]
    verdict = judged(model, plan)
    assert verdict.kind == EQUAL, verdict.text


def test_every_model_is_another() -> None:
    models = [model for models in LISTED.values() for model in models]
    assert len({model.what for model in models}) == len(models)
    assert len({model.source for model in models}) == len(models)
