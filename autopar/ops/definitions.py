"""Where an operator of somebody's own is defined: its name only exists once that module has been imported."""

from __future__ import annotations

import importlib.util
import keyword

from autopar.ops.call import overload


def defining_module(op: str) -> str | None:
    """The importable module that defined an operator by `torch.library.custom_op`; None for torch's own.

    None also for those that a script (`__main__`) or C++ defines: the emitted program's user imports these.
    """
    if op.startswith(("aten.", "prim.")):
        return None
    from torch._library.custom_ops import OPDEFS  # private: torch does not say otherwise who defined an operator

    definition = OPDEFS.get(overload(op)._schema.name)
    module = getattr(getattr(definition, "_init_fn", None), "__module__", "__main__")
    return module if module != "__main__" and _can_be_imported(module) else None


def _can_be_imported(module: str) -> bool:
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in module.split(".")):
        return False  # no import statement names it
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
