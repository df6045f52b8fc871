"""What a pipeline's source states beside its stages' code: inputs, what is received, how stages belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from autopar.emit.classes import INDENT, ClassWriter
from autopar.emit.literals import literal_text
from autopar.emit.names import escaped, keywords
from autopar.errors import PlanError
from autopar.ir.graph import Fields, Graph, Ref
from autopar.ir.mesh import MICROBATCH
from autopar.ir.offload import uses_host
from autopar.ir.placement import Axis, Placement, local_shape
from autopar.ir.plan import Plan
from autopar.ir.stages import gradients_back, leaving_placement, leaving_values, maker_of, stage_graph


def input_lines(
    graph: Graph, plan: Plan, names: Sequence[str], writer: ClassWriter | None = None
) -> list[str]:  # fmt: skip
    """The inputs that a program takes, with their placements where it has a writer of its own."""
    lines = [f"{INDENT}INPUTS = ("]
    for name in names:
        tensor = graph.kept(name)
        placement = "" if writer is None else f", {writer.text(writer.stage.inputs[name])!r}"
        extra = ", microbatch_dim=0" if name in plan.microbatch_inputs else ""
        compute = "" if writer is None else writer.compute(name)
        given = f"{graph.given_name(name)!r}, {tensor.shape}, torch.{tensor.dtype}"
        lines.append(f"{INDENT * 2}rt.Input({given}{placement}{extra}{compute}),")
    return [*lines, f"{INDENT})"]


def argument_lines(graph: Graph) -> list[str]:
    """What forward is given, where that is more than tensors."""
    if not graph.arguments:
        return []
    pairs = (f"{name!r}: {_tree_text(tree)}" for name, tree in graph.arguments)
    return [f"{INDENT}ARGUMENTS = {{{', '.join(pairs)}}}"]


def _tree_text(tree: Any) -> str:
    if isinstance(tree, Ref):
        return f"rt.Given({tree.tensor!r})"
    if isinstance(tree, Fields):
        return f"rt.Fields({keywords({name: _tree_text(item) for name, item in tree.items})})"
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{key!r}: {_tree_text(item)}' for key, item in tree.items())}}}"
    if isinstance(tree, (list, tuple)):
        inside = ", ".join(map(_tree_text, tree))
        return f"[{inside}]" if isinstance(tree, list) else f"({inside},)" if tree else "()"
    return literal_text(tree)


class Received(NamedTuple):
    """A tensor that a stage receives: its name, the stage that makes it, and what is said of it beside."""

    name: str
    source: int
    rest: tuple[str, ...]

    @property
    def text(self) -> str:
        shape, dtype, placement, *rest = self.rest
        return f"rt.Received({', '.join([repr(self.name), shape, dtype, placement, f'source={self.source}', *rest])})"


def received(graph: Graph, plan: Plan, index: int, writer: ClassWriter) -> list[Received]:
    """What a stage receives from which others, by the shape of one microbatch."""
    found = []
    for name in stage_graph(graph, plan, index).received:
        source = maker_of(graph, plan, index, name)
        left = leaving_placement(graph, plan, index, name)
        position = leaving_values(graph, plan, source).index((name, left))
        tensor, placement = graph.tensors[name], plan.stages[index].inputs[name]
        shape = _microbatch_shape(tensor.shape, placement, plan.stages[index].axes)
        parts = [str(shape), f"torch.{tensor.dtype}", repr(writer.text(placement)), f"position={position}",
                 f"left={_text(left, plan.stages[source].axes)!r}"]  # fmt: skip
        parts += [] if name in gradients_back(graph, plan)[index] else ["has_gradient=False"]
        found.append(Received(name, source, tuple(parts)))
    return found


def _text(placement: Placement, axes: Sequence[Axis]) -> str:
    return " ".join(str(t) for t, axis in zip(placement, axes, strict=True) if axis.name != MICROBATCH)


def _microbatch_shape(shape: tuple[int, ...], placement: Placement, axes: Sequence[Axis]) -> tuple[int, ...]:
    cut = [(type_, axis) for type_, axis in zip(placement, axes, strict=True) if axis.name == MICROBATCH]
    return local_shape(shape, tuple(type_ for type_, _ in cut), tuple(axis for _, axis in cut))


def link_lines(plan: Plan) -> list[str]:
    """The simulated link to the host, where the plan keeps something there."""
    if plan.host_link is None or not uses_host(plan):
        return []
    down, up, copy_ns = plan.host_link
    rates = f"down_bandwidth={down!r}, up_bandwidth={up!r}, copy_ns={copy_ns}"
    return [f"{INDENT}HOST_LINK = rt.LinkRates({rates})  # bytes a second, each way"]


def pipeline(graph: Graph, plan: Plan, name: str, prefix: str) -> str:
    """The class of this name, which names the stages: the prefix with their numbers. Raises PlanError where the loss is
    not made by the last stage."""
    count = len(plan.stages)
    returned = [stage_graph(graph, plan, index).returned for index in range(count)]
    if graph.loss is not None and graph.loss not in returned[-1]:
        raise PlanError(
            f"expected the last of {count} stages to make the loss {graph.loss}, found it in an earlier one"
        )
    makers = [next(i for i, names in enumerate(returned) if name in names) for name in graph.outputs]
    outputs = [(i, returned[i].index(name)) for i, name in zip(makers, graph.outputs, strict=True)]
    lines = [
        f"class {name}(rt.Pipeline):",
        f'{INDENT}"""{escaped(graph.model_name)}: {count} stages, of which each rank builds its own."""',
        "",
        f"{INDENT}STAGES = ({', '.join(f'{prefix}{index}' for index in range(count))})",
        f"{INDENT}SCHEDULE = {plan.schedule!r}",
        f"{INDENT}MICROBATCHES = {plan.microbatches}",
        *link_lines(plan),
        *([] if graph.training else [f"{INDENT}TRAINING = False"]),
        *input_lines(graph, plan, graph.inputs),
        *argument_lines(graph),
        f"{INDENT}OUTPUTS = {tuple(outputs)!r}  # (stage, position) of each",
        f"{INDENT}TIED = {dict(graph.tied)!r}",
        "",
    ]
    return "\n".join(lines)
