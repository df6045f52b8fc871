"""The programs of a ladder's rungs in one folder, for `train.py --elastic`: each number of ranks has the fastest of its
rungs, and all have one global batch.

    program.py, plan.json, train.py, weights.pt    of the largest rung
    rungs/NAME/                                    program.py and plan.json of each
    elastic.json                                   the rungs, and what the pauses between them are made of
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autopar.cost.profile import ACROSS
from autopar.errors import PlanError
from autopar.ir.structure import batch_inputs
from autopar.ir.writing import write_whole
from autopar.ladders.rungs import Ladder, Rung
from autopar.ladders.transitions import mirrored_bytes
from autopar.pipeline import parallelize, traced
from autopar.profiler import profiles_of
from autopar.show.text import bytes_text

VERSION = 1


@dataclass(frozen=True)
class Rendezvous:
    """How torchrun learns of lost nodes: each says that it lives every keep_alive_s, and is given up after as many
    times without; those that are left wait last_call_s for further ones. ended_s: until processes that have lost a
    rank, or are to start anew, have ended and torchrun has seen it, which then looks every polled_s who is there."""

    keep_alive_s: int = 5
    keep_alive_attempts: int = 3
    last_call_s: int = 5
    ended_s: float = 3.0
    polled_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("keep_alive_s", "keep_alive_attempts", "last_call_s"):  # as torchrun takes them
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise PlanError(f"expected {name} as a whole number from 1 up, found {value!r}")

    @property
    def noticed_s(self) -> float:
        """Until a lost node is given up, in the mean: half a time has passed since it was last heard of."""
        return self.keep_alive_s * (self.keep_alive_attempts - 0.5)


class MirrorPrice(NamedTuple):
    """What a rank keeps of its own of each of the last two steps, at most, in its host's memory; what it sends to other
    nodes after each step, at most, with the seconds that this takes over the links, and as much comes from others."""

    kept_bytes: int
    sent_bytes: int
    seconds: float

    def __str__(self) -> str:
        text = f"each rank keeps {bytes_text(self.kept_bytes)} of each of two steps in its host's memory"
        if not self.sent_bytes:
            return f"{text}; several nodes have all of it"
        return f"{text}, and sends {bytes_text(self.sent_bytes)} to other nodes a step, {self.seconds:.3g} s"


def mirror_price(rung: Rung, mirrors: int = 1) -> MirrorPrice:
    """Raises PlanError for a rung without a plan."""
    if rung.layout is None:
        raise PlanError(f"expected a plan on {rung.mesh}, found none: {rung.refusal}")
    sent = max(mirrored_bytes(rung.layout, rung.mesh.groups[0].devices_per_node, mirrors))
    return MirrorPrice(max(rung.layout.bytes_by_rank()), sent, sent / _wire_bytes_s(rung))


def save_elastic(
    ladder: Ladder, folder: str | Path, model: nn.Module, example_inputs: Any, *,
    loss_fn: Callable[..., Any] | None = None, rendezvous: Rendezvous | None = None,
) -> Path:  # fmt: skip
    """Writes the folder, of the model that the ladder is of. Raises PlanError for a ladder of several global batches,
    without plans, or of nodes of unequally many devices."""
    meeting, rungs = rendezvous or Rendezvous(), _rungs(ladder)
    folder, rows = Path(folder), list[dict[str, Any]]()
    for rung in rungs:
        assert rung.plan is not None
        inputs = resized(model, example_inputs, rung.global_batch, loss_fn, rung.plan.precision)
        program = parallelize(model, rung.mesh, inputs, loss_fn=loss_fn, optimizer=rung.plan.optimizer,
                              precision=rung.plan.precision, plan=rung.plan, check=False)  # fmt: skip
        if rung is rungs[0]:
            program.save(folder)
        write_whole(folder / "rungs" / rung.name / "program.py", program.source)
        rung.plan.save(folder / "rungs" / rung.name / "plan.json")
        price = mirror_price(rung)
        rows.append(
            {"ranks": rung.devices, "mesh": str(rung.mesh), "program": f"rungs/{rung.name}/program.py",
             "predicted_s": rung.step_ns / 1e9, "written_s": _written_s(ladder, rung), "kept_bytes": price.kept_bytes,
             "mirrored_bytes": price.sent_bytes, "mirror_s": price.seconds}
        )  # fmt: skip
    data = {
        "autopar_elastic": VERSION, "model": ladder.model, "global_batch": rungs[0].global_batch, "rungs": rows,
        "devices_per_node": rungs[0].mesh.groups[0].devices_per_node, "rendezvous": asdict(meeting),
        "noticed_s": meeting.noticed_s, "met_s": float(meeting.last_call_s), "ended_s": meeting.ended_s,
        "polled_s": meeting.polled_s, "wire_bytes_s": _wire_bytes_s(rungs[0]),
    }  # fmt: skip
    write_whole(folder / "elastic.json", json.dumps(data, indent=1) + "\n")
    return folder


def _rungs(ladder: Ladder) -> list[Rung]:
    """Of each number of devices the fastest, of many devices first."""
    batches = sorted({rung.global_batch for rung in ladder.fitting})
    if len(batches) != 1:
        raise PlanError(f"expected rungs of one global batch that have plans, found those of {batches or 'none'}")
    best: dict[int, Rung] = {}
    for rung in sorted(ladder.fitting, key=lambda rung: rung.step_ns):
        best.setdefault(rung.devices, rung)
    rungs = [best[count] for count in sorted(best, reverse=True)]
    sizes = {group.devices_per_node for rung in rungs for group in rung.mesh.groups}
    if len(sizes) != 1:
        raise PlanError(
            "expected rungs of nodes of equally many devices, as nodes are what is lost and comes back, found nodes of "
            f"{' and '.join(map(str, sorted(sizes)))}; name meshes as NODESxDEVICES, such as h100:4x8 and h100:3x8"
        )
    return rungs


def _written_s(ladder: Ladder, rung: Rung) -> float:
    """What a checkpoint takes, of which each node writes its share."""
    assert rung.layout is not None, "it has a plan"
    return rung.layout.num_bytes / (rung.mesh.nodes * ladder.store.write_bytes_s)


def _wire_bytes_s(rung: Rung) -> float:
    """What a device sends to another node."""
    profiles = profiles_of(rung.mesh)
    return min(profiles[group.profile].link(ACROSS).bandwidth for group in rung.mesh.groups)


def resized(
    model: nn.Module, example_inputs: Any, batch: int, loss_fn: Callable[..., Any] | None, precision: str | None
) -> Any:  # fmt: skip
    """The inputs with another number of samples, without values where that is another."""
    graph, _ = traced(model, example_inputs, loss_fn, precision, check=False)
    own = graph.tensors[batch_inputs(graph)[0]].shape[0]

    def one(value: Any) -> Any:
        if batch == own or not isinstance(value, Tensor) or not value.dim() or value.shape[0] != own:
            return value
        return torch.empty((batch, *value.shape[1:]), dtype=value.dtype, device="meta")

    return tree_map(one, example_inputs)
