"""Names in a profiler's trace for what a program does: which operator of the plan each event belongs to.

A traced program (`autopar run --trace`) writes each statement as `with rt.ran(self, 3): …`, where 3 is its number among
those of its module, and states in `RAN` what each of them is: "linear_2 | layers.1.mlp.up | model.py:12". Equal blocks
share one class still; a block learns which of them it is when the program is built (`name_ranges`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from autopar.runtime.declare import Block, Parameters, Program
from autopar.runtime.ranges import AGAIN, MARK, Range


def ran(block: Block, number: int) -> AbstractContextManager[object]:
    """The range of a module's statement; nothing where the program was built without names."""
    names = block.__dict__.get("ran_names")
    if names is None:
        return nullcontext()
    return Range(names[block.mesh.progress.is_again][number])


def name_ranges(program: Program) -> None:
    """Tells each block of a traced program what its statements are."""
    if not program.RAN:
        return
    for path, module in _paths(program, ""):
        if isinstance(module, Block) and path in program.RAN:
            told = program.RAN[path]
            module.__dict__["ran_names"] = [MARK + name for name in told], [AGAIN + name for name in told]


def _paths(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """All modules by the names that the model has for them."""
    yield path, module
    names = module.model_names if isinstance(module, Parameters) else {}
    for attribute, child in module.named_children():
        yield from _paths(
            child, f"{path}.{names.get(attribute, attribute)}" if path else names.get(attribute, attribute)
        )
