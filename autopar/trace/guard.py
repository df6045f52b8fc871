"""Holds a traced graph against its model: what export cannot see shows in what the two compute.

    model, graph  → too dear for the whole batch? cut it (`trace.smaller`)
                  → two steps each, from the same state and random numbers (`trace.eager`)
                  → equal outputs, gradients and buffers, or a TraceError that names where they first part

A difference counts when it is larger than rounding explains: beyond a tolerance that is relative to the largest
element, and beyond what the model's own results change by when the last bits of its parameters do. A model whose own
two runs differ by more than an order of sums explains is refused, too; by less, it cannot be compared, nor can one that
does not run here: the plan says so, and nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.cost import flops
from autopar.errors import InternalError, TraceError
from autopar.ir.graph import Graph
from autopar.ir.structure import is_random
from autopar.trace.eager import (
    Held,
    Key,
    Made,
    Subject,
    held,
    num_backward,
    random_state,
    run_graph_steps,
    run_model,
)
from autopar.trace.export import bind_inputs, called
from autopar.trace.losses import with_loss
from autopar.trace.parting import first_parting
from autopar.trace.precision import cast_copy, cast_inputs, cast_loss
from autopar.trace.smaller import Sizes, cut, cut_shapes, real_inputs, retraced, sizes_to_cut
from autopar.trace.tracing import trace


@dataclass(frozen=True)
class _ComparedScope:
    """What is compared. share: of the time for all; steps, backward, largest: as in `trace.eager`."""

    what: str
    share: float
    steps: int = 1
    backward: int | None = 1
    largest: int | None = None


_SCOPES = (
    _ComparedScope("", 1.0, steps=2, backward=None),
    _ComparedScope("one step, with gradients of parameters of at most 65,536 elements", 0.5, largest=1 << 16),
    _ComparedScope("outputs and buffers of one step", 0.25, backward=0),
)
"""From all to less, where that would take too long."""
_WHOLE_S = 1.0
"""A comparison that takes less, by an estimate, is of the whole batch."""
_AT_MOST_S = 8.0
"""Else less is compared (`_SCOPES`). Twice as much checks all gradients of a billion parameters."""
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of the largest element; 1e-5 for other types. Ten times larger, a lost factor of 1.0001 is passed over."""
_UNLIKE = 100.0
"""So many tolerances are more than an order of sums makes: a model whose runs differ by that is none to plan."""
_NOISE = 100.0
"""So many times what the last bits of the parameters change in the model's own results is rounding."""
_DOES_NOT_RUN = "no, the model does not run"
_UNCLEAR = "no, its sizes are not known"
"""The graph of a whole batch does not fit a cut one; never said."""

_KNOWN: WeakKeyDictionary[nn.Module, dict[Any, str]] = WeakKeyDictionary()


def held_against_eager(
    model: nn.Module,
    graph: Graph,
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None = None,
    compute_dtype: torch.dtype | None = None,
    seconds: float = _AT_MOST_S,
) -> str:
    """ "yes" where the graph computes what the model does, "in part, WHAT", or "no, WHY" where that could not be seen.

    seconds: what the comparison may take, by an estimate. A model and graph that were compared are not again.
    Raises TraceError naming module and source line where they differ.
    """
    known = _KNOWN.setdefault(model, {})
    updates = tuple(graph.mutations.items())
    key = (graph.fingerprint, updates, model.training, compute_dtype, id(loss_fn), _hooks(model))
    if key not in known:
        known[key] = _held(model, graph, example_inputs, loss_fn, compute_dtype, seconds)
    return known[key]


def _hooks(model: nn.Module) -> int:
    """Another number after hooks were registered or removed."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [key for module in model.modules() for kind in kinds for key in getattr(module, kind)]
    tensors = ("_backward_hooks", "_post_accumulate_grad_hooks")
    found += [key for p in model.parameters() for kind in tensors for key in getattr(p, kind, None) or ()]
    return hash(tuple(found))


def _held(
    model: nn.Module, graph: Graph, example_inputs: Any, loss_fn: Any, compute_dtype: torch.dtype | None, seconds: float
) -> str:
    whole = with_loss(model, loss_fn)
    if any(x.is_meta for x in (*whole.parameters(), *whole.buffers())):
        return "no, the model is on the meta device"
    given, of_whole = (model, loss_fn, compute_dtype, seconds), _estimate_s(graph, {})
    if of_whole > min(seconds, _WHOLE_S):
        tracing = partial(_retraced, model, graph, loss_fn, compute_dtype)
        for sizes in sizes_to_cut(example_inputs):
            inputs = cut(example_inputs, sizes)
            found = _in_scope(*given, graph, inputs, _estimate_s(graph, sizes), sizes)
            if found == _UNCLEAR:
                again = retraced(graph, inputs, tracing)
                found = _in_scope(*given, again, inputs, _estimate_s(again, {})) if again is not None else _DOES_NOT_RUN
            if not found.startswith(_DOES_NOT_RUN):
                cuts = ", ".join(f"{n} to {to}" for n, to in sorted(sizes.items()))
                return found if found.startswith("no") else f"{found}, with sizes of inputs cut from {cuts}"
    found = _in_scope(*given, graph, example_inputs, of_whole)
    if compute_dtype is None or not found.startswith(_DOES_NOT_RUN):
        return found
    graph = _retraced(model, graph, loss_fn, None, example_inputs)  # no kernel for this dtype, or for two at once
    found = _held(model, graph, example_inputs, loss_fn, None, seconds)
    return found if found.startswith("no") else f"{found}, in the dtypes that the model has"


def _retraced(
    model: nn.Module, graph: Graph, loss_fn: Any, compute_dtype: torch.dtype | None, example_inputs: Any
) -> Graph:
    """As it was traced, on other inputs or in another dtype."""
    mode = "inference" if graph.inference else "train"
    return trace(model, example_inputs, loss_fn=loss_fn, mode=mode, compute_dtype=compute_dtype)


def _in_scope(
    model: nn.Module, loss_fn: Any, compute_dtype: torch.dtype | None, seconds: float, graph: Graph,
    example_inputs: Any, estimate: float, sizes: Sizes | None = None,
) -> str:  # fmt: skip
    """What came of comparing as much as there is time for. estimate: of all, in seconds. sizes: of cut inputs, where
    the graph is of whole ones."""
    scope = next((item for item in _SCOPES if estimate * item.share <= seconds), None)
    if scope is None:
        return f"no, it would take about {estimate:.0f} s"
    subject = subject_of(model, graph, example_inputs, loss_fn, compute_dtype)
    found = _compared(replace(subject, largest=scope.largest, sizes=sizes), scope.steps, scope.backward)
    return f"in part, {scope.what}: all would take about {estimate:.0f} s" if found == "yes" and scope.what else found


def subject_of(
    model: nn.Module, graph: Graph, example_inputs: Any, loss_fn: Any, compute_dtype: torch.dtype | None
) -> Subject:
    """A model and its graph, with its batch, in the dtype in which the graph computes."""
    _, inputs = bind_inputs(model, real_inputs(example_inputs), loss_fn)
    if compute_dtype is not None:
        whole, inputs = with_loss(model, loss_fn), cast_inputs(inputs, compute_dtype)
        model, loss_fn = cast_copy(model, compute_dtype), cast_loss(loss_fn, compute_dtype)
        _widen(with_loss(model, loss_fn), whole, graph)
    return Subject(model, graph, *called(model, inputs, loss_fn), tuple(inputs), loss_fn)


def _widen(cast: nn.Module, whole: nn.Module, graph: Graph) -> None:
    """Gives a cast model those buffers back that its graph has in their own dtype (`trace.wide`)."""
    for path, module in cast.named_modules():
        for name, buffer in module._buffers.items():
            known = graph.tensors.get(f"{path}.{name}" if path else name)
            if buffer is not None and known is not None and str(buffer.dtype) != f"torch.{known.dtype}":
                own = whole.get_submodule(path)._buffers[name]
                assert own is not None, "a copy has the buffers of its model"
                module._buffers[name] = own.detach().clone()


_SPEED = 2e10
"""FLOP a second that any host does; twice as much halves the models that are compared as they are."""


def estimated_s(graph: Graph) -> float:
    """Of the whole graph, as `_estimate_s`."""
    return _estimate_s(graph, {})


def _estimate_s(graph: Graph, sizes: Sizes) -> float:
    """Of a step with gradients and one without (3 + 1 times the work) of model and graph, in float32 on one core."""
    shapes = cut_shapes(graph, sizes)
    work = sum(
        flops(node, tuple(shapes[name] for name in node.operands), tuple(shapes[name] for name in node.results))
        for node in graph.nodes
    )
    moved = sum(4 * prod(shape) for shape in shapes.values())
    return 8 * (work / _SPEED + moved / 4e9)


@dataclass(frozen=True)
class _Difference:
    key: Key
    model: Tensor
    graph: Tensor


def _compared(subject: Subject, steps: int, backward: int | None) -> str:
    """What came of it. backward: in how many steps gradients are made (`run_model`)."""
    with held(subject) as kept:
        try:
            expected = run_model(subject, kept, steps, backward)
        except Exception as error:
            return f"{_DOES_NOT_RUN} on {subject.device.type} here: {_first_line(error)}"
        if any(isinstance(x, FakeTensor) for x in expected.values()):
            raise TraceError(
                "expected forward to keep tensors where they are seen, in attributes, lists, dicts and caches of "
                "functions, found one that was made while tracing in what the model computes afterwards; keep it in a "
                "registered buffer, and make the model anew"
            )
        ended, backward = random_state(subject), num_backward(expected)
        changes = kept.changes
        kept.restore()
        try:
            found = run_graph_steps(subject, steps, backward)
        except (InternalError, TraceError):
            raise
        except Exception as error:
            if subject.sizes:
                return _UNCLEAR
            return f"no, the graph could not be run operator by operator: {_first_line(error)}"
        drew_alike = all(map(torch.equal, ended, random_state(subject)))
        differences = _differences(subject, kept, expected, found)
        if not differences or subject.sizes:
            return _UNCLEAR if differences else "yes"
        again = _differences(subject, kept, expected, run_model(subject, kept, steps, backward))
        if any(distance(item.model, item.graph) > _UNLIKE * _tolerance(item.model) for item in again):
            raise _refusal(subject, kept, differences[0], changes, is_unlike_itself=True)
        if again:
            return "no, two runs of the model from the same state differ"
        noise = run_model(subject, kept, steps, backward, is_shaken=True)
        largest = {step: _largest_gradient(expected, step) for step in range(steps)}
        real = [
            item for item in differences
            if not _is_rounding(item, expected.get(item.key), noise.get(item.key), largest[item.key.step])
        ]  # fmt: skip
        if not real:
            return "yes"
        if not drew_alike and any(map(is_random, subject.graph.nodes)):
            return "no, the model draws its random numbers in another order"
        raise _refusal(subject, kept, real[0], changes)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}"[:200] if text else type(error).__name__


def _differences(subject: Subject, kept: Held, expected: Made, found: Made) -> list[_Difference]:
    """In the order of steps, and of outputs, gradients and state in each."""
    differences = []
    for key in sorted({*expected, *found}, key=lambda key: (key.step, ("output", "gradient", "state").index(key.kind))):
        before = kept.values.before(subject.state[key.name]) if key.kind == "state" else None
        model, graph = expected.get(key, before), found.get(key, before)
        assert model is not None and graph is not None, f"expected {key} of both"
        if distance(model, graph, before) > _tolerance(model):
            differences.append(_Difference(key, model, graph))
    return differences


def _tolerance(x: Tensor) -> float:
    return _TOLERANCE.get(x.dtype, 1e-5)


def distance(left: Tensor, right: Tensor, before: Tensor | None = None) -> float:
    """The largest difference of two elements, as a share of the largest element; of what changed since `before`."""
    if left.shape != right.shape:
        return float("inf")
    if torch.equal(left, right) or not (left.is_floating_point() or left.is_complex()):
        return 0.0 if torch.equal(left, right) else float("inf")
    wide = [x.detach().to(torch.complex128 if x.is_complex() else torch.float64) for x in (left, right)]
    apart = (wide[0] - wide[1]).abs()
    apart = torch.where((wide[0] == wide[1]) | (wide[0].isnan() & wide[1].isnan()), torch.zeros_like(apart), apart)
    if not apart.numel():
        return 0.0
    largest = max(_largest(x) for x in wide)
    if before is not None and before.shape == left.shape:  # a small change of what is large counts as well
        eps = torch.finfo(left.dtype).eps if left.dtype.is_floating_point or left.is_complex() else 0.0
        change = max(_largest(x - before) for x in wide)
        largest = min(largest, change + largest * eps * 1e6)
    gap = float(apart.nan_to_num(float("inf"), float("inf")).max())
    return gap / largest if gap and largest else float(gap > 0)


def _largest(x: Tensor) -> float:
    sizes = x.abs()
    return float(sizes[sizes.isfinite()].max()) if bool(sizes.isfinite().any()) else 0.0


def _largest_gradient(made: Made, step: int) -> float:
    """The largest element of all gradients of a step."""
    own = [_largest(x.double()) for key, x in made.items() if key.kind == "gradient" and key.step == step and x.numel()]
    return max(own, default=0.0)


_ROUNDED = 16.0
"""So many last bits of the largest gradient are left of one that is zero, such as that of a bias before a norm."""


def _is_rounding(item: _Difference, expected: Tensor | None, shaken: Tensor | None, largest: float) -> bool:
    """Whether the model's own results differ as much when the last bits of its parameters do. largest: of gradients."""
    if item.key.kind == "gradient" and item.model.shape == item.graph.shape and item.model.is_floating_point():
        apart = (item.model.double() - item.graph.double()).abs()
        if apart.numel() and float(apart.max()) <= _ROUNDED * torch.finfo(item.model.dtype).eps * largest:
            return True
    if expected is None or shaken is None or shaken.shape != expected.shape or item.model.shape != item.graph.shape:
        return False
    if not expected.is_floating_point():
        return not torch.equal(expected, shaken)
    gap = (item.model.double() - item.graph.double()).abs().max()
    return bool(gap <= _NOISE * (expected.double() - shaken.double()).abs().max())


def _refusal(
    subject: Subject, kept: Held, item: _Difference, changes: Any, is_unlike_itself: bool = False
) -> TraceError:
    """The error, with the place where values, or else gradients, first part."""
    where = first_parting(subject, kept, item.key)
    what = {"output": "loss" if subject.graph.loss else f"output {item.key.name}", "gradient": "gradient of",
            "state": "new value of"}[item.key.kind]  # fmt: skip
    name = "" if item.key.kind == "output" else f" {item.key.name!r}"
    state = f"; forward changed {', '.join(change.path for change in changes[:3])}" if changes else ""
    if is_unlike_itself:
        return TraceError(
            f"expected forward to compute the same whenever it begins with the same parameters, buffers, inputs and "
            f"random numbers, found another {what}{name}{state}.\n{where}\nTracing keeps what it did once: draw with "
            "torch's functions, and keep in registered buffers what one step leaves for the next. check=False plans "
            "the graph as it was traced."
        )
    return TraceError(
        f"expected the traced graph to compute what the model does, found another {what}{name} in step "
        f"{item.key.step + 1}{_numbers(item)}{state}.\n{where}\nTracing keeps operators on tensors and registered "
        "buffers alone: write so what is done there by hooks, Python state, `.data`, `no_grad` or a function of its "
        "own. check=False plans the graph as it was traced."
    )


def _numbers(item: _Difference) -> str:
    if item.model.numel() == 1 and item.graph.numel() == 1:
        return f": {item.model.item():.6g} by the model, {item.graph.item():.6g} by the graph"
    return f": they differ by {100 * distance(item.model, item.graph):.3g}% of the largest element"
