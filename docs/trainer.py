"""docs/trainer.md: what becomes of each argument of Hugging Face's Trainer under a plan."""

from __future__ import annotations

from autopar.adapters.options import BESIDE, REFUSED, TESTED
from docs.markdown import page, table

INTRODUCTION = """
`autopar.adapters.transformers.Trainer` takes each of `transformers.TrainingArguments`, of the version that the project
is tested with, in one of three ways. None is ignored: an argument that is not on this page, of a later version, is
refused where it is given another value than its default.
"""

HELD = """
A test trains in one process and under a plan, and holds losses, gradient norms, learning rates, evaluation, kept
checkpoints and weights against each other ([test_transformers.py](../tests/adapters/test_transformers.py)).
"""

BY_ITSELF = "Trainer's own code does these on each process, with the same data and losses as one process has."

WHAT_TO_DO = "The program has its own way, which the message names."


def trainer() -> str:
    derived = [(f"`{name}`", why) for why, names in BESIDE.items() for name in names.split()]
    return page(
        "Arguments of Hugging Face's Trainer",
        INTRODUCTION,
        f"## As in one process: {len(TESTED)} that tests hold",
        HELD,
        ", ".join(f"`{name}`" for name in sorted(TESTED)) + ".",
        f"## As in one process: {len(derived)} beside the model's passes",
        BY_ITSELF,
        table(("argument", "what it is"), sorted(derived)),
        f"## Refused: {len(REFUSED)}",
        WHAT_TO_DO,
        table(("argument", "instead"), sorted((f"`{name}`", why) for name, why in REFUSED.items())),
    )
