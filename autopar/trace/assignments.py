"""Buffers that forward puts another tensor in the place of, in any module: as writes at the end of the graph.

    self.state = f(x)        → …; copy_(state, clone(f(x))) before the output

torch.export does so for the outermost module alone, and drops what is assigned in those inside without a word. What is
of another shape or dtype, or no tensor, is refused with its line: no plan has a place for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.export._trace as exporting
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn.modules.module import register_module_buffer_registration_hook

from autopar.errors import TraceError
from autopar.trace.hidden import seen_stores
from autopar.trace.lines import user_line

aten = torch.ops.aten


@contextmanager
def assignments_kept() -> Iterator[None]:
    """While inside, torch.export sees the buffers that forward assigns in modules of the model."""
    with mock.patch.object(exporting, "register_buffer_assignment_hook", _Assigned):
        yield


class _Assigned:
    """In the place of torch's own hook while a model runs once, which it is told the end of by `remove`."""

    def __init__(self, root: nn.Module, _: dict[str, str]) -> None:
        self.root, self.own = root, {name: x is not None for name, x in root._buffers.items()}
        count = len(dict(root.named_parameters(remove_duplicate=False)))
        named = dict(root.named_buffers(remove_duplicate=False))
        self.inputs = {name: number for number, name in enumerate(named, count)}
        self.likes = {name: (buffer.shape, buffer.dtype) for name, buffer in named.items()}
        self.paths = {module: path for path, module in root.named_modules()}
        self.values: dict[str, fx.Node] = {}
        self.told: set[str] = set()
        self.odd: dict[str, str] = {}  # by name, what was assigned last that the buffer's place is not for, and where
        self.began: dict[str, Any] = {}  # buffers as forward finds them
        self.handles = [
            register_module_buffer_registration_hook(self._seen),
            root.register_forward_pre_hook(self._begin),
            root.register_forward_hook(self._end),
        ]

    def _begin(self, *_: Any) -> None:
        self.began = {name: module._buffers.get(last) for name, module, last in self._places()}

    def _end(self, *_: Any) -> None:
        """Looks for what was put into `_buffers` past any attribute."""
        for name, module, last in self._places():
            now = module._buffers.get(last)
            if now is not self.began[name] and name not in self.told:
                self._seen(module, last, now)

    def _places(self) -> Iterator[tuple[str, nn.Module, str]]:
        """The buffers that there were, each with its module and name in that."""
        for module, path in self.paths.items():
            for last in (name for store in seen_stores(module)[1:] for name in store):
                name = f"{path}.{last}" if path else last
                if name in self.inputs:
                    yield name, module, last

    def _seen(self, module: nn.Module, name: str, buffer: Any) -> None:
        path = self.paths.get(module)
        full = f"{path}.{name}" if path else name
        mode = get_proxy_mode()
        if path is not None and mode is None:
            raise RuntimeError(f"{full} is assigned in a block that is watched: it has to be exported")
        if mode is None or full not in self.inputs:
            return
        self.told.add(full)
        value = buffer.from_functional() if isinstance(buffer, FunctionalTensor) else buffer
        self.values.pop(full, None)
        self.odd.pop(full, None)
        shape, dtype = self.likes[full]
        if not isinstance(value, FakeTensor) or (value.shape, value.dtype) != (shape, dtype):
            found = _look(value.shape, value.dtype) if isinstance(value, Tensor) else str(value)
            self.odd[full] = (
                f"buffer {full!r} to stay {_look(shape, dtype)}, found it set to {found} at\n  "
                f"{user_line(sys._getframe(1))}"
            )
            return
        slot: Any = get_proxy_slot(value, mode.tracer, default=None)
        if slot is not None:
            self.values[full] = slot.proxy.node

    def remove(self) -> None:
        """Writes to the buffers what they were assigned last; first of all takes that, which may be other buffers."""
        for handle in self.handles:
            handle.remove()
        self._leave_out_new()
        if self.odd and sys.exc_info()[0] is None:
            raise TraceError(
                f"expected {next(iter(self.odd.values()))}\nRegister it as what it becomes, or compute with a variable "
                "of forward; what is kept until the next step keeps its place."
            )
        if not self.values:
            return
        graph = next(iter(self.values.values())).graph
        inputs = list(graph.find_nodes(op="placeholder"))
        pairs = [(inputs[self.inputs[name]], value) for name, value in self.values.items()]
        with graph.inserting_before(graph.output_node()):
            taken = [_call(graph, aten.clone.default, value, value) for _, value in pairs]
            for (buffer, value), copy in zip(pairs, taken, strict=True):
                _call(graph, aten.copy_.default, value, buffer, copy)

    def _leave_out_new(self) -> None:
        """Takes buffers away that forward has made, which torch would look for among its inputs."""
        for name in [name for name, x in self.root._buffers.items() if x is not None and not self.own.get(name)]:
            if name in self.own:
                self.root._buffers[name] = None
            else:
                del self.root._buffers[name]


def _look(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _call(graph: fx.Graph, target: Any, like: fx.Node, *args: fx.Node) -> fx.Node:
    """A call at the line that made a node, in a module of the model, as export asks for."""
    made = graph.call_function(target, args)
    around: Any = next((n.meta for n in reversed(graph.nodes) if "nn_module_stack" in n.meta), {})
    made.meta = {**{key: around[key] for key in ("nn_module_stack", "source_fn_stack") if key in around}, **like.meta}
    return made
