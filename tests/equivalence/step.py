"""One step of an emitted program on gloo ranks and of its model on one device: what each computes, and how far apart.

Equal means: loss within 1e-5 (relative); each gradient within 1e-4, by the norm of the difference over the larger of
that gradient's norm and 1e-4 of the global norm (some gradients are zero in exact arithmetic); each buffer after the
step within 1e-5, integers exactly; the same loss on every rank; and exactly the predicted bytes of each collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.program import load_source

Tensors = dict[str, Tensor]
LOSS, GRADIENT, BUFFER = 1e-5, 1e-4, 1e-5


@dataclass(frozen=True)
class Step:
    """What one step gives: the loss, whole gradients and buffers by name, and the bytes sent by each collective."""

    loss: Tensor
    gradients: Tensors
    buffers: Tensors
    sent: Mapping[str, int]


@dataclass(frozen=True)
class Comparison:
    """Relative differences between a program and its model, each with the name where it is largest."""

    loss: float
    gradient: float
    parameter: str
    buffer: float
    buffer_name: str
    same_loss: bool  # on every rank
    sent: Mapping[str, int]
    predicted: Mapping[str, int]

    def faults(self) -> list[str]:
        """What is out of tolerance, one line each; empty when the program equals the model."""
        found = []
        if not self.loss <= LOSS:
            found.append(f"loss: relative difference {self.loss:.2e}")
        if not self.gradient <= GRADIENT:
            found.append(f"gradient of {self.parameter}: relative difference {self.gradient:.2e}")
        if not self.buffer <= BUFFER:
            found.append(f"buffer {self.buffer_name}: relative difference {self.buffer:.2e}")
        if not self.same_loss:
            found.append("ranks disagree about the loss")
        if self.sent != self.predicted:
            found.append(f"sent {dict(self.sent)} bytes, predicted {dict(self.predicted)}")
        return found


def step_on_rank(rank: int, world: int, source: str, state: Tensors, batch: Tensors) -> Step:
    """One training step of the program on one rank, from the model's state."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    with rt.count_bytes() as counted:
        loss = built.train_step(**batch)
    gradients = built.full_gradients()
    buffers = {name: value for name, value in built.full_state_dict().items() if name in dict(built.named_buffers())}
    sent = Counter[str]()
    for key, size in counted.items():
        sent[key[0] if isinstance(key, tuple) else key] += size
    return Step(loss, gradients, buffers, dict(sent)) if rank == 0 else Step(loss, {}, {}, dict(sent))


def step_alone(model: nn.Module, batch: Tensors) -> Step:
    """The same step on one device, on the model itself."""
    output = model(**batch)
    loss = output if isinstance(output, Tensor) else output["loss"]
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
    state = model.state_dict()
    buffers = {name: value.clone() for name, value in model.named_buffers() if name in state}
    return Step(loss.detach(), gradients, buffers, {})


def compare(single: Step, ranks: Sequence[Step], predicted: Mapping[str, int]) -> Comparison:
    """How far the ranks' step (all that they hold is on the first) is from the one device's."""
    first = ranks[0]
    gradient, parameter = _worst(_gradient_errors(single.gradients, first.gradients))
    buffer, buffer_name = _worst(_buffer_errors(single.buffers, first.buffers))
    return Comparison(
        loss=float((single.loss - first.loss).abs() / single.loss.abs()),
        gradient=gradient,
        parameter=parameter,
        buffer=buffer,
        buffer_name=buffer_name,
        same_loss={step.loss.item() for step in ranks} == {first.loss.item()},
        sent=first.sent,
        predicted={kind: size for kind, size in predicted.items() if size},
    )


def _worst(errors: Mapping[str, float]) -> tuple[float, str]:
    """The largest error with its name; what is not a number is larger than any number."""
    return max(((float("inf") if error != error else error, name) for name, error in errors.items()), default=(0.0, ""))


def _gradient_errors(expected: Tensors, found: Tensors) -> dict[str, float]:
    """A gradient that only one side has counts as zero on the other."""
    total = sum((gradient.norm() ** 2 for gradient in expected.values()), torch.zeros(())).sqrt()
    errors = {}
    for name in {*expected, *found}:
        one, other = expected.get(name), found.get(name)
        known = one if one is not None else other
        assert known is not None
        one, other = (torch.zeros_like(known) if value is None else value for value in (one, other))
        errors[name] = float((one - other).norm() / max(one.norm(), 1e-4 * total))
    return errors


def _buffer_errors(expected: Tensors, found: Tensors) -> dict[str, float]:
    """Of the persistent buffers; infinite where only one side has one."""
    errors = {name: float("inf") for name in {*expected} ^ {*found}}
    for name in {*expected} & {*found}:
        difference = (expected[name].double() - found[name].double()).norm()
        errors[name] = float(difference / expected[name].double().norm()) if difference else 0.0
    return errors
