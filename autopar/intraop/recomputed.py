"""Which part of the instances of a module computes again, or is copied out: equal blocks decide together."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Node
from autopar.ir.recompute import is_operator_call, module_of_call, modules_again, operators_again
from autopar.ir.structure import region_of


class RecomputedShares:
    """recompute: as in `Plan.recompute`. blocks: the module paths of the instances of each distinct block."""

    def __init__(self, recompute: tuple[str, ...], blocks: Sequence[tuple[str, ...]]) -> None:
        self.recompute, self.operators = modules_again(recompute), operators_again(recompute)
        self._instances = {path: paths for paths in blocks for path in paths}
        self._blocks = {self._block_of(module_of_call(name)) for name in recompute if is_operator_call(name)}
        self._known: dict[tuple[str, str], float] = {}  # by the first of equal blocks, and the path inside

    def _block_of(self, module: str) -> str:
        """The repeated block that a module lies in, or ""."""
        while module and module not in self._instances:
            module = module.rpartition(".")[0]
        return module

    def of(self, module: str) -> float:
        """From 0 to 1, of the module in all blocks that are equal to its own."""
        if not self.recompute:
            return 0.0
        own = self._block_of(module)
        blocks, inside = self._instances.get(own, (own,)), module.removeprefix(own)
        if (blocks[0], inside) not in self._known:
            again = sum(region_of(self.recompute, path + inside) >= 0 for path in blocks)
            self._known[blocks[0], inside] = again / len(blocks)
        return self._known[blocks[0], inside]

    def of_operator(self, node: Node) -> float:
        """From 0 to 1, of the operator in all blocks that are equal to its own, by itself or with its module."""
        return self.by_itself(node) or self.of(node.scope.module)

    def by_itself(self, node: Node) -> float:
        """The same of an operator by itself: where it is, equal blocks that compute any again do so, too."""
        if node.name not in self.operators:
            return 0.0
        twins = self._instances.get(self._block_of(node.scope.module), ())
        return sum(path in self._blocks for path in twins) / len(twins) if twins else 1.0

    def is_entered(self, module: str, source: str) -> bool:
        """Whether what a module reads comes from outside of the recomputed module that it is in."""
        region = region_of(self.recompute, module)
        return region >= 0 and region_of(self.recompute, source) != region
