"""torch.compile of a rank: the operators of each block are compiled; what gathers and communicates stays as it is.

    compiled   the statements of a block's forward between two redistributions or inner blocks, and their backward
    eager      functions of this runtime (`redistribute`, losses over shards, dropout), the hooks around blocks that
               gather parameters and send gradients, and the statements around a loop over inner blocks: torch.compile
               cannot leave a loop and come back. A warning names the blocks that have one

A compiled piece takes this rank's tensors as they are at that moment, like any other function, so that collectives
run in the same order as without. Whether a piece is compiled again for other shapes or dtypes is torch's business.
"""

from __future__ import annotations

import dis
import inspect
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from autopar.runtime.declare import Block, Parameters
from autopar.runtime.errors import ProgramError

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

_RUNTIME = "autopar.runtime"
_wrappers: weakref.WeakKeyDictionary[nn.Module, Callable[[], nn.Module | None]] = weakref.WeakKeyDictionary()


def compile_blocks(program: nn.Module, compiler: Compile) -> None:
    """Compiles every block's forward in place. Blocks call each other, and the runtime, outside of compiled code."""
    blocks = [module for module in program.modules() if isinstance(module, Block)]
    for module in {type(block).__module__ for block in blocks}:
        if not module.startswith(_RUNTIME):
            _call_runtime_eagerly(sys.modules[module])
    _leave_compiled_code_for(program)
    running = [block for block in blocks if type(block).forward is not Block.forward]
    loops = {type(block): _has_loop(type(block).forward) for block in running}
    for block in running:
        plain = types.MethodType(type(block).forward, block)
        block.__dict__["forward"] = plain if loops[type(block)] else compiler(plain)
        block.__dict__["is_compiled"] = not loops[type(block)]
    _tell(loops)


def _leave_compiled_code_for(program: nn.Module) -> None:
    """Calls of blocks run hooks that gather; buffers, constants and parameters of other blocks are kept by the rank."""
    if "__call__" not in vars(Block):  # once for all programs
        Block.__call__ = _eagerly(nn.Module.__call__)  # type: ignore[method-assign]
        Parameters.update = _eagerly(Parameters.update)  # type: ignore[method-assign]
    for module in program.modules():
        if isinstance(module, Parameters):
            module.late_tensors.update({k: _eagerly(v) for k, v in module.late_tensors.items()})
            for name, method in list(vars(type(module)).items()):
                if name.startswith("constants"):
                    module.__dict__[name] = _eagerly(types.MethodType(method, module))


def _eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one that torch.compile calls and does not look into, nor into what it calls."""
    outside: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call] # torch's
    return outside


def _has_loop(function: Callable[..., Any]) -> bool:
    return any(step.opname == "FOR_ITER" for step in dis.get_instructions(function))


def _tell(loops: dict[type[Block], bool]) -> None:
    eager = sorted(block.__name__ for block, has_loop in loops.items() if has_loop)
    compiled = sorted(block.__name__ for block, has_loop in loops.items() if not has_loop)
    if eager:
        warnings.warn(
            f"torch.compile of a rank: the statements of {', '.join(eager)} run eagerly, since they call their blocks "
            f"in a loop; compiled are those of {', '.join(compiled) or 'no block'}",
            stacklevel=4,
        )


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of torch.compile. Raises ProgramError for what cannot be."""
    if options.get("fullgraph"):
        raise ProgramError(
            "expected fullgraph=False: collectives and the sums of gradients run between a program's compiled pieces"
        )
    return options


def _call_runtime_eagerly(module: types.ModuleType) -> None:
    """Lets an emitted module see the runtime's functions as ones that torch does not look into."""
    for name, value in list(vars(module).items()):
        if isinstance(value, types.ModuleType) and value.__name__ == _RUNTIME:
            setattr(module, name, _eager_copy(value))
        elif _is_runtime_function(value):
            setattr(module, name, _eagerly(value))


def _eager_copy(runtime: types.ModuleType) -> types.ModuleType:
    copy = types.ModuleType(f"{_RUNTIME}.eager")
    for name, value in vars(runtime).items():
        setattr(copy, name, _eagerly(value) if _is_runtime_function(value) else value)
    return copy


def _is_runtime_function(value: object) -> bool:
    return inspect.isfunction(value) and value.__module__.startswith(_RUNTIME)


# torch.compile(rank) ----------------------------------------


def watch_for_wrapper(rank_type: type[nn.Module]) -> None:
    """Notices `torch.compile(rank)`: torch makes a module around it, which leaves all but calls to the rank."""

    def on_registration(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if isinstance(submodule, rank_type) and type(module).__name__ == "OptimizedModule":
            _wrappers[submodule] = weakref.ref(module)
            submodule.__dict__["forward"] = _eagerly(submodule.forward)

    register_module_module_registration_hook(on_registration)


def taken_wrapper(rank: nn.Module) -> Compile | None:
    """What compiles as the wrapper would, once for each `torch.compile(rank)`; None when there is nothing new."""
    held = _wrappers.pop(rank, None)
    wrapper = held() if held is not None else None
    if wrapper is None:
        return None
    compiler: Compile | None = getattr(wrapper, "dynamo_ctx", None)
    if compiler is None:
        warnings.warn(
            "torch.compile(rank) compiles nothing under this version of torch, train_step and forward run eagerly; "
            "call rank.compile(), which takes the same options",
            stacklevel=3,
        )
    return compiler
