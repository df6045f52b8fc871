"""How tokens choose experts, as a distribution: what a planner needs to know of a routing that no plan can fix.

A token chooses `choices` different experts of `num_experts`. π_e is how likely it is to choose expert e:

    balanced    π_e = choices / num_experts
    power law   experts are drawn one after the other without replacement, the k-th popular with weight k^−exponent;
                which expert is the k-th popular is not known, and differs from layer to layer
    histogram   π_e in proportion to counts, as they were measured (`autopar profile --routing`)

What a distribution yields for experts that are split over ranks, `autopar.ops.loads` says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.ir import reading
from autopar.ir.writing import write_whole
from autopar.views import view

BALANCED, POWER_LAW, HISTOGRAM = "balanced", "power_law", "histogram"
EVERY_LAYER = ""
P99 = "@p99"
"""Behind a routing's text: every load is taken at its 99th percentile, in time, too."""

ROWS = "@rows:"
"""Behind a routing's text: every load is of so many rows on the busiest rank; what a price at a load is asked by."""

_LARGEST_EXPONENT = 16.0
_FORMS = '"balanced", "power_law:1.2" or a file that `autopar profile --routing` wrote'


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts: `Routing.balanced()`, `Routing.power_law(1.2)` or `Routing.histogram(counts)`.

    counts: (module path, counts by expert) a layer; the path "" stands for every layer. at_p99, rows: see `P99` and
    `ROWS`.
    """

    kind: str = BALANCED
    exponent: float = 0.0
    counts: tuple[tuple[str, tuple[float, ...]], ...] = ()
    at_p99: bool = False
    rows: int = 0

    def __hash__(self) -> int:
        return self._hash  # of a thousand counts that takes long, and loads are remembered by it

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.exponent, self.counts, self.at_p99, self.rows))

    @staticmethod
    def balanced() -> Routing:
        """Every expert is as likely as any other."""
        return Routing()

    @staticmethod
    def power_law(exponent: float) -> Routing:
        """The k-th popular expert is drawn with weight k^−exponent; 0 is balanced. Raises PlanError."""
        is_number = isinstance(exponent, (int, float)) and not isinstance(exponent, bool)
        if not is_number or not 0 <= exponent <= _LARGEST_EXPONENT:
            raise PlanError(f"expected the exponent of a power law from 0 to {_LARGEST_EXPONENT:g}, found {exponent!r}")
        return Routing(POWER_LAW, float(exponent))

    @staticmethod
    def histogram(counts: Sequence[float] | Mapping[str, Sequence[float]] | str | Path) -> Routing:
        """How often each expert was chosen: for all layers alike, by the module path of each layer, or a file of either
        that `autopar profile --routing` wrote. Raises PlanError."""
        if isinstance(counts, (str, Path)):
            return Routing.read(counts)
        layers = counts if isinstance(counts, Mapping) else {EVERY_LAYER: counts}
        if not layers:
            raise PlanError("expected counts by expert, or by layer and expert, found none")
        return Routing(HISTOGRAM, 0.0, tuple((path, _checked(path, own)) for path, own in layers.items()))

    @staticmethod
    def measured(model: Any, batches: Any, loss_fn: Any = None) -> Routing:
        """The histogram of a model's choices on its data (`autopar.trace.popularity`). batches: one, as `parallelize`
        takes it, or a list or iterator of such. Raises PlanError or TraceError."""
        found: Routing = view("measured_routing")(model, batches, loss_fn)
        return found

    def save(self, path: str | Path) -> None:
        """Writes a file that `histogram` and `read` take, whole or not at all; of a histogram."""
        if self.kind != HISTOGRAM:
            raise PlanError(f"expected a histogram to be saved, found {self}, which its text says: {self.text!r}")
        rows = [f"  {json.dumps(layer)}: {json.dumps(list(own))}" for layer, own in self.counts]
        write_whole(Path(path), '{"counts": {\n' + ",\n".join(rows) + "\n}}\n")

    @property
    def layers(self) -> Mapping[str, tuple[float, ...]]:
        """The counts by module path."""
        return dict(self.counts)

    def of_layer(self, path: str) -> tuple[float, ...] | None:
        """The counts of the layer that runs in a module: by its own path, one around or inside it, or for every layer;
        None where there are none."""
        layers = self.layers
        near = [name for name in layers if name and f"{path}.".startswith(f"{name}.")]
        inside = [name for name in layers if f"{name}.".startswith(f"{path}.")]
        found = max(near, key=len, default=None) or (inside[0] if len(inside) == 1 else EVERY_LAYER)
        return layers.get(found)

    # Text and data ----------------------------------------

    @cached_property
    def text(self) -> str:
        """One line that `parse` reads again; what an operator of the graph says of its routing."""
        options = {POWER_LAW: f":{self.exponent!r}", HISTOGRAM: f":{json.dumps(self.layers)}"}
        return f"{self.kind}{options.get(self.kind, '')}{P99 * self.at_p99}{f'{ROWS}{self.rows}' if self.rows else ''}"

    @staticmethod
    def parse(text: str) -> Routing:
        """Reads "balanced", "power_law:1.2" or what `text` gives of a histogram. Raises PlanError."""
        return _parsed(text)

    @staticmethod
    def read(path: str | Path) -> Routing:
        """Reads a file with counts by expert, or by layer and expert, as `autopar profile --routing` writes it."""
        try:
            data = reading.parsed(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanError(f"expected {_FORMS}, found {str(path)!r}, which cannot be read: {error}") from error
        counts = data.get("counts") if isinstance(data, dict) and "counts" in data else data
        if not isinstance(counts, (dict, list)):
            raise PlanError(f'{path}: expected {{"counts": …}} by expert, or by layer and expert, found {counts!r}')
        return Routing.histogram(counts)

    def to_json(self) -> dict[str, Any]:
        """As it is in a plan's file."""
        told: dict[str, dict[str, Any]] = {
            POWER_LAW: {"exponent": self.exponent},
            HISTOGRAM: {"counts": {path: list(own) for path, own in self.counts}},
        }
        return {"kind": self.kind, **told.get(self.kind, {})}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Routing:
        """The inverse of `to_json`. Raises PlanError."""
        if data["kind"] == POWER_LAW:
            return Routing.power_law(data.get("exponent", 0.0))
        return Routing.histogram(data.get("counts", {})) if data["kind"] == HISTOGRAM else Routing.balanced()

    def __str__(self) -> str:
        if self.kind == POWER_LAW:
            return f"a power law of exponent {self.exponent:g}"
        if self.kind == BALANCED:
            return BALANCED
        sizes = sorted({len(own) for _, own in self.counts})
        where = "in every layer" if EVERY_LAYER in self.layers else f"in each of {len(self.counts)} layers"
        return f"a histogram of {' or '.join(map(str, sizes))} experts {where}"


def _checked(path: str, counts: Any) -> tuple[float, ...]:
    """Counts of a layer. Raises PlanError."""
    where = f" of {path!r}" if path else ""
    if not isinstance(path, str) or isinstance(counts, (str, Mapping)) or not hasattr(counts, "__iter__"):
        raise PlanError(f"expected counts{where} as numbers by expert, found {reading.short(repr(counts))}")
    own = tuple(value if isinstance(value, int) else float(value) for value in map(_number, counts))
    if not own or not all(math.isfinite(value) and value >= 0 for value in own) or not sum(own):
        raise PlanError(
            f"expected counts{where} as numbers from 0 up, one an expert, not all 0, found {reading.short(repr(own))}"
        )
    return own


def _number(value: Any) -> float:
    """A number, also of torch or numpy."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanError(f"expected counts as numbers, found {reading.short(repr(value))}")
    return value


@lru_cache(maxsize=64)
def _parsed(text: str) -> Routing:
    told, _, rows = text.partition(ROWS)
    own = told.removesuffix(P99)
    kind, _, rest = own.partition(":")
    made = None
    try:
        if rows and not rows.isdecimal():
            raise ValueError(f"{rows!r} rows")
        if own == BALANCED or not own:
            made = Routing.balanced()
        elif kind == POWER_LAW:
            made = Routing.power_law(float(rest))
        elif kind == HISTOGRAM:
            made = Routing.histogram(json.loads(rest))
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(f"expected {_FORMS}, found {reading.short(text)!r}: {error}") from error
    if made is None:
        raise PlanError(f"expected {_FORMS}, found {reading.short(text)!r}")
    return Routing(made.kind, made.exponent, made.counts, own != told, int(rows or 0))
