"""A part of a model as a program: traced with a loss in the place of what the user's loop makes of its outputs.

Gradients follow from types (`ir.placement`), not from the loss: outputs leave the program whole on every rank, with the
gradient whole on every rank (`I`), and an input of a placement has the gradient of the dual one. So the loss serves to
plan and to price a backward pass, and is left out when the part runs (`runtime.part`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from autopar.errors import PlanError
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.writing import write_whole
from autopar.program import PlannedProgram, load_source

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from autopar.runtime.part import PartRank

IN_ONE_PIECE = (Constraint(stages=1), Constraint(microbatches=1))
"""A user's loop calls a part once, forward and then backward."""


@dataclass(frozen=True)
class Structure:
    """How what the part returns is built of tensors."""

    spec: Any

    @classmethod
    def of(cls, model: nn.Module, example_inputs: Any) -> Structure:
        """As forward returns it on the meta device, where nothing is computed; of a forward that reads numbers there,
        as it returns it on the example inputs. Raises PlanError where the model has no numbers either."""
        stored = {name: x.detach() for name, x in (*model.named_parameters(), *model.named_buffers())}
        try:
            result = _called(
                model, *(pytree.tree_map_only(torch.Tensor, _on_meta, it) for it in (stored, example_inputs))
            )
        except (RuntimeError, NotImplementedError) as error:
            if any(x.is_meta for x in pytree.tree_leaves((stored, example_inputs)) if isinstance(x, torch.Tensor)):
                raise PlanError(
                    "expected a part whose forward reads no numbers while it is on the meta device, found one that does"
                    f" ({error}); give the part its weights, or example inputs that are on a device"
                ) from error
            with torch.random.fork_rng(devices=[]):
                result = _called(model, {name: x.clone() for name, x in stored.items()}, example_inputs)
        return cls(pytree.tree_structure(result))

    def restored(self, tensors: Sequence[Any]) -> Any:
        """A result of these tensors."""
        return pytree.tree_unflatten(list(tensors), self.spec)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def _called(model: nn.Module, stored: Mapping[str, torch.Tensor], inputs: Any) -> Any:
    """What forward returns with other weights and buffers in the place of the model's, without gradients."""
    args, kwargs = (
        ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
    )
    with torch.no_grad():
        return torch.func.functional_call(model, dict(stored), args, kwargs)


def _tensors(result: Any) -> list[torch.Tensor]:
    """Those in a result. Raises PlanError for anything else in it."""
    leaves = pytree.tree_leaves(result)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise PlanError(
                f"expected a part of a model to return tensors, found {type(leaf).__name__} in what it returns; "
                "return tensors alone, also in tuples, lists and dicts"
            )
    return leaves


def stand_in_loss(
    loss_fn: Callable[..., Any] | None, mode: str, others: Mapping[str, Any]
) -> Callable[[Any], dict[str, Any]]:  # fmt: skip
    """A loss of any outputs: their sum. Raises PlanError for what no part can be asked for; others: more such, by
    name."""
    asked = {
        "loss_fn": loss_fn is not None,
        f"mode={mode!r}": mode != "train",
        **{n: bool(x) for n, x in others.items()},
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise PlanError(
                f"expected a part of a model to be planned without {name}, found both: the user's loop has the loss, "
                "and a part trains, or runs under torch.no_grad(); leave it out"
            )

    def loss(outputs: Any) -> dict[str, Any]:
        tensors = _tensors(outputs)
        told = [x.sum() for x in tensors if x.is_floating_point()]
        if not told:
            raise PlanError("expected a part of a model to return a floating-point tensor, found none")
        return {"loss": torch.stack([x.float() for x in told]).sum() if len(told) > 1 else told[0], "outputs": tensors}

    return loss


def require_one_piece(stages: int, microbatches: int) -> None:
    """Raises PlanError for a part in stages or microbatches."""
    for name, count, why in (
        ("stages", stages, "a pipeline's ranks hold up different parts of the user's loop"),
        ("microbatches", microbatches, "the loop has one backward pass for each forward pass; call the part for each"),
    ):
        if count > 1:
            raise PlanError(f"expected a part of a model in one of {name}, found {count}: {why}")


def checked_part(plan: Plan) -> Plan:
    """The plan. Raises PlanError for one in stages or microbatches."""
    require_one_piece(len(plan.stages), plan.microbatches)
    return plan


class PlannedPart(PlannedProgram):
    """The program of a part of a model: `build` returns a module that the user's loop calls."""

    def __init__(
        self, graph: Graph, plan: Plan, source: str, state: Mapping[str, Any] | None, structure: Structure
    ) -> None:  # fmt: skip
        super().__init__(graph, plan, source, state)
        self._structure = structure

    def save(self, folder: str | Path) -> Path:
        """Writes program.py, plan.json and the weights; the loop is the user's own."""
        folder = Path(folder)
        write_whole(folder / "program.py", self.source)
        write_whole(folder / "plan.json", self.plan.to_json())
        self._save_weights(folder)
        return folder

    def save_traced(self, folder: str | Path) -> Path:
        """Raises PlanError: the loop is the user's own."""
        raise PlanError("expected a whole model to trace, found a part of one, which a loop of the user's own calls")

    def build(self, device_mesh: DeviceMesh | None = None, device: str | None = None) -> PartRank:
        """This rank's part of the part: an nn.Module whose outputs and inputs have gradients."""
        from autopar.runtime.part import build_part

        rank = build_part(load_source(self.source).Program, device_mesh, device, self._structure.restored)
        if self._state is not None:
            rank.init_from(self._state, broadcast=False)
        return rank
