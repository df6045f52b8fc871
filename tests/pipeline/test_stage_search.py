"""Plans that the search over stages finds: well typed, as fast as told, no slower than templates, within limits."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import InfeasibleError, PlanError
from autopar.interop import block_layers, fold
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import check_plan
from autopar.pipeline import planned, simulated_step, template_of_graph
from autopar.profiler import load_profile
from autopar.profiler.library import template_profile
from autopar.request import Request, SearchBudget
from autopar.staged.layered import Layered
from autopar.staged.search import StagedSearch
from autopar.staged.ways import Setting
from autopar.trace import find_blocks, trace
from models import gpt, mlp, wide_resnet
from tests.oracles.frozen.cases import PROFILES

MESH = autopar.Mesh(PROFILES["a100"], nodes=2, devices_per_node=2)


@cache
def graph(layers: int = 8) -> Graph:
    config = gpt.Config(num_layers=layers, hidden_size=128, num_heads=4, seq_len=32, vocab_size=256, batch_size=16)
    with torch.device("meta"):
        model = gpt.build(config)
    inputs = {name: tensor.to("meta") for name, tensor in gpt.example_inputs(config).items()}
    return trace(model, inputs)


def found(
    limit: int | None = None, mesh: autopar.Mesh = MESH, model: Graph | None = None,
    rules: tuple[autopar.Constraint, ...] = (), proposals: int = 0, **pins: Any,
) -> Plan:  # fmt: skip
    """As searched, refined by so many proposals."""
    constraints = (autopar.Constraint(**pins),) if pins else ()
    request = Request(
        mesh, "train", "adamw", limit, constraints + rules, SearchBudget(60.0, substitutions=False, proposals=proposals)
    )
    return planned(model or graph(), request)


@cache
def pinned(stages: int, microbatches: int) -> Plan:
    return found(proposals=200, stages=stages, microbatches=microbatches)


@pytest.mark.sampled(only=("2-4", "4-8"))
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 4), (4, 8)])
def test_pinned_plans_are_well_typed_and_take_what_is_told(stages: int, microbatches: int) -> None:
    plan = pinned(stages, microbatches)
    assert len({stage.first_rank for stage in plan.stages}) == stages
    assert plan.microbatches == microbatches
    check_plan(graph(), plan)
    assert Plan.from_json(plan.to_json()) == plan
    step = simulated_step(graph(), plan)
    assert (step.step_time_ns, step.peak_bytes) == (plan.predicted.step_time_ns, plan.predicted.peak_bytes)
    assert plan.search.tried and plan.search.lower_bound_ns <= plan.search.cost_ns


def test_estimates_are_near_what_is_simulated() -> None:
    """Peaks are over rather than under: the largest workspace counts on top of all that stays, and of gradients on
    their way, as much as several buckets hold where all of a model's are smaller than one."""
    for row in pinned(2, 4).search.tried:
        assert row.peak_bytes is not None and row.estimated_bytes is not None
        assert row.estimated_ns == pytest.approx(row.step_time_ns, rel=0.2)
        assert 0.9 * row.peak_bytes <= row.estimated_bytes <= 1.6 * row.peak_bytes, row


@pytest.mark.parametrize("pp", [2, 4])
def test_no_template_of_as_many_stages_is_faster(pp: int) -> None:
    ours = pinned(pp, 2 * pp).predicted.step_time_ns
    grids = [(dp, MESH.num_devices // pp // dp) for dp in (1, 2) if MESH.num_devices // pp % dp == 0]
    for dp, tp in grids:
        for schedule in ("gpipe", "1f1b", "interleaved"):
            theirs = template_of_graph(graph(), MESH, dp=dp, tp=tp, pp=pp, microbatches=2 * pp, schedule=schedule)
            assert ours <= theirs.predicted.step_time_ns, (dp, tp, schedule)


def test_templates_near_the_best_have_all_their_microbatches_looked_at_where_ranks_share_cores() -> None:
    facts = replace(template_profile().facts, cores=2)
    request = Request(autopar.Mesh("cpu", devices_per_node=4), "train", "adamw", None, (), SearchBudget(60.0))
    profile = replace(template_profile(), facts=facts, _shared={})
    search = StagedSearch(Layered(graph(4), find_blocks(graph(4)), request, profile))
    candidates = search.run(lambda line: None)
    best_ns = min(c.step_ns for c in candidates if c.peak_bytes <= search.admitted)
    least_ns: dict[Setting, int] = {}
    for candidate in candidates:
        setting = candidate.ways[0].setting
        if setting.zero is not None:
            least_ns[setting] = min(candidate.step_ns, least_ns.get(setting, candidate.step_ns))
    near = [setting for setting, step_ns in least_ns.items() if step_ns <= 1.25 * best_ns]
    assert {setting.microbatches for setting in near} >= {1, 2}
    for setting in near:
        counts = {setting.microbatches // 2, setting.microbatches * 2} & set(search.layered.counts)
        assert all(replace(setting, microbatches=count) in least_ns for count in counts), setting


def test_no_estimate_is_below_what_is_computed() -> None:
    """A bound by which settings are left out: of each that is looked at, whatever is sent and computed again."""
    mesh = autopar.Mesh(PROFILES["h100"], nodes=2, devices_per_node=2)
    request = Request(mesh, "train", "adamw", None, (), SearchBudget(60.0))
    search = StagedSearch(Layered(graph(), find_blocks(graph()), request, load_profile(PROFILES["h100"])))
    candidates = search.run(lambda line: None)
    assert len({candidate.ways[0].setting for candidate in candidates}) > 4
    for candidate in candidates:
        least_ns = search.looks.computed_ns(candidate.ways[0].setting)
        assert 0 < least_ns <= candidate.step_ns, candidate.row


def test_uneven_numbers_of_blocks() -> None:
    plan = found(mesh=autopar.Mesh("a100", devices_per_node=4), model=graph(6), stages=4, microbatches=8)
    check_plan(graph(6), plan)
    paths = [{path for n in stage.nodes for path in _block(plan.scopes[n])} for stage in plan.stages]
    sizes = [sum(len(blocks) for blocks in paths[submesh::4]) for submesh in range(4)]  # chunks are in turn
    assert sizes in ([1, 2, 2, 1], [2, 1, 2, 1], [1, 1, 2, 2], [2, 2, 1, 1], [1, 2, 1, 2])
    assert set().union(*paths) == {str(number) for number in range(6)}


def _block(scope: str) -> list[str]:
    return re.findall(r"^layers\.(\d+)", scope)


def test_pinned_schedules_and_chunks_are_honoured() -> None:
    plan = found(stages=2, microbatches=4, schedule="interleaved", chunks=3)
    assert plan.schedule == "interleaved" and len(plan.stages) == 6
    check_plan(graph(), plan)
    assert found(stages=2, microbatches=4, schedule="gpipe").schedule == "gpipe"
    assert len(found(stages=2, microbatches=4, chunks=1).stages) == 2
    with pytest.raises(InfeasibleError, match="expected a schedule and chunks as constraints pin them, found none for"):
        found(stages=2, microbatches=4, schedule="gpipe", chunks=2)
    with pytest.raises(PlanError, match=r"agree on the schedule, found \['1f1b', 'gpipe'\]"):
        found(rules=(autopar.Constraint(schedule="gpipe"),), stages=2, schedule="1f1b")


def test_batches_divide_by_other_numbers_than_powers_of_two() -> None:
    """Of 24 samples, 12 microbatches or 6 are looked at beside 8."""
    config = gpt.Config(num_layers=4, hidden_size=128, num_heads=4, seq_len=32, vocab_size=256, batch_size=24)
    with torch.device("meta"):
        whole = trace(gpt.build(config), gpt.example_inputs(config))
    request = Request(MESH, "train", "adamw", None, (autopar.Constraint(stages=2),), SearchBudget(60.0))
    search = StagedSearch(Layered(whole, find_blocks(whole), request, template_profile()))
    looked = {candidate.microbatches for candidate in search.run(lambda line: None)}
    assert search.layered.counts == [1, 2, 4, 8, 24]
    assert looked & {3, 6, 12}


def test_the_limit_that_a_refusal_names_can_be_met() -> None:
    with pytest.raises(InfeasibleError, match="the smallest limit that can be met is") as refused:
        found(1000, stages=2, microbatches=4)
    needed = refused.value.smallest_bytes
    assert needed is not None
    assert found(needed, stages=2, microbatches=4).predicted.peak_bytes <= needed


def test_stages_that_are_not_possible_are_refused() -> None:
    with pytest.raises(PlanError, match=r"number of stages that .*a100\.json:2x2 and 8 layers allow, found 3"):
        found(stages=3)
    with pytest.raises(PlanError, match="at least one stage"):
        autopar.Constraint(stages=0)


def test_a_model_without_blocks_has_one_stage() -> None:
    config = mlp.Config()
    plan = found(model=trace(mlp.build(config), mlp.example_inputs(config)))
    assert len(plan.stages) == 1


def test_a_short_graph_stands_for_a_deep_one() -> None:
    blocks = find_blocks(graph())
    paths = [path for group in blocks.paths for path in group]
    layers = block_layers(graph(), paths)
    folded = fold(graph(), blocks, layers)
    assert (layers.count, folded.layer_of) == (8, (0, 1, 1, 1, 1, 1, 1, 2))
    names = {node.name for node in folded.graph.nodes}
    assert all(name in names for node in folded.graph.nodes for name in _makers(folded.graph, node.operands))
    total = sum(folded.copies.get(node.name, 1) for node in folded.graph.nodes)
    assert total == len(graph().nodes), "every node of the deep graph is stood for"
    assert replace(folded.graph, nodes=graph().nodes, stored=graph().stored, tensors=graph().tensors) == graph()


def test_buffers_that_forward_updates_are_stood_for_as_well() -> None:
    """Running statistics of blocks that the short graph lacks were asked for there: batch norm in four blocks or more
    ended the search with a KeyError."""
    config = wide_resnet.Config(depths=(6,), base_channels=8, batch_size=8)
    model = trace(wide_resnet.build(config), wide_resnet.example_inputs(config))
    plan = found(model=model)
    check_plan(model, plan)
    assert len(model.mutations) > 4 * 3


def test_a_block_that_a_constraint_is_about_is_still_read_in_a_short_graph() -> None:
    """Who read it was left out, and its backward pass with it."""
    rule = autopar.Constraint("layers.4.mlp.up.weight", ("S(0)",), "used")
    blocks = find_blocks(graph(), [rule])
    assert sorted(map(len, blocks.paths)) == [1, 7]
    short = fold(graph(), blocks, block_layers(graph(), [path for group in blocks.paths for path in group])).graph
    unread = [n.name for n in short.nodes for name in n.results if not short.consumers[name]]
    assert unread == [short.nodes[-1].name], "the loss alone"


def test_a_constraint_on_one_layer_holds_there_alone() -> None:
    """Of several stages, too."""
    rule = autopar.Constraint("layers.6.mlp.up.weight", ("S(0)",), "used")
    plan = found(stages=2, microbatches=4, rules=(rule,))
    check_plan(graph(), plan)
    kept = {name: node for stage in plan.stages for name, node in stage.nodes.items()}
    readers = [node for node in graph().nodes for name in node.operands if name.endswith("mlp.up.weight")]
    used = [kept[node.name].operands[1] for node in readers]
    assert used[6] and {str(type_) for type_ in used[6]} == {"S(0)"}
    assert len({*used[:6], used[7]}) == 1 and used[6] not in used[:6]


def _makers(short: Graph, operands: tuple[str, ...]) -> list[str]:
    known = {*short.inputs, *short.stored_by_tensor}
    return [short.producers[name].name for name in operands if name not in known]


def test_three_blocks_or_fewer_stay() -> None:
    blocks = find_blocks(graph(3))
    layers = block_layers(graph(3), [path for group in blocks.paths for path in group])
    assert fold(graph(3), blocks, layers).graph is graph(3)


def test_no_plan_of_stages_hides_a_faster_one_of_one_stage() -> None:
    """On two nodes much of what parameters are gathered and reduced for hides: costs bound no step of one stage."""
    config = gpt.Config(num_layers=8, hidden_size=1024, num_heads=16, seq_len=256, vocab_size=8192, batch_size=32)
    with torch.device("meta"):
        model = trace(gpt.build(config), {k: v.to("meta") for k, v in gpt.example_inputs(config).items()})
    mesh = autopar.Mesh(PROFILES["v100"], nodes=2, devices_per_node=4)
    free, alone = found(mesh=mesh, model=model), found(mesh=mesh, model=model, stages=1)
    assert free.predicted.step_time_ns <= alone.predicted.step_time_ns
