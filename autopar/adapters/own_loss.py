"""A `compute_loss` of the script's own: what it calls the model with, and what it may make of the loss.

Such a function calls the model as it likes, and makes of what comes back what it likes. Under a plan a call gives the
loss alone (`planned.LossAlone`), so the model is planned for what the function really gives it, which one call shows;
and a backward pass begins at what was made of that loss, by the chain rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.adapters.loss import is_of_step
from autopar.runtime import ProgramError


class _CalledError(Exception):
    """Ends a function as soon as it calls the model."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        super().__init__()
        self.inputs = dict(inputs)


class _Shown(nn.Module):
    """Stands in the place of the model, and ends whoever calls it. All else is the model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["_model"] = model
        self.training = model.training

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Raises what `inputs_of_call` takes."""
        if args:
            raise ProgramError(
                f"expected compute_loss to call the model by names, as model(**inputs), found {len(args)} arguments by "
                "position"
            )
        raise _CalledError(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)


def inputs_of_call(model: nn.Module, compute: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """What the function calls the model with at first. Raises ProgramError where it does not call what it is given."""
    try:
        compute(_Shown(model))
    except _CalledError as called:
        return called.inputs
    raise ProgramError(
        "expected compute_loss to call the model that it is given, found that it does not; self.model has no weights "
        "under a plan, which the ranks have in parts"
    )


def check_loss(loss: Tensor, parameters: Mapping[int, str], num_stages: int) -> None:
    """Raises ProgramError for a loss that no step of a program has a part in, or one with terms of parameters where a
    rank has but those of its stage. parameters: names by id."""
    nodes = list(_graph(loss))
    if not any(map(is_of_step, nodes)):
        raise ProgramError(
            "expected a loss that is made of the planned model's, found one that it has no part in; compute_loss must "
            "call the model that it is given, with gradients"
        )
    terms = [name for node in nodes if (name := parameters.get(id(getattr(node, "variable", None))))]
    if terms and num_stages > 1:
        raise ProgramError(
            f"expected a loss of the model alone, found terms of parameters ({', '.join(terms[:3])}), of which each "
            "rank of a pipeline has those of its own stage; put them into the model's forward, or plan without stages"
        )


def _graph(loss: Tensor) -> Iterator[Any]:
    """The functions of autograd that lead to it."""
    left, known = [loss.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node is not None and node not in known:
            known.add(node)
            yield node
            left += [before for before, _ in node.next_functions]
