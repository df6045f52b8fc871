"""What a block does: the list of its calls of torch, with names of tensors that are the same for another like block.

Two calls of blocks are equal when their tapes are: what comes in has the same shapes, strides, dtypes and flags; every
torch function is called in the same order, from the same line, in the same submodule, with the same plain arguments
and the same tensors (the k-th that came in, the own parameter of the same name, one outside of the block, the k-th that
was made); and the same of these goes out. What torch does then follows: it sees nothing else of a model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch

from autopar.trace.lines import place_of

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
#: these change how torch exports what comes after them
_SWITCHES = (
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)

Row = tuple[Any, ...]


class PathWatch(TorchFunctionMode):
    """Sees calls of torch, and which module makes them: the path of that is the last of the stack."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.paths = {id(module): name for name, module in model.named_modules()}
        self.stack = [""]

    @contextmanager
    def following(self) -> Iterator[None]:
        """While inside, all is seen."""
        hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(self.paths.get(id(module), self.stack[-1]))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()


class DiffersError(Exception):
    """A block does something else than the one that it was compared with."""


class UnclearError(Exception):
    """What a block does cannot be told from its calls of torch."""


class Recorder(TorchFunctionMode):
    """Passes what is called on, as rows.

    write: takes the next row; may raise. state: names of parameters and buffers by id of the tensor. modules: names of
    the block's submodules by id. Raises UnclearError at what has no name.
    """

    def __init__(
        self,
        write: Callable[[Row], None],
        inputs: Iterable[Tensor],
        state: Mapping[int, str],
        modules: Mapping[int, str],
    ) -> None:
        super().__init__()
        self.write = write
        self.state, self.modules = state, modules
        self.kept: list[Any] = list(inputs)  # what is named stays alive, so that no id is given twice
        self.names: dict[int, Row] = {id(x): ("input", number) for number, x in enumerate(self.kept)}
        self.num_made = 0
        self.write(("entry", *map(_looks, self.kept), *_modes()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":
            result = func(*args, **kwargs)
            if not isinstance(result, Tensor):
                if isinstance(result, bool):  # of a tensor whose view was written to, that may be another than it says
                    self.write(("read", result))
                return result  # a shape, dtype or the like: it follows from the tensor
        else:
            result = None
        if func in _SWITCHES:
            raise UnclearError(f"it calls {func}")
        call = (self._value(args), self._value(kwargs))
        self.write(("call", func, *call, place_of(sys._getframe(1)), torch.is_grad_enabled()))
        result = self._called(func, args, kwargs) if result is None else result
        with torch._C.DisableTorchFunction():
            self._result(result)
        self.write(("returned", _structure(result)))
        return result

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What torch returns."""
        return func(*args, **kwargs)

    def enter(self, module: nn.Module) -> None:
        name = self.modules.get(id(module))
        if name is None:
            raise UnclearError("it calls a module that is not its own")
        self.write(("enter", name))

    def leave(self, module: nn.Module) -> None:
        self.write(("leave", self.modules.get(id(module))))

    def close(self, outputs: list[Tensor]) -> list[Row]:
        """The names of what goes out."""
        names = [self._tensor(x) for x in outputs]
        self.write(("exit", *names, *_modes()))
        return names

    def _result(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if id(value) not in self.names and id(value) not in self.state:
                self.names[id(value)] = ("made", self.num_made)
                self.num_made += 1
                self.kept.append(value)
            self.write(("result", self._tensor(value), _looks(value)))
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._result(item)

    def _tensor(self, x: Tensor) -> Row:
        name = self.names.get(id(x))
        if name is not None:
            return name
        if id(x) in self.state:
            return ("state", self.state[id(x)])
        raise UnclearError("it uses a tensor that it was not given")

    def _value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return (type(value), *[self._value(item) for item in value])
        if isinstance(value, dict):
            return tuple([(key, self._value(item)) for key, item in value.items()])
        if value is None or value is Ellipsis or isinstance(value, _PLAIN):
            return (type(value), repr(value) if isinstance(value, (float, complex)) else value)
        if isinstance(value, slice):
            return ("slice", *map(self._value, (value.start, value.stop, value.step)))
        if callable(value):
            self.kept.append(value)
            return ("function", id(value))
        raise UnclearError(f"it passes {type(value).__name__} to torch")


class Follower(Recorder):
    """Calls torch only where what the same call returned is not known: a tensor of the same looks stands in for it.

    ahead: what a block that did the same so far wrote after that call.
    """

    def __init__(self, ahead: Callable[[], Iterable[Row]], *recorder: Any) -> None:
        super().__init__(*recorder)
        self.ahead = ahead

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        results, structure = _next_result(self.ahead())
        found = {self._tensor(x): x for x in tensors_in((args, kwargs))}
        made = [(name, looks) for _, name, looks in results if name not in found]
        if (
            not _holds_tensors_alone(structure)
            or [name for name, _ in made] != [("made", self.num_made + k) for k in range(len(made))]
            or any(is_conj or is_neg for _, (*_, is_conj, is_neg) in made)
        ):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            changed = [(found[name], looks) for _, name, looks in results if name in found]
            if any(_in_memory(_looks(x)) != _in_memory(looks) for x, looks in changed):
                with torch.no_grad():  # it changes the looks of a tensor in place, and that may be one that stands in
                    return func(*args, **kwargs)
            for x, looks in changed:  # what is written into it may have a gradient
                x.requires_grad_(looks[4])
            like = self.kept[0]
            return _built(
                structure, iter([found[n] if n in found else stand_in(like, *looks[:5]) for _, n, looks in results])
            )


def _next_result(rows: Iterable[Row]) -> tuple[list[Row], Any]:
    """The rows of what a call returned, and in what; none where other things happened before it did."""
    results: list[Row] = []
    for row in rows:
        if row[0] != "result":
            return (results, row[1]) if row[0] == "returned" else ([], None)
        results.append(row)
    return [], None


def _structure(value: Any) -> Any:
    """Of what a call returned: the kinds of tuples and lists, and where in them tensors are."""
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_structure, value))
    return Tensor if isinstance(value, Tensor) else None


def _holds_tensors_alone(structure: Any) -> bool:
    return all(map(_holds_tensors_alone, structure[1:])) if isinstance(structure, tuple) else structure is Tensor


def _built(structure: Any, tensors: Iterator[Tensor]) -> Any:
    if structure is Tensor:
        return next(tensors)
    kind, *parts = structure
    items = [_built(part, tensors) for part in parts]
    return items if kind is list else kind(items)  # a tuple, or one of torch's with names, which take a sequence


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those in tuples, lists and dicts of any kind, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def stand_in(like: Tensor, shape: Any, stride: Any, dtype: Any, device: Any, requires_grad: bool) -> Tensor:
    """A new tensor of the kind of another: where that is fake, one that no mode is asked for, which takes longer."""
    if not isinstance(like, FakeTensor):
        return torch.empty_strided(shape, stride, dtype=dtype, device=device, requires_grad=requires_grad)
    with no_dispatch():
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(like.fake_mode, meta, device).requires_grad_(requires_grad)


def _looks(x: Tensor) -> Row:
    """All of a tensor that a program can see without its values."""
    return (tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad, x.is_conj(), x.is_neg())


def _in_memory(looks: Row) -> Row:
    """Of its looks, how a tensor lies in memory: not whether it has a gradient."""
    shape, stride, dtype, device, _, *flags = looks
    return (shape, stride, dtype, device, *flags)


def _modes() -> Row:
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast)
