"""Holds a plan's program, on ranks that are threads, against the model on one device: two steps with SGD between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import runtime as rt
from autopar.program import load_source, model_state
from tests.random_programs.world import device_mesh, thread_world
from tests.traced import traced_once

RATE = 0.05
Step = tuple[Tensor, dict[str, Tensor]]


def single(model: nn.Module, inputs: tuple[Any, ...], steps: int = 2) -> list[Step]:
    """Loss and gradients of each step on one device; the model's parameters change, its first gradients go."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    torch.manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        named = model.named_parameters(remove_duplicate=False)
        found.append((loss.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}))
        optimizer.step()
    return found


def planned(model: nn.Module, inputs: tuple[Any, ...], **how: Any) -> autopar.Program:
    """The program of a template (dp, tp, …), or with `devices` of a search under `constraints`."""
    devices = how.pop("devices", None)
    if devices is not None:
        mesh = autopar.Mesh("h100", devices_per_node=devices)
        return autopar.parallelize(model, mesh, inputs, search="fast", **how)
    count = how.get("dp", 1) * how.get("tp", 1) * how.get("pp", 1)
    mesh = autopar.Mesh("h100", devices_per_node=count)
    with traced_once():
        plan = autopar.template_plan(model, mesh, inputs, **how)
        return autopar.parallelize(model, mesh, inputs, plan=plan)


def sharded(program: autopar.Program, model: nn.Module, inputs: tuple[Any, ...], steps: int = 2) -> list[list[Step]]:
    """The same of a program, on each rank."""
    plan = program.plan
    real = tuple((axis.name, axis.size) for axis in plan.stages[0].axes)
    axes = () if len(plan.stages) > 1 or not real else real
    state = {name: tensor.clone() for name, tensor in (model_state(model) or {}).items()}
    job = (program.source, axes, state, inputs, steps)
    ranks: list[list[Step]] = thread_world(plan.mesh.num_devices).run(_run, *job)
    return [_joined(ranks)] if len(plan.stages) > 1 else ranks


def _joined(ranks: list[list[Step]]) -> list[Step]:
    """Of stages of one rank each, of which each has its own parameters."""
    return [(steps[0][0], {k: g for _, own in steps for k, g in own.items()}) for steps in zip(*ranks, strict=True)]


def _run(rank: int, source: str, axes: Any, state: dict[str, Tensor], inputs: tuple[Any, ...], steps: int) -> Any:
    rt.seed_dropout(0)
    rt.set_exact_dropout(not issubclass(load_source(source).Program, rt.Pipeline))
    built = rt.build(load_source(source).Program, device_mesh(axes) if axes else None, "cpu")
    built.init_from(state, broadcast=False)
    trained = [p for p in built.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE) if trained else None
    found = []
    for _ in range(steps):
        if optimizer:
            optimizer.zero_grad()
        loss = built.train_step(*inputs)
        found.append((loss.detach().clone(), _gradients(built)))
        if optimizer:
            optimizer.step()
    return found


def _gradients(built: rt.Rank) -> dict[str, Tensor]:
    """Whole; of stages, whose ranks the threads cannot ask all at once, this rank's."""
    if type(built) is rt.Rank:
        return {name: g.clone() for name, g in built.full_gradients().items()}
    own = {name: p.grad for name, p in built.named_parameters() if p.grad is not None}
    return {name: (g.to_local() if isinstance(g, DTensor) else g).clone() for name, g in own.items()}


def differences(model: nn.Module, inputs: tuple[Any, ...], **how: Any) -> list[str]:
    """What differs from one device, a line each."""
    ranks = sharded(planned(model, inputs, **how), model, inputs)
    return compare(single(model, inputs), ranks)


def compare(one: list[Step], ranks: list[list[Step]]) -> list[str]:
    """Losses to 1e-5; each gradient to 1e-4 of the larger of its norm and 1e-4 of all gradients' norm."""
    found = []
    for rank, steps in enumerate(ranks):
        for number, ((loss, gradients), (own_loss, own)) in enumerate(zip(one, steps, strict=True)):
            where = f"rank {rank}, step {number}"
            if abs(loss - own_loss) > 1e-5 * max(1.0, abs(loss)):
                found.append(f"{where}: loss {own_loss.item()}, expected {loss.item()}")
            total = torch.stack([g.norm() for g in gradients.values()]).norm()
            for name in gradients.keys() | own.keys():
                expected = gradients.get(name)
                if expected is None or name not in own:
                    if (own[name] if expected is None else expected).norm() > 0:
                        found.append(f"{where}: gradient of {name} is on one side only")
                    continue
                error = (expected - own[name]).norm() / max(expected.norm(), 1e-4 * total)
                if not error <= 1e-4:
                    found.append(f"{where}: gradient of {name} differs by {error.item():.1e}")
    return found
