"""How what may be chosen is written, for people and in reports: a strategy, a storage, placements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from autopar.ir.placement import Placement, format_placement
from autopar.ir.plan import Storage


class _Placed(Protocol):
    """An operator's placements: a node of a plan, or a strategy of the search."""

    @property
    def operands(self) -> tuple[Placement, ...]: ...
    @property
    def results(self) -> tuple[Placement, ...]: ...


def strategy_text(placed: _Placed) -> str:
    """ "[S(0)], [R] -> [S(0)]": what an operator reads, and what it makes."""
    return f"{bracketed(placed.operands)} -> {bracketed(placed.results)}"


def bracketed(placements: Iterable[Placement]) -> str:
    """ "[S(0) R], [R R]"."""
    return ", ".join(f"[{format_placement(placement)}]" for placement in placements)


def storage_text(storage: Storage) -> str:
    """A storage placement with its ZeRO behaviour, and where it is: "[S(0) I] gathered per use, on the host"."""
    return f"[{format_placement(storage.placement)}]{use_text(storage)}"


def use_text(storage: Storage) -> str:
    """ " gathered per use", " on the host", or both."""
    marks = ["gathered per use"] * storage.regather + ["on the host"] * storage.on_host
    return f" {', '.join(marks)}" if marks else ""
