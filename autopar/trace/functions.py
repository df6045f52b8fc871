"""Calls of autograd Functions while a model is exported: each becomes one operator (`ops.functions`).

Export would go through a Function's forward, and differentiate that: its own backward would be lost. So a call is made
aside, on shapes alone and outside of the exported graph, forward and backward, which tells what it returns, through
what gradients flow and whether it draws random numbers; the exported graph gets a marker (`trace.markers`).
Operands that get no gradient are detached, so that nothing before them waits for one. Checkpointed functions are gone
through: what to compute again is the plan's choice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from autopar.errors import TraceError
from autopar.ops.functions import import_error
from autopar.trace.evidence import tensors_in
from autopar.trace.lines import user_line
from autopar.trace.literals import UnwritableError, written
from autopar.trace.markers import CALLED, Called, function
from autopar.trace.settings import changed_setting
from autopar.trace.watching import mapped

_PASSED = ("torch._", "torch.utils.checkpoint", "torch.fx", "torch.library")
"""Modules whose Functions are torch's way to do what export sees anyway."""


@contextmanager
def functions_kept() -> Iterator[None]:
    """Calls of autograd Functions become markers, however `apply` was reached: each ends in that of this base."""
    base: Any = _SingleLevelFunction
    own = base.apply.__func__ if "apply" in vars(base) else None
    original: Callable[..., Any] = torch._C._FunctionBase.__dict__["apply"].__get__
    is_aside = False

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_aside
        call = original(None, cls)
        if cls is CheckpointFunction:
            return _run_checkpointed(*args)
        if is_aside or cls.__module__.startswith(_PASSED):
            return call(*args, **kwargs)
        is_aside = True
        try:
            return _marked(cls, args, call)
        finally:
            is_aside = False

    assert own is None, "expected torch's Function to inherit apply from its C++ base"
    base.apply = classmethod(apply)
    surrounds = "_checkpoint_without_reentrant_generator"
    try:
        with mock.patch.object(torch.utils.checkpoint, surrounds, _uncheckpointed):
            yield
    finally:
        del base.apply


def _run_checkpointed(run: Callable[..., Any], _: bool, *args: Any) -> Any:
    """Reentrant checkpointing is a hint, but for this: without a gradient of an argument there is none inside."""
    has_gradient = any(isinstance(x, Tensor) and x.requires_grad for x in args)
    with nullcontext() if has_gradient or not torch.is_grad_enabled() else torch.no_grad():
        return run(*args)


def _uncheckpointed(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of what surrounds a function that is to be computed again."""
    yield


def _marked(cls: Any, args: tuple[Any, ...], call: Callable[..., Any]) -> Any:
    """What the call returns, made by a marker."""
    if reason := import_error(cls):
        _refuse(
            cls,
            f"expected an autograd Function that the program can import, found {cls.__name__}, which {reason}",
            "Move it to the top level of a module that can be imported",
        )
    _check_settings(cls)
    if cls.__module__.startswith("torch.distributed"):
        _refuse(cls, "expected a model of one device, found a collective", "Plan the model without it")
    tensors: list[Tensor] = []
    try:
        text = ", ".join(written(value, tensors) for value in args)
    except UnwritableError as error:
        _refuse(cls, f"expected tensors and plain values as its arguments, found {error}", "Pass what it reads of it")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        _refuse(cls, "expected a call outside of autocast", "Cast its inputs, and call it with autocast disabled")
    tracked = {id(value) for value in args if isinstance(value, Tensor) and value.requires_grad}
    aside = _OutsideCall(cls, call, args, tracked)
    _check_settings(cls)  # it may have changed them itself
    operands = [x if id(x) in aside.reached else x.detach() for x in tensors]
    called = aside.called(text)
    key = repr(called)
    CALLED[key] = called
    made = iter(function(operands, key))
    return mapped(aside.output, lambda _: next(made))


def _check_settings(cls: Any) -> None:
    if changed := changed_setting(cls):
        _refuse(
            cls,
            f"expected it to read what every import of it gives, found {changed}",
            "Pass that value to apply, too, as an argument, or write it so in the source",
        )


class _OutsideCall:
    """One call made outside of the exported graph. reached: ids of the arguments that get a gradient.

    output: what it returned.
    """

    def __init__(self, cls: Any, call: Callable[..., Any], args: tuple[Any, ...], tracked: set[int]) -> None:
        self.cls, self.call, self.args = cls, call, args
        self.on_numbers = False
        with ExitStack() as stack:
            stack.enter_context(disable_proxy_modes_tracing())
            stack.enter_context(torch._C.DisableTorchFunction())
            self.reached = self._reached(tracked)
            if self.reached != tracked:  # what it makes of these alone needs no gradient
                self._run(self.reached)

    def _reached(self, tracked: set[int]) -> set[int]:
        """Which of the arguments its backward has a gradient for."""
        inputs = self._run(tracked)
        pairs = [(name, x) for name, x in inputs.items() if name in tracked]
        results = [x for x in tensors_in(self.output) if x.requires_grad]
        if not pairs or not results:
            return set()
        if self.on_numbers:
            return tracked
        watch = _OperatorWatch(self.cls, [], checks_reads=False)
        try:
            with watch:
                found = torch.autograd.grad(
                    results, [x for _, x in pairs], [torch.ones_like(x) for x in results], allow_unused=True
                )
        except TraceError:
            raise
        except Exception:  # it needs values, or more than shapes: it is taken to have all of them
            return tracked
        if watch.draws:
            _refuse(self.cls, "expected a backward without random numbers", "Draw them in its forward and save them")
        return {name for (name, _), gradient in zip(pairs, found, strict=True) if gradient is not None}

    def _run(self, tracked: set[int]) -> dict[int, Tensor]:
        """Calls it on stand-ins for its tensors, by the ids of these, which are returned."""
        others: dict[int, Tensor] = {}

        def other(x: Tensor) -> Tensor:
            if id(x) not in others:
                others[id(x)] = x.detach().requires_grad_(id(x) in tracked)
            return others[id(x)]

        args = mapped(self.args, other)
        given = list(others.values())
        versions = [x._version for x in given]
        watch = _OperatorWatch(self.cls, given)
        try:
            with watch:
                self.output = self.call(*args)
        except TraceError:
            raise
        except Exception as error:
            self.output = self._on_numbers(args, error)
        if [x._version for x in given] != versions:
            _refuse(self.cls, "expected it to leave its inputs alone, found one that it writes to", "Write to a clone")
        self.draws = watch.draws
        if any(x.layout != torch.strided for x in tensors_in(self.output)):
            _refuse(self.cls, "expected results in dense memory", "Return dense tensors")
        return others

    def _on_numbers(self, args: tuple[Any, ...], error: Exception) -> Any:
        """The same on ones in place of shapes alone, where it asks for values: a kernel, or numpy."""
        fakes: list[Tensor] = []
        self.on_numbers = True

        def ones(x: Tensor) -> Tensor:
            fakes.append(x)
            return torch.ones(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad)

        try:
            with unset_fake_temporarily():
                found = self.call(*mapped(args, ones))
        except Exception:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            _refuse(self.cls, f"expected a forward that runs on shapes, found {reason}", "Make it one")
        device = fakes[0].device if fakes else torch.device("cpu")

        def shape(x: Tensor) -> Tensor:
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
            return made.requires_grad_(x.requires_grad)

        return mapped(found, shape)

    def called(self, text: str) -> Called:
        results = list(tensors_in(self.output))
        flags = tuple(x.requires_grad for x in results)
        looks = tuple((tuple(x.shape), x.stride(), x.dtype, x.device) for x in results)
        return Called(f"{self.cls.__module__}:{self.cls.__qualname__}", text, flags, self.draws, looks)


class _OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Sees each operator that a Function calls: whether one draws random numbers, or reads what it was not given."""

    def __init__(self, cls: Any, given: list[Tensor], checks_reads: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.cls, self.checks_reads, self.draws = cls, checks_reads, False
        self.known = {id(x) for x in given}
        self.kept: list[Tensor] = list(given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        if self.checks_reads and "lift_fresh" not in str(func):
            for x in tensors_in((args, tuple((kwargs or {}).values()))):
                if id(x) not in self.known:
                    _refuse(
                        self.cls,
                        f"expected it to read what it is given, found another tensor of shape {list(x.shape)}",
                        "Pass that tensor to apply, too",
                    )
        result = func(*args, **(kwargs or {}))
        made = list(tensors_in(result))
        self.kept += made
        self.known.update(map(id, made))
        return result


def _refuse(cls: Any, what: str, remedy: str) -> NoReturn:
    raise TraceError(f"{cls.__name__}, at\n  {user_line(sys._getframe(1))}\n{what}. {remedy}.")
