"""Checks of values, which a graph has no place for, are taken as passed while a model is traced.

    if torch.any(var < 0): raise …      assert (ids >= 0).all()      if not torch.isfinite(x).all(): warnings.warn(…)
    torch._check_tensor_all(n == 4)      (what checks of the transformers library come to)

A tensor that Python asks for its truth is looked up in the source: where one of the two ways only raises, or only
reports, the other one is taken. Everything else that depends on values is refused as before.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_REPORTS = frozenset(("print", "warn", "warning", "info", "debug", "error", "log", "warning_once", "write"))

Position = tuple[int, int, int, int]
"""First line and column, last line and column."""


@contextmanager
def checks_passed() -> Iterator[None]:
    """While a model is traced. Not by a mode of torch's, which functions of torch.nn.functional run without."""
    own = {name: getattr(Tensor, name) for name in ("__bool__", "item")}

    def asked(x: Tensor) -> Any:
        wanted = _wanted(sys._getframe(1)) if isinstance(x, FakeTensor) else None
        return own["__bool__"](x) if wanted is None else wanted

    def item(x: Tensor) -> Any:
        wanted = _wanted(sys._getframe(1)) if isinstance(x, FakeTensor) and x.dtype == torch.bool else None
        return own["item"](x) if wanted is None else wanted

    checked = torch._check_tensor_all_with

    def check(error_type: Any, cond: Any, message: Any = None) -> None:
        if not isinstance(cond, FakeTensor):
            checked(error_type, cond, message)  # type: ignore[no-untyped-call] # torch's

    with (
        mock.patch.object(Tensor, "__bool__", asked),
        mock.patch.object(Tensor, "item", item),
        mock.patch.object(torch, "_check_tensor_all_with", check),  # which _check_tensor_all calls
    ):
        yield


def _wanted(frame: FrameType) -> bool | None:
    """The truth for which what is asked passes; None where it is no check."""
    here = frame.f_lasti // 2  # a call; or a jump, before which stands what made the condition
    places = (_position(frame.f_code, number) for number in (here, here - 1))
    found = (_found(frame.f_code.co_filename, place) for place in places if place is not None)
    return next((wanted for wanted in found if wanted is not None), None)


def _position(code: CodeType, number: int) -> Position | None:
    places = list(code.co_positions())
    line, end_line, column, end_column = places[number] if number >= 0 else (None,) * 4
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return line, column, end_line, end_column


@cache
def _found(path: str, position: Position) -> bool | None:
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        wanted = _passing(node)
        if wanted is not None and isinstance(node, (ast.If, ast.Assert)):
            found = _inside(node.test, wanted, position)
            if found is None and isinstance(node, ast.Assert):
                found = _inside_rewritten(node, position)
            if found is not None:
                return found
    return None


def _inside_rewritten(node: ast.Assert, position: Position) -> bool | None:
    """As pytest writes asserts: whatever one asks about, without a `not`, is to be true."""
    is_plain = not any(isinstance(part, (ast.Not, ast.IfExp)) for part in ast.walk(node.test))
    return True if is_plain and position == _place(node) else None


def _passing(node: ast.AST) -> bool | None:
    """The truth of its condition for which a statement goes on."""
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.If):
        if _is_report(node.body) and not (node.orelse and _is_report(node.orelse)):
            return False
        if node.orelse and isinstance(node.orelse[-1], ast.Raise):
            return True
    return None


def _is_report(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Raise) or all(map(_only_tells, body))


def _only_tells(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return isinstance(statement, ast.Pass)
    called = statement.value.func
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name in _REPORTS


def _inside(test: ast.expr, wanted: bool, position: Position) -> bool | None:
    """The truth of the part of a condition at a position, for the condition to have the wanted one."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        own = not wanted if _place(test) == position else None
        return own if own is not None else _inside(test.operand, not wanted, position)
    if isinstance(test, ast.BoolOp):
        parts = (_inside(value, wanted, position) for value in test.values)
        return next((part for part in parts if part is not None), wanted if _place(test) == position else None)
    return wanted if _place(test) == position else None


def _place(node: ast.expr | ast.stmt) -> Position:
    assert node.end_lineno is not None and node.end_col_offset is not None, "parsed from source"
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
