"""Runs a program's plan on all ranks and compares with the model on one device.

Compared, on every rank: the loss, its part of each gradient and buffer, after one step and after a second one that an
SGD step precedes; the bytes that the first rank (of each submesh) hands to each collective, with what the plan says,
and those that the busiest one sends to other stages. What a plan of several stages says is what the runtime counts:
not the loss, which all ranks are told. In inference: every output. Programs of small integers are compared for
equality, others to 1e-9 of the largest element; gradients that cancel out to the rounding that they can leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import runtime as rt
from autopar.contexts import for_sequences
from autopar.emit import emit
from autopar.ir.graph import Graph
from autopar.ir.placement import Placement, chunk_length
from autopar.ir.plan import Plan
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.program import model_state
from autopar.trace import trace
from tests.equivalence.predicted import bytes_by_submesh
from tests.random_programs.plans import Choices, make_plan
from tests.random_programs.programs import Program, load, make_inputs, make_model
from tests.random_programs.world import device_mesh, sent_so_far, thread_world
from tests.routed_bytes import as_routed

TOLERANCE = 1e-9
UNCLIPPED = 1e300
EXACT_BELOW = 2.0**48
ROUNDINGS = 64
"""How many roundings of the largest element that a step computes may be left of summands that cancel out."""
MOST_ROUNDING = 1e-13
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """What a step leaves: on one device whole tensors, on a rank its parts."""

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    norm: Tensor  # of all gradients
    rounding: float = 0.0  # what may be left of gradients that cancel out: absolute


@dataclass(frozen=True, eq=False)
class Subject:
    """A program with its graph, and what it computes on one device."""

    program: Program
    mode: str = "train"

    @cached_property
    def model(self) -> nn.Module:
        return make_model(self.program).train(self.mode == "train")

    @cached_property
    def state(self) -> Tensors:
        found = model_state(self.model) or {}
        return {name: tensor.clone() for name, tensor in found.items()}

    @cached_property
    def batch(self) -> Tensors:
        return make_inputs(self.program)

    @cached_property
    def graph(self) -> Graph:
        """Of some, attention may be split along its sequence, by gathering keys or in a ring."""
        traced = trace(self.model, self.batch, mode=self.mode)
        way = self.program.seed % 3
        return traced if way == 0 else for_sequences(traced, ring=way == 2)[0]

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        """In inference."""
        with torch.no_grad():
            found = self.model(**self.batch)
        return found if isinstance(found, tuple) else (found,)

    def as_routed(self) -> AbstractContextManager[Any]:
        """Inside, plans foretell the bytes of the experts that are chosen."""
        if all(node.op != ROUTED_EXPERTS for node in self.graph.nodes):
            return nullcontext()
        return as_routed(self.graph, self.model, self.batch)

    @property
    def steps(self) -> tuple[Step, Step, float]:
        """Two training steps, and the rate of the SGD step between them."""
        return self._run[:3]

    @property
    def tolerance(self) -> float:
        """Of the largest element, for what is not exact."""
        return TOLERANCE

    @property
    def is_exact(self) -> bool:
        """Whether the first step's results do not depend on the order in which sums are taken."""
        return self.program.exact and self._run[3] < EXACT_BELOW

    @cached_property
    def _run(self) -> tuple[Step, Step, float, float]:
        """The steps and the rate, and the largest element of the first step; the model is left as it was."""
        self.state  # noqa: B018  (taken before the steps)
        self.model.zero_grad()
        largest = _Largest()
        with rt.reference_dropout():
            first = self._step(largest, largest)
        largest_gradient = max([1.0, *(_largest(g) for g in first.gradients.values() if g is not None)])
        rate = 2.0 ** -math.ceil(math.log2(10 * largest_gradient))  # sums of integers stay what they are in any order:
        # a clamp's gradient would jump where one of them comes to its bound but for rounding
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
        if not self.adds:
            self.model.zero_grad()
        with rt.reference_dropout():
            second = self._step(nullcontext(), largest)
        self.model.load_state_dict(self.state, strict=False)  # it has buffers that are not saved, too
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.state[name])
        return first, second, rate, largest.found if largest.has_sixteenths else math.inf

    @property
    def adds(self) -> bool:
        """Whether the second step adds its gradients to the first one's."""
        return self.program.seed % 2 == 1

    def loss_of(self, found: Any) -> Tensor:
        """Of what the model returns, the first."""
        loss: Tensor = found[0] if isinstance(found, tuple) else found
        return loss

    def _step(self, watched: AbstractContextManager[Any], largest: _Largest) -> Step:
        with watched:
            loss = self.loss_of(self.model(**self.batch))
            loss.backward()
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in self.model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), UNCLIPPED).float()
        buffers = {n: b.clone() for n, b in self.model.named_buffers()}
        return Step(loss.detach(), gradients, buffers, norm, largest.rounding)


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


class _Largest(TorchDispatchMode):
    """The largest finite element of all that is computed inside, and whether all are sixteenths (unlike infinity, the
    gradient of a maximum that three share): sums of such below 2**49 are exact in float64, in any order."""

    found = 0.0
    has_sixteenths = True

    @property
    def rounding(self) -> float:
        """Capped: masks hold large numbers that nothing is summed with."""
        return min(MOST_ROUNDING, ROUNDINGS * torch.finfo(torch.float64).eps * self.found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
                finite = torch.nan_to_num(tensor, 0.0, 0.0, 0.0)
                self.found = max(self.found, finite.abs().max().item())
                self.has_sixteenths &= torch.equal(tensor, finite) and torch.equal(16 * tensor, (16 * tensor).round())
        return result


Run = Callable[[int, Callable[..., Any], tuple[Any, ...]], list[Any]]


def run_in_threads(world: int, job: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Runs a job on ranks that are threads of this process."""
    return thread_world(world).run(job, *args)


def problems(subject: Subject, choices: Choices, run: Run = run_in_threads) -> list[str]:
    """What is wrong with a plan's program, one line each; empty when it computes what the model computes."""
    with subject.as_routed():
        plan, predicted = make_plan(subject.graph, choices, subject.mode)
    return plan_problems(subject, plan, predicted, run)


def plan_problems(
    subject: Subject, plan: Plan, predicted: Mapping[str, int] | None = None, run: Run = run_in_threads
) -> list[str]:
    """As `problems`, of a plan of one stage that foretells bytes, or of several."""
    source = emit(subject.graph, plan)
    axes = () if len(plan.stages) > 1 else tuple((axis.name, axis.size) for axis in plan.stage.axes)
    common = (source, axes, subject.state, subject.batch)
    world = plan.mesh.num_devices
    if subject.mode == "inference":
        results = run(world, infer, common)
        return [text for rank, found in enumerate(results) for text in _wrong_outputs(subject, found, rank)]
    first, second, rate = subject.steps
    results = run(world, train, (*common, rate, subject.adds))
    wrong = []
    for rank, (one, two, _) in enumerate(results):
        parts = _parts(subject.graph, plan, rank, subject.tolerance)
        wrong += [f"rank {rank}, first step: {text}" for text in parts.differences(first, one, subject.is_exact)]
        wrong += [f"rank {rank}, second step: {text}" for text in parts.differences(second, two, False)]
    with subject.as_routed():
        submeshes = bytes_by_submesh(plan, subject.graph) if len(plan.stages) > 1 else [(range(world), predicted or {})]
    return wrong + [text for ranks, says in submeshes for text in different_bytes(ranks, says, [r[2] for r in results])]


def different_bytes(ranks: range, predicted: Mapping[str, int], sent: list[Mapping[str, int]]) -> list[str]:
    """Where the first rank of a submesh handed other bytes to a collective than foretold, or the busiest one sent
    others."""
    found = {kind: size for kind, size in sorted(sent[ranks.start].items()) if size and kind != "send"}
    busiest = max(sent[rank].get("send", 0) for rank in ranks)
    found |= {"send": busiest} if busiest else {}
    if "exchange" in predicted and "exchange" not in found:  # groups of one process know all-to-alls alone
        kinds = [("all_to_all" if kind == "exchange" else kind, size) for kind, size in predicted.items()]
        predicted = {kind: sum(size for other, size in kinds if other == kind) for kind, _ in kinds}
        predicted = {kind: size for kind, size in predicted.items() if size}
    if found == predicted:
        return []
    return [f"rank {ranks.start} sent {found} bytes, the plan says {dict(predicted)}"]


# on a rank


def train(
    rank: int, source: str, axes: Any, state: Tensors, batch: Tensors, rate: float, adds: bool
) -> tuple[Step, Step, Any]:
    """Two training steps with an SGD step between them, and the bytes that the first one sent.

    `adds`: the second step's gradients are added to the first one's.
    """
    built = _build(source, axes, state)
    before = sent_so_far()
    with rt.count_bytes() as counted:
        loss = built.train_step(**batch)
    if issubclass(_program(source), rt.Pipeline):
        sent = by_collective(counted)
    else:
        handed = {kind: size - before.get(kind, 0) for kind, size in sent_so_far().items()}
        sent = {"ring" if kind == "send" else kind: size for kind, size in handed.items()}  # nothing else is sent so
    first = _parts_of(built, loss)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.grad is not None:
                _local(parameter).sub_(_local(parameter.grad), alpha=rate)
                parameter.grad = parameter.grad if adds else None
    rt.seed_dropout(0)
    return first, _parts_of(built, built.train_step(**batch)), sent


def infer(rank: int, source: str, axes: Any, state: Tensors, batch: Tensors) -> tuple[Tensor, ...]:
    """The outputs of the forward pass."""
    built = _build(source, axes, state).eval()
    found = built(**batch)
    return found if isinstance(found, tuple) else (found,)


def by_collective(counted: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Bytes over all axes."""
    found: dict[str, int] = {}
    for (collective, _), size in counted.items():
        found[collective] = found.get(collective, 0) + size
    return found


def _program(source: str) -> type[rt.Program] | type[rt.Pipeline]:
    found: type[rt.Program] | type[rt.Pipeline] = load(source, "program").Program
    return found


def _build(source: str, axes: Any, state: Tensors) -> rt.Rank:
    rt.seed_dropout(0)
    program = _program(source)
    rt.set_exact_dropout(not issubclass(program, rt.Pipeline))
    built = rt.build(program, device_mesh(axes) if axes else None, "cpu")
    built.init_from(state, broadcast=False)
    return built


def _parts_of(built: rt.Rank, loss: Tensor) -> Step:
    gradients = {
        name: None if parameter.grad is None else _local(parameter.grad).clone()
        for name, parameter in built.named_parameters()
    }
    buffers = {name: _local(buffer).clone() for name, buffer in built.named_buffers()}
    return Step(loss, gradients, buffers, built.clip_grad_norm_(UNCLIPPED))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# the comparison


@dataclass(frozen=True)
class _Parts:
    """What one rank should hold: of each parameter and buffer of its stages, by name, the part of this placement."""

    placements: Mapping[str, Placement]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    trained: frozenset[str]  # that the rank must have
    tolerance: float = TOLERANCE

    def differences(self, expected: Step, found: Step, exact: bool) -> list[str]:
        wrong = [f"{name} is not there" for name in sorted(self.trained - set(found.gradients))]
        scale = max([0.0, *(_largest(g) for g in expected.gradients.values() if g is not None)])
        if not self._equal(expected.loss, found.loss, exact, 0.0):
            wrong.append(f"loss {expected.loss.item()!r} became {found.loss.item()!r}")
        if not torch.allclose(expected.norm, found.norm, rtol=max(1e-5, self.tolerance)):
            wrong.append(f"gradient norm {expected.norm.item()!r} became {found.norm.item()!r}")
        for name, whole in expected.gradients.items():
            part = found.gradients.get(name)
            if whole is None or name not in found.gradients:
                if part is not None and part.any():
                    wrong.append(f"{name} has a gradient, and none on one device")
            elif part is None or not self._equal(self.own(name, whole), part, exact, 1e-3 * scale, expected.rounding):
                wrong.append(f"gradient of {name}: {_gap(self.own(name, whole), part)}")
        for name, whole in expected.buffers.items():
            held = found.buffers.get(name)
            if held is not None and not self._equal(self.own(name, whole), held, exact, 0.0):
                wrong.append(f"buffer {name}: {_gap(self.own(name, whole), held)}")
        return wrong

    def _equal(self, expected: Tensor, found: Tensor, exact: bool, scale: float, rounding: float = 0.0) -> bool:
        return _equal(expected, found, exact, scale, rounding, self.tolerance)

    def own(self, name: str, whole: Tensor) -> Tensor:
        """The part of a parameter or buffer that this rank stores: what the rank of a coordinate has of S, R and I."""
        for type_, size, index in zip(self.placements.get(name, ()), self.sizes, self.coordinate, strict=False):
            if type_.kind == "S":
                lengths = [chunk_length(whole.shape[type_.dim], size, i) for i in range(size)]
                whole = torch.split(whole, lengths, type_.dim)[index]
        return whole


def _parts(graph: Graph, plan: Plan, rank: int, tolerance: float = TOLERANCE) -> _Parts:
    """Of the rank's stages, whose axes are alike; placements without the microbatches'."""
    stages = [stage for stage in plan.stages if rank in stage.ranks]
    names = {stored.tensor: stored.name for stored in graph.stored}
    sizes = tuple(axis.size for axis in stages[0].axes)
    placements = {names[tensor]: kept.placement for stage in stages for tensor, kept in stage.storage.items()}
    trained = {stored.name for stored in graph.stored if stored.kind == "parameter" and stored.requires_grad}
    coordinate = _coordinate(rank - stages[0].first_rank, sizes)
    return _Parts(placements, sizes, coordinate, frozenset(trained & set(placements)), tolerance)


def _coordinate(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in reversed(sizes):
        found.append(rank % size)
        rank //= size
    return tuple(reversed(found))


def _equal(
    expected: Tensor, found: Tensor, exact: bool, scale: float, rounding: float = 0.0, tolerance: float = TOLERANCE
) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if torch.equal(expected, found):  # infinite elements, too
        return True
    if exact or not (expected.is_floating_point() or expected.is_complex()):
        return False
    bound = max(tolerance * max(scale, expected.abs().max().item(), 1e-6), rounding)
    return bool((expected - found).abs().max() <= bound)  # False for NaN


def _gap(expected: Tensor, found: Tensor | None) -> str:
    if found is None:
        return "missing"
    if expected.shape != found.shape:
        return f"expected {tuple(expected.shape)}, found {tuple(found.shape)}"
    return f"off by {(expected - found).abs().max().item():.3g} of {expected.abs().max().item():.3g}"


def _wrong_outputs(subject: Subject, found: tuple[Tensor, ...], rank: int) -> list[str]:
    expected = subject.outputs
    if len(expected) != len(found):
        return [f"rank {rank}: expected {len(expected)} outputs, found {len(found)}"]
    return [
        f"rank {rank}: output {position}: {_gap(whole, own)}"
        for position, (whole, own) in enumerate(zip(expected, found, strict=True))
        if not _equal(whole, own, False, 0.0)
    ]
