"""All outputs of a model, not its loss alone: by a program for inference, made when they are first asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from autopar.adapters.building import WantedPlan, on_first
from autopar.adapters.samples import num_rows, with_rows
from autopar.adapters.unchanged import Unchanged, as_reads, as_text, recorded_reads
from autopar.errors import PlacementError, PlanError
from autopar.ir.mesh import Mesh
from autopar.program import load_source
from autopar.runtime import ProgramError, Rank, build

_ORDER = ("microbatches", "schedule", "chunks", "recompute", "offload")  # of a step's passes: inference has one


class _AllOutputs(nn.Module):
    """The model with its outputs as a plain tuple of tensors; parameters and buffers have the model's names."""

    def __init__(self, model: nn.Module, ignored: Sequence[str]) -> None:
        super().__init__()
        self.__dict__.update(
            _modules=model._modules, _parameters=model._parameters, _buffers=model._buffers, _model=model,
            _ignored=tuple(ignored),
        )  # fmt: skip
        self.training = False

    _model: nn.Module
    _ignored: tuple[str, ...]

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        """The tensors in order; `form` says what they are."""
        return tuple(
            x for _, value in self._items(batch)[1] for x in ((value,) if isinstance(value, Tensor) else value)
        )

    def _items(self, batch: Any) -> tuple[bool, list[tuple[Any, Any]]]:
        """Whether outputs have names, and what is kept of them."""
        found = self._model(**batch)
        is_named = isinstance(found, Mapping)
        items = list(found.items()) if is_named else list(enumerate(found if isinstance(found, tuple) else (found,)))
        return is_named, [(name, x) for name, x in items if x is not None and name not in self._ignored]

    def form(self, batch: Mapping[str, Any]) -> str:
        """Whether outputs have names, and each name with how many tensors it has: by tensors without values, since the
        parameters may be on meta."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, torch.no_grad():
            own = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in self.named_parameters()}
            own |= {name: mode.from_tensor(x) for name, x in self.named_buffers()}
            given = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in batch.items()}
            self.__dict__["forward"] = self._items
            is_named, items = functional_call(self, own, (given,))
            del self.__dict__["forward"]
        return json.dumps([is_named, [[name, _length(name, value)] for name, value in items]])


def _length(name: Any, value: Any) -> int | None:
    """None of a tensor, else of how many tensors. Raises ProgramError for anything else."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, (tuple, list)) and all(isinstance(item, Tensor) for item in value):
        return len(value)
    raise ProgramError(
        f"expected outputs that are tensors, or tuples of them, found {name} of {type(value).__name__}; name it in "
        "ignore_keys, or in the config's keys_to_ignore_at_inference"
    )


@dataclass
class Predictor:
    """Ranks of inference programs for batches of one kind, with the weights of now.

    asked: for training; a template's axes are taken over, of other plans a plan is searched for. given: the model,
    whose parameters may be on meta; trained: where the weights are. rows: numbers that batches have. A number that the
    plan of the others does not hold for, such as three rows on two ranks, has a plan of its own. unchanged: told of
    what was read of the model then.
    """

    asked: WantedPlan
    mesh: Mesh
    given: nn.Module
    trained: Rank
    unchanged: Unchanged
    ignored: Sequence[str] = ("past_key_values",)
    rows: Sequence[int] = ()
    _kind: Any = None
    _ranks: dict[int, Rank] = field(default_factory=dict)  # by numbers of rows
    _fresh: set[int] = field(default_factory=set)  # ids of ranks that have the weights of now
    _form: list[Any] = field(default_factory=list)

    def forget_weights(self) -> None:
        """Weights may have changed."""
        self._fresh.clear()

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """The outputs for a batch, whole on each rank: a dict, or a tuple as the model returns one."""
        kind = [(name, tuple(x.shape[1:]), x.dtype) for name, x in inputs.items() if isinstance(x, Tensor)]
        if kind != self._kind:
            self._kind, self._ranks = kind, {}
            self._fresh.clear()
        if num_rows(inputs) not in self._ranks:
            self._make(dict(inputs))
        found = self._with_weights(self._ranks[num_rows(inputs)])(batch=dict(inputs))
        return self._as_the_model(iter([found] if isinstance(found, Tensor) else found))

    def _with_weights(self, rank: Rank) -> Rank:
        if id(rank) not in self._fresh:
            buffers = dict(self.given.named_buffers())
            rank.init_from({**buffers, **self.trained.full_state_dict()}, broadcast=False)
            self._fresh.add(id(rank))
        return rank

    def _make(self, inputs: dict[str, Any]) -> None:
        was_training = self.given.training
        self.given.eval()
        try:
            source, form, rows, reads = on_first(lambda: self._written(inputs))
        finally:
            self.given.train(was_training)
        self.unchanged.add(as_reads(reads))
        self._form = json.loads(form)
        rank = build(load_source(source).Program)
        self._ranks |= dict.fromkeys(json.loads(rows), rank)

    def _written(self, inputs: dict[str, Any]) -> tuple[str, ...]:
        """The source, the outputs' form, for which numbers of rows, and what was read of the model."""
        found = set[tuple[str, str]]()
        with recorded_reads(found):
            written = self._program(inputs)
        return *written, as_text(found)

    def _program(self, inputs: dict[str, Any]) -> tuple[str, str, str]:
        step, size = _AllOutputs(self.given, self.ignored), num_rows(inputs)
        form = step.form(inputs)
        others = [count for count in self.rows if count != size and count not in self._ranks]
        shapes = [{"batch": {**_lengths(inputs), **with_rows(inputs, count)}} for count in others]
        for asked, also, rows in ((self._asked(), shapes, [size, *others]), (self._asked(), [], [size])):
            with suppress(PlanError, PlacementError):
                return asked.planned(step, {"batch": inputs}, also)[0], form, json.dumps(rows)
        return replace(self._asked(), plan=None).planned(step, {"batch": inputs}, [])[0], form, json.dumps([size])

    def _asked(self) -> WantedPlan:
        plan = self.asked.plan
        own = {k: v for k, v in plan.items() if k not in _ORDER} if isinstance(plan, Mapping) else None
        return replace(
            self.asked, plan=own, mesh=self.mesh, options={**(self.asked.options or {}), "mode": "inference"}
        )

    def _as_the_model(self, tensors: Iterator[Tensor]) -> Any:
        is_named, parts = self._form
        found = [
            (name, next(tensors) if count is None else tuple(next(tensors) for _ in range(count)))
            for name, count in parts
        ]
        return dict(found) if is_named else tuple(value for _, value in found)


def _lengths(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(x.shape) if isinstance(x, Tensor) else x for name, x in inputs.items()}
