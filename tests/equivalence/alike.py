"""Three SGD steps of a model in some plan, on ranks that are threads of this process, beside the model's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import runtime as rt
from autopar.program import PlannedProgram, load_source, model_state
from autopar.trace import with_loss
from tests.random_programs.world import thread_world
from tests.traced import traced_once

Given = tuple[Any, ...] | dict[str, Any]
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "zero3": {"dp": 2, "zero": 3},
    "microbatches": {"dp": 2, "microbatches": 2},
    "stages": {"stages": 2},
    "stages of microbatches": {"stages": 2, "microbatches": 2},
    "searched": {},
}


def planned(model: nn.Module, inputs: Given, how: str, loss_fn: Any = None) -> PlannedProgram:
    """The program of a model on two ranks in one of the PLANS."""
    mesh, options = autopar.Mesh("cpu", devices_per_node=2), PLANS[how]
    if "dp" in options or "tp" in options:
        with traced_once():
            plan = autopar.template_plan(model, mesh, inputs, loss_fn=loss_fn, **options)
            return autopar.parallelize(model, mesh, inputs, loss_fn=loss_fn, plan=plan)
    constraints = [autopar.Constraint(**options)] if options else []
    budget = autopar.SearchBudget(2.0, substitutions=False, proposals=50)
    return autopar.parallelize(model, mesh, inputs, loss_fn=loss_fn, constraints=constraints, search=budget)


def assert_alike(
    model: nn.Module, inputs: Given, how: str, loss_fn: Any = None, eager: Callable[[], Tensor] | None = None,
    steps: int = 3,
) -> PlannedProgram:  # fmt: skip
    """Plans and trains. eager: the loss on one device, where calling the model does not give it."""
    program = planned(model, inputs, how, loss_fn)
    whole = with_loss(model, loss_fn)
    state = model_state(whole)
    given = copy.deepcopy(inputs)
    found = thread_world(2).run(_trained, program.source, copy.deepcopy(state), given, steps)
    expected = _alone(whole, eager or (lambda: _called(model, copy.deepcopy(inputs), loss_fn)), steps)
    for losses, gradients, tensors in found:
        torch.testing.assert_close(losses, expected[0], rtol=1e-4, atol=1e-5, equal_nan=True)
        for ours, theirs in ((gradients, expected[1]), (tensors, expected[2])):
            for name, value in theirs.items():
                scale = max(float(value.abs().max()), 1e-2) if value.numel() else 1.0
                torch.testing.assert_close(
                    ours[name], value, rtol=1e-3, atol=1e-3 * scale, equal_nan=True,
                    msg=lambda text, name=name: f"{how}: {name}: {text}",
                )  # fmt: skip
    return program


def _trained(rank: int, source: str, state: Any, inputs: Given, steps: int) -> Any:
    built = rt.build(load_source(source).Program, device=torch.device("cpu"))
    built.init_from(state, broadcast=False)
    owned = [p for p in built.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(owned or [nn.Parameter(torch.zeros(1))], lr=0.05, momentum=0.9)
    losses, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(built.train_step(**inputs) if isinstance(inputs, dict) else built.train_step(*inputs))
        gradients = gradients if step else {name: x.clone() for name, x in built.full_gradients().items()}
        optimizer.step()
    return torch.stack(losses), gradients, built.full_state_dict()


def _alone(model: nn.Module, loss_of: Callable[[], Tensor], steps: int) -> Any:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    losses, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        losses.append(loss.detach())
        named = model.named_parameters()
        gradients = gradients if step else {n: p.grad.clone() for n, p in named if p.grad is not None}
        optimizer.step()
    return torch.stack(losses), gradients, {n: x.detach() for n, x in model.state_dict().items()}


def _called(model: nn.Module, inputs: Given, loss_fn: Any) -> Tensor:
    """The loss as a user would call for it."""
    if loss_fn is not None:
        assert isinstance(inputs, tuple)
        return loss_fn(model(*inputs[:-1]), inputs[-1])
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, dict) else output.loss


def both(*names: str) -> Any:
    """A test in each of these plans; of all PLANS where none is named."""
    return pytest.mark.parametrize("how", names or tuple(PLANS))
