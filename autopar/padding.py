"""Short batches filled up with rows that do not count, so that a plan for full ones runs them.

    loss of a batch = Σ of its samples, divided by what follows from inputs alone    typed, as for microbatches of one
    a filling row's summand, its gradient and what it counts are nothing             held against the model

The first says that no sample looks at another, the second that rows of these values leave loss and gradients as they
are on the short batch. A mean over tokens that `ignore_index` leaves out keeps both; a mean over samples does not,
since its divisor is the number of rows. What keeps not both is refused while it is planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.structure import batch_inputs
from autopar.microbatch import microbatch_types

Filling = dict[str, float | None]
"""By input whose dim 0 is the batch, the value of rows that are filled in; None: the first row again."""

_TOLERANCE = 1e-4  # of a loss and of the largest gradient: orders of sums over more rows differ by less


def checked_filling(
    pad: Mapping[str, float], graph: Graph, model: nn.Module, example_inputs: Any, loss_fn: Any
) -> Filling:
    """What a program fills short batches with. Raises PlanError where that would not compute what the model computes.

    pad: by input, a value that makes a row count for nothing, such as -100 for labels.
    """
    if not graph.loss:
        raise PlanError('expected mode="train" beside pad=, found inference, whose outputs would have the rows')
    if loss_fn is not None:
        raise PlanError("expected the loss in the model's forward beside pad=, found loss_fn")
    names = batch_inputs(graph)
    known = {graph.given_name(name): name for name in names}
    if not pad or not set(pad) <= set(known):
        raise PlanError(
            f"expected pad= with values by name of inputs that have rows ({', '.join(known) or 'none'}), found "
            f"{', '.join(pad) or 'none'}"
        )
    rows = graph.tensors[names[0]].shape[0]
    try:
        microbatch_types(graph, rows)
    except PlanError as error:
        raise PlanError(
            f"expected a loss that is a sum over samples, so that rows can be filled in, found that it is not: {error}"
        ) from error
    filling: Filling = {known_as: pad.get(given) for given, known_as in known.items()}
    _check_values(filling, rows, model, example_inputs, {own: given for given, own in known.items()})
    return filling


def _check_values(filling: Filling, rows: int, model: nn.Module, inputs: Any, given: Mapping[str, str]) -> None:
    """Holds short batches against filled ones, in the model's evaluation mode: samples are alone in both."""
    if not isinstance(inputs, Mapping):
        raise PlanError("expected example inputs by name beside pad=, found them by position; give a dict")
    tensors = [*model.parameters(), *(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))]
    if any(tensor.is_meta for tensor in tensors):
        raise PlanError("expected weights and inputs, with which filled rows are tried beside pad=, found meta tensors")
    fill = {given[name]: value for name, value in filling.items()}
    for short in sorted({1, max(1, rows // 2), rows - 1} - {rows, 0}):
        batch = {name: value[:short] if name in fill else value for name, value in inputs.items()}
        whole = {name: filled(value, rows, fill[name]) if name in fill else value for name, value in batch.items()}
        own, other = _step(model, batch), _step(model, whole)
        if not _equal(own, other):
            raise PlanError(
                f"expected the loss of {short} rows and its gradients to stay as they are with {rows - short} rows of "
                f"{_told(fill)} filled in, found a loss of {other[0].item():.7g} instead of {own[0].item():.7g}: the "
                "loss counts such rows. Give values that it ignores, plan with shapes=[…], or drop the last batch"
            )


def filled(value: Tensor, rows: int, fill: float | None) -> Tensor:
    """A tensor of fewer rows with rows of a value added, or its first row again and again."""
    shape = (rows - value.size(0), *value.shape[1:])
    return torch.cat([value, value[:1].expand(shape) if fill is None else value.new_full(shape, fill)])


def _told(fill: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in fill.items() if value is not None)


def _step(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    """The loss and the gradients of what is trained; the model stays as it was."""
    modes = {module: module.training for module in model.modules()}
    before = {buffer: buffer.clone() for buffer in model.buffers()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.eval()
        with torch.random.fork_rng(), torch.enable_grad():
            loss = _loss(model(**inputs))
            gradients = torch.autograd.grad(loss, trained, allow_unused=True) if trained else ()
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, value in before.items():
                buffer.copy_(value)
    return [loss.detach(), *(g if g is not None else torch.zeros(()) for g in gradients)]


def _loss(outputs: Any) -> Tensor:
    named = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(named, Tensor):
        return named
    return next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and not leaf.dim())


def _equal(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    pairs = [(own.double(), other.double()) for own, other in zip(left, right, strict=True)]
    largest = max(own.abs().max().item() for own, _ in pairs[1:] or pairs)
    bounds = [abs(pairs[0][0].item()), *[largest] * (len(pairs) - 1)]
    apart = [(own - other).abs().max().item() for own, other in pairs]
    return all(far <= _TOLERANCE * bound for far, bound in zip(apart, bounds, strict=True))
