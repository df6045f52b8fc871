"""Values that a backward pass reads, and that are written to, unseen by autograd, before it does.

    y = h * w; h.data.clamp_(-1, 1)            w's gradient is made of the clamped h
    h = torch.sigmoid(x); h.data.clamp_(0, 1)  x's, of the clamped result

One device reads there what was written, and says nothing; a graph, in which nothing is written to, has the value of
before. Autograd is asked which operators keep what, on meta tensors, in the graph as it was exported: no operator is
written out in it as others, which may keep something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from autopar.ops.writes import overwritten
from autopar.trace.markers import hooked
from autopar.trace.originals import memory_of


class ExportedCall:
    """One call of the exported graph, as it is now. passes: operands by which a gradient passes to what came before;
    aside: the memory of activations that it writes to by `x.data` or `x.detach()`."""

    def __init__(self, node: fx.Node, passes: frozenset[fx.Node], aside: frozenset[int] = frozenset()) -> None:
        self.node, self.passes, self.aside = node, passes, aside
        self.args, self.kwargs, self.operands = node.args, node.kwargs, node.all_input_nodes


def written_while_kept(steps: Sequence[ExportedCall], returned: set[int]) -> tuple[fx.Node, fx.Node] | None:
    """The first call that writes to what an earlier one, also found, keeps for the backward pass of what is returned.

    returned: the memory of outputs with a gradient.
    """
    if not any(step.aside for step in steps):
        return None
    leading, readers = _leading(steps, returned), dict[int, list[ExportedCall]]()
    for step in steps:
        for earlier in dict.fromkeys(earlier for own in step.aside for earlier in readers.get(own, ())):
            if not step.aside.isdisjoint(_kept(earlier)):
                return step.node, earlier.node
        for own in _near(step) if step in leading else ():
            readers.setdefault(own, []).append(step)
    return None


def _leading(steps: Sequence[ExportedCall], returned: set[int]) -> set[ExportedCall]:
    """Calls through which a gradient of what is returned passes."""
    reached, found = set(returned), set[ExportedCall]()
    for step in reversed(steps):
        made = _near(step) if _writes(step.node) else memory(step.node.meta.get("val"))
        if step.passes and not reached.isdisjoint(made):
            found.add(step)
            reached.update(*(memory(operand.meta.get("val")) for operand in step.passes))
    return found


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _near(step: ExportedCall) -> set[int]:
    """The memory of a call's operands and results."""
    return memory(step.node.meta.get("val")).union(*(memory(x.meta.get("val")) for x in step.operands))


def _kept(step: ExportedCall) -> set[int]:
    """The memory that a call keeps for its backward pass: of its operands and of its results."""
    node = step.node
    if node.target in (hooked, overwritten):
        return set()
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace.startswith("autopar"):
        return _near(step)
    given = {operand: _stand_in(operand.meta.get("val"), operand in step.passes) for operand in step.operands}
    packed: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        packed.update(memory(x))
        return x

    try:
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
            made: Any = node.target(
                *fx.map_arg(step.args, given.__getitem__),
                **_on_meta(fx.map_arg(step.kwargs, given.__getitem__)),
            )
    except (RuntimeError, NotImplementedError):
        return _near(step)
    pairs = [(given[operand], operand.meta.get("val")) for operand in given]
    return set().union(
        *(memory(true) for asked, true in [*pairs, (made, node.meta.get("val"))] if _meets(asked, packed))
    )


def _meets(value: Any, packed: set[int]) -> bool:
    return not memory(value).isdisjoint(packed)


def _stand_in(value: Any, passes: bool) -> Any:
    """A meta tensor of the same looks, which is no leaf: it may be written to."""
    if isinstance(value, (tuple, list)):
        return [_stand_in(item, passes) for item in value]
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device="meta")
    is_real = value.is_floating_point() or value.is_complex()
    return made.requires_grad_().clone() if passes and is_real else made


def _on_meta(kwargs: Any) -> Mapping[str, Any]:
    return {**kwargs, "device": torch.device("meta")} if kwargs.get("device") is not None else kwargs


def memory(value: Any) -> set[int]:
    """What tells the memory of a tensor, or of those in a tuple or list, from other memory."""
    if isinstance(value, (tuple, list)):
        return set().union(*map(memory, value))
    return {memory_of(value)} if isinstance(value, Tensor) and value.layout == torch.strided else set()
