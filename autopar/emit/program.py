"""emit: Graph + Plan -> the text of one Python module that `torchrun` can launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from types import MappingProxyType

from autopar.emit.again import made_again
from autopar.emit.classes import INDENT, Classes, ClassWriter, walk
from autopar.emit.counting import counting_lines
from autopar.emit.early import count_lines, find_early
from autopar.emit.folding import Folding
from autopar.emit.literals import unsaved_text
from autopar.emit.module import Module
from autopar.emit.names import Names, escaped, keywords
from autopar.emit.once import made_once
from autopar.emit.stages import Received, argument_lines, input_lines, link_lines, pipeline, received
from autopar.emit.tree import build_tree
from autopar.ir.faults import faults_told
from autopar.ir.graph import Graph
from autopar.ir.mesh import MICROBATCH, ranks_within_node
from autopar.ir.plan import Plan, Stage, StagePlan
from autopar.ir.recompute import modules_again
from autopar.ir.servers import split
from autopar.ir.shares import axis_text
from autopar.ir.stages import leaving_values, stage_graph
from autopar.ir.statements import Flat, Value, flatten
from autopar.ir.structure import block_paths
from autopar.microbatch import on_microbatch_axis
from autopar.ops import defining_module
from autopar.ops.ahead import ToldAhead
from autopar.ops.experts import joined_axes
from autopar.ops.table import LOWERED

_HEADER = '''"""{model} on {mesh} as {axes}. Emitted by autopar; every statement names the line it comes from.

Local operators run on this rank's shards; communication happens only in `redistribute`, in functions of `rt` that say
what they send, and where a parameter's stored placement differs from its use. Types: S(d) slices, R equal (gradient:
summands), I equal, P summands.
"""

import torch
{imports}from torch import nn

from autopar import runtime as rt
from autopar.runtime import redistribute

aten = torch.ops.aten
'''

_NOTHING: Mapping[str, float | None] = MappingProxyType({})


@faults_told()
def emit(
    graph: Graph, plan: Plan, others: Sequence[tuple[Graph, Plan]] = (),
    filling: Mapping[str, float | None] = _NOTHING, *, is_traced: bool = False,
) -> str:  # fmt: skip
    """The program's source; it imports torch, `autopar.runtime`, and what defines the model's own operators.

    graph: of the step. others: of steps of other shapes, under the same placements. filling: by input, the value of
    rows that short batches are filled up with, None for the first row's. The plans must have been verified.
    is_traced: whether each statement names its event in a profiler's trace (`runtime.tracing`).
    Raises PlanError for what cannot be emitted.
    """
    classes = Classes(is_traced=is_traced)
    programs = _programs(graph, plan, classes, "")
    for number, other in enumerate(others, 1):
        programs += _programs(*other, classes, str(number))
    if others:
        names = ", ".join(f"Program{number}" for number in range(1, len(others) + 1))
        programs.append(f"Program.OTHERS = ({names},)  # the same for inputs of other shapes\n")
    if filling:
        programs.append(f"Program.FILLING = {dict(filling)!r}  # rows of short batches that count for nothing\n")
    plan = on_microbatch_axis(graph, plan)
    header = _HEADER.format(
        model=escaped(graph.model_name), mesh=escaped(str(plan.mesh)), axes=_axes_text(plan), imports=_imports(graph)
    )
    return "\n\n".join([header, *_class_texts(classes), *programs])


def _programs(graph: Graph, plan: Plan, classes: Classes, number: str) -> list[str]:
    """The program of one shape of inputs, or its stages and what they belong to; those of other shapes have numbers."""
    plan = on_microbatch_axis(graph, plan)
    if len(plan.stages) > 1:
        prefix = f"Stage{number}_" if number else "Stage"
        return [*_stage_programs(graph, plan, classes, prefix), pipeline(graph, plan, f"Program{number}", prefix)]
    return [_program(_Written(graph, plan.parts[0], classes, f"Program{number}"))]


class _Written:
    """A program, or a stage of one, with the classes of its blocks written."""

    def __init__(
        self, graph: Graph, stage: StagePlan, classes: Classes, name: str, leaving: Sequence[Value] = ()
    ) -> None:  # fmt: skip
        self.graph, self.stage, self.name = graph, stage, name
        self.ahead = ToldAhead(graph, stage, made_once(graph, stage, flatten(graph, stage, leaving)))
        self.flat = flat = self.ahead.left
        ends = [*flat.outputs, *flat.mutations.values(), *flat.leaving]
        blocks, is_again = block_paths(graph, modules_again(stage.recompute)), made_again(graph, stage.recompute)
        self.root = build_tree(flat.statements, ends, name, blocks, flat.hosts, is_again)
        self.folding = Folding(graph, flat, self.root)
        self.writer = writer = ClassWriter(graph, stage, flat, classes)
        self.tree = writer.module_tree(self.root)
        writer.containers = _containers(self.tree)
        writer.escaping = set(self.root.outputs)
        read = {value for statement in flat.statements for value in statement.reads}
        writer.late = set(flat.outputs) - read - set(flat.mutations.values()) - set(flat.leaving)
        for module in self.tree.with_regions():
            writer.write_module(module)


def _class_texts(classes: Classes) -> list[str]:
    found = []
    for key, name in classes.texts.items():
        (_, body), paths = key, classes.instances[key]
        named = paths[0] if paths[0] == paths[-1] else f"{paths[0]} … {paths[-1]}"
        where = named if len(paths) == 1 else f"{named} ({len(paths)} equal blocks)"
        found.append(f'class {name}(rt.Block):\n{INDENT}"""{escaped(where)}"""\n\n{body}\n')
    return found


def _imports(graph: Graph) -> str:
    """A line for each module that defines operators of the graph, such as a custom kernel's."""
    modules = {defining_module(op): op for op in sorted({node.op for node in graph.nodes} - LOWERED, reverse=True)}
    lines = [f"import {module}  # defines {escaped(op.rpartition('.')[0])}" for module, op in modules.items() if module]
    return "".join(f"{line}\n" for line in sorted(lines))


def _program(what: _Written) -> str:
    lines = [
        f"class {what.name}(rt.Program):",
        f'{INDENT}"""{escaped(what.graph.model_name)}: the whole program of one rank."""',
        "",
        *_declarations(what),
        *argument_lines(what.graph),
        f"{INDENT}TIED = {dict(what.graph.tied)!r}",
    ]
    return "\n".join([*lines, *_methods(what)])


def _stage_programs(graph: Graph, plan: Plan, classes: Classes, prefix: str) -> list[str]:
    """The class of each stage, whose name is the prefix with its number; of stages that differ in no more than ranks,
    numbers of modules and where they receive from, of the first alone, and a line for each run of others."""
    texts: list[str] = []
    known: dict[tuple[str, ...], int] = {}
    for index, stage in enumerate(plan.stages):
        part = stage_graph(graph, plan, index)
        what = _Written(part, plan.parts[index], classes, f"{prefix}{index}", leaving_values(graph, plan, index))
        told = received(graph, plan, index, what.writer)
        results = "".join(f"torch.{part.tensors[name].dtype}, " for name in part.returned).rstrip(" ")
        rest = "\n".join([*_declarations(what), f"{INDENT}RESULTS = ({results})", *_methods(what)])
        like = known.setdefault((rest, *(text for one in told for text in one.rest)), index)
        first, where = tuple(what.writer.firsts.values()), _ranks_text(stage.ranks)
        if like == index:
            where = f"Stage {index} of {escaped(graph.model_name)}, on {where} as {_stage_axes_text(stage)}."
            texts.append("\n".join([*_stage_head(what.name, where, stage.first_rank, first, told), rest]))
        else:
            pairs = tuple((one.name, one.source) for one in told)
            line = f"{prefix}{index} = {prefix}{like}.again({index}, {stage.first_rank}, {first}, {pairs})  # {where}\n"
            if texts[-1].startswith("class"):
                texts.append(line)
            else:
                texts[-1] += line
    return texts


def _stage_head(name: str, where: str, first_rank: int, first: tuple[int, ...], told: Sequence[Received]) -> list[str]:
    lines = [f"class {name}(rt.Stage):", f'{INDENT}"""{where}"""', "", f"{INDENT}FIRST_RANK = {first_rank}"]
    lines += [f"{INDENT}FIRST = {first}"] if first else []
    each = [f"{INDENT * 2}{one.text}," for one in told]
    return [*lines, f"{INDENT}RECEIVED = (", *each, f"{INDENT})"] if told else lines


def _ranks_text(ranks: range) -> str:
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks.stop - 1}"


def _declarations(what: _Written) -> list[str]:
    """What the runtime must know of the program before it builds it."""
    real = {axis.name: axis.size for axis in what.stage.axes if axis.name != MICROBATCH}
    lines = [f"{INDENT}AXES = {real!r}", f"{INDENT}MICROBATCHES = {what.stage.microbatches}"]
    if joined := joined_axes(what.graph, what.stage.nodes, what.stage.axes):
        lines.append(f"{INDENT}JOINED = {joined!r}")
    if what.graph.ends is None:
        lines += link_lines(what.stage.plan)
    lines += _server_lines(what.stage.plan)
    shares = {axis.name: axis.shares for axis in what.stage.axes if axis.shares}
    lines += [f"{INDENT}SHARES = {shares!r}"] if shares else []
    if (algorithm := what.stage.plan.algorithm) is not None:
        told = ", ".join(repr(value) for value in astuple(algorithm))
        lines.append(f"{INDENT}ALGORITHM = rt.Algorithm({told})  # {algorithm}")
    if values := unsaved_text(what.graph):
        lines.append(f"{INDENT}BUFFERS = {{{values}}}")
    if not what.graph.training:
        lines.append(f"{INDENT}TRAINING = False")
    given = [name for name in what.graph.inputs if name not in what.graph.received]
    return [*lines, *input_lines(what.graph, what.stage.plan, given, what.writer)]


def _server_lines(plan: Plan) -> list[str]:
    """How many servers sum gradients, and how many parts of one a worker sums, and a server, by axis."""
    servers = plan.mesh.servers
    if servers is None or not plan.uses_servers:
        return []
    axes = plan.stages[0].axes
    places = {step.axis for item in plan.stages[0].redistributes for step in item.steps if step.is_served}
    per_node, nodes = plan.mesh.devices_per_node, plan.mesh.nodes
    parts = tuple(
        (axis.name, split(servers, axis.size, ranks_within_node(axis, per_node), nodes))
        for axis in (axes[place] for place in sorted(places))
    )
    return [f"{INDENT}SERVERS = rt.Servers({servers.count}, {parts!r})"]


def _methods(what: _Written) -> list[str]:
    """`__init__`, what is computed once or counted ahead, and `forward`."""
    graph, stage, flat, root, writer = what.graph, what.stage, what.flat, what.root, what.writer
    is_stage = not what.name.startswith("Program")
    firsts = {
        path: f"self.FIRST[{number}]" if is_stage else str(first)
        for number, (path, first) in enumerate(writer.first_numbers(what.tree).items())
    }
    lines = [
        "",
        f"{INDENT}def __init__(self, mesh: rt.RankMesh) -> None:",
        f"{INDENT * 2}super().__init__(mesh)",
        *(f"{INDENT * 2}{line}" for line in writer.init_lines(what.tree, firsts)),
    ]
    names = Names({axis.name for axis in stage.axes})
    lines += writer.part_methods(what.tree)
    constants = _constants(what.folding, writer, names)
    inputs = [(name, stage.inputs[name]) for name in graph.inputs if name not in graph.received]
    told = [(name, stage.inputs[name]) for name in graph.received]
    body_names = Names({axis.name for axis in stage.axes})
    for value in inputs:
        body_names.make(value, graph.given_name(value[0]))
    for value in told:
        body_names.make(value, writer.hint(value))
    body: list[str] = []
    if constants:
        lines += ["", *constants[0]]
        targets = [body_names.make(value, value[0]) for value in constants[1]]
        body.append(f"{INDENT * 2}{', '.join(targets)}{',' if len(targets) == 1 else ''} = self.constants()")
    lines += counting_lines(what.ahead.told, writer, inputs)
    known = {*inputs, *(value for statement in flat.constants for value in statement.makes)}
    early = find_early(root.items, known, writer.calls)
    body += writer.body(early.moved, "", body_names)
    body += count_lines(early.losses, writer.calls, body_names, INDENT * 2)
    body += writer.body(early.rest, "", body_names)
    body += _updates(flat, writer, body_names)
    signature = ", ".join(["self", *(body_names[value] for value in (*inputs, *told))])
    remakes = [f"{INDENT}@rt.remaking"] if any(region.is_again for region in walk(root)) else []
    remakes += [f"{INDENT}@rt.offloading"] if any(region.path in stage.copied_out for region in walk(root)) else []
    lines += ["", *remakes, f"{INDENT}def forward({signature}):"]
    lines += writer.axis_lines(body, [axis.name for axis in stage.axes if axis.name != MICROBATCH])
    lines[:0] = writer.ranges.declaration(INDENT) if writer.ranges else []
    outputs, leaving = ([writer.read(value, "", body_names) for value in v] for v in (flat.outputs, flat.leaving))
    returned = f"({_tuple(outputs)}), ({_tuple(leaving)})" if is_stage else ", ".join(outputs)
    return [*lines, *body, f"{INDENT * 2}return {returned}", ""]


def _tuple(items: Sequence[str]) -> str:
    return ", ".join(items) + ("," if len(items) == 1 else "")


def _constants(folding: Folding, writer: ClassWriter, names: Names) -> tuple[list[str], list[Value]] | None:
    """A method that computes, once, what depends on no input and on nothing that a step changes."""
    wanted = folding.wanted
    return (writer.constants_method("constants", folding.statements, wanted, "", names), wanted) if wanted else None


def _updates(flat: Flat, writer: ClassWriter, names: Names) -> list[str]:
    """Assigns the buffers that forward updates; they are seen after the backward pass of the microbatch."""
    lines = []
    for buffer, value in flat.mutations.items():
        owner, _, last = writer.attributes.path(buffer).rpartition(".")
        new = keywords({last: writer.read(value, "", names)})
        lines.append(f"{INDENT * 2}self{writer.below('', owner)}.update({new})")
    return lines


def _axes_text(plan: Plan) -> str:
    if len(plan.stages) > 1:
        return f"{len(plan.stages)} stages ({plan.schedule}, {plan.microbatches} microbatches)"
    return _stage_axes_text(plan.stage)


def _stage_axes_text(stage: Stage) -> str:
    real = [axis_text(axis) for axis in stage.axes if axis.name != MICROBATCH]
    return f"({', '.join(real)})" if real else "one device"


def _containers(module: Module) -> dict[str, list[str]]:
    found = {module.path: list(module.children)}
    for child in module.children.values():
        found.update(_containers(child))
    return found
