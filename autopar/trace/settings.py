"""What an autograd Function reads of its class and module, beside what it is given, and whether that was changed.

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
    names = {name for method in methods for name in _names(method.__code__)}
    yielded = [*_of_class(cls, names)]
    for method in methods:
        yielded += _of_function(method, seen)
    return next((text for owner, path, value in yielded if (text := _difference(owner, path, value))), None)


def _of_function(function: FunctionType, seen: set[Any]) -> Iterator[tuple[ModuleType | None, str, Any]]:
    """The settings that a function reads of its module, and those of the module's functions that it calls."""
    if function in seen or _is_library(function):
        return
    seen.add(function)
    names = set(_names(function.__code__))
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


def _names(code: CodeType) -> Iterator[str]:
    """The globals and attributes that it names, with those of the functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_library(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return str(name).partition(".")[0] in _LIBRARIES


def _difference(module: ModuleType | None, path: str, value: Any) -> str | None:
    """In words; None where the source says the same, or computes the value. Nobody can tell of tensors."""
    if isinstance(value, Tensor):
        return f"the tensor {path} of shape {list(value.shape)}"
    tree = _tree(module) if module is not None else None
    found = _assigned(tree.body, path.split(".")) if tree is not None else None
    if tree is None or found is None or _is_assigned_elsewhere(tree, path.rpartition(".")[2], found):
        return None
    try:
        written = ast.literal_eval(found)
    except ValueError:
        return None
    if type(written) is type(value) and repr(written) == repr(value):
        return None
    assert module is not None
    return f"{path}, which is {value!r} now and {written!r} where {module.__name__} is imported (line {found.lineno})"


@cache
def _tree(module: ModuleType) -> ast.Module | None:
    try:
        return ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return None


def _assigned(body: list[ast.stmt], path: list[str]) -> ast.expr | None:
    """The expression that a body assigns to a name, or the body of a class in it."""
    if len(path) > 1:
        inner = [one for one in body if isinstance(one, ast.ClassDef) and one.name == path[0]]
        return _assigned(inner[0].body, path[1:]) if len(inner) == 1 else None
    for one in body:
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == path[0] for target in targets):
            return one.value  # type: ignore[attr-defined,no-any-return]  # both have one
    return None


def _is_assigned_elsewhere(tree: ast.Module, name: str, value: ast.expr) -> bool:
    """Whether what runs on import sets something of that name, or an item of it, again."""
    for one in _on_import(tree):
        if isinstance(one, (ast.Name, ast.Attribute)) and not isinstance(one.ctx, ast.Load):
            own = one.id if isinstance(one, ast.Name) else one.attr
            if own == name and one.lineno != value.lineno:
                return True
        elif isinstance(one, (ast.Subscript, ast.Call)):
            holder = one.value if isinstance(one, ast.Subscript) else getattr(one.func, "value", None)
            if name in (getattr(holder, "id", None), getattr(holder, "attr", None)):
                return True
    return False


def _on_import(node: ast.AST) -> Iterator[ast.AST]:
    for one in ast.iter_child_nodes(node):
        if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield one
            yield from _on_import(one)
