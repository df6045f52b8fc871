"""Steps of a model and of its traced graph from the same state, with the same random numbers: what each makes.

A step is forward and backward on one batch; buffers, parameters that forward changes and Python state carry on to the
next. The model and all generators are put back exactly as they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.ir.graph import Graph
from autopar.trace.interpreter import Seen, run_graph
from autopar.trace.losses import with_loss
from autopar.trace.snapshot import Change, Snapshot
from autopar.trace.structure import outputs_in


class Key(NamedTuple):
    """What a step made: an output by its place, or the gradient or the new value of a stored tensor by its name."""

    step: int
    kind: str  # "output", "gradient" or "state"
    name: str


Made = dict[Key, Tensor]


class NoLossError(Exception):
    """The model returned no scalar that could be the loss."""


@dataclass(frozen=True)
class Subject:
    """A model with its graph. target: what is called with args and kwargs: the model, or that and its loss function."""

    model: nn.Module
    graph: Graph
    target: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]  # among the arguments, in the order of the graph's inputs
    loss_fn: Any = None
    names: frozenset[str] | None = None  # of the parameters whose gradients are asked for; None for all

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, those of a loss module too."""
        whole = with_loss(self.model, self.loss_fn)
        return {
            name: tensor
            for named in (whole.named_parameters, whole.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters whose gradients are compared."""
        names = [item.name for item in self.graph.parameters if item.requires_grad and item.name in self.state]
        return {name: self.state[name] for name in names if self.names is None or name in self.names}

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors among the arguments by their names in the graph."""
        moved = [x.detach().clone().to(self.device) for x in self.tensors]
        return dict(zip(self.graph.inputs, moved, strict=True))

    @property
    def device(self) -> torch.device:
        return next(iter(self.state.values()), torch.empty(0)).device


@dataclass
class Held:
    """What was put aside of a subject. changes: of Python state, after the steps of the model that ran."""

    subject: Subject
    drawn: tuple[Any, Any, tuple[Tensor, ...]]
    python: Snapshot
    values: list[tuple[Tensor, Tensor]]
    flags: list[tuple[Tensor, bool, Tensor | None]]
    changes: list[Change]

    def restore(self) -> None:
        self.python.restore()
        random.setstate(self.drawn[0])
        np.random.set_state(self.drawn[1])
        _set_random_state(self.subject, self.drawn[2])
        with torch.no_grad():
            for tensor, before in self.values:
                if not same_bits(tensor, before):
                    tensor.copy_(before)
        for tensor, requires_grad, gradient in self.flags:
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            tensor.grad = gradient


@contextmanager
def held(subject: Subject) -> Iterator[Held]:
    """All that steps may change is put back afterwards, and whenever `restore` is called."""
    python = Snapshot(subject.target)
    stored = {id(x): x for x in (*subject.state.values(), *python.tensors)}.values()
    values = [(x, x.detach().clone()) for x in stored]
    flags = [(x, x.requires_grad, x.grad) for x in stored if x.is_leaf]
    kept = Held(subject, (random.getstate(), np.random.get_state(), random_state(subject)), python, values, flags, [])
    try:
        yield kept
    finally:
        kept.restore()


def _cuda(subject: Subject) -> list[torch.device]:
    return [subject.device] if subject.device.type == "cuda" else []


def random_state(subject: Subject) -> tuple[Tensor, ...]:
    """Of torch's generators that the subject draws from."""
    return (torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in _cuda(subject)))


def _set_random_state(subject: Subject, states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(_cuda(subject), states[1:], strict=True):
        torch.cuda.set_rng_state(state, device)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal, NaN where NaN is."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left, right) or bool(((left == right) | ((left != left) & (right != right))).all())


def run_model(subject: Subject, kept: Held, steps: int, *, is_shaken: bool = False) -> Made:
    """What the model makes in so many steps from the state that is put aside, to which it is set back first.

    is_shaken: with parameters that differ in their last bits, to see how far such a difference goes.
    """
    made: Made = {}
    kept.restore()
    if is_shaken:
        _shake(subject)
    for step in range(steps):
        for _, parameter in subject.trained.items():
            parameter.grad = None
        output = call(subject)
        made.update(_made(subject, step, output))
        if subject.graph.loss is not None:
            _backward(subject, output[0])
            made.update((Key(step, "gradient", n), _gradient(p)) for n, p in subject.trained.items())
        made.update(_changed(subject, kept, step))
    kept.changes = kept.python.changes()
    return made


def call(subject: Subject, watch: Any = None) -> list[Tensor]:
    """The loss, or the outputs, of one forward."""
    copy = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), (subject.args, subject.kwargs))
    with torch.enable_grad():
        if watch is None:
            output = subject.target(*copy[0], **copy[1])
        else:
            with watch:
                output = subject.target(*copy[0], **copy[1])
    tensors = _tensors(output)
    return tensors if subject.graph.loss is None else [_loss(output, tensors)]


def _shake(subject: Subject) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in subject.trained:
            x = subject.state[name]
            sign = torch.randint(-1, 2, x.shape, generator=generator).to(x.device)
            x.add_(x * sign.to(x.dtype) * torch.finfo(x.dtype).eps)


def _backward(subject: Subject, loss: Tensor) -> None:
    torch.autograd.backward(loss, inputs=None if subject.names is None else list(subject.trained.values()))


def _gradient(parameter: Tensor) -> Tensor:
    """A parameter's gradient, which is taken from it; zeros where none flowed."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _made(subject: Subject, step: int, outputs: list[Tensor]) -> Made:
    return {Key(step, "output", str(place)): x.detach().clone() for place, x in enumerate(outputs)}


def _changed(subject: Subject, kept: Held, step: int) -> Made:
    """The values of stored tensors that are other than they were at first."""
    before = {id(x): value for x, value in kept.values}
    names = {id(x): name for name, x in reversed(subject.state.items())}
    return {
        Key(step, "state", names[key]): x.detach().clone()
        for key, x in {id(x): x for x in subject.state.values()}.items()
        if not same_bits(x, before[key])
    }


def _tensors(output: Any) -> list[Tensor]:
    if is_dataclass(output) and not isinstance(output, (Mapping, type)):
        output = vars(output)
    if isinstance(output, Mapping):
        output = dict(output)
    return [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]


def _loss(output: Any, tensors: list[Tensor]) -> Tensor:
    """The scalar called `loss`, or else the first that gradients flow from."""
    named = [value for path, value in outputs_in(output) if path.rpartition(".")[2] == "loss"]
    for x in [*named, *tensors]:
        if isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad:
            return x
    raise NoLossError("it returned no scalar loss that gradients flow from")


def run_graph_steps(subject: Subject, steps: int, seen: Callable[[int], Seen | None] | None = None) -> Made:
    """What the graph makes in so many steps, from the state that the model has now."""
    made, state = Made(), _leaves(subject)
    first = dict(state)
    for step in range(steps):
        values = run_graph(
            subject.graph, state, subject.inputs, device=str(subject.device), keep_all=False,
            seen=seen(step) if seen else None,
        )  # fmt: skip
        outputs = [values[name] for name in subject.graph.outputs]
        made.update(_made(subject, step, outputs))
        if subject.graph.loss is not None:
            wanted = {name: state[name] for name in subject.trained}
            found = _gradients(values[subject.graph.loss], wanted)
            made.update((Key(step, "gradient", name), gradient) for name, gradient in found.items())
        state.update((name, values[new].detach()) for name, new in subject.graph.mutations.items())
        changed = {name: state[name] for name in subject.graph.mutations if not same_bits(state[name], first[name])}
        made.update((Key(step, "state", name), value) for name, value in changed.items())
        del values, outputs
    return made


def _leaves(subject: Subject) -> dict[str, Tensor]:
    """The state without the hooks and history of the model's own tensors."""
    trained = {item.name for item in subject.graph.parameters if item.requires_grad}
    return {name: x.detach().requires_grad_(name in trained) for name, x in subject.state.items()}


def _gradients(loss: Tensor, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    if not loss.requires_grad or not wanted:
        return {name: torch.zeros_like(x) for name, x in wanted.items()}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    pairs = zip(wanted.items(), found, strict=True)
    return {name: torch.zeros_like(x, requires_grad=False) if g is None else g for (name, x), g in pairs}


__all__ = ["Held", "Key", "Made", "NoLossError", "Subject", "call", "held", "random_state", "run_graph_steps",
           "run_model", "same_bits"]  # fmt: skip
