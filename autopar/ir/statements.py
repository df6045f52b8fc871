"""The emitted program as a flat list: local operators and typed redistributions, each in its module's scope.

A value is named by its tensor and the placement it has: (tensor, placement). Operators read and make values;
a redistribution makes another value of the same tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.branches import Home, entering, homes, host_scopes, in_order
from autopar.ir.graph import IDENTITY, Graph, Node, Scope, common_scope
from autopar.ir.placement import Placement
from autopar.ir.plan import Redistribute, Stage
from autopar.ir.structure import computed_once, is_cut
from autopar.ir.verifier import output_placement, update_placement

Value = tuple[str, Placement]


@dataclass(frozen=True)
class Operate:
    """A local operator call. home: the branch that it is in, if any."""

    node: Node
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    scope: Scope
    home: Home | None = None


@dataclass(frozen=True)
class Convert:
    """A redistribution of an activation, input, buffer or constant. home: the branch that it is in, if any."""

    redistribute: Redistribute
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    scope: Scope
    home: Home | None = None


Statement = Operate | Convert


@dataclass(frozen=True)
class Flat:
    """Constants that something reads are computed once; the statements run each microbatch. `uses`: placements of each
    parameter; `leaving`: what a stage makes for later ones; `values`: what an operator left of each tensor; `hosts`:
    for each fork the module call that its branches are written in."""

    constants: tuple[Statement, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[Value, ...]
    mutations: dict[str, Value]
    uses: dict[str, tuple[Placement, ...]]
    leaving: tuple[Value, ...] = ()
    values: dict[str, Value] = field(default_factory=dict)
    hosts: tuple[Scope, ...] = ()


def flatten(graph: Graph, stage: Stage, leaving: Sequence[Value] = ()) -> Flat:
    """Orders everything the program does. Identity nodes vanish: their value is their operand's.

    leaving: what must be there at the end of a stage, for later ones (`stages.leaving_values`).
    """
    return _Flattener(graph, stage).run(leaving)


def with_read_constants(flat: Flat) -> Flat:
    """Without the constants that nothing comes of: no rank computes them, or sends anything for them. A stage may make
    some whose readers are in other stages, which make their own."""
    needed = {*flat.outputs, *flat.mutations.values(), *flat.leaving}
    needed.update(value for statement in flat.statements for value in statement.reads)
    kept = list[Statement]()
    for statement in reversed(flat.constants):
        if not needed.isdisjoint(statement.makes):
            needed.update(statement.reads)
            kept.append(statement)
    return flat if len(kept) == len(flat.constants) else replace(flat, constants=tuple(reversed(kept)))


class _Flattener:
    def __init__(self, graph: Graph, stage: Stage) -> None:
        self.graph, self.stage = graph, stage
        self.by_target = {(r.tensor, r.target): r for r in stage.redistributes}
        self.value: dict[str, Value] = {}  # what an operator left of each tensor
        self.done: set[Value] = set()
        self.uses: dict[str, list[Placement]] = {s.tensor: [] for s in graph.stored}
        self.parameters = {s.tensor for s in graph.stored if s.kind == "parameter"}
        self.constant = computed_once(graph, stage)
        self.constants: list[Statement] = []
        self.statements: list[Statement] = []
        self.homes = homes(stage)
        self.home: Home | None = None  # of the operator that is being written
        self.hosts, self.entering = tuple(host_scopes(graph, stage)), entering(graph, stage)
        self.scopes = self._conversion_scopes()

    def run(self, leaving: Sequence[Value]) -> Flat:
        for name, placement in self.stage.inputs.items():
            self.value[name] = (name, placement)
        for stored in self.graph.stored:
            self.value[stored.tensor] = (stored.tensor, self.stage.storage[stored.tensor].placement)
        for node in in_order(self.graph, self.stage):
            self._operate(node)
        self.home = None
        outputs = tuple(
            self._bring(name, output_placement(self.graph, self.stage, name)) for name in self.graph.returned
        )
        mutations = {
            stored: self._bring(name, update_placement(self.graph, self.stage, stored))
            for stored, name in self.graph.mutations.items()
        }
        left = tuple(self._bring(*value) for value in leaving)
        uses = {name: tuple(dict.fromkeys(placements)) for name, placements in self.uses.items()}
        return with_read_constants(
            Flat(tuple(self.constants), tuple(self.statements), outputs, mutations, uses, left, self.value, self.hosts)
        )

    def _operate(self, node: Node) -> None:
        node_plan = self.stage.nodes[node.name]
        self.home = None
        for value in self.entering.get(node.name, ()):
            if value[0] not in self.parameters:
                self._bring(*value)
        self.home = self.homes.get(node.name)
        reads = tuple(self._bring(*item) for item in zip(node.operands, node_plan.operands, strict=True))
        if node.op == IDENTITY:
            self.value[node.results[0]] = reads[0]
            return
        makes = tuple(zip(node.results, node_plan.results, strict=True))
        for value in makes:
            self.value[value[0]] = value
        target = self.constants if node.results[0] in self.constant else self.statements
        target.append(Operate(node, reads, makes, node.scope, self.home))

    def _bring(self, name: str, wanted: Placement) -> Value:
        """The value of the tensor in the wanted placement, converting it on first need; the runtime converts
        parameters, ahead of their use."""
        if name in self.parameters:
            self.uses[name].append(wanted)
            return (name, wanted)
        source = self.value[name]
        if source[1] == wanted:
            return source
        made = (source[0], wanted) if source[0] == name else (name, wanted)
        if made not in self.done:
            self.done.add(made)
            redistribute = self.by_target[name, wanted]
            once = name in self.constant and not is_cut(self.stage, wanted)
            scope = self.scopes.get((name, wanted, self.home), Scope(()))
            convert = Convert(redistribute, (source,), (made,), scope, self.home)
            if name in self.constant and self.home is None and not once:
                self.statements.insert(self._before_call(scope), convert)
            else:
                (self.constants if once else self.statements).append(convert)
        return made

    def _before_call(self, scope: Scope) -> int:
        """Where to write what needs no statement: before the call in `scope` that the last statements are in, which
        goes on in one piece."""
        depth, position = len(scope.path), len(self.statements)
        last = self.statements[-1].scope.path[: depth + 1] if self.statements else ()
        if len(last) > depth and last[:depth] == scope.path:
            while position and self.statements[position - 1].scope.path[: depth + 1] == last:
                position -= 1
        return position

    def _conversion_scopes(self) -> dict[tuple[str, Placement, Home | None], Scope]:
        """A conversion stands in the innermost module that holds all its readers; for branches, in their host, but for
        those of what a branch makes itself."""
        readers: dict[tuple[str, Placement, Home | None], list[Scope]] = {}
        for node in self.graph.nodes:
            home = self.homes.get(node.name)
            for value in zip(node.operands, self.stage.nodes[node.name].operands, strict=True):
                readers.setdefault((*value, None), []).append(node.scope if home is None else self.hosts[home.fork])
                if home is not None:
                    readers.setdefault((*value, home), []).append(node.scope)
        return {value: common_scope(scopes) for value, scopes in readers.items()}
