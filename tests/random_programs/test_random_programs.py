"""Random programs under random plans compute what they compute on one device; and what does not is found and shrunk."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from autopar.errors import PlacementError, PlanError
from autopar.ir.plan import Plan
from autopar.microbatch import check_plan
from autopar.runtime import pieces
from tests.random_programs import run
from tests.random_programs.cases import Case, Written, cases_of, code, outcome, replay
from tests.random_programs.check import Subject
from tests.random_programs.generate import random_program
from tests.random_programs.gloo import run_on_gloo
from tests.random_programs.mutants import mutants_of, wrong_mutants
from tests.random_programs.operators import OPERATORS
from tests.random_programs.plans import MESHES, random_plan
from tests.random_programs.programs import Leaf, bodies
from tests.random_programs.shrink import shrink

SEED = 20_000


@pytest.mark.sweep
def test_random_programs_on_threads(capsys: pytest.CaptureFixture[str]) -> None:
    """Five plans of each of 8 programs; `python -m tests.random_programs.run --seed 20000` runs these, and more."""
    with capsys.disabled():
        print(f"\nrandom programs, seed {SEED}")
    wrong, exact = [], 0
    for case in itertools.islice(run._cases(SEED, plans=5), 40):
        text = outcome(case)
        if text:
            wrong.append(f"{case.name}: {text}\n{code(case, text)}")
        exact += case.subject.mode == "train" and case.subject.is_exact
    assert not wrong, f"{len(wrong)} of 40 cases are wrong; the first:\n{wrong[0]}"
    assert exact >= 6


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_random_programs_on_gloo(world: int) -> None:
    meshes = [sizes for sizes in MESHES if _product(sizes) == world]
    for seed in range(SEED, SEED + 3):
        subject = Subject(random_program(seed))
        choices = random_plan(subject.graph, meshes[seed % len(meshes)], random.Random(seed))
        if choices is not None:
            assert outcome(Case(subject, choices), run_on_gloo) == ""


def _product(sizes: tuple[int, ...]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def test_every_operator_comes_up_within_some_programs() -> None:
    programs = [random_program(seed) for seed in range(SEED, SEED + 60)]
    seen = {statement.op for program in programs for body in bodies(program) for statement in body.statements}
    assert len(set(OPERATORS) - seen) <= len(OPERATORS) // 6, sorted(set(OPERATORS) - seen)
    assert "block" in seen
    leaves = [leaf for program in programs for body in bodies(program) for leaf in body.leaves]
    assert any(leaf.tied for leaf in leaves) and any(leaf.frozen for leaf in leaves)
    assert {leaf.kind for leaf in leaves} == {"parameter", "buffer", "float", "ids", "mask"}


@pytest.mark.sweep
def test_a_planted_fault_is_found_and_shrinks_to_code_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """P → I that keeps the first rank's summand instead of the sum."""
    monkeypatch.setattr(pieces, "sum_over", lambda x, axis, wait=True: x.clone())
    case = next(case for case in _cases(8) if outcome(case))
    small = shrink(case)
    assert outcome(small) and small.subject.program.num_statements <= 4
    assert len(small.choices.sizes) == 1
    text = code(small, "a fault")
    assert text.count("class Model") == 1 and "replay(" in text
    space: dict[str, object] = {"print": lambda value: results.append(value)}
    results: list[object] = []
    exec(compile(text, "<replay>", "exec"), space)
    assert results == [outcome(small)]
    monkeypatch.undo()
    exec(compile(text, "<replay>", "exec"), space)
    assert results[1] == ""


def _cases(programs: int) -> Iterator[Case]:
    for seed in range(programs):
        yield from cases_of(seed, plans=4)


@pytest.mark.sweep
def test_mutants_of_random_plans_that_verify_compute_the_same() -> None:
    """What the verifier lets through of mutated plans is right; some of each kind do occur."""
    assert [text for seed in (2, 5) for text in wrong_mutants(seed)] == []
    refused = [_is_refused(case, mutation.apply(plan)) for case, plan, mutation in mutants_of(2)]
    assert 5 < sum(refused) < len(refused) - 5


def _is_refused(case: Case, mutant: Plan) -> bool:
    try:
        check_plan(case.subject.graph, mutant)
    except (PlanError, PlacementError):
        return True
    return False


# what random programs have found, each with the least program that showed it

CONVERTED_BUFFER = """
import torch
from torch import nn

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x)

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.register_buffer("b", torch.empty(4))
    def forward(self, x):
        return self.inner(x) + self.b

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer = Outer()
    def forward(self, i0):
        return self.outer(i0).sum()
"""


def test_a_buffer_of_a_block_that_is_converted_for_its_use() -> None:
    """The emitter took the converted buffer for an attribute of the block, which only the stored one is."""
    nodes = {"linear": "R, R, R -> R", "add": "P, P -> P", "sum_1": "P -> P"}
    storage = {"outer.inner.linear.weight": "I", "outer.inner.linear.bias": "I", "outer.b": "R"}
    assert _replayed(CONVERTED_BUFFER, nodes, storage) == ""


DETACHED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.empty(6))
        self.p1 = nn.Parameter(torch.empty(6))
    def forward(self, i0):
        return ((i0 * self.p0).detach() * self.p1).sum()
"""


def test_bytes_of_gradients_that_never_flow_are_not_foretold() -> None:
    nodes = {"mul": "R, R -> R", "detach": "R -> R", "mul_1": "R, R -> R", "sum_1": "R -> R"}
    assert _replayed(DETACHED, nodes, {"p0": "S(0) reduce", "p1": "S(0)"}) == ""


FROZEN_IN_A_BLOCK = CONVERTED_BUFFER.replace("nn.Linear(4, 4)", "nn.Linear(4, 4).requires_grad_(False)").replace(
    "return self.outer(i0).sum()", "return self.outer(i0 * self.p).sum()"
).replace("self.outer = Outer()", "self.outer = Outer(); self.p = nn.Parameter(torch.empty(4))")  # fmt: skip


def test_bytes_of_a_frozen_parameter_that_is_gathered_again() -> None:
    nodes = {"mul": "R, R -> R", "linear": "R, R, R -> R", "add": "R, R -> R", "sum_1": "R -> R"}
    storage = {"outer.inner.linear.weight": "S(0) regather", "outer.inner.linear.bias": "R", "outer.b": "R", "p": "I"}
    assert _replayed(FROZEN_IN_A_BLOCK, nodes, storage) == ""


def _replayed(source: str, nodes: dict[str, str], storage: dict[str, str]) -> str:
    leaf = Leaf("i0", "float", (6, 4) if "Outer" in source else (6,))
    named = Subject(Written(source, (leaf,), False, 0)).graph.nodes  # type: ignore[arg-type]
    assert [node.name for node in named] == list(nodes)
    return replay(source, leaves=[leaf], sizes=(2,), inputs={"i0": "R"}, storage=storage, nodes=nodes)


ACROSS_SAMPLES = """import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.empty((4,), dtype=torch.float64))
    def forward(self, i0, i1):
        return (i0 * self.p * i1.transpose(0, 1)).sum()
"""


def test_bytes_of_a_tensor_that_is_gathered_whole_before_microbatches_cut_it() -> None:
    text = replay(
        ACROSS_SAMPLES, leaves=[Leaf("i0", "float", (8, 4)), Leaf("i1", "float", (4, 8))], exact=True, sizes=(2,),
        microbatches=2, inputs={"i0": "R", "i1": "S(1)"}, storage={"p": "I"},
        nodes={"mul": "R, R -> R", "transpose": "S(1) -> S(0)", "mul_1": "R, R -> R", "sum_1": "R -> R"},
    )  # fmt: skip
    assert text == ""


TWO_SUMS = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p0 = nn.Parameter(torch.empty((2,), dtype=torch.float64))

    def forward(self, i0):
        v1 = i0 * i0
        v2 = v1 * v1
        return v1.sum() + (v1 + v2).sum() + self.p0.sum() + (self.p0 * v2).sum(), v2.detach()
"""


def test_bytes_of_what_several_sums_over_all_microbatches_are_made_of() -> None:
    """Each sum is made by itself of the inputs, and what follows from these beside them is made once more."""
    leaf = Leaf(name="i0", kind="float", shape=(4, 2), high=0, frozen=False, ignored=False, tied="")
    names = ("mul", "mul_1", "sum_1", "add", "sum_2", "add_1", "sum_3", "add_2", "mul_2", "sum_4", "add_3")
    two = {"mul", "mul_1", "add", "add_1", "add_2", "mul_2", "add_3"}
    nodes = {name: "R, R -> R" if name in two else "R -> R" for name in names}
    text = replay(
        TWO_SUMS, leaves=[leaf], sizes=(2,), inputs={"i0": "S(1)"}, storage={"p0": "I"}, nodes=nodes, microbatches=2
    )
    assert text == ""


IN_A_MODULE_AND_ALONE = """import torch
from torch import nn


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.empty((4,), dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(x * self.p)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.ModuleList(Inner() for _ in range(2))

    def forward(self, x):
        return self.l[1](self.l[0](x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = Outer()

    def forward(self, i0):
        return self.m(i0).sum()
"""


def test_a_module_that_runs_again_reads_what_an_operator_of_another_makes_again() -> None:
    """Its own copy of that runs again with the module, not by itself."""
    text = replay(
        IN_A_MODULE_AND_ALONE, leaves=[Leaf("i0", "float", (4, 4))], sizes=(2,), inputs={"i0": "S(0)"},
        storage={"m.l.0.p": "I", "m.l.1.p": "I"}, recompute=("m.l.1", "m.l.0.tanh()"),
        nodes={"mul": "S(0), R -> S(0)", "tanh": "S(0) -> S(0)", "mul_1": "R, R -> R", "tanh_1": "R -> R",
               "sum_1": "R -> R"},
    )  # fmt: skip
    assert text == ""
