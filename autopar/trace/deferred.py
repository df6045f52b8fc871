"""Python code of torch's graphs that is only made where a graph is called.

torch.export writes out the code of a graph after each of its twenty passes, and calls two of them: for large graphs
that is a quarter of the time that tracing takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen


@contextmanager
def code_deferred() -> Iterator[None]:
    """Inside, a graph module's `recompile` notes that its code is to be made, at the first call after it."""
    module: Any = GraphModule
    recompile, code = module.recompile, module.code

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        recompile(self)
        return self(*args, **kwargs)

    def noted(self: Any) -> None:
        codegen = self.graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        type(self).forward = forward

    def made(self: Any) -> Any:
        if type(self).forward is forward:
            recompile(self)
        return code.fget(self)

    with mock.patch.object(module, "recompile", noted), mock.patch.object(module, "code", property(made)):
        yield
