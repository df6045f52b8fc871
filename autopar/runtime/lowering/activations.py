"""What lies between an expert's two products: a named activation, or a few elementwise operators written as a text.

    "silu"                                            silu(a)
    "c = clamp(a, None, 7.0); d = mul(c, b)"          d, the last

`a` is the hidden rows; where they are gated, `a` and `b` are their halves, or their even and odd columns. Names are
ATen's, called on values that have been named before, on numbers, booleans and None. Nothing else is ever called.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.errors import ProgramError


class _NamedValue(NamedTuple):
    """One that has been named before."""

    name: str


class _ActivationStep(NamedTuple):
    """name = op(*args, **options)"""

    name: str
    op: str
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


def activated(hidden: Tensor, activation: str, gated: bool, paired: bool = False) -> Tensor:
    """The activation of the rows; gated, a name stands for name(a) · b. "gelu_tanh" is the approximate gelu of ATen."""
    if not gated:
        values = {"a": hidden}
    elif paired:
        values = {"a": hidden[:, ::2], "b": hidden[:, 1::2]}
    else:
        values = dict(zip("ab", hidden.chunk(2, -1), strict=True))
    if "=" not in activation:
        return _named(values, activation)
    for statement in _statements(activation):
        args = [values[value.name] if isinstance(value, _NamedValue) else value for value in statement.args]
        values[statement.name] = getattr(torch.ops.aten, statement.op)(*args, **dict(statement.options))
    return values[statement.name]


def _named(values: dict[str, Tensor], name: str) -> Tensor:
    first = values["a"]
    made: Tensor = (
        F.gelu(first, approximate="tanh") if name == "gelu_tanh" else getattr(torch.ops.aten, name).default(first)
    )
    return made * values["b"] if "b" in values else made


@cache
def _statements(text: str) -> tuple[_ActivationStep, ...]:
    """Reads such a text. Raises ProgramError for anything else."""
    try:
        return tuple(_statement(line) for line in ast.parse(text).body)
    except (SyntaxError, ValueError, AttributeError) as error:
        raise ProgramError(f"expected statements such as 'c = clamp(a, None, 7.0); …', found {text!r}") from error


def _statement(line: Any) -> _ActivationStep:
    """Raises AttributeError or ValueError where the line is not the call of an elementwise operator."""
    (target,), call = line.targets, line.value
    op: str = call.func.id
    overloads = [getattr(getattr(torch.ops.aten, op), name) for name in getattr(torch.ops.aten, op).overloads()]
    if not any(torch.Tag.pointwise in overload.tags for overload in overloads):
        raise ValueError(op)
    args = [_NamedValue(arg.id) if isinstance(arg, ast.Name) else ast.literal_eval(arg) for arg in call.args]
    return _ActivationStep(target.id, op, tuple(args), tuple((o.arg, ast.literal_eval(o.value)) for o in call.keywords))
