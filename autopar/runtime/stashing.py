"""Versions of a stage's weights, one for each microbatch between its two passes, and an update after each: PipeDream.

What operators read of a weight is another tensor in each microbatch: a copy of the latest when the forward pass begins.
The backward pass computes with the same, what is made again for it too; its gradient is handed to the parameter, which
the optimizer updates at once. Sources and meaning: `ops.pipedream`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.runtime.errors import ProgramError
from autopar.runtime.optimizers.kinds import kind_of
from autopar.runtime.stored import ParameterUse, StoredParameter

PIPEDREAM = "pipedream"


class Updates:
    """The optimizer that updates a rank's weights within its steps, once it is given."""

    def __init__(self) -> None:
        self.optimizer: Optimizer | None = None

    def take(self, optimizer: Optimizer, parameters: Sequence[StoredParameter]) -> None:
        """Raises ProgramError for an optimizer of other parameters, or one that looks at those of other ranks."""
        own = {id(item.tensor) for item in parameters if item.declared.requires_grad}
        given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if own - given:
            raise ProgramError(
                f"expected an optimizer of all of rank.parameters(), found one without {len(own - given)} of them"
            )
        if kind_of(optimizer) != "elements":
            raise ProgramError(
                f"expected an optimizer that looks at elements by themselves, such as AdamW or SGD, with {PIPEDREAM}, "
                f"whose stages make their updates at other times, found {type(optimizer).__name__}"
            )
        self.optimizer = optimizer

    def check(self, parameters: Sequence[StoredParameter]) -> None:
        """Before a step. Raises ProgramError where no optimizer is known, and for hooks, which see no gradient."""
        if self.optimizer is None:
            raise ProgramError(
                f"expected the optimizer before the first step, since under {PIPEDREAM} weights are updated within "
                "steps, found none; call rank.update_with(optimizer)"
            )
        hooked = next((item.name for item in parameters if item.has_hooks), None)
        if hooked is not None:
            raise ProgramError(
                f"expected parameters without hooks under {PIPEDREAM}, since each microbatch has gradients of its own, "
                f"found one on {hooked}; take it away"
            )


class WeightStash:
    """Of a stage. scale: by which a microbatch's gradient is that of a minibatch of its own."""

    def __init__(self, uses: Sequence[ParameterUse], updates: Updates, scale: int) -> None:
        self._uses = [use for use in uses if use.parameter.declared.requires_grad]
        self._updates, self._scale = updates, scale
        self._versions: dict[int, list[Tensor]] = {}

    def begin_step(self) -> None:
        """Forgets what a step that failed midway has left."""
        self._versions.clear()

    @contextmanager
    def forward(self, index: int) -> Iterator[None]:
        """Around the forward pass of a microbatch: it reads a copy of the latest weights, which is kept."""
        self._versions[index] = [use.parameter.local.detach().clone().requires_grad_() for use in self._uses]
        with self._shown(index):
            yield

    @contextmanager
    def backward(self, index: int) -> Iterator[None]:
        """Around its backward pass: what is made again reads the same."""
        with self._shown(index):
            yield

    @contextmanager
    def _shown(self, index: int) -> Iterator[None]:
        for use, version in zip(self._uses, self._versions[index], strict=True):
            use.holder.__dict__[use.attribute] = version
        try:
            yield
        finally:
            for use in self._uses:
                use.show()

    @torch.no_grad()
    def update(self, index: int) -> None:
        """After it: the latest weights are updated by its gradient. A weight of two uses has the sum of theirs."""
        optimizer = self._updates.optimizer
        assert optimizer is not None, "checked before the step"
        self._hand_over(self._versions.pop(index))
        optimizer.step()
        for use in self._uses:
            use.parameter.tensor.grad = None

    def _hand_over(self, versions: list[Tensor]) -> None:
        """Gradients to the parameters; nothing holds the versions then, while the optimizer needs memory."""
        for use in self._uses:
            use.parameter.tensor.grad = None
        for use, version in zip(self._uses, versions, strict=True):
            if version.grad is not None:
                held = use.parameter.tensor.grad
                use.parameter.tensor.grad = version.grad if held is None else held.add_(version.grad)
        for parameter in {id(use.parameter): use.parameter for use in self._uses}.values():
            if parameter.tensor.grad is not None:
                parameter.tensor.grad.mul_(self._scale)
