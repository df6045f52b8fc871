"""What ranks run for the tests of the hard cases: a module of its own, which they can import."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar import runtime as rt
from autopar.program import load_source
from tests.equivalence.harness import Tensors
from tests.equivalence.lamb import Lamb

STEPS = 3


def exact_steps(rank: int, world: int, source: str, state: Tensors, batch: Tensors, seed: int) -> Any:
    """Losses, last gradients of some steps of exact mode, without touching torch's own generator."""
    torch.manual_seed(1000 + rank)  # ranks need not agree on it
    before = torch.get_rng_state()
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    rt.set_exact_dropout(True)
    rt.seed_dropout(seed)
    losses = []
    for _ in range(STEPS):
        built.zero_grad()
        losses.append(built.train_step(**batch).item())
    rt.set_exact_dropout(False)
    assert torch.equal(before, torch.get_rng_state())
    return losses, built.full_gradients()


def outputs(rank: int, world: int, source: str, state: Tensors, batch: Tensors, seed: int, exact: bool) -> Any:
    """What forward returns, and what this rank holds of it before it is joined."""
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    rt.set_exact_dropout(exact)
    rt.seed_dropout(seed)
    found = [built(**batch) for _ in range(2)]
    rt.set_exact_dropout(False)
    return found


def trained(rank: int, world: int, source: str, state: Tensors, batch: Tensors, recipe: str, steps: int = STEPS) -> Any:
    """Losses, all tensors, names in state_dict and gradients after some steps of a recipe (see `optimizer`)."""
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    chosen = optimizer(recipe, built)
    losses = []
    for _ in range(steps):
        chosen.zero_grad()
        losses.append(built.train_step(**batch).item())
        chosen.step()
    buffers = {name: _whole(buffer) for name, buffer in built.named_buffers()}
    return losses, {**built.full_state_dict(), **buffers}, set(built.state_dict()), set(built.full_gradients())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def trained_alone(model: nn.Module, batch: Tensors, recipe: str, steps: int = STEPS) -> Any:
    """The same of the model itself; works on a copy."""
    model = copy.deepcopy(model)
    chosen = optimizer(recipe, model)
    losses = []
    for _ in range(steps):
        chosen.zero_grad()
        loss = model(**batch)
        loss.backward()
        losses.append(loss.item())
        chosen.step()
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    return losses, tensors, set(model.state_dict()), gradients


def optimizer(recipe: str, module: nn.Module) -> torch.optim.Optimizer:
    """lamb; groups: biases and norms without weight decay and with another rate, frozen parameters left out."""
    if recipe == "lamb":
        return Lamb(module.parameters())
    if recipe == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    wanted = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    plain = [parameter for parameter in wanted.values() if parameter.dim() < 2]
    decayed = [parameter for parameter in wanted.values() if parameter.dim() >= 2]
    groups = [{"params": plain, "weight_decay": 0.0, "lr": 1e-2}, {"params": decayed, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-6)


def clipped(rank: int, world: int, source: str, state: Tensors, batch: Tensors, norm_type: float) -> Any:
    """The norm and the clipped gradients, by the rank's own method and by torch's function over DTensors."""
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    found = []
    for clip in (built.clip_grad_norm_, partial(nn.utils.clip_grad_norm_, built.parameters())):
        built.zero_grad()
        built.train_step(**batch)
        norm = clip(0.01, norm_type)
        found.append((_whole(norm).item(), built.full_gradients()))
    return found


def thawed(rank: int, world: int, source: str, state: Tensors, batch: Tensors, frozen: str, late: str) -> Any:
    """Whether a parameter frozen after planning gets a gradient; what is said of one that is not frozen any more."""
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    built.get_parameter(late).requires_grad_(False)
    built.train_step(**batch)
    without = built.get_parameter(late).grad is None
    built.get_parameter(frozen).requires_grad_(True)
    try:
        built.train_step(**batch)
    except rt.ProgramError as error:
        return without, str(error)
    return without, "nothing"


def evaluated(rank: int, world: int, source: str, state: Tensors, batch: Tensors) -> Any:
    """What an inference program returns, twice, and what a change of its mode says."""
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    first, second = built(**batch), built(**batch)
    try:
        built.train(not built.training)
        said = "nothing"
    except rt.ProgramError as error:
        said = str(error)
    return first, second, built.training, said


def saved_bytes(parameters: Iterable[Tensor], step: Callable[[], Any]) -> int:
    """Bytes of all that autograd keeps in a step, but for parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        step()
    return sum(kept.values())


def saved_on_rank(rank: int, world: int, source: str, state: Tensors, batch: Tensors) -> int:
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    return saved_bytes([p.to_local() for p in built.parameters()], lambda: built.train_step(**batch))
