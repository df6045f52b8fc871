"""What an autograd Function reads of its class and module, beside what it is given, and whether that was changed.

    methods → globals, class attributes and functions that their code names → plain values
            → does the source, as it is imported, say the same? Nobody can tell of tensors, nor of what it computes.

A program imports the Function anew. A class attribute or a global that is one value in the source and was set to
another after the import would be the first again there, and nobody would see.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

_PLAIN = (bool, int, float, complex, str, bytes, tuple, list, dict, set, type(None))
_LIBRARIES = ("torch", "numpy", "math", "builtins", "autopar")


def changed_setting(cls: type) -> str | None:
    """The first plain value that a Function's methods read and that is not what the source says, in words."""
    methods = [f for base in cls.__mro__ if not _is_library(base) for f in map(_function, vars(base).values()) if f]
    seen: set[Any] = set()
    names = {name for method in methods for name in names_in(method.__code__)}
    read = [*_of_class(cls, names)]
    for method in methods:
        read += _of_function(method, seen)
    return next((text for module, path, value in read if (text := _difference(module, path, value))), None)


def _of_function(function: FunctionType, seen: set[Any]) -> Iterator[tuple[ModuleType | None, str, Any]]:
    """The settings that a function reads of its module, and those of the module's functions that it calls."""
    if function in seen or _is_library(function):
        return
    seen.add(function)
    names = set(names_in(function.__code__))
    module = inspect.getmodule(function)
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, (Tensor, *_PLAIN)):
            yield module, name, value
        elif isinstance(value, FunctionType):
            yield from _of_function(value, seen)
        elif isinstance(value, type):
            yield from _of_class(value, names)
        elif isinstance(value, ModuleType) and not _is_library(value):
            for inner in sorted(names & vars(value).keys()):
                if isinstance(vars(value)[inner], (Tensor, *_PLAIN)):
                    yield value, inner, vars(value)[inner]


def _of_class(cls: type, names: set[str]) -> Iterator[tuple[ModuleType | None, str, Any]]:
    for base in cls.__mro__:
        if not _is_library(base):
            for name in sorted(names & vars(base).keys()):
                if isinstance(vars(base)[name], (Tensor, *_PLAIN)):
                    yield inspect.getmodule(base), f"{base.__qualname__}.{name}", vars(base)[name]


def _function(member: Any) -> FunctionType | None:
    inner = getattr(member, "__func__", member)
    return inner if isinstance(inner, FunctionType) else None


def names_in(code: CodeType) -> Iterator[str]:
    """The globals and attributes that it names, with those of the functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def _is_library(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return str(name).partition(".")[0] in _LIBRARIES


def _difference(module: ModuleType | None, path: str, value: Any) -> str | None:
    """In words; None where the source says the same, or computes the value. Nobody can tell of tensors."""
    if isinstance(value, Tensor):
        return f"the tensor {path} of shape {list(value.shape)}"
    tree = _tree(module) if module is not None else None
    *classes, name = path.split(".")
    body = _body(tree, classes) if tree is not None else None
    found = _assigned(body, name) if body is not None else None
    if tree is None or body is None or found is None or _is_set_again(tree, body, name, found):
        return None
    try:
        written = ast.literal_eval(found)
    except ValueError:
        return None
    if type(written) is type(value) and (written == value or repr(written) == repr(value)):
        return None
    assert module is not None
    return f"{path}, which is {value!r} now and {written!r} where {module.__name__} is imported (line {found.lineno})"


@cache
def _tree(module: ModuleType) -> ast.Module | None:
    try:
        return ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return None


def _body(tree: ast.Module | ast.ClassDef, classes: list[str]) -> ast.Module | ast.ClassDef | None:
    """What holds the statements of a class, by the names of those around it and its own."""
    for name in classes:
        inner = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
        if len(inner) != 1:
            return None
        tree = inner[0]
    return tree


def _assigned(body: ast.Module | ast.ClassDef, name: str) -> ast.expr | None:
    """The expression that a statement of a body assigns to a name."""
    for one in body.body:
        if isinstance(one, (ast.Assign, ast.AnnAssign)):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return one.value
    return None


def _is_set_again(tree: ast.Module, body: ast.Module | ast.ClassDef, name: str, value: ast.expr) -> bool:
    """Whether what runs on import sets the name in its body again, or an attribute or items of that name."""
    for one in _on_import(body, into_classes=False):
        is_set = isinstance(one, ast.Name) and one.id == name and not isinstance(one.ctx, ast.Load)
        if is_set and one.lineno != value.lineno:  # type: ignore[attr-defined]  # a name has one
            return True
    for one in _on_import(tree, into_classes=True):
        if isinstance(one, ast.Attribute) and one.attr == name and not isinstance(one.ctx, ast.Load):
            return True
        holder: Any = None
        if isinstance(one, ast.Subscript) and not isinstance(one.ctx, ast.Load):
            holder = one.value
        elif isinstance(one, ast.Call):
            holder = getattr(one.func, "value", None)
        if name in (getattr(holder, "id", None), getattr(holder, "attr", None)):
            return True
    return False


def _on_import(node: ast.AST, into_classes: bool) -> Iterator[ast.AST]:
    """What runs when a module is imported: not what is in its functions."""
    skipped = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, *(() if into_classes else (ast.ClassDef,)))
    for one in ast.iter_child_nodes(node):
        if not isinstance(one, skipped):
            yield one
            yield from _on_import(one, into_classes)
