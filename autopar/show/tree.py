"""A plan's modules as a tree of plain data: what each stores and runs, in which placements; equal siblings are one.

Numbered siblings (`layers.0`, `layers.1`, …) are folded where all below them is the same: operators, placements,
storage and redistributions. Names of graph nodes, stages and ranks may differ: a fold lists the stages of all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.ir.branches import homes
from autopar.ir.labels import storage_text
from autopar.ir.placement import format_placement
from autopar.ir.plan import Choice, Plan, Redistribute, Stage
from autopar.show.explain import choices_of, first_twin, is_against_constraint, node_twins
from autopar.show.text import used_placements

Data = dict[str, Any]

PLACEMENT_FIELDS = (
    "stored",
    "note",
    "used",
    "in",
    "out",
    "moves",
    "at",
    "layout",
)  # by which rows and folds are compared


@dataclass(eq=False)
class _TreeModule:
    """A module while the tree is made. rows: by kind, name and placements, so that equal ones of stages are one."""

    path: str
    children: dict[str, _TreeModule] = field(default_factory=dict)
    rows: dict[Hashable, Data] = field(default_factory=dict)

    def below(self, path: str) -> _TreeModule:
        """The module at a dotted path below this one, made if it is not there."""
        module = self
        for name in path.split(".") if path else ():
            child = f"{module.path}.{name}" if module.path else name
            module = module.children.setdefault(name, _TreeModule(child))
        return module

    def add(self, row: Data, stage: int) -> None:
        """Adds a row of a stage, or the stage to the row that is equal."""
        known = self.rows.setdefault((row["kind"], row["name"], *_placements(row)), row)
        if stage not in known["stages"]:
            known["stages"].append(stage)

    @cached_property
    def shape(self) -> Hashable:
        """What equal siblings have in common."""
        rows = tuple((row["kind"], row["label"], *_placements(row)) for row in self.rows.values())
        return rows, tuple((name, child.shape) for name, child in self.children.items())

    @cached_property
    def stages(self) -> frozenset[int]:
        own = frozenset(stage for row in self.rows.values() for stage in row["stages"])
        return own.union(*(child.stages for child in self.children.values()))


def _placements(row: Data) -> Iterator[Hashable]:
    return (_frozen(row.get(name)) for name in PLACEMENT_FIELDS)


def _frozen(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return tuple(map(_frozen, value.values()))
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def model_tree(plan: Plan, layouts: list[Any]) -> Data:
    """The root: `name`, `path`, `count` (of equal siblings), `stages`, `rows` and `modules` (its children).

    Rows are inputs, parameters and operators with placements as text, redistributions (`moves`), and the decision of
    the search behind it, if it is known (`choice`). layouts: the plan's distinct logical meshes.
    """
    root = _TreeModule("")
    for number, stage in enumerate(plan.stages):
        view = _StageRows(plan, stage, layouts.index(stage.axes))
        for path, row in view.rows():
            root.below(path).add({**row, "stages": []}, number)
    return _folded(root, plan.model, 1, root.stages, set(plan.recompute))


def _folded(module: _TreeModule, name: str, count: int, stages: frozenset[int], recomputed: set[str]) -> Data:
    """The module as data, with the stages of all that it stands for."""
    groups: dict[Hashable, list[str]] = {}
    for child_name, child in module.children.items():
        again = child.path in recomputed
        groups.setdefault((child.shape, again) if child_name.isdigit() else child_name, []).append(child_name)
    modules = []
    for names in groups.values():
        members = [module.children[member] for member in names]
        together = frozenset[int]().union(*(member.stages for member in members))
        modules.append(_folded(members[0], spans(names), len(members), together, recomputed))
    if module.path and not module.rows and len(modules) == 1 and count == 1:  # only a name around one other module
        return modules[0] | {"name": f"{name}.{modules[0]['name']}"}
    return {
        "name": name,
        "path": module.path,
        "count": count,
        "stages": sorted(stages),
        "recomputed": module.path in recomputed,
        "rows": [{key: value for key, value in row.items() if value} | _kept(row) for row in module.rows.values()],
        "modules": modules,
    }


def _kept(row: Data) -> Data:
    """What is 0 or empty but said."""
    return {"layout": row["layout"], "stages": row["stages"]}


def spans(names: list[str]) -> str:
    """ "0–3, 5": numbers in order, neighbours joined; other names as they are."""
    if not all(name.isdigit() for name in names):
        return ", ".join(names)
    runs: list[list[int]] = []
    for number in sorted(map(int, names)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


class _StageRows:
    """A stage's rows. layout: the number of its logical mesh."""

    def __init__(self, plan: Plan, stage: Stage, layout: int) -> None:
        self.plan, self.stage, self.layout = plan, stage, layout
        self.choices = {(choice.kind, choice.name): choice for choice in choices_of(plan, stage)}
        self.moves: dict[str, list[Data]] = {}
        for redistribute in stage.redistributes:
            self.moves.setdefault(redistribute.tensor, []).append(_move(stage, redistribute))

    def rows(self) -> Iterator[tuple[str, Data]]:
        """Each with the path of its module, operators in the order in which they run."""
        yield from (("", self._input(name)) for name in self.stage.inputs)
        for name in self.stage.nodes:
            yield self.plan.scope(name)[0], self._operator(name)
        for tensor in self.stage.storage:
            yield self.plan.parameters.get(tensor, tensor).rpartition(".")[0], self._stored(tensor)

    def _row(self, kind: str, tensor: str, name: str, label: str, choice: Choice | None) -> Data:
        moves, decided = self.moves.get(tensor, []), None if choice is None else _choice(self.plan, choice)
        type_ = self.plan.types.get(tensor, "")
        return {
            "kind": kind, "name": name, "label": label, "type": type_, "layout": self.layout, "moves": moves,
            "choice": decided,
        }  # fmt: skip

    def _input(self, name: str) -> Data:
        kind = "input" if name in self.plan.types else "received"
        row = self._row(kind, name, name, name, self.choices.get(("input", name)))
        return row | {"stored": format_placement(self.stage.inputs[name])}

    def _stored(self, tensor: str) -> Data:
        name = self.plan.parameters.get(tensor, tensor)
        choice = self._choice_of("stored", tensor, self._first_twin)
        row = self._row("parameter", tensor, name, name.rpartition(".")[2], choice)
        storage = self.stage.storage[tensor]
        return row | {
            "stored": format_placement(storage.placement),
            "used": sorted(text.strip("[]") for text in self._uses.get(tensor, ())),
            "note": storage_text(replace(storage, placement=())).removeprefix("[]").strip(),
        }

    def _operator(self, name: str) -> Data:
        _, operator, source = self.plan.scope(name)
        placed = self.stage.nodes[name]
        label = operator.removeprefix("aten.").removesuffix(".default")
        home = self._homes.get(name)
        choice = None if home else self._choice_of("node", name, self._node_twins)
        return self._row("operator", name, name, label, choice) | {
            "source": source,
            "in": [format_placement(placement) for placement in placed.operands],
            "out": [format_placement(placement) for placement in placed.results],
            "at": f"{home.axis}={home.coordinate}" if home else "",
        }

    @cached_property
    def _uses(self) -> dict[str, set[str]]:
        return used_placements(self.stage)

    @cached_property
    def _homes(self) -> Mapping[str, Any]:
        return homes(self.stage)

    def _choice_of(self, kind: str, name: str, twins: Mapping[str, str]) -> Choice | None:
        """Its own, or that of its twin in the first of the equal blocks."""
        return self.choices.get((kind, name)) or self.choices.get((kind, twins.get(name, name)))

    @cached_property
    def _node_twins(self) -> dict[str, str]:
        return node_twins(self.plan) if self.choices else {}

    @cached_property
    def _first_twin(self) -> dict[str, str]:
        named = {name: tensor for tensor, name in self.plan.parameters.items()}
        tensors = self.plan.parameters if self.choices else ()
        return {tensor: first_twin(self.plan, tensor, named) for tensor in tensors}


def _move(stage: Stage, redistribute: Redistribute) -> Data:
    """Steps: the axis, before, after, and the collectives of the forward and the backward pass."""
    steps = []
    for step in redistribute.steps:
        axis = stage.axes[step.axis].name
        forward, backward = step.transfers
        steps.append([axis, str(step.before), str(step.after), forward.collective or "", backward.collective or ""])
    return {"to": format_placement(redistribute.target), "steps": steps}


def _choice(plan: Plan, choice: Choice) -> Data:
    """Alternatives: the option, what it costs more in ns and bytes, how much of the ns the operator takes itself, and
    whether a constraint is against it."""
    return {
        "count": choice.count,
        "chosen": choice.chosen,
        "cost_ns": choice.cost_ns,
        "num_options": choice.num_options,
        "alternatives": [[*item, is_against_constraint(plan, item)] for item in choice.alternatives],
    }
