"""A Lightning module's `validation_step`, `test_step` and `predict_step`, each as programs for inference.

One is made for each kind of batch: when a loop begins, for the batches of its loaders; later for any other. They have
the weights of now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from autopar.adapters.building import WantedPlan, on_first
from autopar.adapters.steps import EvaluationStep, StepOutcome, log_again
from autopar.adapters.unchanged import ReadAttributes, as_reads, as_text, recorded_reads
from autopar.errors import PlacementError, PlanError
from autopar.program import load_source
from autopar.runtime import ProgramError, Rank, build

_ORDER = ("microbatches", "schedule", "chunks", "recompute", "offload")  # of a step's passes: evaluation has one


@dataclass(frozen=True, slots=True)
class _PlannedEvaluation:
    """A program of a step for some batches; rank is None where it makes no tensor."""

    rank: Rank | None
    made: StepOutcome
    attributes: ReadAttributes


class Evaluations:
    """Programs of a module's evaluation steps."""

    def __init__(
        self, module: LightningModule, wanted: WantedPlan, as_given: Callable[[], AbstractContextManager[None]],
        fill: Callable[[Rank], None],
    ) -> None:  # fmt: skip
        """wanted: of a template, its axes are taken over; of other plans for training, a plan is searched for.
        as_given: within it, the module has whole parameters. fill: gives a rank the weights of now."""
        self._module, self._as_given, self._fill = module, as_given, fill
        plan = wanted.plan
        own = {k: v for k, v in plan.items() if k not in _ORDER} if isinstance(plan, Mapping) else None
        self._wanted = replace(wanted, plan=own, options={**(wanted.options or {}), "mode": "inference"})
        self._known: dict[Any, _PlannedEvaluation] = {}
        self._fresh: set[int] = set()  # ids of ranks that have the weights of now

    def forget_weights(self) -> None:
        """Weights may have changed."""
        self._fresh.clear()

    def prepare(self, name: str, batch: Any, more: Sequence[int], rows: Sequence[int]) -> None:
        """Plans a step for such batches, and for these with other numbers of rows where one plan holds for them."""
        if self._key(name, batch, more) not in self._known:
            self._make(name, batch, tuple(more), rows)

    def __call__(self, name: str, batch: Any, more: Sequence[int]) -> Any:
        """Runs a step: logs what it logs, returns what it returns, whole on each process. more: what it is given beside
        the batch and its number. Raises ProgramError where an attribute that it reads has changed since."""
        self.prepare(name, batch, more, ())
        found = self._known[self._key(name, batch, more)]
        if changed := found.attributes.changed():
            raise ProgramError(
                f"expected the module as it was when its {name} was planned, found changes of {', '.join(changed)}, of "
                "which the program knows nothing. Put it into the batch, or into a buffer that is written to in place"
            )
        outputs = self._outputs(found.rank, batch)
        log_again(self._module.log, found.made.logged, outputs)
        return found.made.filled(outputs)

    def _outputs(self, rank: Rank | None, batch: Any) -> Sequence[Tensor]:
        if rank is None:
            return ()
        if id(rank) not in self._fresh:
            self._fill(rank)
            self._fresh.add(id(rank))
        outputs = rank(batch=batch)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    def _key(self, name: str, batch: Any, more: Sequence[int], rows: int | None = None) -> Any:
        leaves, spec = tree_flatten(batch)
        own = size_of(batch)
        kinds = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                has_rows = rows is not None and leaf.dim() and leaf.size(0) == own
                kinds.append((rows, *leaf.shape[1:]) if has_rows else tuple(leaf.shape))
                kinds.append((leaf.dtype,))
            else:
                kinds.append((repr(leaf),))
        return name, tuple(more), str(spec), tuple(kinds)

    def _make(self, name: str, batch: Any, more: tuple[int, ...], rows: Sequence[int]) -> None:
        was = {module: module.training for module in self._module.modules()}
        self._module.eval()
        try:
            with self._as_given():
                step = EvaluationStep(self._module, name, more)
                made = step.tried(batch)
                source, also, reads = (
                    ("", "", "[]") if not made.has_outputs else on_first(lambda: self._planned(step, batch, rows))
                )
                attributes = ReadAttributes(self._module, as_reads(reads))
        finally:
            for module, training in was.items():
                module.training = training
        rank = build(load_source(source).Program) if source else None
        found = _PlannedEvaluation(rank, made, attributes)
        self._known[self._key(name, batch, more)] = found
        for count in rows if also else ():
            self._known[self._key(name, batch, more, count)] = found

    def _planned(self, step: EvaluationStep, batch: Any, rows: Sequence[int]) -> tuple[str, str, str]:
        """The source, whether it is for all numbers of rows, and what was read."""
        found = set[tuple[str, str]]()
        with recorded_reads(found):
            for shapes in ([with_rows(batch, count) for count in rows], []):
                with suppress(PlanError, PlacementError):
                    source = self._wanted.planned(step, {"batch": batch}, shapes)[0]
                    return source, "all" if shapes else "", as_text(found)
            source = replace(self._wanted, plan=None).planned(step, {"batch": batch}, [])[0]
        return source, "", as_text(found)


def size_of(batch: Any) -> int:
    """The number of rows: of the first tensor that has any dim."""
    return next((x.size(0) for x in tree_flatten(batch)[0] if isinstance(x, Tensor) and x.dim()), 0)


def with_rows(batch: Any, rows: int) -> dict[str, Any]:
    """The lengths of a batch's tensors, with another number of rows, as a shape that a plan may hold for."""
    size = size_of(batch)

    def lengths(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return (rows, *x.shape[1:]) if x.dim() and x.size(0) == size else tuple(x.shape)

    return {"batch": tree_map(lengths, batch)}
