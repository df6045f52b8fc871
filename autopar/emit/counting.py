"""What several microbatches are told of the whole batch before the first: counts that means divide by, and other sums.

    loss = Σ_microbatches Σ_samples loss_i / count        count = targets of all microbatches that are not ignored

Whatever follows from inputs alone can be summed so (P → R over microbatches): the count of a mask, a sum of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.emit.classes import INDENT, ClassWriter
from autopar.emit.early import chain, known_ahead, makers
from autopar.emit.names import Names
from autopar.errors import PlanError
from autopar.ir.mesh import MICROBATCH
from autopar.ir.plan import StagePlan
from autopar.ir.statements import Convert, Flat, Operate, Statement, Value
from autopar.ops.call import Call


def is_sum_ahead(statement: Statement, stage: StagePlan) -> bool:
    """Whether a conversion brings the sum over all microbatches."""
    steps = statement.redistribute.steps if isinstance(statement, Convert) else ()
    return bool(steps) and stage.axes[steps[0].axis].name == MICROBATCH and steps[0].before.kind == "P"


def without_summands(flat: Flat, stage: StagePlan) -> Flat:
    """What each microbatch runs: not what only serves such sums."""
    if not any(is_sum_ahead(statement, stage) for statement in flat.statements):
        return flat
    needed = {*flat.outputs, *flat.mutations.values(), *flat.leaving}
    kept: list[Statement] = []
    for statement in reversed(flat.statements):
        if needed.isdisjoint(statement.makes):
            continue
        if isinstance(statement, Convert) and is_sum_ahead(statement, stage):
            statement = replace(statement, reads=())
        needed.update(statement.reads)
        kept.append(statement)
    return replace(flat, statements=tuple(reversed(kept)))


def counting_lines(flat: Flat, writer: ClassWriter, inputs: Sequence[Value]) -> list[str]:
    """The method `prepare` of a program with such counts or sums, and those that it calls; else nothing.

    Raises PlanError where they do not follow from the inputs.
    """
    counting = _Counting(flat, writer, inputs)
    body: list[str] = []
    methods: list[str] = []
    for number, statement in enumerate(counting.wanted):
        suffix = f"_{number}" if number else ""
        text, method = counting.lines(statement, suffix)
        body += text
        methods += method
    if not body:
        return []
    head = f'{INDENT * 2}"""Counts and sums over all microbatches, which follow from the inputs alone."""'
    return ["", f"{INDENT}def prepare(self, microbatches):", head, *body, *methods]


class _Counting:
    def __init__(self, flat: Flat, writer: ClassWriter, inputs: Sequence[Value]) -> None:
        self.flat, self.writer, self.inputs = flat, writer, inputs
        self.statements = [*flat.constants, *flat.statements]
        self.made_by = makers(self.statements)
        self.known = known_ahead(writer.graph, writer.stage, inputs)
        sums: set[str] = set()
        self.wanted: list[Operate | Convert] = []
        for statement in flat.statements:
            if isinstance(statement, Operate):
                self.wanted += [statement] if writer.calls.is_mean_over_microbatches(statement) else []
            elif is_sum_ahead(statement, writer.stage) and statement.redistribute.tensor not in sums:
                sums.add(statement.redistribute.tensor)
                self.wanted.append(statement)

    def lines(self, statement: Operate | Convert, suffix: str) -> tuple[list[str], list[str]]:
        """What `prepare` does for it, and the method that it calls."""
        calls = self.writer.calls
        if isinstance(statement, Convert):
            method, name = f"summand{suffix}", statement.redistribute.tensor
            line = f"self.whole[{name!r}] = rt.total([self.{method}(*inputs) for inputs in microbatches])"
            where = f"{name}, which is summed over all microbatches,"
            return [INDENT * 2 + line], self._method(method, statement.reads[:1], where)
        method, node = f"targets{suffix}", statement.node
        where = f"the targets of {node.name} at {node.source}, which are counted over all microbatches,"
        axes, ignored = calls.sample_axes(statement), Call(self.writer.graph, node).arguments["ignore_index"]
        reduced = "(" + "".join(f'self.mesh["{axis}"], ' for axis in axes).rstrip(" ") + ")"
        counted = f"targets, {reduced}, ignore_index={ignored}"
        if len(statement.reads) > 2:
            text = [
                f"parts = [self.{method}(*inputs) for inputs in microbatches]",
                "targets, weight = torch.cat([part[0].flatten() for part in parts]), parts[0][1]",
                f"{calls.count_of(node.name)} = rt.valid_count({counted}, weight=weight)",
            ]
        else:
            text = [
                f"targets = torch.cat([self.{method}(*inputs).flatten() for inputs in microbatches])",
                f"{calls.count_of(node.name)} = rt.valid_count({counted})",
            ]
        return [INDENT * 2 + line for line in text], self._method(method, statement.reads[1:], where)

    def _method(self, method: str, values: Sequence[Value], where: str) -> list[str]:
        """Returns the values, of one microbatch."""
        chains = [chain(value, self.known, self.made_by, self._is_there) for value in values]
        found = [statement for made in chains if made is not None for statement in made]
        if any(made is None for made in chains):
            raise PlanError(f"expected {where} to follow from the inputs alone; use microbatches=1")
        inside = next((statement.home for statement in found if statement.home is not None), None)
        if inside is not None:
            raise PlanError(
                f"expected {where} to come from no branch, found one on axis {inside.axis}; use microbatches=1"
            )
        needed = {id(statement) for statement in found}
        names = Names({axis.name for axis in self.writer.stage.axes})
        for value in self.inputs:
            names.make(value, value[0])
        running = [replace(s, reads=()) if self._is_there(s) else s for s in self.statements if id(s) in needed]
        body = self.writer.body(running, "", names)
        every = [axis.name for axis in self.writer.stage.axes]
        return [
            "",
            f"{INDENT}def {method}({', '.join(['self', *(names[value] for value in self.inputs)])}):",
            *self.writer.axis_lines(body, every),
            *body,
            f"{INDENT * 2}return {', '.join(self.writer.read(value, '', names) for value in values)}",
        ]

    def _is_there(self, statement: Statement) -> bool:
        """Whether it only reads a sum that `prepare` has made before."""
        return is_sum_ahead(statement, self.writer.stage)
