"""`autopar.serve`: a decoder, a mesh, a batch and a length → prefill and decode over one cache, planned and emitted.

trace (one graph a step, `planning.traced_steps`) → hold against the decoder (`held`) → for each batch that is asked for
and each layout of the mesh, plans of all steps (`planning.planned_steps`), simulated → the largest batch whose steps
hold their bounds (`curve.LatencyCurve.largest`), in the layout whose decode step is shortest → emit
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import nn

from autopar.collector import without_collector
from autopar.errors import AutoparError, InternalError, MeshError, PlanError
from autopar.ir.constraint import Constraint
from autopar.ir.faults import faults_told
from autopar.ir.mesh import Mesh, checked
from autopar.request import memory_limit_of
from autopar.serving.cached import checked_config
from autopar.serving.curve import BatchLatency, LatencyCurve
from autopar.serving.held import held_against_decoder
from autopar.serving.planning import (
    NOT_CHECKED,
    ServedLayout,
    StepGraph,
    Steps,
    planned_steps,
    traced_steps,
    without_gradients,
)
from autopar.serving.program import ServedProgram, state_of
from autopar.serving.shapes import cached_shapes


@faults_told()
@without_collector()
def serve(
    model: nn.Module,
    mesh: Mesh,
    *,
    max_batch: int,
    max_length: int,
    prompt_lengths: Sequence[int] | None = None,
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int = 1,
    latency_bound_ms: float | None = None,
    prefill_bound_ms: float | None = None,
    tail: float = 1.0,
    batches: Sequence[int] | None = None,
    memory_limit: int | None = None,
    constraints: Sequence[Constraint] = (),
    check: bool = True,
) -> ServedProgram:
    """Turns a causal decoder of transformers into a sharded program that generates, with a cache of keys and values.

    max_batch: sequences that run at once; max_length: positions that each may have, prompt and new tokens together.
    prompt_lengths: columns of prefill steps, in which prompts of any length go, in chunks of the longest; by default
    max_length / 4, at most 512. dp, tp, pp: how ranks share the model: sequences of the batch, heads and features,
    layers; what is not given is found: of all that the mesh and the model allow, what decodes fastest and fits. ep:
    ranks of dp that share the experts of each layer. latency_bound_ms: of a decode step; prefill_bound_ms: of a prefill
    step. With a bound, the batch is the largest of `batches` (by default max_batch and what halving makes of it)
    whose predicted steps hold it; a 90% interval's upper end, where the profile has one. tail: how much longer the
    slowest of a hundred steps takes, measured where it serves (`curve`). memory_limit: bytes a device,
    weights and cache together. check: whether graphs and cache are held against the model where it has weights.
    The weights stay as they are, in their own dtype. Raises AutoparError subclasses; InfeasibleError when nothing fits,
    or holds the bounds.
    """
    mesh, limit = checked(mesh), memory_limit_of(memory_limit)
    lengths = _prompt_lengths(prompt_lengths, max_length)
    sizes = _sizes(max_batch, batches, latency_bound_ms is not None or prefill_bound_ms is not None)
    layouts = _layouts(mesh, model, (dp, tp, pp), ep)
    was_training = model.training
    model.eval()
    try:
        with without_gradients(model):
            checked_as = held_against_decoder(model, max_length) if check else NOT_CHECKED
            found: dict[int, Steps] = {}
            points = []
            for size in sizes:
                traced = traced_steps(model, size, max_length, lengths, check)
                steps, refusals = _fastest(traced, model, mesh, layouts, limit, constraints)
                points.append(BatchLatency(size, refusal="; ".join(refusals)) if steps is None else steps.latency())
                found |= {} if steps is None else {size: steps}
    finally:
        model.train(was_training)
    curve = LatencyCurve(tuple(points))
    best = curve.largest(latency_bound_ms, prefill_bound_ms, tail)
    return ServedProgram(found[best.batch], curve, max_length, state_of(model), checked_as)


def _fastest(
    traced: Mapping[int, StepGraph], model: nn.Module, mesh: Mesh, layouts: Sequence[ServedLayout], limit: int | None,
    constraints: Sequence[Constraint],
) -> tuple[Steps | None, list[str]]:  # fmt: skip
    """The plans of the layout whose decode step is predicted to be shortest; and why others have none."""
    best: Steps | None = None
    refusals: list[str] = []
    for layout in layouts:
        try:
            steps = planned_steps(traced, model, mesh, layout, limit, constraints)
        except InternalError:
            raise
        except AutoparError as error:
            if len(layouts) == 1:
                raise
            refusals.append(f"{layout}: {error}")
            continue
        if best is None or _time(steps) < _time(best):
            best = steps
    return best, refusals


def _time(steps: Steps) -> int:
    return steps.decode[1].predicted.step_time_ns


def _layouts(mesh: Mesh, model: nn.Module, wanted: tuple[int | None, ...], ep: int) -> list[ServedLayout]:
    """All ways to share a model that are not excluded by what is given: (dp, tp, pp), None for any. Raises MeshError
    where they do not multiply to the devices."""
    count, config = mesh.num_devices, checked_config(model)
    factors = [size for size in range(1, count + 1) if count % size == 0]
    given = [[size] if size is not None else factors for size in wanted]
    every = [ServedLayout(one, two, three, ep) for one, two, three in itertools.product(*given)]
    found = [one for one in every if one.dp * one.tp * one.pp == count]
    if not found:
        told = ", ".join(f"{name}={size}" for name, size in zip(("dp", "tp", "pp"), wanted, strict=True) if size)
        raise MeshError(f"expected dp × tp × pp = {count} devices of {mesh}, found {told}")
    if None not in wanted or len(found) == 1:
        return found
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    cached = {shape.heads for shape in cached_shapes(model)}
    splits = {
        tp for tp in factors if heads % tp == 0 and all(kept % tp == 0 or tp % kept == 0 for kept in cached)
    }  # fmt: skip
    fits = [one for one in found if one.tp in splits and one.pp <= layers and one.dp % ep == 0]
    return fits or found


def _prompt_lengths(prompt_lengths: Sequence[int] | None, max_length: int) -> tuple[int, ...]:
    if prompt_lengths is None:
        prompt_lengths = (min(512, max(2, max_length // 4)),)
    lengths = tuple(sorted(set(prompt_lengths)))
    if not lengths or lengths[0] < 2 or lengths[-1] > max_length:
        raise PlanError(
            f"expected prompt_lengths from 2 to max_length={max_length}, one at least, found {list(prompt_lengths)}"
        )
    return lengths


def _sizes(max_batch: int, batches: Sequence[int] | None, has_bound: bool) -> list[int]:
    if not isinstance(max_batch, int) or max_batch < 1:
        raise PlanError(f"expected max_batch as a number of sequences from 1 up, found {max_batch!r}")
    if batches is None:
        halves = [max_batch >> count for count in range(max_batch.bit_length())] if has_bound else [max_batch]
        return sorted(set(halves))
    if not batches or min(batches) < 1 or max(batches) > max_batch:
        raise PlanError(f"expected batches from 1 to max_batch={max_batch}, found {list(batches)}")
    return sorted(set(batches))
