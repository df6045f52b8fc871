"""What torch registers for composite operators while it decomposes a program, kept from one program to the next.

To keep composite operators whole, torch registers some twenty kernels for each of five hundred, and takes all of them
back afterwards: an eighth of a second a program, twice of what a small one takes otherwise. They are the same each
time. So what the first program had registered is put in place for the others, where nothing else has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch.export import exported_program

_Given = Mapping[OpOverload, Callable[..., Any]]
_Registering = Callable[[_Given], AbstractContextManager[None]]
_Kernels = dict[Any, Callable[..., Any]]


class _Registered(NamedTuple):
    """An operator's kernels before and while it is registered, and its rule for fake tensors."""

    op: OpOverload
    before: _Kernels
    kernels: _Kernels
    fake_rule: Callable[..., Any]


_KNOWN: dict[tuple[Any, ...], list[_Registered]] = {}
"""By what torch was given: operators, and what takes each apart."""


@contextmanager
def registrations_kept() -> Iterator[None]:
    """While inside, torch registers what it has registered before without going through it again."""
    own: _Registering = exported_program._override_composite_implicit_decomp
    with mock.patch.object(exported_program, "_override_composite_implicit_decomp", partial(_registered, own)):
        yield


@contextmanager
def _registered(own: _Registering, given: _Given) -> Iterator[None]:
    known = _KNOWN.get(tuple(given.items()))
    if known is not None and all(_is_as_before(one) for one in known):
        with _put_in_place(known):
            yield
        return
    before = {op: dict(op.py_kernels) for op in given}
    is_plain = not any(op in fake_impls.op_implementations_dict for op in given)
    with own(given):
        if is_plain:  # torch takes other rules for fake tensors away the first time
            _KNOWN[tuple(given.items())] = [
                _Registered(op, before[op], dict(op.py_kernels), fake_impls.op_implementations_dict[op]) for op in given
            ]
        yield


def _is_as_before(one: _Registered) -> bool:
    return one.op.py_kernels == one.before and one.op not in fake_impls.op_implementations_dict


@contextmanager
def _put_in_place(known: list[_Registered]) -> Iterator[None]:
    for one in known:
        _set_kernels(one.op, one.kernels)
        fake_impls.op_implementations_dict[one.op] = one.fake_rule
    try:
        yield
    finally:
        for one in known:
            _set_kernels(one.op, one.before)
            fake_impls.op_implementations_dict.pop(one.op, None)


def _set_kernels(op: OpOverload, kernels: _Kernels) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()
