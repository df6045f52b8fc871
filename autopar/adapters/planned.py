"""A planned model as training loops see a model: called with a batch, it returns the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autopar.adapters.loss import loss_with_backward
from autopar.adapters.unchanged import Unchanged
from autopar.runtime import ProgramError, Rank


class PlannedModel(nn.Module):
    """Stands in the place of the model. Its parameters are the rank's, under the model's names.

    In training mode a call runs the step, forward and backward, and the loss hands its gradients over in `backward`; in
    evaluation mode it runs the forward pass of the evaluation program.
    """

    def __init__(
        self, rank: Rank, evaluation: Rank | None, given: nn.Module, why_not: str = "",
        reads: Iterable[tuple[str, str]] = (),
    ) -> None:  # fmt: skip
        """evaluation: a rank of the model in evaluation mode; the same where the model does not follow the mode, None
        where there is none, and why_not says why. given: the model that was planned; reads: attributes of it that were
        read then."""
        super().__init__()
        self.__dict__.update(  # no submodules: their mode is fixed
            rank=rank, _evaluation=evaluation, _why_not=why_not, predictor=None, config=getattr(given, "config", None),
            unchanged=Unchanged(given, reads=reads),
        )  # fmt: skip

    rank: Rank
    predictor: Callable[[dict[str, Any]], Any] | None  # where all outputs are asked for, what makes them
    _evaluation: Rank | None
    _why_not: str
    unchanged: Unchanged

    def forward(self, **inputs: Any) -> Any:
        """The loss of the whole batch, equal on all ranks, as the only entry of a dict; or all outputs, from the
        predictor."""
        self.unchanged.check()
        if self.predictor is not None:
            return self.predictor(tensors_of(inputs))
        if self.training and torch.is_grad_enabled():
            return LossAlone(loss=loss_with_backward(self.rank, inputs))
        return LossAlone(loss=_loss(self._evaluating()(**inputs), self.rank))

    def _evaluating(self) -> Rank:
        if self.training:
            return self.rank
        if self._evaluation is None:
            raise ProgramError(self._why_not)
        return self._evaluation

    def train(self, mode: bool = True) -> PlannedModel:
        """Before evaluation, its program gets the weights of now."""
        if self.training and not mode and self._evaluation is not None and self._evaluation is not self.rank:
            self._evaluation.load_full_state_dict(self.rank.full_state_dict())
        self.training = mode
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The rank's."""
        return self.rank.named_parameters(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The rank's."""
        return self.rank.parameters(recurse)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The rank's."""
        return self.rank.named_buffers(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `torch.nn.Module.zero_grad`."""
        self.rank.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ProgramError: a rank has parts of parameters."""
        raise ProgramError(
            "expected whole parameters, found a planned model, of which a rank has parts; take "
            "model.rank.full_state_dict(), or model.rank.save_safetensors(folder)"
        )


def _loss(outputs: Any, rank: Rank) -> Tensor:
    loss: Tensor = outputs if isinstance(outputs, Tensor) else outputs[rank.programs[0].LOSS_INDEX]
    return loss


class LossAlone(dict[str, Tensor]):
    """What a program returns of the model's outputs. WantedPlan for another one, says so."""

    def __missing__(self, key: str) -> NoReturn:
        raise ProgramError(
            f"expected to be asked for the loss, which is all that a training program returns, found {key!r}; what is "
            "made of other outputs belongs into the model's forward, as a part of its loss"
        )

    def get(self, key: str, default: Any = None) -> Any:
        """See `dict.get`; what the model may have returned beside the loss is not known to be missing."""
        return self[key]

    def __contains__(self, key: object) -> bool:
        return bool(self[str(key)] is not None)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


def on_meta(model: nn.Module) -> None:
    """Frees a model's weights, which the ranks hold now; whoever computes with the model is told by torch. Tied ones
    stay tied, and buffers stay: what a model computes once, such as frequencies, is needed to plan it again."""
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in known:
                    known[id(parameter)] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                module._parameters[name] = known[id(parameter)]


def tensors_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as a plain dict, without entries that are None."""
    return {name: value for name, value in batch.items() if value is not None}
