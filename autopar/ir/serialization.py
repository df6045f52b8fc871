"""Plans as JSON: versioned, validated against a published schema, byte-stable."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from importlib.resources import files
from typing import Any

from autopar.errors import AutoparError, PlanError
from autopar.ir import earlier, reading
from autopar.ir.algorithm import algorithm_of_json, algorithm_to_json
from autopar.ir.consistency import check_consistent
from autopar.ir.inexact import GradientError
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Axis, format_placement, parse_placement, parse_type
from autopar.ir.plan import (
    EAGER,
    Alternative,
    Branch,
    Breakdown,
    Choice,
    Fork,
    GraphPlan,
    Move,
    NodePlan,
    Plan,
    Prediction,
    Redistribute,
    Refinement,
    Rewriting,
    SearchReport,
    SimulatedLink,
    Stage,
    Storage,
    Substitution,
)
from autopar.ir.redistribution import Step
from autopar.ir.routing import Routing
from autopar.ir.schedule import SCHEDULES
from autopar.ir.servers import Servers
from autopar.ir.tried import Tried

VERSION = 3
EIGHT_BITS = 8  # of a node that keeps its activations so
_TOLD = ("coverage", "sources", "parameters", "types", "scopes")
_PLAIN = ("fingerprint", "model", "schedule", "microbatches", "mode", "optimizer", "precision", "memory_limit")


@lru_cache(maxsize=1)
def schema() -> Any:
    """The JSON Schema of plan files (`autopar/ir/plan.schema.json`), with the names of schedules."""
    found = json.loads(files("autopar.ir").joinpath("plan.schema.json").read_text(encoding="utf-8"))
    found["properties"]["schedule"]["enum"] = [*SCHEDULES]
    return found


def to_json(plan: Plan) -> str:
    """The plan as JSON text with one entry a line, ending in a newline."""
    data: dict[str, Any] = {"autopar_plan": VERSION}
    data.update({name: getattr(plan, name) for name in _PLAIN})
    data |= {} if plan.training else {"training": False}
    data |= {} if plan.runs == EAGER else {"runs": plan.runs}
    data |= {"allow": list(plan.allow)} if plan.allow else {}
    data |= {"host_link": list(plan.host_link)} if plan.host_link else {}
    data |= {} if plan.routing is None else {"routing": plan.routing.to_json()}
    data |= {} if plan.algorithm is None else {"algorithm": algorithm_to_json(plan.algorithm)}
    data |= {} if plan.gradient_error is None else {"gradient_error": asdict(plan.gradient_error)}
    data["mesh"] = plan.mesh.to_json()
    data |= {} if plan.mesh.servers is None else {"servers": plan.mesh.servers.to_json()}
    data["microbatch_inputs"] = list(plan.microbatch_inputs)
    data["recompute"] = list(plan.recompute)
    data |= {"copied_out": list(plan.copied_out)} if plan.copied_out else {}
    data["stages"] = [_stage_to_json(stage) for stage in plan.stages]
    data["predicted"] = {name: value for name, value in asdict(plan.predicted).items() if value is not None}
    data["search"] = _search_to_json(plan.search)
    data.update({name: dict(getattr(plan, name)) for name in _TOLD})
    data["choices"] = [
        [c.name, c.kind, c.count, c.chosen, c.cost_ns, c.num_options, [list(a) for a in c.alternatives]]
        for c in plan.choices
    ]
    data["blocks"] = [list(paths) for paths in plan.blocks]
    data["checked_against_eager"] = plan.checked_against_eager
    data["substitutions"] = [_substitution_to_json(step) for step in plan.substitutions]
    return json.dumps(data, indent=1) + "\n"


def _search_to_json(search: SearchReport) -> dict[str, Any]:
    data = {**asdict(search), "tried": [row.told for row in search.tried]}
    return {name: value for name, value in data.items() if value is not None}


def _substitution_to_json(step: Substitution) -> dict[str, Any]:
    return {**asdict(step), "modules": list(step.modules), "roots": list(step.roots), "binding": dict(step.binding)}


def _stage_to_json(stage: Stage) -> dict[str, Any]:
    return {
        "first_rank": stage.first_rank,
        "axes": [_axis_to_json(axis) for axis in stage.axes],
        "inputs": {name: format_placement(placement) for name, placement in stage.inputs.items()},
        "storage": {
            name: [format_placement(kept.placement), kept.regather, kept.reduce_each_microbatch, *[True] * kept.on_host]
            for name, kept in stage.storage.items()
        },
        "nodes": {
            name: [
                [format_placement(p) for p in node.operands],
                [format_placement(p) for p in node.results],
                *([EIGHT_BITS] if node.in_eight_bits else [True] * node.in_bits),
            ]
            for name, node in stage.nodes.items()
        },
        "redistributes": [
            [r.tensor, format_placement(r.target), [_step_to_json(step) for step in r.steps]]
            for r in stage.redistributes
        ],
        "forks": [[fork.axis, [[b.coordinate, list(b.nodes)] for b in fork.branches]] for fork in stage.forks],
    }


def _step_to_json(step: Step) -> list[Any]:
    """[axis, before, after], and the parts of a sum by levels, or "servers"."""
    told = [step.parts] if step.parts > 1 else ["servers"] if step.is_served else []
    return [step.axis, str(step.before), str(step.after), *told]


def _axis_to_json(axis: Axis) -> list[Any]:
    """[name, size, stride], and the shares where there are any."""
    return [*axis[:3], list(axis.shares)] if axis.shares else list(axis[:3])


def from_json(text: str) -> Plan:
    """Reads a plan; one of an earlier version is stated as of this one.

    Raises PlanError for another version or anything the schema or types refuse, with its place.
    """
    try:
        data = reading.parsed(text)
    except reading.MalformedError as error:
        raise PlanError(f"expected a plan as JSON; {error}; write the plan again") from None
    version = data.get("autopar_plan") if isinstance(data, dict) else None
    if type(version) is not int or not 1 <= version <= VERSION:
        raise PlanError(f"expected a plan of version 1 to {VERSION}, found {version!r}; plan again with this autopar")
    try:
        data = earlier.as_of_now(data)
        reading.validate(data, _validator())
        plan = _plan(data) if version == VERSION else earlier.of_one_microbatch(_plan(data))
        check_consistent(plan)
    except (reading.MalformedError, AutoparError) as error:
        raise PlanError(f"expected a plan as its format says; {error}") from None
    return plan


@lru_cache(maxsize=1)
def _validator() -> Any:
    return reading.validator(schema())


def _plan(data: dict[str, Any]) -> Plan:
    return Plan(
        **{name: data[name] for name in (*_PLAIN, *_TOLD)},
        training=data.get("training", True),
        runs=data.get("runs", EAGER),
        allow=tuple(data.get("allow", ())),
        host_link=SimulatedLink(*data["host_link"]) if "host_link" in data else None,
        routing=Routing.from_json(data["routing"]) if "routing" in data else None,
        algorithm=algorithm_of_json(data["algorithm"]) if "algorithm" in data else None,
        gradient_error=GradientError(**data["gradient_error"]) if "gradient_error" in data else None,
        mesh=Mesh(
            [(name, nodes, devices) for name, nodes, devices in data["mesh"]],
            servers=Servers(**data["servers"]) if "servers" in data else None,
        ),
        stages=tuple(map(_stage, data["stages"])),
        microbatch_inputs=tuple(data["microbatch_inputs"]),
        recompute=tuple(data["recompute"]),
        copied_out=tuple(data.get("copied_out", ())),
        predicted=_prediction(data["predicted"]),
        search=_search(data["search"]),
        choices=tuple(map(_choice, data["choices"])),
        blocks=tuple(tuple(paths) for paths in data["blocks"]),
        substitutions=tuple(map(_substitution, data.get("substitutions", ()))),
        checked_against_eager=data.get("checked_against_eager", "no, the file does not say"),
    )


def _stage(data: dict[str, Any]) -> Stage:
    """The inverse of `_stage_to_json`."""
    return Stage(
        first_rank=data["first_rank"],
        axes=tuple(Axis(*axis[:3], *map(tuple, axis[3:])) for axis in data["axes"]),
        inputs={name: parse_placement(text) for name, text in data["inputs"].items()},
        storage={name: Storage(parse_placement(row[0]), *row[1:]) for name, row in data["storage"].items()},
        nodes={name: _node(*row) for name, row in data["nodes"].items()},
        redistributes=tuple(
            Redistribute(tensor, parse_placement(target), tuple(_step(step) for step in steps))
            for tensor, target, steps in data["redistributes"]
        ),
        forks=tuple(
            Fork(axis, tuple(Branch(coordinate, tuple(nodes)) for coordinate, nodes in branches))
            for axis, branches in data.get("forks", ())
        ),
    )


def _node(operands: list[str], results: list[str], kept: bool | int = False) -> NodePlan:
    is_eight = kept is not True and kept == EIGHT_BITS
    return NodePlan(
        tuple(map(parse_placement, operands)), tuple(map(parse_placement, results)), kept is True, is_eight
    )  # fmt: skip


def _step(row: list[Any]) -> Step:
    told = {"is_served": True} if row[3:] == ["servers"] else dict(zip(("parts",), row[3:], strict=False))
    return Step(row[0], parse_type(row[1]), parse_type(row[2]), **told)


def _choice(row: list[Any]) -> Choice:
    name, kind, count, chosen, cost_ns, num_options, alternatives = row
    return Choice(name, kind, count, chosen, cost_ns, num_options, tuple(Alternative(*item) for item in alternatives))


def _substitution(row: dict[str, Any]) -> Substitution:
    return Substitution(**{**row, "modules": tuple(row["modules"]), "roots": tuple(row["roots"])})


def _search(data: dict[str, Any]) -> SearchReport:
    refined, rewritten = data.get("refinement"), data.get("rewriting")
    told = {
        "tried": tuple(map(Tried.of, data["tried"])),
        "refinement": None if refined is None else _refinement(refined),
        "rewriting": None if rewritten is None else _rewriting(rewritten),
    }
    return SearchReport(**{**data, **told})


def _rewriting(data: dict[str, Any]) -> Rewriting:
    return Rewriting(**{**data, "graphs": tuple(GraphPlan(**row) for row in data["graphs"])})


def _refinement(data: dict[str, Any]) -> Refinement:
    rates, starts = ({name: (a, b) for name, (a, b) in data[key].items()} for key in ("rates", "starts"))
    trace, moves = tuple((a, b, c) for a, b, c in data["trace"]), tuple(Move(**move) for move in data["moves"])
    return Refinement(**{**data, "rates": rates, "starts": starts, "trace": trace, "moves": moves})


def _prediction(data: dict[str, Any]) -> Prediction:
    interval = data.get("step_time_interval_ns")
    odds = {} if interval is None else {"step_time_interval_ns": tuple(interval)}
    return Prediction(**{**data, "breakdown": Breakdown(**data["breakdown"]), **odds})
