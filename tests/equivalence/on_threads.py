"""A program's training steps on ranks that are threads of this process, beside those of the model on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from autopar import AutoparError, Constraint, Mesh, SearchBudget, parallelize, template_plan
from autopar import runtime as rt
from autopar.errors import InternalError
from autopar.program import PlannedProgram
from tests.random_programs.programs import load
from tests.random_programs.world import thread_world
from tests.traced import Known, traced_once

STEPS, RATE = 3, 0.05
Tensors = dict[str, Tensor]

#: plans that what forward changes is tried in: "searched" by the default search; on four ranks and in two stages, by
#: one of the model's own graph alone
PLANS: dict[str, dict[str, Any]] = {
    "dp=2": {"dp": 2},
    "tp=2": {"tp": 2},
    "dp=2 tp=2": {"dp": 2, "tp": 2},
    "zero=3": {"dp": 2, "zero": 3},
    "pp=2": {"pp": 2},
    "microbatches": {"dp": 2, "microbatches": 2},
    "pp=2 microbatches": {"pp": 2, "microbatches": 4},
    "recompute": {"dp": 2, "recompute": "full"},
    "searched": {"searched": 2},
    "searched@4": {"searched": 4},
    "stages=2": {"searched": 2, "stages": 2},
}

SEARCH = SearchBudget(proposals=200)  # the default search, but for a fifth of its proposals
OWN_GRAPH = replace(SEARCH, substitutions=False)
_LAST_TRACED: list[Known] = []


def planned(model: nn.Module, batch: Tensors, how: str) -> PlannedProgram:
    """The program of one of PLANS. Raises AutoparError where there is none."""
    choices = dict(PLANS[how])
    with traced_once(_LAST_TRACED):
        if "searched" in choices:
            mesh = Mesh("cpu", devices_per_node=choices["searched"])
            constraints = [Constraint(stages=choices["stages"])] if "stages" in choices else []
            search = SEARCH if how == "searched" else OWN_GRAPH
            return parallelize(model, mesh, batch, constraints=constraints, search=search)
        world = choices.get("dp", 1) * choices.get("tp", 1) * choices.get("pp", 1)
        mesh = Mesh("cpu", devices_per_node=world)
        return parallelize(model, mesh, batch, plan=template_plan(model, mesh, batch, **choices))


@lru_cache(maxsize=1)
def kept(make: Callable[..., nn.Module], batch: Callable[[], Tensors], *given: Any) -> tuple[nn.Module, Tensors]:
    """A model and a batch: for its next plan they are the same, and need not be traced again."""
    return make(*given), batch()


def differences(model: nn.Module, batch: Tensors, how: str) -> list[str] | None:
    """What a plan's program computes otherwise than the model in three SGD steps: losses, gradients, all that is
    stored. None where the plan is refused."""
    try:
        program = planned(model, batch, how)
    except InternalError:
        raise
    except AutoparError:
        return None
    return program_differences(model, batch, program)


def program_differences(model: nn.Module, batch: Tensors, program: PlannedProgram) -> list[str]:
    """As `differences`, of a program."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: tensor.detach().clone() for name, tensor in state.items()}
    expected = _on_one_device(copy.deepcopy(model), batch)
    found = thread_world(program.plan.mesh.num_devices).run(_on_rank, program.source, state, batch)
    return [f"rank {rank}: {text}" for rank, own in enumerate(found) for text in _differ(expected, own)]


def _on_one_device(model: nn.Module, batch: Tensors) -> Tensors:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    results: Tensors = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_in(model(**copy.deepcopy(batch)))
        loss.backward()
        results[f"loss {step}"] = loss.detach()
        named = model.named_parameters(remove_duplicate=False)
        gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        results |= {f"gradient {step} of {name}": gradient for name, gradient in gradients.items()}
        stored = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        results |= {f"{name} after forward {step}": tensor.detach().clone() for name, tensor in stored.items()}
        optimizer.step()
    return results | {name: tensor.clone() for name, tensor in model.state_dict().items()}


def loss_in(output: Any) -> Tensor:
    """The loss in what a forward returns: itself, or what is called so."""
    if isinstance(output, Tensor):
        return output
    found: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return found


def _on_rank(rank: int, source: str, state: Tensors, batch: Tensors) -> Tensors:
    built = rt.build(load(source, "program").Program, device="cpu")
    built.init_from(state, broadcast=False)
    own = [p for p in built.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(own, lr=RATE, momentum=0.9)
    results: Tensors = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        results[f"loss {step}"] = built.train_step(**copy.deepcopy(batch)).detach()
        results |= {f"gradient {step} of {name}": g.clone() for name, g in built.full_gradients().items()}
        results |= {f"{name} after forward {step}": tensor.clone() for name, tensor in built.full_state_dict().items()}
        optimizer.step()
    return results | {name: tensor.clone() for name, tensor in built.full_state_dict().items()}


def _differ(expected: Tensors, found: Tensors) -> list[str]:
    wrong = [f"{name} is missing" for name in expected if name not in found and not _may_be_missing(name)]
    scale = max(value.abs().max().item() for name, value in expected.items() if name.startswith("gradient 0"))
    for name, value in expected.items():
        if name in found and found[name].shape != value.shape:
            wrong.append(f"{name}: {tuple(found[name].shape)} for {tuple(value.shape)}")
        elif name in found and value.numel():
            gap = (found[name].double() - value.double()).abs().max().item()
            bound = 2e-4 * max(value.abs().max().item(), 1e-2 * scale, 1e-5)
            wrong += [] if gap <= bound else [f"{name}: off by {gap:.2g} of {value.abs().max().item():.2g}"]
    odd = [name for name, g in found.items() if name.startswith("gradient") and name not in expected and g.any()]
    return wrong + [f"{name} is there, and not on one device" for name in odd]


def _may_be_missing(name: str) -> bool:
    """Buffers that no state dict has are not gathered."""
    return " after forward " in name
