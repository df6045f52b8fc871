"""The method of a program that tells microbatches of the whole batch before the first (`ops.ahead`)."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.emit.classes import INDENT, ClassWriter
from autopar.emit.names import Names
from autopar.errors import PlanError
from autopar.ir.statements import Convert, Value
from autopar.ops.ahead import Told
from autopar.ops.call import Call


def counting_lines(told: Sequence[Told], writer: ClassWriter, inputs: Sequence[Value]) -> list[str]:
    """The method `prepare` of a program with such counts or sums, and those that it calls; else nothing.

    Raises PlanError where they do not follow from the inputs.
    """
    counting = _Counting(writer, inputs)
    body: list[str] = []
    methods: list[str] = []
    for number, one in enumerate(told):
        suffix = f"_{number}" if number else ""
        text, method = counting.lines(one, suffix)
        body += text
        methods += method
    if not body:
        return []
    head = f'{INDENT * 2}"""Counts and sums over all microbatches, which follow from the inputs alone."""'
    return ["", f"{INDENT}def prepare(self, microbatches):", head, *body, *methods]


class _Counting:
    def __init__(self, writer: ClassWriter, inputs: Sequence[Value]) -> None:
        self.writer, self.inputs = writer, inputs

    def lines(self, told: Told, suffix: str) -> tuple[list[str], list[str]]:
        """What `prepare` does for it, and the method that it calls."""
        calls, statement = self.writer.calls, told.statement
        if isinstance(statement, Convert):
            method, name = f"summand{suffix}", statement.redistribute.tensor
            line = f"self.whole[{name!r}] = rt.total([self.{method}(*inputs) for inputs in microbatches])"
            return [INDENT * 2 + line], self._method(method, told, f"{name}, which is summed over all microbatches,")
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
        return [INDENT * 2 + line for line in text], self._method(method, told, where)

    def _method(self, method: str, told: Told, where: str) -> list[str]:
        """Returns the values, of one microbatch."""
        if told.makers is None:
            raise PlanError(f"expected {where} to follow from the inputs alone; use microbatches=1")
        inside = next((statement.home for statement in told.makers if statement.home is not None), None)
        if inside is not None:
            raise PlanError(
                f"expected {where} to come from no branch, found one on axis {inside.axis}; use microbatches=1"
            )
        names = Names({axis.name for axis in self.writer.stage.axes})
        for value in self.inputs:
            names.make(value, value[0])
        body = self.writer.body(told.makers, "", names)
        every = [axis.name for axis in self.writer.stage.axes]
        return [
            "",
            f"{INDENT}def {method}({', '.join(['self', *(names[value] for value in self.inputs)])}):",
            *self.writer.axis_lines(body, every),
            *body,
            f"{INDENT * 2}return {', '.join(self.writer.read(value, '', names) for value in told.values)}",
        ]
