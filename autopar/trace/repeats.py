"""Exports one of the blocks that do the same, and of the others only watches that they do.

Blocks that look alike (`trace.alike`) are wrapped while a model is exported:

    the first   → is exported, between markers, and its calls of torch are written down (`trace.evidence`)
    another     → runs on shapes alone, outside of the exported graph; its calls are compared with those written down
                  as they happen; where all are equal, the graph gets one marker for them (`trace.markers`)

That another block does the same is never assumed. Where one differs, all begins anew and it is exported for itself;
where what blocks do cannot be told from their calls (one writes to its inputs or buffers, returns views of them, uses
tensors that nobody gave it), all of its kind are. What runs between blocks is exported as it is, so that blocks may be
wired in any way. Parameters of watched blocks are hidden from export, whose time grows with their number; to look at
them from outside of the block is noticed, and then the block is exported, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autopar.trace.alike import alike
from autopar.trace.evidence import Follower, Recorder, Row
from autopar.trace.hidden import hidden
from autopar.trace.snapshot import Snapshot
from autopar.trace.tied import tied_names
from autopar.trace.watching import BlockCall, ModelState, Tape, export_between_markers, run_aside

FEWEST = 4
"""So many blocks that look alike are worth a look at each."""
_MOST_ATTEMPTS = 6


class AgainError(Exception):
    """Export has to begin anew, with one more block exported for itself, or all of a kind."""


@dataclass(eq=False)
class _Kind:
    """Blocks that look alike. exported: those that are, each a pattern for those after it."""

    paths: list[str]
    exported: list[str]
    tapes: dict[str, Tape] = field(default_factory=dict)


class Repeats:
    """Which blocks of a model are exported, and which are watched, from one attempt to the next."""

    def __init__(self, model: nn.Module, fewest: int = FEWEST) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.tied = tied_names(model)
        self.kinds = [_Kind(paths, paths[:1]) for paths in alike(model, self.tied, fewest)]
        self.attempts = 0
        self.is_void = False  # whether this attempt's program must not be used
        self.is_running = False
        self.recorder: Recorder | None = None
        self.state: dict[str, Tensor] = {}  # what export sees of the model's parameters and buffers
        self.names: dict[int, str] = {}

    @property
    def watched(self) -> list[str]:
        """Paths of the blocks that are not exported."""
        return [path for kind in self.kinds for path in kind.paths if path not in kind.exported]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the model is exported. Raises AgainError where that must be done again, with other blocks watched."""
        before = Snapshot(self.model) if self.kinds else None
        self.is_void = False
        try:
            with ExitStack() as stack:
                self._install(stack)
                yield
        except Exception:
            if not self.is_void:
                if not self.kinds:
                    raise
                self.give_up()  # without markers it is the same, or does not happen
        if self.is_void:
            if before is not None:  # hooks that forward installs once would be there twice
                before.restore()
            raise AgainError

    def give_up(self) -> None:
        """Watches nothing from now on, and lets this attempt go."""
        self.kinds, self.is_void = [], True

    def _install(self, stack: ExitStack) -> None:
        self.attempts += 1
        self.is_running, self.recorder, self.state, self.names = False, None, {}, {}
        for kind in self.kinds:
            kind.tapes = {}
            for path in kind.paths:
                stack.enter_context(self._wrapped(kind, path))
        if self.kinds:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave).remove)
            stack.callback(self.model.register_forward_pre_hook(self._start).remove)
            stack.callback(self.model.register_forward_hook(self._end).remove)

    @contextmanager
    def _wrapped(self, kind: _Kind, path: str) -> Iterator[None]:
        block = self.modules[path]
        own, was_set = block.forward, block.__dict__.get("forward")
        is_exported = path in kind.exported

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = BlockCall(block, path, own, args, kwargs)
            return self._export(kind, call) if is_exported else self._watch(kind, call)

        block.__dict__["forward"] = forward
        try:
            with ExitStack() as stack:
                if not is_exported:
                    stack.enter_context(hidden(block, lambda: self._noticed(kind, path)))
                yield
        finally:
            del block.__dict__["forward"]
            if was_set is not None:
                block.__dict__["forward"] = was_set

    # While the model runs ----------------------------------------

    def _start(self, module: nn.Module, args: Any) -> None:
        both = (self.model.named_parameters, self.model.named_buffers)
        self.state = {name: tensor for pairs in both for name, tensor in pairs(remove_duplicate=False)}
        self.names = {id(tensor): self.tied.get(name, name) for name, tensor in self.state.items()}
        self.is_running = True

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.is_running = False

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.recorder is not None:
            self.recorder.enter(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.recorder is not None:
            self.recorder.leave(module)

    def _noticed(self, kind: _Kind, path: str) -> None:
        if self.is_running:
            self._again(kind, path)

    def _export(self, kind: _Kind, call: BlockCall) -> Any:
        if call.path in kind.tapes or self.recorder is not None:
            return call.own(*call.args, **call.kwargs)  # once more: as any other module
        try:
            returned, tape = export_between_markers(call, self._state(call.path), partial(self._record, call))
        except Exception:  # also what is wrong with the model itself: it will be found when nothing is watched
            self._again(kind)
        finally:
            self.recorder = None
        kind.tapes[call.path] = tape
        return returned

    def _watch(self, kind: _Kind, call: BlockCall) -> Any:
        tapes = list(kind.tapes.values())
        try:
            return run_aside(call, self._state(tapes[0].block), partial(self._record, call), tapes)
        except Exception:
            self._again(kind, call.path)
        finally:
            self.recorder = None

    def _record(
        self,
        call: BlockCall,
        write: Callable[[Row], None],
        inputs: Sequence[Tensor],
        state: Mapping[int, str],
        ahead: Callable[[], Iterable[Row]] | None = None,
    ) -> Recorder:
        modules = {id(module): name for name, module in call.block.named_modules()}
        told = (write, inputs, state, modules)
        self.recorder = Recorder(*told) if ahead is None else Follower(ahead, *told)
        return self.recorder

    def _state(self, path: str) -> ModelState:
        """Of an exported block."""

        def name(stored: str) -> str:
            first = self.tied.get(stored, stored)
            return first.removeprefix(path) if first.startswith(path + ".") else first

        inside = {stored: x for stored, x in self.state.items() if stored.startswith(path + ".")}
        own = {stored[len(path) + 1 :]: (name(stored), x) for stored, x in inside.items()}
        return ModelState(own, self.names, list(self.state.values()))

    def _again(self, kind: _Kind, path: str | None = None) -> NoReturn:
        """Lets this attempt go; in the next, the block is exported for itself, or all of its kind."""
        if not self.is_void:
            self.is_void = True
            if path is None or path in kind.exported:
                self.kinds.remove(kind)
            else:
                kind.exported.append(path)
            if self.attempts == _MOST_ATTEMPTS:
                self.kinds = []
        raise AgainError
