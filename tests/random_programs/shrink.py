"""From a case that fails to a small one that fails alike: fewer statements, shorter dims, plainer plan."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from autopar.errors import PlacementError, PlanError
from autopar.ir.placement import I, R
from autopar.ir.plan import NodePlan, Storage
from tests.random_programs.cases import Case, StagedCase, outcome
from tests.random_programs.check import Subject
from tests.random_programs.generate import is_usable, prune
from tests.random_programs.plans import MESHES, Choices, random_plan
from tests.random_programs.programs import Body, Leaf, Length, Program, Statement
from tests.random_programs.staged import random_staged_plan

PLANS_A_PROGRAM = 16  # tried before a smaller program is taken for one that does not fail


def shrink(case: Case, fails: Callable[[Case], str] = outcome, rounds: int = 6) -> Case:
    """The smallest case found that fails in the same way."""
    kind = _kind(fails(case))
    for _ in range(rounds):
        before = case
        case = _smaller_mesh(case, fails, kind)
        case = _smaller_program(case, fails, kind)
        if case is before:
            break
    return _plainer_plan(case, fails, kind)


def _kind(text: str) -> str:
    """What a failure is about, without its numbers."""
    for word in ("gradient of", "has a gradient", "loss", "bytes", "buffer", "output"):
        if word in text:
            return word
    return text.split(":")[0]


def _fails_alike(case: Case, fails: Callable[[Case], str], kind: str) -> bool:
    text = fails(case)
    return bool(text) and _kind(text) == kind


def _smaller_mesh(case: Case, fails: Callable[[Case], str], kind: str) -> Case:
    for sizes in MESHES[: MESHES.index(case.choices.sizes)]:
        found = _some_plan(case.subject, [sizes], fails, kind)
        if found is not None:
            return found
    return case


def _smaller_program(case: Case, fails: Callable[[Case], str], kind: str) -> Case:
    for program in smaller_programs(case.subject.program):
        if not is_usable(program):
            continue
        found = _some_plan(Subject(program, case.subject.mode), [case.choices.sizes], fails, kind)
        if found is not None:
            return _smaller_program(found, fails, kind)
    return case


def _some_plan(subject: Subject, meshes: list[tuple[int, ...]], fails: Callable[[Case], str], kind: str) -> Case | None:
    for sizes in meshes:
        for seed in range(PLANS_A_PROGRAM):
            try:
                choices = random_plan(subject.graph, sizes, random.Random(seed), subject.mode)
            except Exception:  # the smaller program cannot be traced: it is no use
                return None
            if choices is not None and _fails_alike(Case(subject, choices), fails, kind):
                return Case(subject, choices)
    return None


def shrink_staged(case: StagedCase, fails: Callable[[StagedCase], str] = outcome) -> StagedCase:
    """The smallest case of a plan of several stages found that fails in the same way."""
    kind = _kind(fails(case))

    def alike(other: StagedCase) -> bool:
        text = fails(other)
        return bool(text) and _kind(text) == kind

    case = _smaller_staged_program(case, alike)
    case = min([case, *filter(alike, _staged(case.subject, range(60)))], key=_size)
    for plainer in (
        {"recompute": ()}, {"handovers": None}, {"schedule": "1f1b"}, {"schedule": "gpipe"},
        {"stages": tuple(replace(one, ways=None) for one in case.choices.stages)},
    ):  # fmt: skip
        other = replace(case, choices=replace(case.choices, **plainer))
        with suppress(PlanError, PlacementError):
            case = other if alike(other) else case
    return case


def _smaller_staged_program(case: StagedCase, alike: Callable[[StagedCase], bool]) -> StagedCase:
    for program in smaller_programs(case.subject.program):
        if is_usable(program):
            with suppress(RuntimeError, ValueError, PlanError):  # one that cannot be traced is no use
                cases = _staged(Subject(program, case.subject.mode), range(PLANS_A_PROGRAM))
                found = next(filter(alike, cases), None)
                if found is not None:
                    return _smaller_staged_program(found, alike)
    return case


def _staged(subject: Subject, seeds: range) -> Iterator[StagedCase]:
    for seed in seeds:
        choices = random_staged_plan(subject.graph, random.Random(seed), subject.mode)
        if choices is not None:
            yield StagedCase(subject, choices)


def _size(case: StagedCase) -> tuple[int, int, int]:
    choices = case.choices
    return len(choices.stages), sum(map(math.prod, choices.sizes)), choices.microbatches


# programs


def smaller_programs(program: Program) -> Iterator[Program]:
    """Each program that is one step smaller."""
    for index in range(len(program.terms)):
        if len(program.terms) > 1:
            terms = program.terms[:index] + program.terms[index + 1 :]
            yield prune(replace(program, terms=terms))
    if program.outputs:
        yield prune(replace(program, outputs=()))
    for body in _smaller_bodies(program, program.body, inputs=True):
        yield prune(replace(program, body=body))
    for name, block in program.blocks.items():
        for body in _smaller_bodies(program, block, inputs=False):
            yield prune(replace(program, blocks={**program.blocks, name: body}))
    for length in sorted(_lengths(program), reverse=True):
        for other in (2, 3, length - 1):
            if 1 < other < length:
                yield _with_length(program, length, other)


def _smaller_bodies(program: Program, body: Body, inputs: bool) -> Iterator[Body]:
    for index in reversed(range(len(body.statements))):
        statement = body.statements[index]
        if statement.op == "block" and statement.args[1] > 1:
            once = replace(statement, args=(statement.args[0], 1))
            yield replace(body, statements=(*body.statements[:index], once, *body.statements[index + 1 :]))
        for operand in dict.fromkeys(statement.operands):
            yield _without(body, index, operand)
        shape = _shape_of(program, body, statement.result)
        if shape is not None and statement.op not in ("greater", "both"):
            leaf = Leaf(_new_name(body), "float" if inputs else "parameter", shape)
            yield _without(replace(body, leaves=(*body.leaves, leaf)), index, leaf.name)
    for index, leaf in enumerate(body.leaves):
        if leaf.tied or leaf.frozen:
            plain = replace(leaf, tied="", frozen=False)
            yield replace(body, leaves=(*body.leaves[:index], plain, *body.leaves[index + 1 :]))


def _shape_of(program: Program, body: Body, name: str) -> tuple[int, ...] | None:
    """The shape of a value of the model's own body, by running it; None for a block's."""
    from tests.random_programs.programs import _Writer

    if body is not program.body:
        return None
    _, _, values = _Writer(program, {}).body(body, {})
    return tuple(values[name].shape)


def _new_name(body: Body) -> str:
    known = {leaf.name for leaf in body.leaves}
    return next(name for name in (f"n{number}" for number in itertools.count()) if name not in known)


def _without(body: Body, index: int, instead: str) -> Body:
    """Without a statement; what read its result reads something else."""
    gone = body.statements[index].result

    def renamed(statement: Statement) -> Statement:
        return replace(statement, operands=tuple(instead if n == gone else n for n in statement.operands))

    rest = tuple(renamed(s) for position, s in enumerate(body.statements) if position != index)
    result = instead if body.result == gone else body.result
    return replace(body, statements=rest, result=result)


def _lengths(program: Program) -> set[int]:
    found = {size for body in (program.body, *program.blocks.values()) for leaf in body.leaves for size in leaf.shape}
    return {size for size in found if size > 2}


def _with_length(program: Program, old: int, new: int) -> Program:
    def swap(value: object) -> object:
        return Length(new) if value == Length(old) and isinstance(value, Length) else value

    def smaller(body: Body) -> Body:
        leaves = tuple(
            replace(
                leaf,
                shape=tuple(new if n == old else n for n in leaf.shape),
                high=new if leaf.high == old else leaf.high,
            )
            for leaf in body.leaves
        )
        statements = tuple(replace(s, args=tuple(map(swap, s.args))) for s in body.statements)
        return replace(body, leaves=leaves, statements=statements)

    blocks = {name: smaller(body) for name, body in program.blocks.items()}
    return replace(program, body=smaller(program.body), blocks=blocks)


# plans


def _plainer_plan(case: Case, fails: Callable[[Case], str], kind: str) -> Case:
    """Every choice that need not be anything special is R, or stored whole."""
    progress = True
    while progress:
        progress = False
        for choices in plainer_choices(case):
            try:
                found = replace(case, choices=choices)
                alike = _fails_alike(found, fails, kind)
            except (PlanError, PlacementError):
                continue
            if alike:
                case, progress = found, True
                break
    return case


def plainer_choices(case: Case) -> Iterator[Choices]:
    """The choices with one of them made plain."""
    choices, graph = case.choices, case.subject.graph
    count = len(choices.sizes)
    if choices.ways is not None:
        yield replace(choices, ways=None)
    for name, placement in choices.inputs.items():
        if any(type_ != R for type_ in placement):
            yield replace(choices, inputs={**choices.inputs, name: (R,) * count})
    for name, kept in choices.storage.items():
        plain = Storage(((I if graph.tensors[name].differentiable else R),) * count)
        if kept != plain:
            yield replace(choices, storage={**choices.storage, name: plain})
            yield replace(choices, storage={**choices.storage, name: Storage(kept.placement)})
    for name, node in choices.nodes.items():
        whole = NodePlan(tuple((R,) * count for _ in node.operands), tuple((R,) * count for _ in node.results))
        if node != whole:
            yield replace(choices, nodes={**choices.nodes, name: whole})
