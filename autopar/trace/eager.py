"""Steps of a model and of its traced graph from the same state, with the same random numbers: what each makes.

A step is forward and backward on one batch; buffers, parameters that forward changes and Python state carry on to the
next, which is forward alone where nothing of these changed. Gradients are taken as they are made, and of large ones
only sums are kept (`summary`), so that neither weights nor gradients are in memory twice. The model and all generators
are put back exactly as they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, is_dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import InternalError
from autopar.ir.graph import Graph, Node
from autopar.ir.structure import OWN_BACKWARD, has_own_backward
from autopar.trace.interpreter import drawn_states, run_graph, undeclared_draws
from autopar.trace.losses import with_loss
from autopar.trace.machine import MachineAnswers
from autopar.trace.originals import Originals, same_bits
from autopar.trace.smaller import Sizes
from autopar.trace.snapshot import Snapshot, StateChange
from autopar.trace.structure import outputs_in


class Key(NamedTuple):
    """What a step made: an output by its place, or the gradient or the new value of a stored tensor by its name."""

    step: int
    kind: str  # "output", "gradient" or "state"
    name: str


Made = dict[Key, Tensor]


class NoLossError(Exception):
    """The model returned no scalar that could be the loss."""


def named_state(model: nn.Module, loss_fn: Any) -> dict[str, Tensor]:
    """What a model and its loss store now, by name."""
    whole = with_loss(model, loss_fn)
    return {
        name: tensor
        for named in (whole.named_parameters, whole.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    }


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
    sizes: Sizes | None = None  # of cut inputs, where the graph is that of whole ones
    largest: int | None = None  # of the parameters whose gradients are compared, in elements; None for all

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, those of a loss module too."""
        return named_state(self.model, self.loss_fn)

    @cached_property
    def trained(self) -> dict[str, Tensor]:
        """The parameters whose gradients are compared: the graph's, and those that the model alone trains."""
        names = [item.name for item in self.graph.parameters if item.requires_grad and item.name in self.state]
        names += [name for name, x in self.state.items() if x.requires_grad and x.is_leaf]
        by_id = {id(self.state[name]): name for name in reversed(names)}
        found = {name: self.state[name] for name in dict.fromkeys(names) if by_id[id(self.state[name])] == name}
        return {name: x for name, x in found.items() if self.largest is None or x.numel() <= self.largest}

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
    """What was put aside of a subject. changes: of Python state, after the steps of the model that ran. has_run:
    whether any did."""

    subject: Subject
    drawn: tuple[Any, Any, tuple[Tensor, ...]]
    python: Snapshot
    values: Originals
    flags: list[tuple[Tensor, bool, Tensor | None]]
    changes: list[StateChange]
    has_run: bool = False

    def restore(self) -> None:
        self.python.restore()
        random.setstate(self.drawn[0])
        np.random.set_state(self.drawn[1])
        _set_random_state(self.subject, self.drawn[2])
        self.values.restore()
        for tensor, requires_grad, gradient in self.flags:
            if not tensor.is_leaf:  # a buffer that forward writes to with a gradient, such as a cache
                tensor.detach_()
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            tensor.grad = gradient

    @property
    def has_changes(self) -> bool:
        """Whether anything is seen that could make the next step another one."""
        return bool(self.python.changes()) or any(map(self.values.changed, self.values.tensors))


@contextmanager
def held(subject: Subject) -> Iterator[Held]:
    """All that steps may change is put back afterwards, and whenever `restore` is called. Clocks that forward asks run
    ahead, so that what it takes of the time is not what it was when it was traced."""
    python = Snapshot(subject.target)
    stored = {id(x): x for x in (*subject.state.values(), *python.tensors)}.values()
    values = Originals(stored)
    flags = [(x, x.requires_grad, x.grad) for x in stored if x.is_leaf]
    kept = Held(subject, (random.getstate(), np.random.get_state(), random_state(subject)), python, values, flags, [])
    try:
        with values.watching(), MachineAnswers().later():
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


def run_model(
    subject: Subject, kept: Held, steps: int, backward: int | None = None, *, is_shaken: bool = False
) -> Made:
    """What the model makes in so many steps from the state that is put aside, to which it is set back first.

    backward: in how many of them gradients are made; None for the first, and for all where it changes anything.
    is_shaken: with parameters that differ in their last bits, to see how far such a difference goes.
    """
    made: Made = {}
    if kept.has_run:
        kept.restore()
    kept.has_run = True
    if is_shaken:
        _shake(subject)
    for step in range(steps):
        for tensor, _, _ in kept.flags:
            tensor.grad = None
        is_asked = step < backward if backward is not None else step == 0 or kept.has_changes
        with in_step(subject, kept, step):
            output = call(subject)
            made.update(_made(step, output))
            if subject.graph.loss is not None and is_asked:
                made.update(_gradients(step, output[0], subject.trained, subject.largest is None))
        made.update(_changed(subject, kept, step))
    kept.changes = kept.python.changes()
    return made


def num_backward(made: Made) -> int:
    """In how many steps gradients were made."""
    return len({key.step for key in made if key.kind == "gradient"})


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


@contextmanager
def in_step(subject: Subject, kept: Held, step: int) -> Iterator[None]:
    """While inside, trained parameters are half as large but in the first step, as if an optimizer had been there: what
    a model remembers of the step before no longer fits. Exact in floating point, both ways."""
    trained = [subject.state[name] for name in subject.trained if step]
    _scale(trained, kept, 0.5)
    try:
        yield
    finally:
        _scale(trained, kept, 2.0)


def _scale(tensors: Iterable[Tensor], kept: Held, factor: float) -> None:
    with torch.no_grad(), kept.values.unchanging():
        for x in tensors:
            x.mul_(factor)


def _shake(subject: Subject) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in subject.trained:
            x = subject.state[name]
            sign = torch.randint(-1, 2, x.shape, generator=generator).to(x.device)
            x.add_(x * sign.to(x.dtype) * torch.finfo(x.dtype).eps)


def _gradients(step: int, loss: Tensor, trained: Mapping[str, Tensor], of_all: bool) -> Made:
    """Of leaves, large ones taken as soon as they are made; zeros where none flowed. of_all: the loss has no other
    leaves."""
    found: dict[str, Tensor] = {}

    def take(name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:  # in parts, where a reentrant checkpoint runs a backward pass of its own
            part = summary(gradient.to_dense() if gradient.is_sparse else gradient)
            found[name] = found[name] + part if name in found else part

    with ExitStack() as stack:
        for name, leaf in trained.items():
            if leaf.requires_grad and _is_large(leaf):
                handle = leaf.register_post_accumulate_grad_hook(partial(take, name))  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
        wanted = [leaf for leaf in trained.values() if leaf.requires_grad]
        if loss.requires_grad and (wanted or of_all):
            torch.autograd.backward(loss, inputs=None if of_all else wanted)
    for name, leaf in trained.items():
        take(name, leaf)
        if name not in found:
            found[name] = summary(torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape))
    return {Key(step, "gradient", name): gradient for name, gradient in found.items()}


_LARGE = 1 << 16


def summary(x: Tensor) -> Tensor:
    """Of a large matrix the sums of its rows with random weights: differences in a row do not cancel."""
    if not _is_large(x):
        return x
    matrix = (torch.view_as_real(x) if x.is_complex() else x).flatten(1)
    matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
    sums: Tensor = matrix @ _weights(matrix.shape[1], matrix.dtype, matrix.device)
    return sums if x.is_complex() else sums.to(x.dtype)


def _is_large(x: Tensor) -> bool:
    return x.numel() > _LARGE and x.dim() > 1


@lru_cache(maxsize=64)
def _weights(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """So that sums are about as large as what is summed."""
    drawn = torch.randn(length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    return drawn.div(length**0.5).to(device, dtype)


def _made(step: int, outputs: list[Tensor]) -> Made:
    return {Key(step, "output", str(place)): x.detach().clone() for place, x in enumerate(outputs)}


def _changed(subject: Subject, kept: Held, step: int) -> Made:
    """The values of stored tensors that are other than they were at first, written to or put in another's place."""
    names = {id(x): name for name, x in reversed(subject.state.items())}
    stored = {id(x): x for x in subject.state.values()}
    written = {names[key]: x for key, x in stored.items() if kept.values.changed(x)}
    now, kinds = named_state(subject.model, subject.loss_fn), subject.state.items()
    placed = {name: now[name] for name, x in kinds if now.get(name, x) is not x and name in names.values()}
    put = {name: x for name, x in placed.items() if not same_bits(x, kept.values.before(subject.state[name]))}
    return {Key(step, "state", name): x.detach().clone() for name, x in (written | put).items()}


def _tensors(output: Any) -> list[Tensor]:
    if is_dataclass(output) and not isinstance(output, (Mapping, type)):
        output = vars(output)
    if isinstance(output, Mapping):
        output = dict(output)
    return [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]


def loss_of(output: Any) -> Tensor:
    """What a model's call returns as its loss."""
    return _loss(output, _tensors(output))


def _loss(output: Any, tensors: list[Tensor]) -> Tensor:
    """The scalar called `loss`, or else the first that gradients flow from."""
    named = [value for path, value in outputs_in(output) if path.rpartition(".")[2] == "loss"]
    for x in [*named, *tensors]:
        if isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad:
            return x
    raise NoLossError("it returned no scalar loss that gradients flow from")


def run_graph_steps(subject: Subject, steps: int, backward: int) -> Made:
    """What the graph makes in so many steps, the first with gradients, from the state that the model has now."""
    made, state = Made(), leaves(subject)
    first = dict(state)
    for step in range(steps):
        now = state_in_step(subject, state, step)
        values = run_graph(
            subject.graph, now, subject.inputs, device=str(subject.device), keep_all=False, sizes=subject.sizes,
            seen=partial(_check_flags, subject.graph),
        )  # fmt: skip
        made.update(_made(step, [values[name] for name in subject.graph.outputs]))
        if subject.graph.loss is not None and step < backward:
            trained = {name: now[name] for name in subject.trained}
            made.update(_drawing_nothing(subject.graph, partial(
                _gradients, step, values[subject.graph.loss], trained, subject.largest is None
            )))  # fmt: skip
        state.update(state_in_step(subject, updated(subject.graph, values), step, 2.0))
        changed = {name: state[name] for name in subject.graph.mutations if not same_bits(state[name], first[name])}
        made.update((Key(step, "state", name), value) for name, value in changed.items())
        del values
    return made


def _drawing_nothing(graph: Graph, backward: Callable[[], Made]) -> Made:
    """What a backward pass makes. Torch's own draw nothing there; raises TraceError where a custom operator's does."""
    own = [node for node in graph.nodes if has_own_backward(node) and node.op not in OWN_BACKWARD]
    before = drawn_states() if own else ()
    made = backward()
    if own and drawn_states() != before:
        raise undeclared_draws(own[0], " in its backward (or another custom operator of the model)")
    return made


def state_in_step(
    subject: Subject, state: Mapping[str, Tensor], step: int, factor: float = 0.5
) -> dict[str, Tensor]:  # fmt: skip
    """What a graph reads where the model is `in_step`; with the factor 2, what it leaves for the next."""
    trained = [name for name in subject.trained if step and name in state]
    return {**state, **{name: (state[name].detach() * factor).requires_grad_() for name in trained}}


def updated(graph: Graph, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a step leaves of buffers and parameters that it updates, for the next one."""
    trained = {item.name for item in graph.parameters if item.requires_grad}
    return {name: values[new].detach().requires_grad_(name in trained) for name, new in graph.mutations.items()}


def _check_flags(graph: Graph, node: Node, made: list[tuple[str, Tensor]]) -> None:
    """Raises InternalError where a gradient flows through what plans take for having none: they would lose it."""
    for name, value in made:
        if value.requires_grad and not graph.tensors[name].differentiable:
            raise InternalError(
                f"expected no gradient through {name} of node {node.name} ({node.op}) at "
                f"{node.source or 'an unknown line'}, found that one flows. This is a fault of autopar; with "
                "check=False the gradient would be lost"
            )


def leaves(subject: Subject) -> dict[str, Tensor]:
    """The state without the hooks and history of the model's own tensors."""
    trained = {item.name for item in subject.graph.parameters if item.requires_grad}
    return {name: x.detach().requires_grad_(name in trained) for name, x in subject.state.items()}
