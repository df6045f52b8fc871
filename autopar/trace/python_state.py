"""Refuses a forward that does not do the same each time it is called: what export keeps is one call of it.

    attributes, lists, dicts, global variables, generators of Python and numpy before → while traced → changed?
    then forward runs again and again on shapes alone, each time from where it left → other calls of torch? TraceError

What changes without any effect on what is computed, such as a cache that is filled once, is not refused. Of numbers
that grow by as much each time, larger ones are tried as well, so that schedules show what they will do. Refused at once
are generators of one's own, seeds that forward sets, and parameters that it freezes or thaws.
"""

from __future__ import annotations

import inspect
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.ir.structure import RANDOM
from autopar.trace.evidence import PathWatch
from autopar.trace.hidden import seen_stores
from autopar.trace.lines import line_at, place_of, user_line
from autopar.trace.machine import MachineAnswers
from autopar.trace.originals import memory_of
from autopar.trace.snapshot import MISSING, Snapshot, StateChange

_RUNS = 3
"""So many calls in a row must do the same."""
_DRAWING_RUNS = 24
"""So many where Python's or numpy's generator is drawn from."""
_FURTHER = (9, 99, 100, 999, 1_000, 9_999, 10_000, 100_000, 1_000_000)
"""So many times further numbers are set that grow by as much with each call."""
_LONGEST_S = 10.0
#: what export itself, and what watches it, put in the place of a module's own
_OTHERS = {"forward", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks",
           "_forward_hooks_always_called", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"}  # fmt: skip
_SEEDS = ("manual_seed", "seed", "set_rng_state")


@contextmanager
def same_each_time(
    target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool = True
) -> Iterator[None]:
    """While a model is exported, after which it is as it was. Raises TraceError where forward's next call does
    something else, naming what changed, the module and the source line. trains: parameters change between calls."""
    roots = [target, *(x for x in vars(target).values() if callable(x))]
    before = Snapshot(*roots, random._inst, np.random.mtrand._rand)
    changes: list[StateChange] = []

    machine = MachineAnswers()
    marks: dict[str, dict[str, Any]] = {}  # attributes of parameters and buffers, by their names

    def entered(*_: Any) -> None:
        marks.update((name, dict(vars(x))) for name, x in _stored(target))

    def left(*_: Any) -> None:
        changes[:] = [change for change in before.changes() if not _is_exports(change)]
        changes.extend(
            StateChange(f"{name}.{key}", x, key, MISSING, value, partial(setattr, x, key))
            for name, x in _stored(target)
            for key, value in vars(x).items()
            if key not in marks.get(name, {key}) and isinstance(value, Tensor)
        )

    try:
        with ExitStack() as stack:
            stack.callback(target.register_forward_pre_hook(entered).remove)
            stack.callback(target.register_forward_hook(left).remove)
            stack.enter_context(_Refusing())
            stack.enter_context(machine.noted())
            modules = set(target.modules())
            register = _registering(nn.Module.register_parameter, modules)
            stack.enter_context(mock.patch.object(nn.Module, "register_parameter", register))
            for name in ("__setattr__", "add_module"):
                replace = _replacing(getattr(nn.Module, name), modules)
                stack.enter_context(mock.patch.object(nn.Module, name, replace))
            for name in _SEEDS:
                for module in (torch, torch.random):
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, _seeding(getattr(module, name))))
            yield
        if changes or machine.asked:
            before.restore()
            _check_again(before, changes, machine, _ShapeCall(target, args, kwargs, trains))
            used = [change for change in changes if change.is_of_iterator]
            if used:
                raise _refusal(used, target, *_place_of_attribute(target, used[0].path))
    finally:
        before.restore()


def _stored(target: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in target.named_modules():
        for store in seen_stores(module):
            yield from ((f"{path}.{name}".lstrip("."), x) for name, x in store.items() if x is not None)


def _is_exports(change: StateChange) -> bool:
    if change.path.split(".")[-2:-1] == ["forward"]:
        return False  # an attribute of the function
    if change.before in (None, MISSING) and change.path.split(".")[-2:-1] == ["_buffers"]:
        return False  # a buffer that forward makes
    return not _OTHERS.isdisjoint((change.key, *change.path.split(".")[-2:]))


def _line() -> str:
    """The user's line that is running."""
    return user_line(sys._getframe(2))


def _seeding(own: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of a function that sets torch's generator."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if "/torch/" in caller:
            return own(*args, **kwargs)
        raise TraceError(
            f"expected forward to draw from torch's generator as it is, found {own.__name__} at\n  {_line()}\n"
            "Tracing keeps no seed: remove it, or pass what is drawn as an input."
        )

    return refused


def _registering(own: Callable[..., None], modules: set[nn.Module]) -> Callable[..., None]:
    """In the place of what makes a tensor a module's parameter."""

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename in _SETTING:
            frame = frame.f_back
        is_new = module._parameters.get(name) is not parameter  # `self.weight += 1` sets the one that is there
        if is_new and module in modules and "/torch/" not in frame.f_code.co_filename:
            raise TraceError(
                f"expected forward to leave alone which parameters there are, found {name!r} of a "
                f"{type(module).__name__} set anew at\n  {line_at(place_of(frame))}\nAn optimizer would keep the one "
                "before: compute with another tensor, make it a parametrization (torch.nn.utils.parametrize), or "
                "change the parameter after optimizer.step()."
            )
        own(module, name, parameter)

    return registered


#: files of what stands between the line that sets a parameter and its registration
_SETTING = (nn.Module.__setattr__.__code__.co_filename, __file__)


def _replacing(own: Callable[..., None], modules: set[nn.Module]) -> Callable[..., None]:
    """In the place of what makes a module another's: a new one with parameters would be lost after this step."""

    def replaced(module: nn.Module, name: str, value: Any) -> None:
        is_new = isinstance(value, nn.Module) and value not in modules and module in modules
        if is_new and any(True for _ in value.parameters()):
            raise TraceError(
                f"expected forward to leave alone which parameters there are, found a new {type(value).__name__} as "
                f"{name!r} of a {type(module).__name__} at\n  {_line()}\nAn optimizer would not have its parameters: "
                "make it where the model is made."
            )
        own(module, name, value)

    return replaced


_CHOOSES_TRAINED = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class _Refusing(TorchFunctionMode):
    """Refuses what tracing would drop without a word."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):  # asked at every call that export and decompositions make
            if isinstance(value, torch.Generator):
                raise TraceError(
                    f"expected forward to draw from torch's own generator, found another torch.Generator at\n  "
                    f"{_line()}\nTracing keeps no generators: leave generator= out, or pass what is drawn as an input."
                )
        if func in _CHOOSES_TRAINED:
            wanted = bool(args[1]) if len(args) > 1 else kwargs.get("requires_grad", True)
            if isinstance(args[0], nn.Parameter) and args[0].requires_grad != wanted:
                raise TraceError(
                    "expected forward to leave alone which parameters are trained, found requires_grad changed at\n"
                    f"  {_line()}\nSet it before planning, and plan again where it changes; or use detach()."
                )
        return func(*args, **kwargs)


# Once more ----------------------------------------


class _MadeTensor(NamedTuple):
    """varies: with random numbers, inputs, or parameters that are trained. buffers: that it is made of, by name."""

    expression: int
    varies: bool
    buffers: frozenset[str]
    tensor: Tensor  # alive, so that no id is given twice


_OF_SHAPES = {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}
"""What reads no element of the tensors that it is told."""
_LIKE = {"to", "type_as", "expand_as", "view_as", "reshape_as", "broadcast_to"}
"""What reads none of the second."""


class _ExpressionTape(PathWatch):
    """What forward computes: of each tensor the expression that makes it, down to inputs and what is stored.

    known: tensors that earlier calls made, by id, which a cache may hold: the same where they do not vary.
    """

    def __init__(self, target: nn.Module, known: dict[int, _MadeTensor]) -> None:
        super().__init__(target)
        self.rows: list[tuple[int, str, Any]] = []  # expression, module path and place of each call
        self.known, self.own = known, dict[int, _MadeTensor]()
        self.written: dict[int, int] = {}  # what was written in place, by storage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            versions = [x._version for x in given]
            name = getattr(func, "__name__", "").strip("_")
            call = (func, self._value(args), self._value(kwargs), torch.is_grad_enabled())
        result = func(*args, **kwargs)
        if name == "get" and not isinstance(result, Tensor):
            return result  # a shape, dtype or the like
        with torch._C.DisableTorchFunction():
            read = [] if name in _OF_SHAPES else given[:1] if name in _LIKE else given
            made_of = [self._made(x) for x in read]
            varies = name in RANDOM or any(made.varies for made in made_of)
            buffers = frozenset[str]().union(*(made.buffers for made in made_of))
            for x, version in zip(given, versions, strict=True):
                if x._version != version:
                    self.written[memory_of(x)] = hash((self.written.get(memory_of(x), 0), call))
            results = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
            for place, x in enumerate(results):
                if not any(x is other for other in given):
                    self.own[id(x)] = _MadeTensor(hash((place, call)), varies, buffers, x)
            self.rows.append((hash(call), self.stack[-1], place_of(sys._getframe(1))))
        return result

    def name(self, x: Tensor, name: Any, varies: bool) -> None:
        """Of an input or a stored tensor."""
        buffers = frozenset() if varies or not isinstance(name, str) else frozenset({name})
        self.own[id(x)] = _MadeTensor(hash(name), varies, buffers, x)

    def lasting(self, stored: Mapping[str, Tensor]) -> dict[int, _MadeTensor]:
        """What is made of nothing that another call has other values of."""
        written = {name for name, x in stored.items() if memory_of(x) in self.written}
        return {key: made for key, made in self.own.items() if not made.varies and made.buffers.isdisjoint(written)}

    def _made(self, x: Tensor) -> _MadeTensor:
        made = self.own.get(id(x))
        if made is None:
            old = self.known.get(id(x))
            made = _MadeTensor(hash(("kept", id(x))), False, frozenset(), x) if old is None else old
            self.own[id(x)] = made
        return made

    def _value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return ("tensor", self._made(value).expression, self.written.get(memory_of(value), 0))
        if isinstance(value, (list, tuple)):
            return tuple(map(self._value, value))
        if isinstance(value, dict):
            return tuple((key, self._value(item)) for key, item in value.items())
        if isinstance(value, (bool, int, float, complex, str, type(None), torch.dtype, torch.device)):
            return (type(value).__name__, repr(value))
        return type(value).__name__

    def result(self, output: Any, stored: list[Tensor]) -> Any:
        """All that a call leaves behind: what it returns, and what it wrote to what is stored."""
        return [self._value(x) for x in pytree.tree_leaves(output)], [self.written.get(memory_of(x), 0) for x in stored]


def _check_again(before: Snapshot, changes: list[StateChange], machine: MachineAnswers, call: _ShapeCall) -> None:
    """Runs forward from where it was before, and after that; of numbers that grow, from where they will be.

    A call that fails says nothing: on shapes alone not all can run, and the comparison with the model is left.
    """
    runs = _DRAWING_RUNS if _draws(changes) or machine.asked else _RUNS
    began, known = time.monotonic(), dict[int, _MadeTensor]()
    with suppress(_ShapesAloneError), machine.later() if machine.asked else nullcontext():
        first, made = call.recorded(known)
        for ahead in (*[None] * (runs - 1), *_FURTHER):
            if time.monotonic() - began > _LONGEST_S:
                return
            if ahead == _FURTHER[0]:
                grown = _growing(changes, before.changes(), runs)
            if ahead is not None:
                before.restore()
                for change in grown:
                    change.put(change.before + (change.after - change.before) * ahead)
            if ahead is None or grown:
                known.update(first.lasting(call.stored))
                again, made_again = call.recorded(known)
                if made_again != made:
                    raise _refusal(changes, call.target, *_first_other(first, again), machine)
                known.update(again.lasting(call.stored))


def _growing(once: list[StateChange], later: list[StateChange], runs: int) -> list[StateChange]:
    """Numbers that change by as much in each of so many calls."""
    ends = {(id(change.holder), change.key): change.after for change in later}
    numbers = [c for c in once if type(c.before) in (int, float) and type(c.after) is type(c.before)]
    return [c for c in numbers if ends.get((id(c.holder), c.key)) == c.before + (c.after - c.before) * runs]


def _first_other(first: _ExpressionTape, again: _ExpressionTape) -> tuple[str, str]:
    """Module and line of the first call that only one of the two has."""
    for tape, other in ((again, first), (first, again)):
        known = {expression for expression, _, _ in other.rows}
        for expression, module, place in tape.rows:
            if expression not in known:
                return module, line_at(place)
    return "", line_at(first.rows[-1][2] if first.rows else None)


def _place_of_attribute(target: nn.Module, path: str) -> tuple[str, str]:
    """Module and line that name an attribute: those of its module's forward."""
    modules = dict(target.named_modules())
    owner, _, name = path.rpartition(".")
    module = next((owner[:end] for end in range(len(owner), 0, -1) if owner[:end] in modules), "")
    with suppress(OSError, TypeError):
        forward = inspect.unwrap(type(modules[module]).forward)
        lines, first = inspect.getsourcelines(forward)
        found = [(number, line) for number, line in enumerate(lines, first) if name in line] or [(first, lines[0])]
        return module, f"{inspect.getsourcefile(forward)}:{found[0][0]}: {found[0][1].strip()}"
    return module, line_at(None)


class _ShapesAloneError(Exception):
    """A call that cannot be made on shapes alone."""


class _ShapeCall:
    """A call of forward on shapes alone."""

    def __init__(self, target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool) -> None:
        self.target = target
        self.trained = {name for name, x in target.named_parameters() if trains and x.requires_grad}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        stored = (*target.named_parameters(), *target.named_buffers())
        self.stored = {name: self._fake(x) for name, x in stored}
        self.given = pytree.tree_map_only(Tensor, self._fake, (args, kwargs))

    def _fake(self, x: Tensor) -> Tensor:
        return self.mode.from_tensor(x, static_shapes=True)

    def recorded(self, known: dict[int, _MadeTensor]) -> tuple[_ExpressionTape, Any]:
        """Makes it: what it computes, and all that it leaves behind."""
        tape = _ExpressionTape(self.target, known)
        for name, x in (*self.stored.items(), *enumerate(pytree.tree_leaves(self.given))):
            if isinstance(x, Tensor):
                tape.name(x, name, not isinstance(name, str) or name in self.trained)
        try:
            with self.mode, tape.following():
                output = torch.func.functional_call(self.target, self.stored, *self.given)
        except Exception as error:
            raise _ShapesAloneError from error
        return tape, tape.result(output, list(self.stored.values()))


def _draws(changes: list[StateChange]) -> bool:
    """Whether Python's or numpy's own generator was drawn from."""
    return any(isinstance(change.holder, (random.Random, np.random.RandomState)) for change in changes)


def _refusal(
    changes: list[StateChange], target: nn.Module, module: str, where: str, machine: MachineAnswers | None = None
) -> TraceError:
    kind = type(target.get_submodule(module)).__name__
    inside = f"module {module!r} ({kind})" if module else "forward"
    asked = {} if machine is None else machine.asked
    if not changes:
        places = "\nand ".join(f"{name} at\n  {line_at(place)}" for name, place in asked.items())
        return TraceError(
            f"expected forward to do the same each time it is called, found that it asks {places}\n"
            f"and with that does something else in {inside} at\n  {where}\n"
            "The program would keep what it did at first. Pass what it asks for as an input."
        )
    if _draws(changes):
        what = "the state of a generator of Python or numpy"
        remedy = "Draw with torch's functions, or pass what is drawn as an input."
    else:
        what = ", ".join(f"{c.path} ({_short(c.before)} → {_short(c.after)})" for c in changes[:3])
        remedy = "Keep it in a registered buffer that forward updates by operators on tensors, or pass it as an input."
    remedy += f" It asks {', '.join(asked)}, too." if asked else ""
    return TraceError(
        f"expected forward to do the same each time it is called, found that it changes {what}, and with that what "
        f"{inside} does at\n  {where}\nThe program would keep what it did at first. {remedy}"
    )


def _short(value: Any) -> str:
    text = "nothing" if value is MISSING else repr(value)
    text = f"tensor{list(value.shape)}" if isinstance(value, Tensor) else text
    return text if len(text) <= 30 else f"{text[:27]}…"
