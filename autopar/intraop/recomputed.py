"""Which part of the instances of a module computes again: equal blocks decide together, not all are recomputed."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.structure import region_of


class RecomputedShares:
    """recompute: module paths. blocks: the module paths of the instances of each distinct block."""

    def __init__(self, recompute: tuple[str, ...], blocks: Sequence[tuple[str, ...]]) -> None:
        self.recompute = recompute
        self._instances = {path: paths for paths in blocks for path in paths}
        self._known: dict[str, float] = {}

    def of(self, module: str) -> float:
        """From 0 to 1, of the module in all blocks that are equal to its own."""
        if not self.recompute:
            return 0.0
        if module not in self._known:
            own = module
            while own and own not in self._instances:
                own = own.rpartition(".")[0]
            inside = module.removeprefix(own)
            twins = [path + inside for path in self._instances.get(own, ())] or [module]
            again = sum(region_of(self.recompute, twin) >= 0 for twin in twins)
            self._known[module] = again / len(twins)
        return self._known[module]

    def is_entered(self, module: str, source: str) -> bool:
        """Whether what a module reads comes from outside of the recomputed module that it is in."""
        region = region_of(self.recompute, module)
        return region >= 0 and region_of(self.recompute, source) != region
