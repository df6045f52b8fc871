"""A Lightning step as a module that can be planned: its batch goes in, its loss or what it logs comes out.

The step's Python runs while it is planned, and never again. So whatever it does beside computing is refused: a use of
the batch's number or of the trainer, a value that it logs besides the loss, an attribute that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.runtime import ProgramError


@dataclass(frozen=True, slots=True)
class Logged:
    """A call of `self.log`: a number that is the same in all steps, or None for the loss or the output at its place."""

    name: str
    number: float | None
    options: Mapping[str, Any]


class TrainingStep(nn.Module):
    """`training_step` as a forward pass; parameters and buffers have the module's names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(
            _modules=module._modules, _parameters=module._parameters, _buffers=module._buffers, _module=module,
            logged=[],
        )  # fmt: skip
        self.training = module.training

    logged: list[Logged]
    _module: Any

    def forward(self, batch: Any) -> Tensor:
        """The loss."""
        with _recorded(self._module) as calls:
            loss = _loss(self._module.training_step(batch, _Number()))
        if not isinstance(loss, FakeTensor):
            self.logged[:] = [_of_loss(name, value, options, loss) for name, value, options in calls]
        return loss


class EvaluationStep(TrainingStep):
    """`validation_step`, say, whose outputs are the tensors that it logs, in turn."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.__dict__["_name"] = name

    _name: str

    def forward(self, batch: Any) -> tuple[Tensor, ...]:  # type: ignore[override] # of several
        """What is logged, but for numbers that are the same in all steps."""
        with _recorded(self._module) as calls:
            getattr(self._module, self._name)(batch, _Number())
        self.logged[:] = [
            Logged(name, None if isinstance(value, Tensor) else float(value), options) for name, value, options in calls
        ]
        return tuple(value for _, value, _ in calls if isinstance(value, Tensor))


@contextmanager
def _recorded(module: Any) -> Iterator[list[tuple[str, Any, dict[str, Any]]]]:
    """Calls of `self.log` are kept, and the trainer is out of reach. Raises ProgramError for attributes that change."""
    calls: list[tuple[str, Any, dict[str, Any]]] = []
    trainer, before = module._trainer, _state(module)
    module._trainer = _OutOfReach()
    module.log = lambda name, value, **options: calls.append((name, value, options))
    module.log_dict = lambda values, **options: calls.extend((name, x, options) for name, x in values.items())
    try:
        yield calls
    finally:
        module._trainer = trainer
        del module.log, module.log_dict
    changed = [name for name, value in _state(module).items() if before.get(name) != value]
    if changed:
        raise ProgramError(
            f"expected a step that computes and logs alone, found that it changes {', '.join(changed)}: the program "
            "would not. Move that to a hook such as on_train_batch_end"
        )


def _state(module: nn.Module) -> dict[str, Any]:
    """What can be seen of the attributes of a module and of those inside: plain values, and lengths of containers."""
    found = {}
    for path, inner in module.named_modules():
        for name, value in vars(inner).items():
            if isinstance(value, (bool, int, float, str)):
                found[f"{path}.{name}".lstrip(".")] = value
            elif isinstance(value, (list, dict, set)) and name not in ("_modules", "_parameters", "_buffers"):
                found[f"{path}.{name}".lstrip(".")] = len(value)
    return found


class _OutOfReach:
    """In the trainer's place while a step is planned."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ProgramError(
            f"expected a step that computes from its batch alone, found that it reads trainer.{name}, which would be "
            "what it was at planning in all steps. Move that to a hook, or into the batch"
        )


def _refused(self: Any, *_: Any) -> NoReturn:
    raise ProgramError("expected a step that computes from its batch alone, found that it uses the batch's number")


class _Number(int):
    """The number of a batch, which a step must not look at."""


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "mod", "mul", "rmul", "floordiv", "bool", "str",
              "format", "truediv", "index", "int", "float"):  # fmt: skip
    setattr(_Number, f"__{_name}__", _refused)
_Number.__hash__ = int.__hash__  # type: ignore[method-assign] # __eq__ took it


def _loss(found: Any) -> Tensor:
    loss = found.get("loss") if isinstance(found, Mapping) else found
    if isinstance(found, Mapping) and set(found) != {"loss"}:
        raise ProgramError(f"expected training_step to return the loss alone, found {', '.join(found)}")
    if not isinstance(loss, Tensor) or loss.dim():
        raise ProgramError(f"expected training_step to return a scalar loss, found {type(loss).__name__}")
    return loss


def _of_loss(name: str, value: Any, options: dict[str, Any], loss: Tensor) -> Logged:
    if isinstance(value, (int, float)):
        return Logged(name, float(value), options)
    if isinstance(value, Tensor) and value.data_ptr() == loss.data_ptr():  # also detached
        return Logged(name, None, options)
    raise ProgramError(
        f"expected training_step to log its loss or numbers, found {name}, which is neither: a training program "
        "returns the loss alone. Log it in validation_step"
    )


def log_again(log: Callable[..., Any], logged: list[Logged], values: Iterator[Tensor]) -> None:
    """Calls the module's own `log` as its step did, with the values of now."""
    for call in logged:
        log(call.name, next(values) if call.number is None else call.number, **call.options)


def tried(step: TrainingStep, batch: Any) -> list[Logged]:
    """What a step logs: it runs once, and leaves buffers as they are."""
    before = {buffer: buffer.clone() for buffer in step.buffers()}
    with torch.no_grad():
        step(batch)
        for buffer, value in before.items():
            buffer.copy_(value)
    return list(step.logged)
