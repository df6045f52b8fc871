"""Random programs as data, and as the source of an `nn.Module`.

A *body* is a list of statements over leaves (parameters and inputs) and earlier values; a block's body also reads
`x` and gives back a value of the same shape. Lengths are plain numbers: where one changes, it changes wherever it
stands, and the shapes of all values follow by running the statements on meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

INDENT = "    "


class Length(NamedTuple):
    """A length among a statement's arguments, which changes with all equal ones."""

    size: int


@dataclass(frozen=True)
class Leaf:
    """A parameter or a buffer, or an input: `float`, `ids` (below `high`, or −100 where `ignored`) or `mask`.

    `tied`: another name of that parameter.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    high: int = 0
    frozen: bool = False
    ignored: bool = False
    tied: str = ""

    @property
    def is_stored(self) -> bool:
        return self.kind in ("parameter", "buffer")

    @property
    def declaration(self) -> str:
        if self.tied:
            return f"self.{self.name} = self.{self.tied}"
        tensor = f"torch.empty({self.shape}, dtype=torch.float64)"
        if self.kind == "buffer":
            return f"self.register_buffer({self.name!r}, {tensor})"
        return f"self.{self.name} = nn.Parameter({tensor}{', requires_grad=False' if self.frozen else ''})"


@dataclass(frozen=True)
class Statement:
    """`result` = the operator on the operands, which are leaves or earlier results."""

    result: str
    op: str
    operands: tuple[str, ...]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Body:
    """Statements in order; `result` is what a block gives back."""

    leaves: tuple[Leaf, ...]
    statements: tuple[Statement, ...]
    result: str = ""


@dataclass(frozen=True)
class Program:
    """A model: its loss is the sum of the terms (value, how); further outputs come after it.

    How: a row of TERMS, or the leaf that holds a weight for each element, so that no two may be exchanged.
    """

    body: Body
    terms: tuple[tuple[str, str], ...]
    blocks: Mapping[str, Body] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    exact: bool = False  # integers stay integers, so that equality can be asked for
    seed: int = 0

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.body.leaves if not leaf.is_stored)

    @cached_property
    def num_statements(self) -> int:
        return len(self.body.statements) + sum(len(block.statements) for block in self.blocks.values())

    @cached_property
    def source(self) -> str:
        """The model's Python source; raises what torch raises where shapes do not fit."""
        return render(self)


TERMS = {
    "itself": "{}",
    "sum": "{}.sum()",
    "mean": "{}.mean()",
    "squares": "({} * {}).sum()",
    "mean of squares": "{}.square().mean()",
}

PRELUDE = """import torch
import torch.nn.functional as F
from torch import nn


def add_in_place(x, y):
    x = x.clone()
    x += y
    return x


def set_in_place(x, dim, start, end, value):
    x = x.clone()
    x.narrow(dim, start, end - start).mul_(value)
    return x
"""

_PRELUDE_SPACE: dict[str, Any] = {}
exec(PRELUDE, _PRELUDE_SPACE)  # the same text that models start with


def load(source: str, name: str = "model") -> Any:
    """Runs the source; the names it defines. Lines are found again in tracebacks and in traced graphs."""
    import linecache

    filename = f"<{name} {abs(hash(source)):x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    space: dict[str, Any] = {"__name__": name}
    exec(compile(source, filename, "exec"), space)
    return SimpleNamespace(**space)


def render(program: Program) -> str:
    """The source of the whole model."""
    classes = []
    shapes: dict[str, tuple[int, ...]] = {}
    writer = _Writer(program, shapes)
    init, forward, values = writer.body(program.body, {})
    terms = " + ".join(_term(program, name, how) for name, how in program.terms)
    for name, _ in program.terms:
        assert name in values, f"{name} is not there"
    classes += writer.classes
    names = [leaf.name for leaf in program.inputs]
    others = (f"{_read(program.body, name)}.detach()" for name in program.outputs)  # or they might be the loss
    returned = ", ".join([terms, *others])
    lines = [
        "class Model(nn.Module):",
        f"{INDENT}def __init__(self):",
        f"{INDENT * 2}super().__init__()",
        *(INDENT * 2 + line for line in init),
        "",
        f"{INDENT}def forward({', '.join(['self', *names])}):",
        *(INDENT * 2 + line for line in forward),
        f"{INDENT * 2}return {returned}",
    ]
    return "\n".join([PRELUDE, *("\n" + text for text in classes), "", *lines, ""])


def _term(program: Program, name: str, how: str) -> str:
    """A scalar; with weights of its own for each element, where `how` is a leaf of the value's shape."""
    read = _read(program.body, name)
    return TERMS[how].format(read, read) if how in TERMS else f"({read} * {_read(program.body, how)}).sum()"


def _read(body: Body, name: str) -> str:
    return f"self.{name}" if any(leaf.name == name and leaf.is_stored for leaf in body.leaves) else name


class _Writer:
    """Writes bodies, running each statement on meta tensors to know the shapes that the next ones are told."""

    def __init__(self, program: Program, shapes: dict[str, tuple[int, ...]]) -> None:
        self.program, self.shapes = program, shapes
        self.classes: list[str] = []
        self.written: dict[tuple[str, tuple[int, ...]], str] = {}

    def body(self, body: Body, given: Mapping[str, torch.Tensor]) -> tuple[list[str], list[str], dict[str, Any]]:
        init, forward = [], []
        values: dict[str, Any] = dict(given)
        for leaf in body.leaves:
            values[leaf.name] = meta_leaf(leaf)
            if leaf.is_stored:
                init.append(leaf.declaration)
        for statement in body.statements:
            more_init, text = self.statement(body, statement, values)
            init += more_init
            forward += text.splitlines()
        return init, forward, values

    def statement(self, body: Body, statement: Statement, values: dict[str, Any]) -> tuple[list[str], str]:
        from tests.random_programs.operators import OPERATORS

        if statement.op == "block":
            return self.block(body, statement, values)
        operator = OPERATORS[statement.op]
        operands = [values[name] for name in statement.operands]
        shapes = [tuple(value.shape) for value in operands]
        args = [arg.size if isinstance(arg, Length) else arg for arg in statement.args]
        names = [_read(body, name) for name in statement.operands]
        module = operator.module(shapes, args) if operator.module else ""
        text = operator.text([*names, f"self.m_{statement.result}"] if module else names, shapes, args)
        values[statement.result] = run_on_meta(operator, operands, shapes, args, module)
        init = [f"self.m_{statement.result} = {module}"] if module else []
        return init, f"{statement.result} = {text}"

    def block(self, body: Body, statement: Statement, values: dict[str, Any]) -> tuple[list[str], str]:
        name, count = statement.args
        operand = values[statement.operands[0]]
        made = self.block_class(name, operand)
        values[statement.result] = operand
        attribute = f"m_{statement.result}"
        read = _read(body, statement.operands[0])
        if count == 1:
            return [f"self.{attribute} = {made}()"], f"{statement.result} = self.{attribute}({read})"
        init = [f"self.{attribute} = nn.ModuleList({made}() for _ in range({count}))"]
        loop = f"for block in self.{attribute}:\n{INDENT}{statement.result} = block({statement.result})"
        return init, f"{statement.result} = {read}\n{loop}"

    def block_class(self, name: str, x: torch.Tensor) -> str:
        key = (name, tuple(x.shape))
        if key not in self.written:
            body = self.program.blocks[name]
            init, forward, values = self.body(body, {"x": x})
            result = values[body.result]
            if result.shape != x.shape or result.dtype != x.dtype:
                raise ValueError(f"{name} turns {tuple(x.shape)} into {tuple(result.shape)}")
            same = sum(other == name for other, _ in self.written)
            self.written[key] = made = name.capitalize() + (f"_{same}" if same else "")
            lines = [f"class {made}(nn.Module):", f"{INDENT}def __init__(self):", f"{INDENT * 2}super().__init__()"]
            lines += [INDENT * 2 + line for line in init]
            lines += ["", f"{INDENT}def forward(self, x):", *(INDENT * 2 + line for line in forward)]
            lines += [f"{INDENT * 2}return {_read(body, body.result)}", ""]
            self.classes.append("\n".join(lines))
        return self.written[key]


def run_on_meta(operator: Any, operands: list[Any], shapes: list[Any], args: list[Any], module: str) -> torch.Tensor:
    """The result's shape and dtype, as a meta tensor."""
    names = [f"o{position}" for position in range(len(operands))]
    space = {**_PRELUDE_SPACE, "torch": torch, "F": F, "nn": nn, "self": SimpleNamespace(training=True)}
    space |= dict(zip(names, operands, strict=True))
    if module:
        with torch.device("meta"):
            space["made"] = eval(module, space)
        names.append("made")
    with torch.no_grad():
        result = eval(operator.text(names, shapes, args), space)
    if not isinstance(result, torch.Tensor) or result.numel() == 0:
        raise ValueError(f"{operator.name} gives no elements")
    return result


def meta_leaf(leaf: Leaf) -> torch.Tensor:
    """A tensor of the leaf's shape and dtype without data."""
    dtype = {"ids": torch.int64, "mask": torch.bool}.get(leaf.kind, torch.float64)
    return torch.empty(leaf.shape, dtype=dtype, device="meta")


def bodies(program: Program) -> Iterator[Body]:
    """The model's own body and those of its blocks."""
    yield program.body
    yield from program.blocks.values()


def make_inputs(program: Program) -> dict[str, torch.Tensor]:
    """One global batch, the same for the same seed."""
    generator = torch.Generator().manual_seed(program.seed)
    return {leaf.name: _fill(leaf, generator, program.exact) for leaf in program.inputs}


def _fill(leaf: Leaf, generator: torch.Generator, exact: bool) -> torch.Tensor:
    if leaf.kind == "ids":
        ids = torch.randint(0, leaf.high, leaf.shape, generator=generator)
        if leaf.ignored:  # more at the front, so that ranks hold unequal counts
            flat = ids.view(-1)
            flat[: len(flat) // 3] = -100
        return ids
    if leaf.kind == "mask":
        return torch.rand(leaf.shape, generator=generator) < 0.6
    return random_values(leaf.shape, generator, exact)


def random_values(shape: tuple[int, ...], generator: torch.Generator, exact: bool) -> torch.Tensor:
    """Small integers when results are to be exact."""
    if exact:
        return torch.randint(-2, 3, shape, generator=generator).double()
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.7


def make_model(program: Program) -> nn.Module:
    """The model, with weights of the program's seed."""
    model: nn.Module = load(program.source).Model().double()
    generator = torch.Generator().manual_seed(program.seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(random_values(tuple(parameter.shape), generator, program.exact))
        for name, buffer in model.named_buffers():
            if name.rpartition(".")[2].startswith("b"):  # not batch norm's
                buffer.copy_(random_values(tuple(buffer.shape), generator, program.exact))
    return model
