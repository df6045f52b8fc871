"""One call of a block while its model is exported: of one that is exported itself, or of one that is watched."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from autopar.trace.evidence import DiffersError, Recorder, Row, UnclearError, stand_in
from autopar.trace.hidden import shown
from autopar.trace.markers import entered, left, repeated


@dataclass(frozen=True)
class Tape:
    """What an exported block did, and its results by their names."""

    block: str
    rows: list[Row]
    made: dict[Row, Tensor]


@dataclass(frozen=True)
class ModelState:
    """Parameters and buffers of a model. own: of one block, by name in it, with the names that stand for them.

    names: of all that export sees, by id, as the model calls them. seen: these tensors. Where a block's own name begins
    with a dot, the tensor is the block's; else it shares it with others.
    """

    own: Mapping[str, tuple[str, Tensor]]
    names: dict[int, str]
    seen: list[Tensor]

    @property
    def known(self) -> Mapping[int, str]:
        """Names by id, as the block calls them."""
        return ChainMap({id(x): name for name, x in self.own.values()}, self.names)

    def twins(self) -> ModelState:
        """With other tensors of the same looks in place of the block's: another that reads those is told apart."""
        made: dict[str, Tensor] = {}
        with torch._C.DisableTorchFunction():  # export's modes look at each call and attribute
            for name, x in self.own.values():
                if name.startswith(".") and name not in made:
                    made[name] = _twin(x)
        own = {path: (name, made.get(name, x)) for path, (name, x) in self.own.items()}
        return ModelState(own, self.names, [*self.seen, *made.values()])


class BlockCall:
    """A call of a block: `inputs` are the different tensors among its arguments, alone or in tuples."""

    def __init__(self, block: nn.Module, path: str, own: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.block, self.path, self.own, self.args, self.kwargs = block, path, own, args, kwargs
        self.inputs = list({id(x): x for x in _tensors((args, tuple(kwargs.values())))}.values())

    @property
    def is_plain(self) -> bool:
        """Whether no list or dict holds a tensor: others could see what the block does to it."""
        return not any(_in_lists(value) for value in (self.args, *self.kwargs.values()))

    def run(self, recorder: Recorder, inputs: Sequence[Tensor]) -> _Outputs:
        """Calls the block with these in place of its inputs."""
        other = {id(x): new for x, new in zip(self.inputs, inputs, strict=True)}

        def new(x: Tensor) -> Tensor:
            return other[id(x)]

        with recorder:
            value = self.own(*mapped(self.args, new), **{key: mapped(item, new) for key, item in self.kwargs.items()})
        return _Outputs(value, recorder.close(list(_tensors(value))))


@dataclass(frozen=True)
class _Outputs:
    """What a block returned. names: of each tensor in it."""

    value: Any
    names: list[Row]

    @property
    def made(self) -> dict[Row, Tensor]:
        return {name: x for name, x in zip(self.names, _tensors(self.value), strict=True) if name[0] == "made"}

    def replaced(self, inputs: Sequence[Tensor], made: Mapping[Row, Tensor]) -> Any:
        """With the caller's own inputs, and others in place of what was made."""
        names = iter(self.names)

        def new(_: Tensor) -> Tensor:
            name = next(names)
            return inputs[name[1]] if name[0] == "input" else made[name]

        return mapped(self.value, new)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those in tuples, lists and dicts, in order; what other objects hold is theirs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple) or type(value) is list:
        for item in value:
            yield from _tensors(item)
    elif type(value) is dict:
        yield from _tensors(tuple(value.values()))


def mapped(value: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """The same with other tensors; what holds none is the same object."""
    if isinstance(value, Tensor):
        return new(value)
    if next(_tensors(value), None) is None:
        return value
    if isinstance(value, dict):
        return {key: mapped(item, new) for key, item in value.items()}
    items = [mapped(item, new) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _in_lists(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_in_lists(item) for item in value)
    return not isinstance(value, Tensor) and next(_tensors(value), None) is not None


class Record(Protocol):
    """Makes what writes down a block's calls; with `ahead`, what follows those of another (`evidence.Follower`)."""

    def __call__(
        self,
        write: Callable[[Row], None],
        inputs: Sequence[Tensor],
        state: Mapping[int, str],
        ahead: Callable[[], Iterable[Row]] | None = None,
    ) -> Recorder: ...


def export_between_markers(call: BlockCall, state: ModelState, record: Record) -> tuple[Any, Tape]:
    """What the block returns, and what it did. Raises UnclearError where a marker cannot stand for such a block."""
    if not call.inputs or any(id(x) in state.names or not _is_simple(x) for x in call.inputs):
        raise UnclearError("expected tensors in dense memory that are no parameters as its inputs")
    if not call.is_plain:
        raise UnclearError("expected its inputs alone or in tuples")
    marks = [entered(x, call.path, number) for number, x in enumerate(call.inputs)]
    others, rows = [*marks, *state.seen], list[Row]()
    before = _versions(others)
    outputs = call.run(record(rows.append, marks, state.known), marks)
    if not outputs.made or any(name[0] == "state" for name in outputs.names):
        raise UnclearError("expected it to return tensors that it made")
    if _versions(others) != before or _share_memory(list(outputs.made.values()), others):
        raise UnclearError("expected it to leave alone what it is given, and to return no views of it")
    made = {name: left(x, call.path, number) for number, (name, x) in enumerate(outputs.made.items())}
    return outputs.replaced(call.inputs, made), Tape(call.path, rows, made)


def run_aside(call: BlockCall, pattern: ModelState, record: Record, tapes: Iterable[Tape]) -> Any:
    """What the block returns, made by a marker, after it was seen to do what one of the exported blocks did.

    pattern: the state of such a block. Raises DiffersError where it does something else.
    """
    comparison = _Comparison(tapes)
    if not call.is_plain:
        raise DiffersError
    with disable_proxy_modes_tracing():
        state = pattern.twins()
        others = [*call.inputs, *state.seen]
        before = _versions(others)
        with shown(call.block, {path: x for path, (_, x) in state.own.items()}):
            recorder = record(comparison.check, call.inputs, state.known, comparison.ahead)
            outputs = call.run(recorder, call.inputs)
        if _versions(others) != before:
            raise DiffersError
    tape = comparison.result()
    with _without_lines():
        made = repeated(call.inputs, list(tape.made.values()), tape.block, call.path)
    if [x.requires_grad for x in made] != [x.requires_grad for x in tape.made.values()]:
        raise DiffersError
    return outputs.replaced(call.inputs, dict(zip(tape.made, made, strict=True)))


@contextmanager
def _without_lines() -> Iterator[None]:
    """While inside, export does not look for the model's line of each call, which takes a third of the call: nobody
    asks for that of a marker."""
    mode: Any = get_proxy_mode()
    if mode is None:
        yield
        return
    with mock.patch.object(mode.tracer, "record_stack_traces", False):
        yield


class _Comparison:
    """Takes rows for as long as one of the tapes has the same."""

    def __init__(self, tapes: Iterable[Tape]) -> None:
        self.tapes = list(tapes)
        self.num_rows = 0

    def check(self, row: Row) -> None:
        at = self.num_rows
        self.tapes = [tape for tape in self.tapes if at < len(tape.rows) and tape.rows[at] == row]
        self.num_rows += 1
        if not self.tapes:
            raise DiffersError

    def ahead(self) -> Iterable[Row]:
        """What comes next on one of the tapes that are left."""
        return islice(self.tapes[0].rows, self.num_rows, None)

    def result(self) -> Tape:
        for tape in self.tapes:
            if len(tape.rows) == self.num_rows:
                return tape
        raise DiffersError


def _twin(x: Tensor) -> Tensor:
    """Another tensor of the same looks."""
    twin = stand_in(x, x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
    if isinstance(x, nn.Parameter):
        twin._is_param = True  # what nn.Parameter makes of a fake tensor's detached copy
    return twin


def _is_simple(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_conj() and not x.is_neg()


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    with torch._C.DisableTorchFunction():  # as in `ModelState.twins`
        return [x._version for x in tensors]


def _share_memory(made: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two of those made do, or one and another."""
    memory = [x.untyped_storage()._cdata for x in made]
    return len(set(memory)) < len(memory) or not set(memory).isdisjoint(x.untyped_storage()._cdata for x in others)
