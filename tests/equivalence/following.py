"""Plans that follow their inputs: every operator runs where its operands lie, with the least bytes moved.

Unlike a searched plan, such a plan splits what the inputs split, whatever it costs, and in uneven slices too.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import autopar
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import Axis, I, Placement, R, parse_placement
from autopar.ir.plan import NodePlan, Plan, Redistribute, Stage, Storage
from autopar.ir.redistribution import Step, apply, cheapest_path, transfer_bytes
from autopar.ir.verifier import output_placement
from autopar.ops import axis_rules, shape_error
from autopar.simulate.traffic import traffic


def follow(graph: Graph, sizes: tuple[int, ...], inputs: dict[str, str], stored: dict[str, str]) -> Plan:
    """The plan on CPU ranks whose axes have these sizes; `inputs` and `stored` (by parameter name): what is split."""
    strides = [math.prod(sizes[position + 1 :]) for position in range(len(sizes))]
    axes = tuple(Axis(f"d{i}", size, stride) for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)))
    return _Follower(graph, axes, inputs, stored).plan()


class _Follower:
    def __init__(self, graph: Graph, axes: LogicalMesh, inputs: dict[str, str], stored: dict[str, str]) -> None:
        self.graph, self.axes = graph, axes
        whole = (R,) * len(axes)
        self.inputs = {name: parse_placement(inputs[name]) if name in inputs else whole for name in graph.inputs}
        self.storage = {
            s.tensor: Storage(
                parse_placement(stored[s.name])
                if s.name in stored
                else (I if graph.tensors[s.tensor].differentiable else R,) * len(axes)
            )
            for s in graph.stored
        }
        self.now = {**self.inputs, **{name: storage.placement for name, storage in self.storage.items()}}
        self.redistributes: dict[tuple[str, Placement], Redistribute] = {}

    def plan(self) -> Plan:
        nodes = {}
        for node in self.graph.nodes:
            nodes[node.name] = chosen = self._choose(node)
            for name, wanted in zip(node.operands, chosen.operands, strict=True):
                self._bring(name, wanted)
            self.now.update(zip(node.results, chosen.results, strict=True))
        draft = Plan(
            fingerprint=self.graph.fingerprint,
            model=self.graph.model_name,
            mesh=autopar.Mesh("cpu", devices_per_node=math.prod(axis.size for axis in self.axes)),
            stages=(Stage(0, self.axes, self.inputs, self.storage, nodes),),
        )
        for name in (*self.graph.outputs, *self.graph.mutations.values()):
            self._bring(name, output_placement(self.graph, draft.stage, name))
        plan = draft.placed(redistributes=tuple(self.redistributes.values()))
        return replace(plan, predicted=replace(plan.predicted, comm_bytes=traffic(self.graph, plan)))

    def _choose(self, node: Node) -> NodePlan:
        """The strategy that moves least; of those, the one that splits most."""
        rules = axis_rules(self.graph, node) if node.operands else ()
        found = []
        for combination in itertools.product(rules, repeat=len(self.axes)):
            operands = tuple(zip(*(rule.operands for rule in combination), strict=True))
            results = tuple(zip(*(rule.results for rule in combination), strict=True))
            moved = [self._moved(name, wanted) for name, wanted in zip(node.operands, operands, strict=True)]
            if None not in moved and not shape_error(self.graph, node, operands, self.axes):
                split = sum(type_.kind == "S" for placement in (*operands, *results) for type_ in placement)
                found.append((sum(size for size in moved if size is not None), -split, operands, results))
        if not found:
            return NodePlan((), ((R,) * len(self.axes),) * len(node.results))
        return NodePlan(*min(found)[2:])

    def _moved(self, name: str, wanted: Placement) -> int | None:
        """Bytes of the way to a placement; 0 for what is there already, None where there is none.

        Stored tensors are best used as they are kept, or whole.
        """
        if (name, wanted) in self.redistributes or self.now[name] == wanted:
            return 0
        steps = self._path(name, wanted)
        if steps is None:
            return None
        placement, total = self.now[name], 0
        for step in steps:
            total += self._bytes(name, placement, step)
            placement = apply(step, placement)
        pairs = zip(self.now[name], wanted, strict=True)
        return sum(want not in (have, R) for have, want in pairs) if name in self.storage else total

    def _path(self, name: str, wanted: Placement) -> tuple[Step, ...] | None:
        """Of least bytes; of stored tensors, which the runtime converts, the one of fewest steps."""
        if name in self.storage:
            return cheapest_path(self.now[name], wanted, lambda placement, step: 1)
        return cheapest_path(self.now[name], wanted, lambda placement, step: self._bytes(name, placement, step) + 1)

    def _bytes(self, name: str, placement: Placement, step: Step) -> int:
        tensor = self.graph.tensors[name]
        return sum(transfer_bytes(tensor.shape, tensor.itemsize, placement, self.axes, step))

    def _bring(self, name: str, wanted: Placement) -> None:
        if self.now[name] != wanted and (name, wanted) not in self.redistributes:
            steps = self._path(name, wanted)
            assert steps is not None, f"no way for {name} from {self.now[name]} to {wanted}"
            self.redistributes[name, wanted] = Redistribute(name, wanted, steps)
