"""A case: a program with a plan. What comes of it in one line, and the code that runs it again."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.errors import PlacementError, PlanError
from autopar.ir.placement import Placement, format_placement, parse_placement
from autopar.ir.plan import NodePlan, Plan, Storage
from autopar.microbatch import check_plan
from tests.random_programs.check import Run, Subject, plan_problems, problems, run_in_threads
from tests.random_programs.generate import random_program
from tests.random_programs.plans import MESHES, Choices, random_plan
from tests.random_programs.programs import Leaf
from tests.random_programs.staged import StagedChoices, make_staged_plan, random_staged_plan

PLANS_A_PROGRAM = 10  # tracing takes as long as several plans


@dataclass(frozen=True)
class Case:
    """A plan for a program; `name` finds it again."""

    subject: Subject
    choices: Choices
    name: str = ""


@dataclass(frozen=True)
class StagedCase:
    """A plan of several stages for a program; `name` finds it again."""

    subject: Subject
    choices: StagedChoices
    name: str = ""


def outcome(case: Case | StagedCase, run: Run = run_in_threads) -> str:
    """What is wrong; empty when nothing is. Plans that do not verify are no cases: their errors are raised."""
    try:
        if isinstance(case, StagedCase):
            plan = make_staged_plan(case.subject.graph, case.choices, case.subject.mode)
            return "\n".join(plan_problems(case.subject, plan, run=run))
        return "\n".join(problems(case.subject, case.choices, run))
    except (PlanError, PlacementError):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


def cases_of(seed: int, plans: int = PLANS_A_PROGRAM) -> Iterator[Case]:
    """The cases of a program's seed: one in seven programs in inference, each plan on some mesh."""
    rng = random.Random(f"plans of {seed}")
    subject = Subject(random_program(seed), "inference" if seed % 7 == 3 else "train")
    for number in range(plans):
        choices = random_plan(subject.graph, rng.choice(MESHES), rng, subject.mode)
        if choices is not None:
            yield Case(subject, choices, f"{seed}.{number}")


def staged_cases_of(seed: int, plans: int = PLANS_A_PROGRAM // 2) -> Iterator[StagedCase]:
    """As `cases_of`, of plans of several stages; three in four programs can be divided into microbatches."""
    rng = random.Random(f"staged plans of {seed}")
    subject = Subject(random_program(seed, by_samples=0.75), "inference" if seed % 7 == 3 else "train")
    for number in range(plans):
        choices = random_staged_plan(subject.graph, rng, subject.mode)
        if choices is not None:
            yield StagedCase(subject, choices, f"{seed}.{number}")


# code


def code(case: Case | StagedCase, what: str = "") -> str:
    """A script that runs the case again: the model's source, its inputs, and every placement of the plan."""
    if isinstance(case, StagedCase):
        return _staged_code(case, what or case.name)
    program, choices = case.subject.program, case.choices
    title = what.splitlines()[0] if what else case.name
    lines = [f"\"\"\"{title}\"\"\"", "", "from tests.random_programs.cases import replay",
             "from tests.random_programs.programs import Leaf", "", f"MODEL = '''{program.source}'''", ""]  # fmt: skip
    lines += ["print(replay(", "    MODEL,"]
    lines += [
        f"    leaves={list(program.inputs)!r},".replace("[", "[\n        ").replace("), Leaf", "),\n        Leaf")
    ]
    lines += [f"    exact={program.exact}, seed={program.seed}, mode={case.subject.mode!r},"]
    lines += [f"    sizes={choices.sizes}, microbatches={choices.microbatches}, ways={choices.ways},"]
    lines += [f"    recompute={choices.recompute!r},"] if choices.recompute else []
    for what_, texts in zip(("inputs", "storage", "nodes"), _texts(choices), strict=True):
        lines += [f"    {what_}={{", *(f"        {name!r}: {text!r}," for name, text in texts.items()), "    },"]
    return "\n".join([*lines, "))", ""])


def _staged_code(case: StagedCase, what: str) -> str:
    """With the plan as it is saved, line by line of its placements."""
    program = case.subject.program
    try:
        plan = make_staged_plan(case.subject.graph, case.choices, case.subject.mode).to_json()
    except Exception as error:
        plan = f"no plan: {error}"
    return "\n".join([
        f'"""{what.splitlines()[0]}"""', "", "from tests.random_programs.cases import replay_plan",
        "from tests.random_programs.programs import Leaf", "", f"MODEL = '''{program.source}'''", "",
        f"PLAN = r'''{plan}'''", "",
        f"print(replay_plan(MODEL, PLAN, leaves={list(program.inputs)!r}, exact={program.exact}, seed={program.seed}, "
        f"mode={case.subject.mode!r}))", "",
    ])  # fmt: skip


def replay_plan(
    source: str, plan: str, *, leaves: list[Leaf], exact: bool = False, seed: int = 0, mode: str = "train",
    run: Run = run_in_threads,
) -> str:  # fmt: skip
    """Runs a saved plan of several stages, if it verifies; what is wrong with it."""
    subject = Subject(Written(source, tuple(leaves), exact, seed), mode)  # type: ignore[arg-type]
    loaded = Plan.from_json(plan)
    check_plan(subject.graph, loaded)
    return "\n".join(plan_problems(subject, loaded, run=run))


def _texts(choices: Choices) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    inputs = {name: format_placement(placement) for name, placement in choices.inputs.items()}
    storage = {
        name: format_placement(kept.placement)
        + (" regather" if kept.regather else " reduce" if kept.reduce_each_microbatch else "")
        for name, kept in choices.storage.items()
    }
    nodes = {name: f"{_row(node.operands)} -> {_row(node.results)}" for name, node in choices.nodes.items()}
    return inputs, storage, nodes


def _row(placements: tuple[Placement, ...]) -> str:
    return ", ".join(map(format_placement, placements))


@dataclass(frozen=True)
class Written:
    """A program that is given by its source."""

    source: str
    inputs: tuple[Leaf, ...]
    exact: bool
    seed: int


def replay(
    source: str, *, leaves: list[Leaf], sizes: tuple[int, ...], inputs: Mapping[str, str], storage: Mapping[str, str],
    nodes: Mapping[str, str], exact: bool = False, seed: int = 0, mode: str = "train", microbatches: int = 1,
    ways: int | None = None, recompute: tuple[str, ...] = (), run: Run = run_in_threads,
) -> str:  # fmt: skip
    """Runs a printed case; what is wrong with it."""
    choices = Choices(
        sizes, microbatches, {name: parse_placement(text) for name, text in inputs.items()},
        {name: _storage(text) for name, text in storage.items()}, {name: _node(text) for name, text in nodes.items()},
        ways, recompute,
    )  # fmt: skip
    subject = Subject(Written(source, tuple(leaves), exact, seed), mode)  # type: ignore[arg-type]
    return outcome(Case(subject, choices), run)


def _storage(text: str) -> Storage:
    words = [word for word in text.split() if word not in ("regather", "reduce")]
    again = "regather" in text
    return Storage(parse_placement(" ".join(words)), again, again or "reduce" in text)


def _node(text: str) -> NodePlan:
    left, _, right = text.partition("->")
    operands = tuple(parse_placement(part) for part in left.split(",")) if left.strip() else ()
    return NodePlan(operands, tuple(parse_placement(part) for part in right.split(",")))
