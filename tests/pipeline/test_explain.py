"""`plan.explain` shows each decision with alternatives; their costs are those of the plan with that one change."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

import autopar
from autopar.intraop.alternatives import explain_choices
from autopar.intraop.builder import Built, build
from autopar.intraop.costs import ProfiledCosts
from autopar.ir.labels import strategy_text
from autopar.ir.mesh import make_axes
from autopar.ir.plan import Alternative
from autopar.profiler import load_profile
from autopar.selection.evaluator import evaluate
from autopar.selection.problem import INFINITE, NO_PATH_NS
from autopar.selection.solver import solve
from autopar.show.explain import SCREEN_LINES
from autopar.show.text import runners_up
from autopar.trace import find_blocks, trace
from autopar.zero import storage_options
from models import gpt, mlp
from tests.oracles.frozen.cases import PROFILES


def gpt_plan(num_layers: int = 3) -> autopar.Plan:
    config = gpt.Config(num_layers=num_layers)
    mesh = autopar.Mesh(PROFILES["h100"], devices_per_node=4)
    pinned = [autopar.Constraint(stages=1)]
    return autopar.parallelize(
        gpt.build(config), mesh, gpt.example_inputs(config), search="fast", constraints=pinned
    ).plan


@cache
def shared_plan() -> autopar.Plan:
    return gpt_plan()


def solved() -> tuple[Built, tuple[int, ...]]:
    config = mlp.Config(widths=(64, 256, 16))
    graph = trace(mlp.build(config), mlp.example_inputs(config))
    axes = make_axes(("d0",), (2,))
    costs = ProfiledCosts(graph, axes, 2, load_profile(PROFILES["h100"]), "train", "adamw")
    built = build(graph, find_blocks(graph), axes, costs, storage_options)
    return built, solve(built.problem).choice


def group_of(built: Built, number: int) -> list[int]:
    """The variables that go along: an operator and the parameters that it is the first to read."""
    linear = {v.name: n for n, v in enumerate(built.variables) if v.name.startswith("linear")}
    groups = [[n, *(k for k, v in enumerate(built.variables) if v.kind == "stored" and v.name.startswith(prefix))]
              for prefix, n in (("layers.0.", linear["linear"]), ("layers.1.", linear["linear_1"]))]  # fmt: skip
    return next((group for group in groups if number in group), [number])


def best_with(built: Built, choice: tuple[int, ...], number: int, option: int) -> tuple[int, int]:
    """Cost and usage of the best plan with that option, by trying everything else in its group."""
    others = [other for other in group_of(built, number) if other != number]
    best = (INFINITE, 0)
    for values in product(*(range(len(built.variables[other].options)) for other in others)):
        changed = list(choice)
        for variable, value in zip((number, *others), (option, *values), strict=True):
            changed[variable] = value
        found = evaluate(built.problem, changed)
        best = min(best, (found.cost, found.peak_usage))
    return best


def test_stated_costs_are_those_of_the_best_change_of_an_operator_with_its_parameters() -> None:
    built, choice = solved()
    base = evaluate(built.problem, choice)
    found = {(item.kind, item.name): item for item in explain_choices(built, choice)}
    several = [number for number, variable in enumerate(built.variables) if len(variable.options) > 1]
    assert len(found) == len(several)
    for number in several:
        variable = built.variables[number]
        others = [option for option in range(len(variable.options)) if option != choice[number]]
        best = [best_with(built, choice, number, option) for option in others]
        item = found[variable.kind, variable.name]
        extra = sorted(cost - base.cost for cost, _ in best if cost < NO_PATH_NS)
        assert [alternative.extra_ns for alternative in item.alternatives] == extra[:5], variable.name
        assert item.num_options == len(variable.options)
        assert all(value >= 0 for value in extra), "no change makes an optimal choice cheaper"
        memory = {cost - base.cost: usage - base.peak_usage for cost, usage in best}
        lone = [a for a in item.alternatives if extra.count(a.extra_ns) == 1]
        assert [a.extra_bytes for a in lone] == [memory[a.extra_ns] for a in lone]
        if variable.kind == "node":
            own = {strategy_text(o): int(c) for o, c in zip(variable.options, built.compute_ns[number], strict=True)}
            longer = {text: cost - own[item.chosen] for text, cost in own.items()}
            assert [a.compute_ns for a in item.alternatives] == [longer[a.option] for a in item.alternatives]


def test_a_price_is_split_in_compute_and_redistribution() -> None:
    """A linear whose weight is used whole on both ranks computes more than one whose ranks share it."""
    built, choice = solved()
    linear = next(item for item in explain_choices(built, choice) if item.name == "linear")
    longer = {alternative.option: alternative.compute_ns for alternative in linear.alternatives}
    assert longer["[R], [R], [R] -> [R]"] > 0


def test_prices_say_what_is_compute_and_what_is_redistribution() -> None:
    plan = shared_plan()
    up = next(item for item in plan.choices if item.kind == "node" and "mlp.up" in plan.scopes[item.name])
    others = (Alternative("a", 3_000, 0, 5_000), Alternative("b", 3_000, -1024, 0), Alternative("c", 3_000, 0))
    told = replace(plan, choices=(replace(up, alternatives=others),)).explain("layers.0.mlp.up")
    assert [line.strip() for line in told.splitlines() if line.startswith("    +")] == [
        "+3 µs (compute +5 µs, redistribution −2 µs): a",
        "+3 µs of redistribution, −1.02 kB: b",
        "+3 µs: c",
    ]


@pytest.mark.parametrize("pattern", ["layers.0.mlp", "layers.2.mlp"])
def test_module_shows_parameters_and_operators_with_alternatives(pattern: str) -> None:
    lines = shared_plan().explain(pattern).splitlines()
    assert lines[0].startswith("Of whole plans, the next best were mesh ")
    assert lines[1].startswith("Each decision with the cheapest others, and what these add to a step.")
    assert any(line.startswith(f"parameter {pattern}.up.weight: stored [") for line in lines)
    up = next(number for number, line in enumerate(lines) if line.startswith(f"{pattern}.up: aten.linear.default "))
    assert "# models/gpt.py:" in lines[up]
    assert lines[up].endswith("  ×3"), "three equal blocks decide together"
    assert lines[up + 1].startswith("    +")
    assert " -> [" in lines[up + 1]


def test_equal_blocks_have_equal_reasons() -> None:
    plan = shared_plan()
    prices = [
        [line for line in plan.explain(f"layers.{layer}.mlp").splitlines() if line.startswith("    ")]
        for layer in (0, 2)
    ]
    assert prices[0] == prices[1] != []


@pytest.mark.parametrize("pattern", ["layers.0.mlp", "layers.0.attention.query.weight", "layers.0", "head*"])
def test_it_fits_on_a_screen(pattern: str) -> None:
    assert 2 < len(shared_plan().explain(pattern).splitlines()) <= SCREEN_LINES + 3


def test_survives_the_file_and_does_not_grow_with_depth() -> None:
    plan = shared_plan()
    again = autopar.Plan.from_json(plan.to_json())
    assert again.choices == plan.choices
    assert again.explain("layers.0.mlp") == plan.explain("layers.0.mlp")
    assert max(len(item.alternatives) for item in plan.choices) == 5
    assert len(gpt_plan(6).choices) == len(plan.choices)


def test_stages_have_reasons_too() -> None:
    config = gpt.Config(num_layers=4)
    mesh = autopar.Mesh(PROFILES["h100"], devices_per_node=4)
    pinned = [autopar.Constraint(stages=2, microbatches=4)]
    plan = autopar.parallelize(
        gpt.build(config), mesh, gpt.example_inputs(config), search="fast", constraints=pinned
    ).plan
    lines = plan.explain("layers.3.mlp").splitlines()
    assert lines[0].startswith("Of whole plans, the next best were 2 stages of 2, ")
    assert f"  instead     {runners_up(plan)[0]}" in str(plan)
    up = next(number for number, line in enumerate(lines) if line.startswith("layers.3.mlp.up: aten.linear.default "))
    assert lines[up].endswith("  ×4") and lines[up + 1].startswith("    +"), "no template's constraint is in the way"


def test_constraints_show_as_such() -> None:
    config: Any = mlp.Config()
    mesh = autopar.Mesh("h100", devices_per_node=2)
    plan = autopar.template_plan(mlp.build(config), mesh, mlp.example_inputs(config), tp=2)
    assert "against a constraint" in plan.explain("layers.1.weight")


def test_inputs_are_decisions_too() -> None:
    lines = shared_plan().explain("tokens").splitlines()
    assert lines[3].startswith("input tokens: [")
    assert lines[4].startswith("    +")


def test_nothing_matches() -> None:
    assert shared_plan().explain("decoder") == (
        "expected a module, parameter or operator of the plan, found none that matches 'decoder'; "
        "its modules are named as 'layers.0.attention.output' is"
    )


def test_near_names_are_told_where_nothing_matches() -> None:
    assert "; near names are layers.0.attention" in shared_plan().explain("layers.0.atention.qery")


def test_what_was_chosen_for_one_of_equal_layers_alone_is_told_there() -> None:
    plan = shared_plan()
    up = {plan.scopes[name].split("|")[0]: name for name in plan.stage.nodes if plan.scopes[name].startswith("layers.")}
    first = next(item for item in plan.choices if item.name == up["layers.0.mlp.up"])
    alone = replace(first, name=up["layers.2.mlp.up"], count=1, alternatives=(Alternative("as the others", 7_000, 0),))
    told = replace(plan, choices=(*plan.choices, alone))
    assert "    +7 µs: as the others" in told.explain("layers.2.mlp.up").splitlines()
    assert "as the others" not in told.explain("layers.0.mlp.up")


def test_a_long_plan_fits_a_screen_and_a_model_in_eval_mode_is_said() -> None:
    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number in range(40):
                setattr(self, f"part_{'abcdefghij'[number % 10]}{number}", torch.nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.children():
                x = layer(x)
            return x.square().mean()

    plan = autopar.template_plan(Wide().eval(), autopar.Mesh("h100", 1, 2), {"x": torch.randn(4, 8)}, dp=2)
    lines = str(plan).splitlines()
    assert len(lines) <= 45
    assert any("(80 names)" in line and line.endswith("×80") for line in lines)
    assert any(line.startswith("  eval mode") for line in lines)
    assert autopar.Plan.from_json(plan.to_json()) == plan and not plan.training
