"""Which block computes what does not change between steps: the one whose parameters it is made of.

What is made of a block's own parameters alone, in inference, is computed once by the block. Equal blocks then share
one class as before. Everything else that does not change is computed by the program.
"""

from __future__ import annotations

from autopar.emit.tree import Region
from autopar.ir.graph import Graph
from autopar.ir.statements import Flat, Statement, Value
from autopar.ops.ahead import makers


class Folding:
    """The constants of a program, handed out to its regions. wanted: those that are the program's own, with what makes
    them."""

    def __init__(self, graph: Graph, flat: Flat, root: Region) -> None:
        self._graph, self._made_by = graph, makers(flat.constants)
        self._order = {id(statement): number for number, statement in enumerate(flat.constants)}
        for region in root.regions():
            self._hand_out(region)
        read = [value for value in (*_read(root), *flat.outputs, *flat.leaving) if value in self._made_by]
        self.wanted = list(dict.fromkeys(read))
        self.statements = self._making(self.wanted)

    def _hand_out(self, region: Region) -> None:
        """Innermost first: an outer region computes, or is given, what no inner one computes by itself."""
        for inner in region.regions():
            self._hand_out(inner)
        read = set(_read(region))
        region.inputs = [value for value in region.inputs if value in read]
        region.kept = [value for value in region.inputs if not region.is_part and self._is_of(region, value)]
        region.inputs = [value for value in region.inputs if value not in region.kept]
        region.constants = self._making(region.kept)

    def _is_of(self, region: Region, value: Value) -> bool:
        """Whether a constant is made of parameters, and of nothing that the region's module does not store."""
        if value not in self._made_by:
            return False
        stored = self._graph.stored_by_tensor
        read = {name for statement in self._making([value]) for name, _ in statement.reads}
        sources = [stored[name] for name in read if name in stored]
        own = all(item.name.startswith(f"{region.path}.") for item in sources)
        return own and any(item.kind == "parameter" for item in sources)

    def _making(self, values: list[Value]) -> list[Statement]:
        """What makes the values of what is stored, in order."""
        found: dict[int, Statement] = {}
        pending = [value for value in values if value in self._made_by]
        while pending:
            statement = self._made_by[pending.pop()]
            if id(statement) not in found:
                found[id(statement)] = statement
                pending += [value for value in statement.reads if value in self._made_by]
        return sorted(found.values(), key=lambda statement: self._order[id(statement)])


def _read(region: Region) -> list[Value]:
    """What a region's own statements read, and what its inner regions are given."""
    return [value for item in region.items for value in (item.inputs if isinstance(item, Region) else item.reads)]
