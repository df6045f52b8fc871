"""What a construct is: lines of a model whose meaning tracing might drop, as data.

The lines read and write `h`, the activation of shape (B, D), and may add a scalar to `extra`, which the loss gets. They
stand in the model itself, or in a layer that runs twice. `$i` in them becomes a number of the construct's own, so that
several of one kind fit into a model; B, D and C (batch, width, classes) are globals of the model's module.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from string import Template


@dataclass(frozen=True)
class Construct:
    """Lines for each place of a model.

    above: beside the classes. init: in `__init__`. forward: where the construct stands; late: before the forward ends.
    inputs: further inputs of forward, each with the expression that makes it. loss: instead of cross-entropy, from `z`
    (logits) and `y`. loss_fn: what makes a loss function of its own. returns: instead of the loss. places: where it may
    stand, "layer" or "model". random: draws random numbers. must_run: no plan of one stage and one microbatch may
    refuse it.
    """

    name: str
    kind: str
    forward: str = ""
    above: str = ""
    init: str = ""
    late: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    loss: str = ""
    loss_fn: str = ""
    returns: str = ""
    places: tuple[str, ...] = ("layer", "model")
    random: bool = False
    must_run: bool = False

    @property
    def key(self) -> str:
        """Its kind and name: no other construct has the same."""
        return f"{self.kind}: {self.name}"

    def lines(self, place: str, number: int) -> list[str]:
        """The lines for one of its places, with the number filled in."""
        text = textwrap.dedent(getattr(self, place)).strip("\n")
        return _filled(text, number).splitlines() if text else []

    def named_inputs(self, number: int) -> dict[str, str]:
        """Its inputs by their names in the model."""
        found = ((_filled(name, number), _filled(text, number)) for name, text in self.inputs.items())
        return dict(found)

    @property
    def is_loss(self) -> bool:
        """Whether it says what the loss is, so that a model has one such at most."""
        return bool(self.loss or self.loss_fn or self.returns)


def _filled(text: str, number: int) -> str:
    return Template(text).safe_substitute(i=number)


def by_key(*families: Iterable[Construct]) -> dict[str, Construct]:
    """All of some families by key."""
    found: dict[str, Construct] = {}
    for construct in (one for family in families for one in family):
        assert construct.key not in found, f"two constructs are called {construct.key}"
        found[construct.key] = construct
    return found
