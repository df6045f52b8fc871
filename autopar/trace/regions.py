"""The operators of an exported program that are between a block's markers (`trace.markers`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autopar.trace.markers import entered, is_everywhere, left, repeated

_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass
class BlockRegion:
    """A block's inputs (the markers of those that are read, by position), its operators in order, and its results."""

    inputs: dict[int, fx.Node] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)
    results: dict[int, fx.Node] = field(default_factory=dict)

    @cached_property
    def read(self) -> list[str]:
        """Names of what its operators read beside its inputs and each other."""
        inside = {*self.inputs.values(), *self.nodes}
        sources = (source for node in (*self.nodes, *self.results.values()) for source in node.all_input_nodes)
        return list(dict.fromkeys(source.name for source in sources if source not in inside))


def regions(program: ExportedProgram) -> dict[str, BlockRegion]:
    """By the block's path."""
    found: dict[str, BlockRegion] = {}
    current: BlockRegion | None = None
    for node in program.graph.nodes:
        if node.target is entered:
            current = found.setdefault(str(node.args[1]), BlockRegion())
            current.inputs[cast(int, node.args[2])] = node
        elif node.target is left:
            found[str(node.args[1])].results[cast(int, node.args[2])] = node
            current = None
        elif current is not None:
            current.nodes.append(node)
    return found


def check_markers(program: ExportedProgram) -> None:
    """Raises ValueError where an operator that a marker stands for could not be written out for another block."""
    found = regions(program)
    state = {str(getattr(spec.arg, "name", "")) for spec in program.graph_signature.input_specs if spec.kind in _STATE}
    for path, region in found.items():
        if not state.issuperset(region.read):
            raise ValueError(f"{path} reads what is outside of it")
        if not all(_runs_in(node, path) for node in region.nodes):
            raise ValueError(f"{path} is entered by operators that it does not call")
    for node in program.graph.nodes:
        if is_everywhere(node) and _hooked_tensor(node).target is entered:
            raise ValueError("a hook on what a block is given is also for those that read it outside of the block")
        if node.target is repeated and not (node.args[2] in found and _runs_in(node, node.args[3], innermost=True)):
            raise ValueError(f"{node.args[3]} does not run where its call is")
    if any(isinstance(value, FakeTensor) for value in program.constants.values()):
        raise ValueError("a tensor made in a block that was not exported is used outside of it")


def _hooked_tensor(mark: fx.Node) -> fx.Node:
    found = cast(list[fx.Node], mark.args[0])[0]
    return _hooked_tensor(found) if is_everywhere(found) else found


def _runs_in(node: fx.Node, path: str, innermost: bool = False) -> bool:
    called = [re.sub(r"@\d+$", "", name) for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return any(name in (path, f"model.{path}") for name in (called[-1:] if innermost else called))
