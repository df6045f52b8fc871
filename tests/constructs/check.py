"""Plans a model's step, runs it on all ranks, and compares three SGD steps with the eager model.

Compared: the loss and its equality over ranks, each gradient, the clipped norm, all parameters and buffers at the end,
that planning left model and inputs as they were, and the bytes that the first rank of each submesh hands to each
collective in a step, with what the plan says (but where experts are chosen as a step goes). In float64, to 1e-6 (the
norm is float32); of models that hold float32, to 1e-4.
"""

from __future__ import annotations

import copy
import json
import random
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import runtime as rt
from autopar.cost.files import profiles_folder
from autopar.errors import AutoparError, InternalError
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.program import load_source, model_state
from autopar.simulate import traffic
from tests.constructs.models import Model, loaded
from tests.constructs.written import Written
from tests.equivalence.predicted import bytes_by_submesh
from tests.random_programs.check import by_collective, different_bytes
from tests.random_programs.world import thread_world
from tests.traced import traced_once

STEPS = 3
TOLERANCE, SINGLE_TOLERANCE = 1e-6, 1e-4
RATE, MOMENTUM, MAX_NORM = 0.05, 0.9, 1.0
WORLD = 2
EQUAL, REFUSED, WRONG, CRASHED = "equal", "refused", "WRONG", "crashed"

TEMPLATES: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "zero3": {"dp": 2, "zero": 3},
    "recompute": {"dp": 2, "recompute": "full"},
    "microbatches": {"dp": 2, "microbatches": 2},
    "stages": {"pp": 2, "microbatches": 2},
    "samples": {},  # one a microbatch
}
SPLIT: dict[str, dict[str, Any]] = {
    "gather": {"cp": 2},
    "ring": {"cp": 2, "context": "ring"},
    "heads": {"cp": 2, "context": "heads"},
    "ring zero3": {"cp": 2, "context": "ring", "zero": 3, "recompute": "full"},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "exchange": {"dp": 2, "ep": 2},
    "exchange in chunks": {"dp": 2, "ep": 2, "exchange_chunks": 4, "zero": 1},
    "exchange of microbatches": {"dp": 2, "ep": 2, "microbatches": 2},
}
"""Of models with positions, or with experts (`listed`)."""
SEARCHED = {"searched": (), "searched stages": (autopar.Constraint(stages=2),)}
PLANS = (*TEMPLATES, *SEARCHED)
WHOLE = ("dp", "tp", "zero3", "recompute")
"""Plans of one stage and one microbatch: what they need not refuse is not refused."""
BUDGET = autopar.SearchBudget(2.0, substitutions=False, proposals=100)
_SLOWDOWN = 10_000


@dataclass(frozen=True)
class Verdict:
    """What came of a case: the kind, and in words why."""

    kind: str
    text: str = ""

    @property
    def names_a_line(self) -> bool:
        """Whether a refusal says where."""
        return re.search(r"\.py\S*:\d+|line \d+", self.text) is not None


class InvalidModel(Exception):
    """The eager model itself does not run: no case."""


@dataclass(frozen=True)
class Record:
    """Of each step the loss, the gradients and their norm; parameters and buffers after the last."""

    steps: tuple[tuple[Tensor, Mapping[str, Tensor], Tensor], ...]
    state: Mapping[str, Tensor]
    sent: Mapping[str, int] = field(default_factory=dict)  # bytes of the first step by collective


Run = Callable[[Callable[..., Any], tuple[Any, ...]], list[Any]]


def run_in_threads(job: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Runs a job on ranks that are threads of this process."""
    return thread_world(WORLD).run(job, *args)


def judged(model: Model | Written, plan: str, run: Run = run_in_threads) -> Verdict:
    """What comes of a model under a plan. Raises InvalidModel."""
    with _undisturbed():
        expected = eager(model)
        try:
            module, (made, state) = made_of(model)
            program = _planned(module, made, plan)
        except InternalError as error:
            return Verdict(CRASHED, _told(error, "planning"))
        except AutoparError as error:
            return Verdict(REFUSED, f"{type(error).__name__}: {error}")
        except Exception as error:
            return Verdict(CRASHED, _told(error, "planning"))
        wrong = [f"planning changed {name}" for name in _changed(state, model_state(made) or {})]
        try:
            args = (model.name, model.source, program.source, state, _batch(module), model.is_random)
            results = run(train, args)
        except Exception as error:
            return Verdict(CRASHED, _told(error, "the run"))
    wrong += differences(expected, results) + wrong_bytes(program, [rank.sent for rank in results])
    return Verdict(WRONG, "\n".join(wrong)) if wrong else Verdict(EQUAL)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Some models warn, some leave gradients switched off where they end in an error."""
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


def _told(error: Exception, when: str) -> str:
    """Its last line first, where it came from after it."""
    text = str(error).strip()
    last = text.splitlines()[-1] if text else ""
    return f"{type(error).__name__} in {when}: {last}\n{traceback.format_exc()}"


# one device ----------------------------------------


@contextmanager
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def made_of(model: Model | Written) -> tuple[ModuleType, tuple[nn.Module, dict[str, Tensor]]]:
    """Its module loaded anew, the model with the weights of its seed, and a copy of these."""
    with _double():
        module = loaded(model.name, model.source)
        torch.manual_seed(model.seed)
        random.seed(model.seed)
        made = module.Model()
        module.loss = module.loss_fn()
    state = {name: tensor.clone() for name, tensor in (model_state(made) or {}).items()}
    if isinstance(module.loss, nn.Module):
        state |= {f"loss_fn.{name}": tensor.clone() for name, tensor in (model_state(module.loss) or {}).items()}
    return module, (made, state)


def _batch(module: ModuleType) -> dict[str, Any]:
    with _double():
        found: dict[str, Any] = module.batch()
    return found


def eager(model: Model | Written) -> Record:
    """Three steps of the model itself. Raises InvalidModel."""
    try:
        with _undisturbed():
            module, (made, _) = made_of(model)
            return _trained(made, module, model.is_random)
    except Exception as error:
        raise InvalidModel(f"{model.what}: {error}") from error


def _trained(made: nn.Module, module: ModuleType, is_random: bool) -> Record:
    whole = nn.ModuleDict({"model": made})
    if isinstance(module.loss, nn.Module):
        whole["loss_fn"] = module.loss
    optimizer = torch.optim.SGD(whole.parameters(), lr=RATE, momentum=MOMENTUM)
    steps, began = [], {n: b.detach().clone() for n, b in whole.named_buffers(remove_duplicate=False)}
    for _ in range(STEPS):
        optimizer.zero_grad()
        with rt.reference_dropout() if is_random else _nothing():
            loss = _loss(made, module, _batch(module))
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in _parameters(whole).items() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
        optimizer.step()
        steps.append((loss.detach().clone(), gradients, norm.detach().clone()))
    named, kept = dict(whole.named_buffers(remove_duplicate=False)), whole.state_dict().keys()
    changed = {name for name, old in began.items() if name in named and not _same(old, named[name])}
    buffers = {  # not what no checkpoint has: caches that forward fills, constants that it may not even read
        _public(name): buffer for name, buffer in named.items() if name in kept or name in changed
    }
    state = {name: value.detach().clone() for name, value in (_parameters(whole) | buffers).items()}
    return Record(tuple(steps), state)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _parameters(whole: nn.Module) -> dict[str, nn.Parameter]:
    return {_public(name): p for name, p in whole.named_parameters(remove_duplicate=False)}


def _public(name: str) -> str:
    return name.removeprefix("model.")


def _loss(made: nn.Module, module: ModuleType, inputs: dict[str, Any]) -> Tensor:
    if module.loss is not None:
        target = inputs.pop("y")
        return module.loss(made(**inputs), target)
    found = made(**inputs)
    if isinstance(found, Tensor):
        return found
    if isinstance(found, dict):
        return found["loss"]
    if hasattr(found, "loss"):
        return found.loss
    return next(one for one in found if one.dim() == 0)


# planning ----------------------------------------


@cache
def slow_mesh() -> autopar.Mesh:
    """Devices so slow that even tiny models are worth splitting."""
    profile = json.loads((profiles_folder() / "cpu.json").read_text())
    facts = profile["facts"]
    facts["peak_flops"] = {dtype: rate / _SLOWDOWN for dtype, rate in facts["peak_flops"].items()}
    facts["memory_bandwidth"] /= _SLOWDOWN
    path = Path(tempfile.mkdtemp(prefix="autopar-test-")) / "slow.json"
    path.write_text(json.dumps(profile))
    return autopar.Mesh(str(path), devices_per_node=WORLD)


def _planned(module: ModuleType, made: nn.Module, plan: str) -> autopar.PlannedProgram:
    """Through the public surface; the model is traced once for its plan and for the program of that plan."""
    inputs = _batch(module)
    loss_fn = {} if module.loss is None else {"loss_fn": module.loss}
    with traced_once():
        if plan in SEARCHED:
            rules = SEARCHED[plan]
            program = autopar.parallelize(made, slow_mesh(), inputs, constraints=rules, search=BUDGET, **loss_fn)
        else:
            mesh = autopar.Mesh("cpu", devices_per_node=WORLD)
            how = (TEMPLATES | SPLIT)[plan] or {"pp": 2, "microbatches": module.B}
            template = autopar.template_plan(made, mesh, inputs, **how, **loss_fn)
            program = autopar.parallelize(made, mesh, inputs, plan=template, **loss_fn)
    return program


def _changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    names = before.keys() & after.keys()
    return [name for name in names if not _near(before[name], after[name], 0.0)]


# on a rank ----------------------------------------


def train(
    rank: int, name: str, model: str, program: str, state: Mapping[str, Tensor], inputs: dict[str, Any], exact: bool
) -> Record:
    """Three steps of SGD with momentum, whole gradients and whole state."""
    rt.set_exact_dropout(exact)
    built = rt.build(load_source(program).Program, None, "cpu")
    built.init_from(state, broadcast=False)
    optimizer = torch.optim.SGD(_trainable(built), lr=RATE, momentum=MOMENTUM)
    steps, sent = [], dict[str, int]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        rt.seed_dropout(0)
        with rt.count_bytes() as counted:
            loss = built.train_step(**copy.deepcopy(inputs))
        sent = sent or by_collective(counted)
        gradients = {key: value.clone() for key, value in built.full_gradients().items()}
        norm = built.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        steps.append((loss.detach().clone(), gradients, norm.detach().clone()))
    own = {key: _local(buffer).clone() for key, buffer in built.named_buffers()}
    return Record(tuple(steps), own | {key: value.clone() for key, value in built.full_state_dict().items()}, sent)


def _trainable(built: nn.Module) -> list[Tensor]:
    """A rank of a pipeline may have none, which optimizers refuse."""
    found: list[Tensor] = [parameter for parameter in built.parameters() if parameter.requires_grad]
    return found or [nn.Parameter(torch.zeros(1))]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# the comparison ----------------------------------------


def differences(expected: Record, ranks: list[Record]) -> list[str]:
    """What is not equal, one line each."""
    wrong = []
    first = ranks[0]
    for number, (one, other) in enumerate(zip(expected.steps, first.steps, strict=True), 1):
        wrong += [f"step {number}: {text}" for text in _step_differences(*one, *other)]
        if any(not _same(rank.steps[number - 1][0], other[0]) for rank in ranks):
            wrong.append(f"step {number}: ranks disagree about the loss")
    held: dict[str, Tensor] = {}
    for rank in reversed(ranks):
        held |= rank.state
    for name, value in expected.state.items():
        if name not in held:
            wrong.append(f"after {STEPS} steps: {name} is not there")
        elif not _near(value, held[name], max(_norm(value), 1e-2)):
            wrong.append(f"after {STEPS} steps: {name} is {_short(held[name])}, expected {_short(value)}")
    return wrong


def wrong_bytes(program: autopar.PlannedProgram, sent: list[Mapping[str, int]]) -> list[str]:
    """Where ranks handed other bytes to collectives than the plan says."""
    graph, plan = program._graph, program.plan
    if any(node.op == ROUTED_EXPERTS for node in graph.nodes):
        return []
    if len(plan.stages) == 1:
        return different_bytes(range(len(sent)), traffic(graph, plan), sent)
    return [text for ranks, says in bytes_by_submesh(plan, graph) for text in different_bytes(ranks, says, sent)]


def _step_differences(
    loss: Tensor, gradients: Mapping[str, Tensor], norm: Tensor,
    loss_2: Tensor, found: Mapping[str, Tensor], norm_2: Tensor,
) -> Iterator[str]:  # fmt: skip
    if not _near(loss, loss_2, max(1.0, abs(loss.item()))):
        yield f"loss {loss_2.item():.8g}, expected {loss.item():.8g}"
    if not _near(norm, norm_2, norm.item()):
        yield f"gradient norm {norm_2.item():.8g}, expected {norm.item():.8g}"
    total = sum(_norm(gradient) ** 2 for gradient in gradients.values()) ** 0.5
    for name in sorted({*gradients, *found}):
        one, other = gradients.get(name), found.get(name)
        if one is None or other is None:
            given = one if one is not None else other
            if given is not None and given.any():
                yield f"gradient of {name} {'is missing' if other is None else 'is there, and none on one device'}"
        elif not _near(one, other, max(_norm(one), 1e-3 * total)):
            yield f"gradient of {name} has norm {_norm(other):.8g}, expected {_norm(one):.8g}"


def _norm(value: Tensor) -> float:
    return value.detach().to(torch.float64).norm().item() if not value.is_complex() else value.detach().norm().item()


def _same(one: Tensor, other: Tensor) -> bool:
    one, other = (tensor.to_dense() if tensor.is_sparse else tensor for tensor in (one, other))
    return torch.equal(one, other) or bool((one != one).all() and (other != other).all())


def _near(one: Tensor, other: Tensor, scale: float) -> bool:
    if one.shape != other.shape:
        return False
    if one.is_sparse or other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    difference = one.to(other.dtype) - other
    if one.isnan().any():
        return torch.equal(one.isnan(), other.isnan())
    tolerance = SINGLE_TOLERANCE if one.dtype == torch.float32 else TOLERANCE
    return _norm(difference) <= tolerance * scale + 1e-12


def _short(value: Tensor) -> str:
    return str([round(number, 6) for number in value.detach().flatten()[:3].to(torch.float64).tolist()])
