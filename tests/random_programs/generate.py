"""Draws random programs: statements over a growing pool of values, some of them in blocks that repeat."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from tests.random_programs.operators import OPERATORS, NoOperands, Operator
from tests.random_programs.programs import (
    Body,
    Leaf,
    Length,
    Program,
    Statement,
    bodies,
    make_inputs,
    make_model,
    meta_leaf,
    run_on_meta,
)

T = TypeVar("T")
LENGTHS = (2, 3, 4, 5, 6, 6, 7, 8, 8, 10, 12)
MAX_ELEMENTS, MAX_RANK = 3000, 4


class Pool:
    """The values and leaves of a body under construction, and the choices an operator makes among them."""

    def __init__(self, rng: random.Random, exact: bool, batch: int | None, prefix: str = "") -> None:
        self.rng, self.exact, self.batch, self.prefix = rng, exact, batch, prefix
        self.leaves: list[Leaf] = []
        self.statements: list[Statement] = []
        self.known: dict[str, torch.Tensor] = {}
        self.recent: list[str] = []
        self.no_inputs = False

    # choices

    def pick(self, options: Sequence[T]) -> T:
        return self.rng.choice(options)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def length(self) -> int:
        return self.pick(LENGTHS)

    def short_shape(self, rank: int) -> tuple[int, ...]:
        sizes = [self.pick(LENGTHS[:8]) for _ in range(self.rng.randint(1, rank))]
        return tuple([self.batch, *sizes[1:]] if self.batch else sizes)

    def image_shape(self) -> tuple[int, ...]:
        return (self.batch or self.pick([2, 4, 6]), self.pick([2, 4, 6]), self.pick([4, 6]), self.pick([4, 5, 6]))

    # values

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.known[name].shape)

    def values(
        self, kind: str = "float", rank: int | None = None, min_rank: int = 0, max_rank: int = MAX_RANK
    ) -> list[str]:
        dtype = {"float": torch.float64, "bool": torch.bool, "int": torch.int64}[kind]
        fits = range(min_rank, max_rank + 1) if rank is None else (rank,)
        return [n for n in self.recent if self.known[n].dtype == dtype and self.known[n].dim() in fits]

    def value(self, **wanted: Any) -> str:
        """One of the values, rather a late one."""
        found = self.values(**wanted)
        if not found:
            raise NoOperands
        return found[max(self.rng.randrange(len(found)), self.rng.randrange(len(found)))]

    def dim(self, name: str) -> int:
        return self.rng.randrange(len(self.shape(name)))

    def long_dim(self, name: str) -> int:
        dims = [dim for dim, size in enumerate(self.shape(name)) if size > 1]
        if not dims:
            raise NoOperands
        return self.pick(dims)

    def broadcasts(self, name: str, to: str) -> bool:
        try:
            return tuple(torch.broadcast_shapes(self.shape(name), self.shape(to))) == self.shape(to)
        except RuntimeError:
            return False

    def partner(self, name: str, same: bool = False) -> str:
        """Something that is added to or multiplied with a value."""
        found = [other for other in self.values() if self.broadcasts(other, name)]
        if found and self.chance(0.65):
            return self.pick(found)
        shape = self.shape(name)
        if not same and self.chance(0.6):
            shape = shape[self.rng.randrange(len(shape) + 1) :]
            shape = tuple(1 if self.chance(0.2) else size for size in shape)
        return self.leaf(shape)

    def same_shape(self) -> tuple[list[str], tuple[Any, ...]]:
        name = self.value()
        same = [other for other in self.values() if self.shape(other) == self.shape(name)]
        return [name, self.pick(same)], ()

    # leaves

    def leaf(self, shape: tuple[int, ...]) -> str:
        """A parameter of the shape, perhaps one that is used already; now and then frozen, or an input."""
        same = [leaf for leaf in self.leaves if leaf.kind == "parameter" and leaf.shape == shape]
        if same and self.chance(0.35):
            return self.pick(same).name
        if same and self.chance(0.2):
            first = self.pick(same)
            return self._add(
                Leaf(self._name("p"), "parameter", shape, frozen=first.frozen, tied=first.tied or first.name)
            )
        if self.chance(0.1) and not self.no_inputs:
            return self.input("float", shape)
        if self.chance(0.06):
            return self._add(Leaf(self._name("b"), "buffer", shape))
        return self._add(Leaf(self._name("p"), "parameter", shape, frozen=self.chance(0.1)))

    def leaf_or_value(self, shape: tuple[int, ...]) -> str:
        same = [name for name in self.values() if self.shape(name) == shape]
        return self.pick(same) if same and self.chance(0.7) else self.leaf(shape)

    def input(self, kind: str, shape: tuple[int, ...], high: int = 0, ignored: bool = False) -> str:
        if self.no_inputs:
            raise NoOperands
        same = [
            leaf.name for leaf in self.leaves
            if (leaf.kind, leaf.shape, leaf.high, leaf.ignored) == (kind, shape, high, ignored)
        ]  # fmt: skip
        if same and self.chance(0.5):
            return self.pick(same)
        return self._add(Leaf(self._name("i"), kind, shape, high, ignored=ignored))

    def _name(self, letter: str) -> str:
        return f"{letter}{len(self.leaves)}"

    def _add(self, leaf: Leaf) -> str:
        self.leaves.append(leaf)
        self.known[leaf.name] = meta_leaf(leaf)
        if not leaf.is_stored and leaf.kind != "ids":
            self.recent.append(leaf.name)
        return leaf.name

    # statements

    def step(self, operator: Operator | None = None) -> bool:
        """Adds a statement; whether it found operands and a result of moderate size."""
        operators = [op for op in OPERATORS.values() if op.exact or not self.exact]
        operator = operator or self.rng.choices(operators, [op.weight for op in operators])[0]
        held = list(self.leaves), dict(self.known), list(self.recent)
        try:
            operands, args = operator.propose(self)
            result = self._run(operator, operands, args)
        except (NoOperands, RuntimeError, ValueError, IndexError):
            self.leaves, self.known, self.recent = held
            return False
        self._keep(operator.name, operands, args, result)
        return True

    def _run(self, operator: Operator, operands: list[str], args: tuple[Any, ...]) -> torch.Tensor:
        values = [self.known[name] for name in operands]
        shapes = [tuple(value.shape) for value in values]
        plain = [arg.size if isinstance(arg, Length) else arg for arg in args]
        module = operator.module(shapes, plain) if operator.module else ""
        result = run_on_meta(operator, values, shapes, plain, module)
        if result.numel() > MAX_ELEMENTS or result.dim() > MAX_RANK:
            raise ValueError("too large")
        if self.batch and result.dim() and result.shape[0] != self.batch:
            raise ValueError("not by samples")
        return result

    def _keep(self, op: str, operands: list[str], args: tuple[Any, ...], result: torch.Tensor) -> str:
        name = f"v{len(self.statements)}"
        self.statements.append(Statement(name, op, tuple(operands), args))
        self.known[name] = result
        self.recent.append(name)
        return name

    def grow(self, count: int) -> None:
        for _ in range(count * 20):
            if len(self.statements) >= count:
                return
            self.step()


def random_program(seed: int, size: int = 12, by_samples: float = 0.35) -> Program:
    """The program of a seed, with about `size` statements; its loss depends on a parameter, and is finite.

    by_samples: how likely every value has a row for each sample, as microbatches need.
    """
    for attempt in range(100):
        program = _draw(random.Random(f"{seed}/{attempt}"), seed, size, by_samples=by_samples)
        if is_usable(program):
            return program
    raise AssertionError(f"no program for seed {seed}")


def program_with(op: str, seed: int) -> Program:
    """A small program that has the operator."""
    for attempt in itertools.count():
        program = _draw(random.Random(f"{op}/{seed}/{attempt}"), seed, 4, op)
        if any(statement.op == op for body in bodies(program) for statement in body.statements) and is_usable(program):
            return program
    raise AssertionError("unreachable")


def is_usable(program: Program) -> bool:
    """Whether the model runs, and its loss is a finite number that depends on a parameter."""
    try:
        found = make_model(program)(**make_inputs(program))
    except (RuntimeError, ValueError, IndexError, AssertionError, KeyError, AttributeError, NameError):
        return False
    loss = found[0] if isinstance(found, tuple) else found
    return bool(loss.requires_grad and loss.dim() == 0 and loss.isfinite() and loss.abs() < 1e15)


def _draw(rng: random.Random, seed: int, size: int, wanted: str = "", by_samples: float = 0.35) -> Program:
    exact = rng.random() < 0.5 and (not wanted or OPERATORS[wanted].exact)
    batch = rng.choice([4, 6, 8, 12]) if rng.random() < by_samples else None
    pool = Pool(rng, exact, batch)
    _start(pool)
    blocks: dict[str, Body] = {}
    count = rng.randint(3, size)
    pool.grow(count // 2)
    for _ in range(0 if wanted else rng.choice([0, 0, 1, 1, 2])):
        _add_block(pool, blocks, depth=0)
    for _ in range(5 if wanted else 0):
        if pool.step(OPERATORS[wanted]):
            break
    pool.grow(count)
    body, terms, outputs = _finish(pool)
    return prune(Program(body, terms, blocks, outputs, exact, seed))


def _start(pool: Pool) -> None:
    for _ in range(pool.rng.randint(1, 3)):
        sizes = [pool.length() for _ in range(pool.rng.choice([2, 2, 3]))]
        shape = tuple([pool.batch, *sizes[1:]] if pool.batch else sizes)
        if math.prod(shape) <= MAX_ELEMENTS:
            pool.input("float", shape)
    if not pool.recent:
        pool.input("float", (6, 8))


def _add_block(pool: Pool, blocks: dict[str, Body], depth: int) -> None:
    """A body from some value to another of its shape: some statements and a way back, called once or several times."""
    operands = pool.values(min_rank=2)
    if not operands:
        return
    x = pool.pick(operands)
    inner = Pool(pool.rng, pool.exact, pool.batch)
    inner.no_inputs = True
    inner.known["x"] = pool.known[x]
    inner.recent.append("x")
    if depth == 0 and pool.chance(0.4):
        _add_block(inner, blocks, depth=1)
    inner.grow(len(inner.statements) + pool.rng.randint(1, 4))
    result = _way_back(inner, pool.shape(x))
    if result is None:
        return
    name = f"block{len(blocks)}"
    blocks[name] = Body(tuple(inner.leaves), tuple(inner.statements), result)
    count = pool.rng.choice([1, 1, 2, 3]) if not _has_state(blocks[name], blocks) else 1
    pool._keep("block", [x], (name, count), pool.known[x])


def _has_state(body: Body, blocks: dict[str, Body]) -> bool:
    return any(
        s.op == "batch_norm" or (s.op == "block" and _has_state(blocks[s.args[0]], blocks)) for s in body.statements
    )


def _way_back(pool: Pool, shape: tuple[int, ...]) -> str | None:
    """A value of the block's shape that something was done to: the last such, or one more projection."""
    same = [s.result for s in pool.statements if pool.known[s.result].shape == shape]
    floats = [name for name in same if pool.known[name].dtype == torch.float64]
    if floats and pool.chance(0.5):
        return floats[-1]
    leading = [n for n in pool.values(min_rank=1) if pool.shape(n)[:-1] == shape[:-1]]
    if not leading:
        return floats[-1] if floats else None
    last = leading[-1]
    operator = OPERATORS["nn.Linear"]
    args = (Length(shape[-1]), pool.chance(0.5))
    try:
        made = pool._run(operator, [last], args)
    except ValueError:  # the value is not one row a sample, as the program's are
        return floats[-1] if floats else None
    return pool._keep("add", ["x", pool._keep("nn.Linear", [last], args, made)], (), pool.known["x"])


def _finish(pool: Pool) -> tuple[Body, tuple[tuple[str, str], ...], tuple[str, ...]]:
    """The loss: what nothing reads, and some that something does."""
    read = {name for statement in pool.statements for name in statement.operands}
    floats = [s.result for s in pool.statements if pool.known[s.result].dtype == torch.float64]
    ends = [name for name in floats if name not in read]
    chosen = ends[-3:] + [name for name in floats if name in read and pool.chance(0.1)]
    if not chosen:
        chosen = pool.values()[-1:]
    terms = tuple((name, _how(pool, name)) for name in dict.fromkeys(chosen))
    outputs = tuple(name for name in floats[-4:] if pool.chance(0.15))
    if any(statement.op == "dropout" for statement in pool.statements):
        outputs = ()  # what the loss does not depend on draws no masks when trained
    return Body(tuple(pool.leaves), tuple(pool.statements)), terms, outputs


def _how(pool: Pool, name: str) -> str:
    if not pool.shape(name):
        return "itself"
    if pool.chance(0.6):
        return pool.input("float", pool.shape(name))
    if pool.exact:
        return pool.pick(["sum", "squares"])
    return pool.pick(["mean", "sum", "squares", "mean of squares"])


def prune(program: Program) -> Program:
    """Without the statements, leaves and blocks that nothing needs. One input stays, so that there is a batch."""
    needed = {name for term in program.terms for name in term} | set(program.outputs)
    body = _pruned(program.body, needed, keep_input=True)
    blocks = {name: _pruned(block, {block.result}, keep_input=False) for name, block in program.blocks.items()}
    used: set[str] = set()
    waiting = [body]
    while waiting:
        for statement in waiting.pop().statements:
            if statement.op == "block" and statement.args[0] not in used:
                used.add(statement.args[0])
                waiting.append(blocks[statement.args[0]])
    return replace(program, body=body, blocks={name: block for name, block in blocks.items() if name in used})


def _pruned(body: Body, needed: set[str], keep_input: bool) -> Body:
    needed, kept = set(needed), []
    for statement in reversed(body.statements):
        if statement.result in needed:
            needed.update(statement.operands)
            kept.append(statement)
    needed |= {leaf.tied for leaf in body.leaves if leaf.name in needed}
    leaves = [leaf for leaf in body.leaves if leaf.name in needed]
    if keep_input and all(leaf.is_stored for leaf in leaves):
        leaves += [leaf for leaf in body.leaves if not leaf.is_stored][:1]
    return replace(body, leaves=tuple(leaves), statements=tuple(reversed(kept)))
