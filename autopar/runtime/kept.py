"""What a rank's modules hold stays what the program was built with: its tensors, their dtypes and device, its modules.

torch's conversions, `setattr` and hooks work on modules; a program computes with its own tensors, in its own blocks,
and would know nothing of that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from autopar.runtime.errors import ProgramError


class Kept(nn.Module):
    """A module whose tensors keep their dtype, device and memory."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `double`, `share_memory` and their like call with what they do to a tensor.

        Raises ProgramError for one that would change any, before it does; `float()` of float32 does nothing.
        """
        held: list[Tensor] = [*nn.Module.parameters(self, recurse), *self.buffers(recurse)]
        for dtype, device in dict.fromkeys((tensor.dtype, tensor.device) for tensor in held):
            probe = torch.zeros(1, dtype=dtype, device=device)
            changed = fn(probe)
            is_shared: bool = device.type == "cpu" and probe.is_shared()  # type: ignore[no-untyped-call] # torch's
            if changed is probe and not is_shared:
                continue
            found = "shared memory" if changed is probe else f"{changed.dtype} on {changed.device}"
            raise ProgramError(
                f"expected parameters and buffers to stay {dtype} on {device}, as the program was planned and built, "
                f"found a change to {found}. Plan a model of another dtype, or with precision=; give rt.build the "
                "device; or convert and share what rank.full_state_dict() returns"
            )
        return self

    def train(self, mode: bool = True) -> Self:
        """Keeps the mode that the model was in when it was planned; raises ProgramError for the other one.

        Dropout, batch norm and whatever else follows the mode are written into the program.
        """
        if mode != self.training:
            raise _other_mode(mode)
        return self


def _other_mode(mode: bool) -> ProgramError:
    other, now = ("training", "evaluation") if mode else ("evaluation", "training")
    call = "model.train()" if mode else "model.eval()"
    return ProgramError(
        f"expected to stay in {now} mode, for which the program was emitted, found a change to {other}. Plan "
        f"another program after {call}, and move the weights with full_state_dict and load_full_state_dict"
    )


class Contents:
    """The parameters, buffers and modules that a module and those inside it had at first, and the mode they were in."""

    def __init__(self, root: nn.Module) -> None:
        self._training = root.training
        self._modules = dict(root.named_modules())
        self._held = [
            (path, held, dict(held))
            for path, module in self._modules.items()
            for held in (module._parameters, module._buffers, module._modules)
        ]

    def changed(self) -> list[str]:
        """Names of what was added, replaced or taken away since."""
        return [
            f"{path}.{name}".removeprefix(".")
            for path, held, first in self._held
            if len(held) != len(first) or not all(map(operator.is_, held.values(), first.values()))
            for name in {**first, **held}
            if held.get(name) is not first.get(name)
        ]

    def check_use(self, is_called: bool) -> None:
        """Raises ProgramError for a hook that would not run, or `training` that was set by hand.

        is_called: the root is, so that its forward hooks run.
        """
        for path, module in self._modules.items():
            if module.training != self._training:
                raise _other_mode(module.training)
            hooks = module._backward_hooks or module._backward_pre_hooks
            if path or not is_called:
                hooks = hooks or module._forward_hooks or module._forward_pre_hooks
            for hook in hooks.values():
                raise ProgramError(
                    f"expected no hook of {path or 'the rank'} that would not run, found "
                    f"{getattr(hook, '__qualname__', type(hook).__name__)}: the program's blocks run in the place of "
                    "the rank's modules, and train_step is no call. Use hooks of parameters, or change what "
                    "train_step is given and returns"
                )
