"""emit: Graph + Plan -> the text of one Python module that `torchrun` can launch."""

from __future__ import annotations

from autopar.emit.calls import LOWERED
from autopar.emit.classes import INDENT, ClassWriter, Module, access
from autopar.emit.counting import counting_lines
from autopar.emit.early import count_lines, find_early
from autopar.emit.names import Names
from autopar.emit.tree import Region, build_tree
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import PlanData
from autopar.ir.statements import Flat, Value, flatten
from autopar.ir.structure import block_paths
from autopar.ir.verifier import MICROBATCH
from autopar.ops import defining_module

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


def emit(graph: Graph, plan: PlanData) -> str:
    """The program's source; it imports torch, `autopar.runtime`, and what defines the model's own operators.

    The plan must have been verified. Raises PlanError for several stages: not available yet.
    """
    if plan.stages:
        raise PlanError(
            f"expected a plan of one stage, found {len(plan.stages)} stages: such plans can be shown and simulated, "
            "but not emitted yet"
        )
    flat = flatten(graph, plan)
    blocks = block_paths(graph, plan.recompute)
    root = build_tree(flat.statements, [*flat.outputs, *flat.mutations.values()], "Program", blocks)
    writer = ClassWriter(graph, plan, flat)
    tree = writer.module_tree(root)
    writer.container_sizes = _containers(tree)
    writer.escaping = set(root.outputs)
    writer.late = set(flat.outputs) - {v for s in flat.statements for v in s.reads} - set(flat.mutations.values())
    classes: list[str] = []
    inner = _inner_modules(tree)
    for module in inner:
        writer.write_module(module, module.regions[0].class_name)
    for key, name in writer.texts.items():
        body = key.split("\n", 2)[2]
        paths = writer.instances[key]
        where = paths[0] if len(paths) == 1 else f"{paths[0]} … {paths[-1]} ({len(paths)} equal blocks)"
        classes.append(f'class {name}(rt.Block):\n{INDENT}"""{where}"""\n\n{body}\n')
    header = _HEADER.format(model=graph.model_name, mesh=plan.mesh, axes=_axes_text(plan), imports=_imports(graph))
    program = _program(graph, plan, flat, root, tree, writer)
    return "\n\n".join([header, *classes, program])


def _imports(graph: Graph) -> str:
    """A line for each module that defines operators of the graph, such as a custom kernel's."""
    modules = {defining_module(op): op for op in sorted({node.op for node in graph.nodes} - LOWERED, reverse=True)}
    lines = [f"import {module}  # defines {op.rpartition('.')[0]}" for module, op in modules.items() if module]
    return "".join(f"{line}\n" for line in sorted(lines))


def _program(graph: Graph, plan: PlanData, flat: Flat, root: Region, tree: Module, writer: ClassWriter) -> str:
    real = [axis for axis in plan.axes if axis.name != MICROBATCH]
    lines = [
        "class Program(rt.Program):",
        f'{INDENT}"""{graph.model_name}: the whole program of one rank."""',
        "",
    ]
    lines.append(f"{INDENT}AXES = { ({axis.name: axis.size for axis in real})!r}")
    lines.append(f"{INDENT}MICROBATCHES = {plan.microbatches}")
    if not graph.training:
        lines.append(f"{INDENT}TRAINING = False")
    lines.append(f"{INDENT}INPUTS = (")
    for name in graph.inputs:
        tensor = graph.kept(name)
        cut = 0 if name in plan.microbatch_inputs else None
        placement = writer.text(plan.inputs[name])
        extra = ("" if cut is None else f", microbatch_dim={cut}") + writer.compute(name)
        lines.append(f"{INDENT * 2}rt.Input({name!r}, {tensor.shape}, torch.{tensor.dtype}, {placement!r}{extra}),")
    lines += [f"{INDENT})", f"{INDENT}TIED = {dict(graph.tied)!r}", ""]
    lines += [
        f"{INDENT}def __init__(self, mesh: rt.RankMesh) -> None:",
        f"{INDENT * 2}super().__init__(mesh)",
    ]
    lines += [f"{INDENT * 2}{line}" for line in writer._init_lines(tree)]
    names = Names({axis.name for axis in plan.axes})
    constants = _constants(flat, root, writer, names)
    inputs = [(name, plan.inputs[name]) for name in graph.inputs]
    body_names = Names({axis.name for axis in plan.axes})
    for value in inputs:
        body_names.make(value, value[0])
    body = []
    if constants:
        lines += ["", *constants[0]]
        targets = [body_names.make(value, value[0]) for value in constants[1]]
        body.append(f"{INDENT * 2}{', '.join(targets)}{',' if len(targets) == 1 else ''} = self.constants()")
    lines += counting_lines(flat, writer, inputs)
    known = {*inputs, *(value for statement in flat.constants for value in statement.makes)}
    early = find_early(root.items, known, writer.calls)
    body += writer.body(early.moved, "", body_names)
    body += count_lines(early.losses, writer.calls, body_names, INDENT * 2)
    body += writer.body(early.rest, "", body_names)
    body += _updates(flat, writer, body_names)
    signature = ", ".join(["self", *(body_names[value] for value in inputs)])
    lines += ["", f"{INDENT}def forward({signature}):"]
    lines += writer.axis_lines(body, [axis.name for axis in real])
    returned = ", ".join(writer.read(value, "", body_names) for value in flat.outputs)
    return "\n".join([*lines, *body, f"{INDENT * 2}return {returned}", ""])


def _constants(flat: Flat, root: Region, writer: ClassWriter, names: Names) -> tuple[list[str], list[Value]] | None:
    """A method that computes, once, what depends on no input and no parameter."""
    made = {value for statement in flat.constants for value in statement.makes}
    read = [value for statement in root.statements() for value in statement.reads]
    wanted = [value for value in dict.fromkeys([*read, *flat.outputs]) if value in made]
    if not wanted:
        return None
    body = writer.body(flat.constants, "", names)
    axes = [axis.name for axis in writer.plan.axes if axis.name != MICROBATCH]
    returned = ", ".join(names[value] for value in wanted)
    lines = [
        f"{INDENT}@rt.computed_once",
        f"{INDENT}def constants(self):",
        *writer.axis_lines(body, axes),
        *body,
    ]
    return [*lines, f"{INDENT * 2}return ({returned},)"], wanted


def _updates(flat: Flat, writer: ClassWriter, names: Names) -> list[str]:
    """Assigns the buffers that forward updates; they are seen after the backward pass of the microbatch."""
    lines = []
    for buffer, value in flat.mutations.items():
        owner, _, last = buffer.rpartition(".")
        text = "self" + access(owner)
        lines.append(f"{INDENT * 2}{text}.update({last}={writer.read(value, '', names)})")
    return lines


def _axes_text(plan: PlanData) -> str:
    real = [f"{axis.name}={axis.size}" for axis in plan.axes if axis.name != MICROBATCH]
    return f"({', '.join(real)})" if real else "one device"


def _inner_modules(module: Module) -> list[Module]:
    from autopar.emit.classes import _with_regions

    return _with_regions(module)


def _containers(module: Module) -> dict[str, int]:
    found = {module.path: len(module.children)}
    for child in module.children.values():
        found.update(_containers(child))
    return found


__all__ = ["emit"]
