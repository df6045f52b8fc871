"""A Lightning step as a module that can be planned: its batch goes in, its loss or what it logs and returns comes out.

The step's Python runs while it is planned, and never again. So whatever it does beside computing is refused: a use of
the batch's number or of the trainer, a value that it logs besides the loss, an attribute that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map

from autopar.runtime import ProgramError


@dataclass(frozen=True, slots=True)
class Logged:
    """A call of `self.log`: a number that is the same in all steps, or None for the loss or the output at `place`."""

    name: str
    number: float | None
    options: Mapping[str, Any]
    place: int = 0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step makes of a batch beside its outputs.

    returned: as it was, with the place of an output for each tensor (`OutputPlace`); None where nothing is returned.
    """

    logged: Sequence[Logged]
    returned: Any

    @property
    def has_outputs(self) -> bool:
        """Whether there is any tensor."""
        leaves = tree_flatten(self.returned)[0]
        return any(call.number is None for call in self.logged) or any(isinstance(x, OutputPlace) for x in leaves)

    def filled(self, outputs: Sequence[Tensor]) -> Any:
        """What the step returns, of these outputs."""
        return tree_map(lambda x: outputs[x.index] if isinstance(x, OutputPlace) else x, self.returned)


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """Of a tensor among outputs."""

    index: int


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
            loss = _loss(self._module.training_step(batch, *_number(self._module.training_step)))
        if not isinstance(loss, FakeTensor):
            self.logged[:] = [_of_loss(name, value, options, loss) for name, value, options in calls]
        return loss


class EvaluationStep(TrainingStep):
    """`validation_step`, say, whose outputs are the tensors that it returns and logs, each once."""

    def __init__(self, module: nn.Module, name: str, more: Sequence[int]) -> None:
        """more: what the step is given after the batch and its number, if it takes that."""
        super().__init__(module)
        self.__dict__.update(_name=name, _more=tuple(more), made=StepOutcome((), None))

    made: StepOutcome
    _name: str
    _more: tuple[int, ...]

    def forward(self, batch: Any) -> tuple[Tensor, ...]:  # type: ignore[override] # of several
        """The outputs; `made` says what they are."""
        step = getattr(self._module, self._name)
        with _recorded(self._module) as calls:
            returned = step(batch, *_number(step), *self._more)
        outputs = list[Tensor]()
        logged = [_evaluated(name, value, options, outputs) for name, value, options in calls]
        self.__dict__["made"] = StepOutcome(logged, tree_map(lambda x: _placed(x, outputs), returned))
        return tuple(outputs)

    def tried(self, batch: Any) -> StepOutcome:
        """What the step makes of such a batch: by tensors without values, since parameters may be on meta."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, torch.no_grad():
            own = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in self.named_parameters()}
            own |= {name: torch.empty(x.shape, dtype=x.dtype) for name, x in self.named_buffers()}
            given = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, batch)
            try:
                functional_call(self, own, (given,))
            except ProgramError:
                raise
            except Exception as error:
                raise ProgramError(
                    f"expected a {self._name} that computes with tensors alone, found {type(error).__name__}: {error}. "
                    "What looks at values belongs into a hook: steps may return tensors, which "
                    f"on_{self._name.replace('step', 'batch_end')} gets"
                ) from error
        return self.made


def _evaluated(name: str, value: Any, options: dict[str, Any], outputs: list[Tensor]) -> Logged:
    if isinstance(value, Tensor):
        return Logged(name, None, options, _placed(value, outputs).index)
    if isinstance(value, (int, float)):
        return Logged(name, float(value), options)
    raise ProgramError(
        f"expected a step to log tensors or numbers, found {name} of {type(value).__name__}, whose state would stay "
        "as it was at planning; return what it is made of, and update it in a hook"
    )


def _placed(value: Any, outputs: list[Tensor]) -> Any:
    """A tensor's place among the outputs, to which it is added; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    for index, known in enumerate(outputs):
        if known is value:
            return OutputPlace(index)
    outputs.append(value)
    return OutputPlace(len(outputs) - 1)


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


def _number(step: Callable[..., Any]) -> tuple[int, ...]:
    """The batch's number, where the step takes it."""
    return (_Number(),) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()


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


def log_again(log: Callable[..., Any], logged: Sequence[Logged], values: Sequence[Tensor]) -> None:
    """Calls the module's own `log` as its step did, with the values of now."""
    for call in logged:
        log(call.name, values[call.place] if call.number is None else call.number, **call.options)


def tried(step: TrainingStep, batch: Any) -> list[Logged]:
    """What a training step logs: it runs once, and leaves buffers as they are."""
    before = {buffer: buffer.clone() for buffer in step.buffers()}
    with torch.no_grad():
        step(batch)
        for buffer, value in before.items():
            buffer.copy_(value)
    return list(step.logged)
