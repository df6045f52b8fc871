"""Where a model and its graph first part: in a value that a line of a module makes, or in its gradient."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.graph import Node
from autopar.trace.eager import Held, Key, Subject, call, in_step, leaves, run_model, state_in_step, updated
from autopar.trace.evidence import PathWatch
from autopar.trace.interpreter import run_graph
from autopar.trace.lines import line_at, place_of, source_at

_NEAR = 1e-3  # of the largest element


class _SeenTensor:
    """A tensor that the model made. module: by its path; line: file and number."""

    def __init__(self, module: str, line: tuple[str, int], tensor: Tensor) -> None:
        self.module, self.line, self.tensor = module, line, tensor
        self.value = tensor.detach().clone()

    @property
    def key(self) -> tuple[str, str]:
        """As a node of the graph names its place."""
        return self.module, source_at(self.line)


class _LineWatch(PathWatch):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.seen: list[_SeenTensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        line = place_of(sys._getframe(1))
        if line is not None:
            with torch._C.DisableTorchFunction():
                for x in result if isinstance(result, (tuple, list)) else [result]:
                    if isinstance(x, Tensor) and getattr(func, "__name__", "") != "__get__":
                        self.seen.append(_SeenTensor(self.stack[-1], line, x))
        return result


def first_parting(subject: Subject, kept: Held, key: Key) -> str:
    """A line or two that name module and source line; as good as can be told."""
    try:
        found = _found(subject, kept, key)
    except Exception:  # whatever happens here, the difference is there
        found = None
    return found or _of_name(subject, key)


def _found(subject: Subject, kept: Held, key: Key) -> str | None:
    run_model(subject, kept, key.step)
    watch = _LineWatch(subject.model)
    with in_step(subject, kept, key.step):
        loss = call(subject, watch.following())[0]
        wanted = [item for item in watch.seen if item.tensor.requires_grad] if key.kind == "gradient" else []
        gradients = torch.autograd.grad(loss, [item.tensor for item in wanted], allow_unused=True) if wanted else ()
    made, graph_loss = _graph_values(subject, kept, key.step)
    everywhere: dict[Any, list[Tensor]] = {}
    for x in (x for tensors in made.values() for x in tensors):
        everywhere.setdefault((x.shape, x.dtype), []).append(x)
    pairs, lost = [], None  # lost: what the graph has nowhere, the first since both had the same
    for item in watch.seen:
        same = [x for x in made.get(item.key, ()) if x.shape == item.value.shape and x.dtype == item.value.dtype]
        near = [x for x in same if _near(x, item.value)]
        if same and not near:
            return f"Values first part in {_place(subject, lost or item)}"
        if not near and not any(_near(x, item.value) for x in everywhere.get((item.value.shape, item.value.dtype), ())):
            lost = lost or item
        if near:
            lost = None
            pairs.append((item, near[0]))
    if not wanted:
        return None
    by_id = {id(item): gradient for item, gradient in zip(wanted, gradients, strict=True)}
    pairs = [(item, x) for item, x in pairs if id(item) in by_id and x.requires_grad]
    others = torch.autograd.grad(graph_loss, [x for _, x in pairs], allow_unused=True)
    for (item, _), other in zip(reversed(pairs), reversed(others), strict=True):
        gradient = by_id[id(item)]
        zeros = torch.zeros_like(item.value)
        if not _near(zeros if gradient is None else gradient, zeros if other is None else other):
            return f"Values are equal; gradients first part at what is made in {_place(subject, item)}"
    return None


def _graph_values(subject: Subject, kept: Held, step: int) -> tuple[dict[tuple[str, str], list[Tensor]], Tensor]:
    """What the graph makes in a step, by module and line, and its loss."""
    kept.restore()
    made: dict[tuple[str, str], list[Tensor]] = {}

    def seen(node: Node, named: list[tuple[str, Tensor]]) -> None:
        made.setdefault((node.scope.module, node.source), []).extend(x for _, x in named)

    state = leaves(subject)
    for number in range(step + 1):
        made.clear()
        now = state_in_step(subject, state, number)
        values = run_graph(subject.graph, now, subject.inputs, device=str(subject.device), seen=seen)
        state.update(state_in_step(subject, updated(subject.graph, values), number, 2.0))
    return made, values[subject.graph.outputs[0]]


def _near(left: Tensor, right: Tensor) -> bool:
    if not (left.is_floating_point() or left.is_complex()):
        return torch.equal(left, right)
    scale = max(float(left.detach().abs().nan_to_num(0, 0, 0).max()) if left.numel() else 0.0, 1e-30)
    return bool(torch.isclose(left, right, rtol=_NEAR, atol=_NEAR * scale, equal_nan=True).all())


def _place(subject: Subject, item: _SeenTensor) -> str:
    module = subject.model.get_submodule(item.module)
    name = f"module {item.module!r} ({type(module).__name__})" if item.module else type(module).__name__
    return f"{name} at\n  {line_at(item.line)}"


def _of_name(subject: Subject, key: Key) -> str:
    """The module that has the parameter or buffer, and the first line that reads it."""
    path = "" if key.kind == "output" else key.name.rpartition(".")[0]
    line = next((n.source for n in subject.graph.nodes if key.name in n.operands), "")
    line = line or next((n.source for n in reversed(subject.graph.nodes) if n.source), "an unknown line")
    kind = type(subject.model.get_submodule(path)).__name__ if not path.startswith("loss_fn") else "loss_fn"
    return f"It is in module {path or '(the model)'} ({kind}), read at {line}"
