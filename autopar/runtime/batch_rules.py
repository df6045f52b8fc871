"""What learning rate a batch of another size suggests, by rules that people use.

    linear         rate · k          SGD                Krizhevsky (2014), Goyal et al. (2017)
    square root    rate · √k         Adam and its kind  Krizhevsky (2014), Hoffer et al. (2017)

with k the samples of a step over those that the rate is for. They are starting points and not proved: both keep
something of a step's noise as it was. Where k is more than 1, the rate is reached by degrees from the one that is known
to be right (Goyal et al. took five epochs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autopar.runtime.errors import ProgramError

LINEAR, SQUARE_ROOT = "linear", "square root"
RULES = (LINEAR, SQUARE_ROOT)
_LINEAR = frozenset({"sgd", "asgd"})
_SQUARE_ROOT = frozenset({
    "adam", "adamw", "nadam", "radam", "adamax", "sparseadam", "adagrad", "adadelta", "adafactor", "rmsprop", "lamb",
    "adamw8bit", "adam8bit",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class SuggestedRate:
    """A learning rate for steps of `batch` samples, by a rule, from one (`base`) for `base_batch`. As a float it is the
    rate."""

    base: float
    base_batch: int
    batch: int
    rule: str

    @property
    def factor(self) -> float:
        """Of the base."""
        share = self.batch / self.base_batch
        return share if self.rule == LINEAR else math.sqrt(share)

    @property
    def rate(self) -> float:
        """Once it is warmed up."""
        return self.base * self.factor

    def at(self, step: int, warmup_steps: int) -> float:
        """Of a step, from 0 on: in equal steps from the base to the rate, and then the rate."""
        if step >= warmup_steps:
            return self.rate
        return self.base + (self.rate - self.base) * (step + 1) / warmup_steps

    def __float__(self) -> float:
        return self.rate

    def __str__(self) -> str:
        share = f"{self.batch} / {self.base_batch}"
        how = f"({share})" if self.rule == LINEAR else f"√({share})"
        return f"learning rate {self.rate:.6g} = {self.base:.6g} · {how}, by the {self.rule} rule"


def suggested_rate(
    base: float, base_batch: int, batch: int, optimizer: Any = "adamw", rule: str | None = None
) -> SuggestedRate:  # fmt: skip
    """The rate for steps of `batch` samples. optimizer: one of torch.optim, its class or its name, which decides the
    rule where none is given. Raises ProgramError for numbers that are none, and optimizers without a known rule."""
    numbers = {"base": base, "base_batch": base_batch, "batch": batch}
    for name, value in numbers.items():
        whole = name == "base" or int(value) == value
        if isinstance(value, bool) or not (math.isfinite(value) and value > 0 and whole):
            raise ProgramError(f"expected {name} as a positive number of {_of(name)}, found {value!r}")
    if rule is not None and rule not in RULES:
        raise ProgramError(f"expected rule as one of {', '.join(map(repr, RULES))}, found {rule!r}")
    return SuggestedRate(float(base), int(base_batch), int(batch), rule or _rule_of(optimizer))


def _of(name: str) -> str:
    return "what a step changes" if name == "base" else "samples"


def _rule_of(optimizer: Any) -> str:
    optimizer = getattr(optimizer, "optimizer", optimizer)  # that which Accelerate has wrapped
    kind = optimizer if isinstance(optimizer, (str, type)) else type(optimizer)
    name = (kind if isinstance(kind, str) else kind.__name__).lower().replace("_", "")
    if name in _LINEAR:
        return LINEAR
    if name in _SQUARE_ROOT:
        return SQUARE_ROOT
    raise ProgramError(
        f"expected an optimizer for which a rule is known ({', '.join(sorted(_LINEAR | _SQUARE_ROOT))}), found {name}; "
        f"say rule={LINEAR!r} or rule={SQUARE_ROOT!r}"
    )
