"""What operators keep for their backward pass, as torch keeps it, beside what their rows say.

    python -m tests.cost.kept [TEXT …]

Runs each operator of all kinds of models (`random_programs.kinds`, their names contain a TEXT) by itself, with
gradients and unread results as they are there. Ends with 1 where one keeps more than is said, or where something is
said of what keeps nothing, which is what decides whether a call runs again.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.cost.memory import saved_values
from autopar.errors import AutoparError
from autopar.ir.graph import Graph, Node
from autopar.ops import run
from autopar.ops.saved import Extra
from tests.random_programs.check import Subject

SLACK_BYTES = 160
"""Statistics of channels, biases and numbers, which are large beside samples alone."""
BY_THE_RUNTIME = ("autopar.", "aten.native_dropout.", "transformers.")
"""On ranks a function of the runtime runs in their place, whose memory tests of their own measure."""


class Held(NamedTuple):
    """What an operator keeps and is said to. is_asked_for: whether hooks on what is said are called."""

    what: str
    kept_bytes: int
    said_bytes: int
    is_asked_for: bool

    @property
    def is_wrong(self) -> bool:
        """Whether less is said than kept, or anything where nothing is."""
        return self.kept_bytes > self.said_bytes + SLACK_BYTES or (self.kept_bytes > 0) != self.is_asked_for


def held(what: str, node: Node, graph: Graph, values: Mapping[str, Tensor]) -> tuple[Held | None, tuple[Tensor, ...]]:
    """Of an operator of a graph with values of its operands, and its results; None where no gradient comes to them."""
    kept = dict[int, Tensor]()  # alive, so that no address is used twice

    def keep(x: Tensor) -> Tensor:
        return kept.setdefault(x.untyped_storage().data_ptr(), x)

    own = {name: values[name].detach().clone().requires_grad_(_gets_gradient(graph, name)) for name in node.operands}
    with warnings.catch_warnings(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        warnings.simplefilter("ignore")
        results = tuple(run(node, own.__getitem__, "cpu"))
    pairs = zip(node.outputs, results, strict=True)
    if not any(name is not None and x.requires_grad for name, x in pairs):
        return None, results
    said = saved_values(node, graph, "cpu")
    extras = sum(one.num_bytes(graph.tensors[one.like].shape) for one in said if isinstance(one, Extra))
    named = sum(graph.tensors[one].num_bytes for one in said if isinstance(one, str))
    asked = any(isinstance(one, str) or not one.is_number for one in said)
    return Held(what, sum(x.untyped_storage().nbytes() for x in kept.values()), extras + named, asked), results


def _gets_gradient(graph: Graph, name: str) -> bool:
    return graph.tensors[name].differentiable and not graph.tensors[name].dtype.startswith(("int", "bool"))


def held_in(name: str, subject: Subject) -> Iterator[Held]:
    """Of the operators of a model that its inputs reach by names."""
    graph, state, batch = subject.graph, subject.state, subject.batch
    values = {stored.tensor: state[stored.name] for stored in graph.stored if stored.name in state} | graph.values
    values |= {one: batch[one] for one in graph.inputs if one in batch}
    for node in graph.nodes:
        if node.op.startswith(BY_THE_RUNTIME) or not values.keys() >= set(node.operands):
            continue
        shapes = [graph.tensors[one].shape for one in node.operands]
        found, results = held(f"{name}: {node.op} {node.args} of {shapes}", node, graph, values)
        values |= {one: x.detach() for one, x in zip(node.outputs, results, strict=True) if one is not None}
        if found is not None:
            yield found


def main() -> int:
    """Prints what is wrong, once an operator."""
    from tests.random_programs.kinds.practice import MODELS, practice_subject
    from tests.random_programs.kinds.row import subject_of
    from tests.random_programs.kinds.table import KINDS

    texts, wrong, count = sys.argv[1:] or [""], 0, 0
    subjects = [(name, subject_of(kind, 1)) for name, kind in KINDS.items()]
    subjects += [(name, practice_subject(model, 0)) for name, model in MODELS.items()]
    for name, subject in (one for one in subjects if any(text in one[0] for text in texts)):
        try:
            for found in held_in(name, subject):
                count, wrong = count + 1, wrong + found.is_wrong
                if found.is_wrong:
                    print(found, flush=True)
        except AutoparError as error:
            print(f"refused: {name}: {str(error).splitlines()[0]}", flush=True)
    print(f"{count} operators keep something or nothing, {wrong} not what is said")
    return int(wrong > 0 or count == 0)


if __name__ == "__main__":
    sys.exit(main())
