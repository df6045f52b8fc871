"""What the public functions are given is of the kinds that they take; anything else is refused before work begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

from torch import nn

from autopar.errors import PlanError, TraceError
from autopar.ir.constraint import Constraint
from autopar.ir.plan import Plan
from autopar.ir.routing import Routing


def check_arguments(**given: Any) -> None:
    """Raises TraceError for what is no model, PlanError for any other argument that is not of its kind.

    given: arguments by name, those of `parallelize`, `template_plan` and `verify`.
    """
    for name, value in given.items():
        wanted = _KINDS[name]
        if not wanted[0](value):
            error = TraceError if name in ("model", "loss_fn") else PlanError
            raise error(f"expected {name} as {wanted[1]}, found {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}… of {type(value).__name__}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_constraints(value: Any) -> bool:
    return isinstance(value, Iterable) and all(isinstance(item, Constraint) for item in value)


def _are_whole(value: Any) -> bool:
    return value is None or (isinstance(value, Sequence) and bool(value) and all(map(_is_whole, value)))


ALLOWED = ("offload",)
"""What a search prices only where it is allowed by name: tensors kept on the host."""


def _are_allowed(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and all(name in ALLOWED for name in value)


_Kind = tuple[Callable[[Any], bool], str]
_WHOLE: _Kind = _is_whole, "a whole number"
_COUNT: _Kind = (lambda value: _is_whole(value) and value > 0), "a number from 1 up"
_TEXT: _Kind = (lambda value: value is None or isinstance(value, str)), "text or None"
_KINDS: dict[str, _Kind] = {
    "model": (lambda value: isinstance(value, nn.Module), "a torch.nn.Module"),
    "loss_fn": (lambda value: value is None or callable(value), "a function of what forward returns"),
    "plan": (lambda value: isinstance(value, Plan), "an autopar.Plan, such as Plan.load(path) or program.plan"),
    "constraints": (_is_constraints, "a sequence of autopar.Constraint"),
    "allow": (_are_allowed, f"a sequence of names out of {', '.join(ALLOWED)}"),
    "routing": (lambda value: value is None or isinstance(value, Routing), "an autopar.Routing, such as "
                "Routing.power_law(1.2), or None"),
    "progress": (lambda value: value is None or callable(value), "a function that takes a line of text, or None"),
    "optimizer": _TEXT, "precision": _TEXT, "dp": _WHOLE, "tp": _WHOLE, "pp": _WHOLE, "zero": _WHOLE, "hsdp": _WHOLE,
    "cp": _WHOLE, "ep": _WHOLE, "microbatches": _COUNT, "chunks": _COUNT,
    "layers": (_are_whole, "a sequence of whole numbers, or None"),
}  # fmt: skip
