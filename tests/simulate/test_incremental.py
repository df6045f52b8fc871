"""Simulation by differences: equal to the whole one to the nanosecond and the byte, whatever is proposed."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from autopar import Mesh
from autopar.cost.profile import Interference
from autopar.errors import PlanError
from autopar.ir.placement import Type
from autopar.ir.plan import Storage
from autopar.microbatch import check_plan
from autopar.pipeline import template_of_graph
from autopar.planning import Place, divided
from autopar.profiler import load_profile
from autopar.refinement import space_of
from autopar.request import Request, SearchBudget
from autopar.simulate import segments
from autopar.simulate.facts import graph_facts
from autopar.simulate.incremental import Incremental, simulate_whole
from autopar.simulate.part_player import PartPlayer
from autopar.simulate.parts import PartLowering
from autopar.simulate.segments import segments_of
from autopar.soap.space import Change
from autopar.trace import find_blocks, trace
from autopar.zero import joined, recomputable
from benchmarks.soap.cases import CASES, WAITS, Start, start
from benchmarks.soap.delta import PARTS, bounds_broken, differences
from benchmarks.soap.proposals import Proposer
from tests.random_programs.cases import cases_of
from tests.random_programs.plans import draft_plan

PROPOSALS = 17
NAMES = (
    "gpt, data and tensor, 2 microbatches", "gpt, tied, 4 microbatches", "gpt, all computed again", "gpt, slow host",
    "gpt, CPU", "gpt, CPU, sequences, blocks computed again", "gpt, CPU, ZeRO-3", "gpt, ZeRO-2",
    "gpt, tied, ZeRO-3, all computed again", "gpt, inference", "moe", "wide_resnet", "mlp", "llama",
)  # fmt: skip
GPT = "gpt, large"


@cache
def begin(name: str) -> Start:
    return start(CASES[name])


@pytest.mark.sampled(
    only=(
        "gpt, data and tensor, 2 microbatches",
        "gpt, slow host",
        "gpt, CPU, sequences, blocks computed again",
        "gpt, tied, ZeRO-3, all computed again",
        "gpt, inference",
        "moe",
        "wide_resnet",
        "mlp",
    )
)
@pytest.mark.parametrize("name", NAMES)
def test_any_proposal_is_simulated_as_a_whole_simulation_would(name: str) -> None:
    part, plan, profile = begin(name)
    incremental, proposer, rng = Incremental(part.graph, profile), Proposer(part, plan, seed=16), random.Random(16)
    for number in range(PROPOSALS):
        full = simulate_whole(part.graph, plan, profile)
        assert not bounds_broken(full, incremental, plan, rng.choice(PARTS)), f"proposal {number}"
        assert not differences(full, incremental.timeline(plan)), f"proposal {number}"
        plan = proposer.propose(plan, equal=rng.random() < 0.5, stores=0.3)
    assert incremental.num_whole == 0


def test_equal_layers_of_which_some_are_computed_again_are_told_apart() -> None:
    """What one layer took was taken for all: a plan that did not fit was said to."""
    part, plan, profile = begin("gpt, data and tensor, 2 microbatches")
    paths = [path for group in plan.blocks for path in group]
    incremental = Incremental(part.graph, profile)
    for again in ((), (paths[0],), (paths[1],), (f"{paths[1]}.attention",), (paths[0], f"{paths[1]}.attention")):
        other = replace(plan, recompute=again)
        assert not differences(simulate_whole(part.graph, other, profile), incremental.timeline(other)), again


@pytest.mark.parametrize("name", ["gpt, data and tensor, 2 microbatches", "gpt, CPU, ZeRO-3"])
def test_what_is_known_of_a_layer_serves_whatever_is_computed_again_of_others(name: str) -> None:
    """Segments are lowered once for all that is computed again elsewhere: modules, attention, or operators."""
    part, plan, profile = begin(name)
    options = recomputable(part.graph, [path for group in plan.blocks for path in group])
    kinds = [*zip(options.full, options.attention, options.operators, strict=True)]
    incremental, rng = Incremental(part.graph, profile), random.Random(5)
    for _ in range(9):
        again = joined([rng.choice([(), *of_block]) for of_block in kinds])
        other = replace(plan, recompute=again)
        assert not differences(simulate_whole(part.graph, other, profile), incremental.timeline(other)), again


def test_a_layer_is_lowered_once_however_many_others_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    part, plan, profile = begin(GPT)
    paths = [path for group in plan.blocks for path in group]
    incremental, lowered, lower = Incremental(part.graph, profile), list[str](), PartLowering.lower

    def noted(self: PartLowering, segment: segments.Segment, *rest: Any) -> Any:
        lowered.append(segment.nodes[0].name)
        return lower(self, segment, *rest)

    monkeypatch.setattr(PartLowering, "lower", noted)
    incremental.timeline(replace(plan, recompute=tuple(paths[:2])))
    lowered.clear()
    for count in (3, 4, 5):
        incremental.timeline(replace(plan, recompute=tuple(paths[:count])))
    assert not lowered


def test_a_shared_parameter_that_is_regathered_to_several_placements_is_gathered_for_each() -> None:
    """Its second gather was left out in the backward pass: such plans are simulated as a whole."""
    part, plan, profile = begin("gpt, tied, ZeRO-3, all computed again")
    (table,) = (item.tensor for item in part.graph.stored if len(part.graph.consumers[item.tensor]) > 1)
    request = Request(plan.mesh, "train", "adamw", None, (), SearchBudget())
    space = space_of(Place(part, plan.stage.axes, request, profile))
    (_, (head, at)) = part.graph.consumers[table]
    stored = Storage((Type("S", 0), Type("S", 1)), regather=True, reduce_each_microbatch=True)
    options = {option.operands[at]: option for option in space.strategies[head.name]}
    assert options.pop(plan.stage.nodes[head.name].operands[at])
    changes = [Change("", "", {head.name: option, table: stored}) for option in [*options.values()][:3]]
    drafts = [space.changed(space.draft(plan), change) for change in changes]
    for other in [draft.plan for draft in drafts if draft is not None]:
        assert not differences(
            simulate_whole(part.graph, other, profile), Incremental(part.graph, profile).timeline(other)
        )  # fmt: skip
    assert any(drafts)


@pytest.mark.parametrize("seed", [3, 26])
def test_random_plans_of_random_programs_in_segments_of_two_operators(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "ROOT_NODES", 2)
    profile = replace(load_profile("cpu"), _shared={})
    facts, waits = replace(profile.facts, overlap_slowdown=1.3), {("intra_node", 2): WAITS}
    source = profile.facts.provenance
    slowed = {name: Interference(name, slow, 1.2, source) for name, slow in (("intra_node", 1.0), ("inter_node", 1.5))}
    profile = replace(profile, facts=facts, waits=waits, interference=slowed, _shared={})
    for case in cases_of(seed, 5):
        part = divided(case.subject.graph, find_blocks(case.subject.graph), case.choices.microbatches)
        plan, incremental = draft_plan(part, case.choices, case.subject.mode), Incremental(part.graph, profile)
        full = simulate_whole(part.graph, plan, profile)
        assert not differences(full, incremental.timeline(plan)), case.name


class ReadBefore(nn.Module):
    """A fixed point that is looked for without gradients: weights are read before a gradient is theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(5):
                z = torch.tanh(self.down(self.up(z)) * 0.3 + x)
        z = torch.tanh(self.down(self.up(z)) * 0.3 + x)
        return nn.functional.cross_entropy(self.head(z), y)


@pytest.mark.parametrize("asked", [{}, {"zero": 1}, {"zero": 3}, {"microbatches": 2}], ids=str)
def test_parameters_that_are_read_first_without_a_gradient(asked: dict[str, int], monkeypatch: Any) -> None:
    """What had its gradient in a later part than its first reader's ended in a KeyError."""
    monkeypatch.setattr(segments, "ROOT_NODES", 2)
    graph = trace(ReadBefore(), {"x": torch.randn(8, 16), "y": torch.randint(8, (8,))})
    plan, profile = template_of_graph(graph, Mesh("cpu", devices_per_node=2), dp=2, **asked), load_profile("cpu")
    assert plan.microbatches == asked.get("microbatches", 1)
    part = divided(graph, find_blocks(graph), plan.microbatches)
    assert not differences(simulate_whole(part.graph, plan, profile), Incremental(part.graph, profile).timeline(plan))


def test_proposals_are_well_typed() -> None:
    part, plan, _ = begin("gpt, data and tensor, 2 microbatches")
    proposer = Proposer(part, plan)
    for _ in range(5):
        plan = proposer.propose(plan)
        check_plan(part.whole, part.with_traffic(plan))


def test_plans_may_come_in_any_order() -> None:
    part, first, profile = begin(GPT)
    proposer, incremental = Proposer(part, first, seed=2), Incremental(part.graph, profile)
    plans = [first, *(proposer.propose(first, equal=number % 2 == 0, stores=0.3) for number in range(6))]
    expected = {id(plan): simulate_whole(part.graph, plan, profile).step_time_ns for plan in plans}
    for plan in random.Random(3).choices(plans, k=30):
        assert incremental.step_time_ns(plan) == expected[id(plan)]


def test_only_what_changed_is_lowered_and_played(monkeypatch: pytest.MonkeyPatch) -> None:
    part, plan, profile = begin(GPT)
    incremental = Incremental(part.graph, profile)
    incremental.step_time_ns(plan)
    lowered, played = list[object](), list[object]()
    lower, play = PartLowering.lower, PartPlayer.play_part
    monkeypatch.setattr(PartLowering, "lower", lambda *args: (lowered.append(args[1]), lower(*args))[1])
    monkeypatch.setattr(PartPlayer, "play_part", lambda *args: (played.append(args[0]), play(*args))[1])
    incremental.step_time_ns(plan.placed(nodes=dict(plan.stage.nodes)))
    assert not lowered and not played, "an equal plan is known"
    name = next(node.name for node in part.graph.nodes if "gelu" in node.op)
    whole = plan.stage.nodes[name].operands[0]
    cut = Proposer(part, plan, seed=1)
    while (changed := cut.propose(plan, stores=0.0)).stage.nodes[name].operands[0] == whole:
        pass
    incremental.step_time_ns(changed)
    assert 1 <= len(lowered) <= 2 and 1 <= len(played) <= 8


def test_a_missing_conversion_is_refused_as_in_a_whole_simulation() -> None:
    part, plan, profile = begin(GPT)
    lacking, incremental = plan.placed(redistributes=()), Incremental(part.graph, profile)
    with pytest.raises(PlanError, match="expected a redistribution of"):
        incremental.step_time_ns(lacking)
    whole = simulate_whole(part.graph, plan, profile)
    assert incremental.step_time_ns(plan) == whole.step_time_ns, "what was refused leaves no trace"


def test_equal_layers_are_equal_segments() -> None:
    part, plan, _ = begin("gpt, tied, 4 microbatches")
    segments = segments_of(part.graph, graph_facts(part.graph, "cuda"), frozenset(plan.recompute))
    assert [len(segment.nodes) for segment in segments] == [4, 23, 23, 23, 23, 5]
    assert len({segment.kind for segment in segments[1:-1]}) == 1
    assert [node for segment in segments for node in segment.nodes] == list(part.graph.nodes)
