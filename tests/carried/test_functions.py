"""Autograd Functions: their own forward and backward run in the program, or the plan is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError, RuleError, TraceError
from autopar.ir.graph import Graph
from autopar.ir.structure import FUNCTION
from autopar.ops import lookup
from autopar.ops.functions import function_name
from autopar.runtime.errors import ProgramError
from autopar.runtime.functions import imported
from autopar.trace import trace
from tests.carried import functions as own
from tests.carried.compared import differences, planned
from tests.carried.models import PARTS, WIDTH, Net, Stack, batch

HOWS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "zero": {"dp": 2, "zero": 3},
    "searched": {"devices": 2},
}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(3)
    yield


def calls(graph: Graph) -> list[str]:
    return [node.args[0].rpartition(":")[2] for node in graph.nodes if node.op == FUNCTION]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("part", "how"),
    [*((part, "dp") for part in PARTS), *(("top two", how) for how in HOWS), ("of a parameter", "zero")],
)
def test_program_equals_the_model(part: str, how: str) -> None:
    assert differences(Net(PARTS[part]), batch(), **HOWS[how]) == []


@pytest.mark.sampled(only=("{'devices': 2}", "{'dp': 2, 'recompute': 'full'}", "{'dp': 2, 'tp': 2}"))
@pytest.mark.parametrize("how", [*HOWS.values(), {"dp": 2, "recompute": "full"}, {"dp": 2, "tp": 2}], ids=str)
def test_equal_blocks_share_what_they_do_and_equal_the_model(how: dict[str, Any]) -> None:
    model = Stack()
    assert calls(trace(model, batch())) == ["Sign", "Clipped", "Reverse"] * 5
    assert differences(model, batch(), **how) == []


@pytest.mark.parametrize("how", [{"dp": 2, "recompute": "full"}, {"dp": 2, "zero": 3, "recompute": "full"}], ids=str)
def test_a_recomputed_function_reads_what_it_has_saved_twice(how: dict[str, Any]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            if h.requires_grad:
                other = self.scale.detach().tanh()
                h.register_hook(lambda gradient: gradient * other)
            return torch.tanh(own.ReadsTwice.apply(h, self.scale))

    model = Stack()
    model.blocks = nn.ModuleList(Block() for _ in range(3))
    assert differences(model, batch(), **how) == []


def test_blocks_that_call_other_functions_or_with_other_numbers_are_not_taken_for_equal() -> None:
    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.linear, self.number = nn.Linear(WIDTH, WIDTH), number

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return own.Sign.apply(h) if self.number == 2 else own.Reverse.apply(h, 0.1 * (self.number == 3) + 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(map(Block, range(6)))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.pow(2).mean()

    model = Model()
    graph = trace(model, batch()[:1])
    texts = [node.args[2] for node in graph.nodes if node.op == FUNCTION]
    assert texts == ["{0}, 1.0", "{0}, 1.0", "{0}", "{0}, 1.1", "{0}, 1.0", "{0}, 1.0"]
    assert differences(model, batch()[:1], dp=2) == []


def test_function_without_a_rule_is_reported_as_replicated_and_named_in_the_program() -> None:
    program = planned(Net(PARTS["reverse"]), batch(), dp=2)
    assert program.plan.coverage["tests.carried.functions:Reverse"].startswith("replicated: an autograd Function")
    assert "rt.apply('tests.carried.functions:Reverse', mul_1, 0.7)" in program.source


def test_function_without_a_rule_takes_no_microbatches() -> None:
    """It could couple samples, as one here does."""
    with pytest.raises(PlanError, match=r"batchcoupled .* at carried/models\.py:\d+.*Use\s+microbatches=1"):
        planned(Net(PARTS["coupled"]), batch(), dp=2, microbatches=2)


@pytest.fixture
def pointwise() -> Iterator[None]:
    functions = own.Reverse, own.Sign, own.ClippedEach
    for function in functions:
        autopar.register_rule(function, "... -> ...")
    yield
    for function in functions:
        del lookup._USER[function_name(function)]


@pytest.mark.sampled(only=("{'tp': 2}", "{'dp': 2, 'zero': 3}", "{'dp': 2, 'microbatches': 2}"))
@pytest.mark.parametrize("how", [*HOWS.values(), {"dp": 2, "microbatches": 2}], ids=str)
def test_function_with_a_registered_rule_is_split_and_equals_the_model(pointwise: None, how: dict[str, Any]) -> None:
    """Clipped gradients, too: slices of the batch and microbatches are given those of the whole batch's loss."""
    for part in ("reverse", "sign", "clipped each"):
        assert differences(Net(PARTS[part]), batch(), **dict(how)) == []


def test_function_with_a_registered_rule_is_reported_and_not_gathered_for(pointwise: None) -> None:
    program = planned(Net(PARTS["clipped each"]), batch(), dp=2)
    assert program.plan.coverage["tests.carried.functions:ClippedEach"] == "user"
    assert "all_gather" not in program.source
    assert "all_gather" in planned(Net(PARTS["clipped"]), batch(), dp=2).source


def test_rules_of_functions_that_cannot_hold_are_refused() -> None:
    with pytest.raises(RuleError, match="can import, found one that is defined inside of a function"):

        class Local(own.Sign):
            pass

        autopar.register_rule(Local, "... -> ...")
    for function, rule, part, message in (
        (own.Noisy, "... -> ...", "noisy", "it draws random numbers"),
        (own.TopTwo, "... -> ...", "top two", "expected 2 operands"),
    ):
        autopar.register_rule(function, rule)
        try:
            with pytest.raises(RuleError, match=rf"for tests\.carried\.functions:{function.__name__} .*{message}"):
                planned(Net(PARTS[part]), batch(), dp=2)
        finally:
            del lookup._USER[function_name(function)]


def test_operand_without_a_gradient_leaves_parameters_before_it_without() -> None:
    graph = trace(Net(PARTS["none for second"]), batch())
    (node,) = (node for node in graph.nodes if node.op == FUNCTION)
    assert [graph.tensors[name].differentiable for name in node.operands] == [True, False]


def _local_class(net: Net, h: Tensor) -> Tensor:
    class Local(own.Sign):
        pass

    return Local.apply(h)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (_local_class, "Local, which is defined inside of a function. Move it to the top level of a module"),
        (lambda net, h: own.Writes.apply(h.clone()), "leave its inputs alone, found one that it writes to"),
        (lambda net, h: own.Captures.apply(h), r"tensor Captures\.table of shape \[16\]\. Pass that value to apply"),
        (lambda net, h: own.DrawsBackward.apply(h), "a backward without random numbers"),
        (lambda net, h: own.Takes.apply(h, net), "plain values as its arguments, found Net"),
    ],
)
def test_what_cannot_be_carried_is_refused_with_line_and_remedy(part: Any, message: str) -> None:
    with pytest.raises(TraceError, match=r", at\n  .*functions\.py:\d+: (?s:.*)" + message):
        planned(Net(part), batch(), dp=2)


def test_class_of_the_script_that_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own.Sign, "__module__", "__main__")
    with pytest.raises(TraceError, match=r"Sign, which is defined in the script that runs \(__main__\). Move it"):
        planned(Net(PARTS["sign"]), batch(), dp=2)


def test_module_that_a_rank_does_not_find_is_named() -> None:
    with pytest.raises(ProgramError, match=r"import Sign of module no_such_module.*PYTHONPATH"):
        imported("no_such_module:Sign")
