"""Plans of several stages: what runs where, what the verifier refuses, files and text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.emit import emit
from autopar.errors import MeshError, PlacementError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.placement import I, R, S
from autopar.ir.plan import Plan, Stage
from autopar.microbatch import check_plan
from autopar.pipeline import template_of_graph
from autopar.trace import trace
from models import gpt, mlp

MESH = autopar.Mesh("a100", devices_per_node=4)


@cache
def tied_gpt() -> tuple[nn.Module, Any]:
    config = gpt.Config(num_layers=4, hidden_size=32, num_heads=2, seq_len=16, vocab_size=64, tie_head=True)
    return gpt.build(config), gpt.example_inputs(config)


@cache
def graph() -> Graph:
    return trace(*tied_gpt())


@cache
def staged(**choices: Any) -> Plan:
    return template_of_graph(graph(), MESH, **choices)


def verify(plan: Plan) -> None:
    check_plan(graph(), plan)


def two_stages() -> Plan:
    return staged(pp=2, tp=2, microbatches=2)


def test_stages_have_equal_blocks_and_what_is_before_and_behind_them() -> None:
    plan = two_stages()
    first, last = plan.stages
    assert (first.ranks, last.ranks) == (range(2), range(2, 4))
    modules = [{plan.scopes[node].split("|")[0].partition(".attention")[0] for node in s.nodes} for s in plan.stages]
    assert {"embedding", "layers.0", "layers.1"} < modules[0] and not {"layers.2", "head"} & modules[0]
    assert {"layers.2", "layers.3", "final_norm", "head"} < modules[1] and "layers.1" not in modules[1]


def test_inputs_go_where_they_are_read_and_tied_weights_are_kept_twice() -> None:
    first, last = two_stages().stages
    assert list(first.inputs) == ["tokens"] and "labels" in last.inputs and "tokens" not in last.inputs
    assert set(first.storage) & set(last.storage) == {"embedding.token.weight"}
    assert len(last.inputs) == 2, "the labels, and one activation"


@pytest.mark.parametrize(
    "choices",
    [{"pp": 2, "tp": 2, "microbatches": 2}, {"pp": 2, "dp": 2, "schedule": "interleaved", "microbatches": 2},
     {"pp": 4, "schedule": "gpipe", "recompute": "block"},
     {"pp": 2, "dp": 2, "schedule": "zero_bubble"}, {"dp": 4, "recompute": "full"}],
)  # fmt: skip
def test_plans_are_well_typed_and_keep_every_byte_in_a_file(choices: dict[str, Any]) -> None:
    plan = staged(**choices)
    text = plan.to_json()
    assert Plan.from_json(text) == plan and Plan.from_json(text).to_json() == text
    verify(Plan.from_json(text))
    assert plan.timeline().step_time_ns == plan.predicted.step_time_ns > 0


def sizes_of(plan: Plan) -> list[int]:
    """The blocks of each stage, by their attention."""
    return [sum("attention" in name for name in stage.nodes) for stage in plan.stages]


UNEVEN: dict[str, tuple[dict[str, Any], list[int]]] = {
    "4 blocks in 3": ({"pp": 3}, [1, 2, 1]),
    "the embedding by itself": ({"pp": 3, "layers": (0, 2, 2)}, [0, 2, 2]),
    "the head by itself": ({"pp": 3, "layers": (3, 1, 0)}, [3, 1, 0]),
    "as given": ({"pp": 3, "layers": [1, 1, 2]}, [1, 1, 2]),
    "both ends by themselves": ({"pp": 3, "schedule": "interleaved", "chunks": 2}, [0, 1, 1, 1, 1, 0]),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_stages_may_have_unequal_numbers_of_blocks(case: str) -> None:
    choices, sizes = UNEVEN[case]
    plan = template_of_graph(graph(), autopar.Mesh("a100", devices_per_node=3), microbatches=2, **choices)
    verify(plan)
    assert sizes_of(plan) == sizes
    assert "embedding" in plan.stages[0].nodes and "embedding" not in plan.stages[1].nodes


BAD_SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "too many stages": (
        {"pp": 3, "schedule": "interleaved", "chunks": 3}, r"at least 9 repeated blocks .* found 4; choose fewer st",
    ),
    "another sum": ({"pp": 3, "layers": (1, 1, 1)}, r"3 numbers .* add up to the model's 4, found 3 that add up to 3"),
    "too few": ({"pp": 3, "layers": (2, 2)}, r"layers as 3 numbers of .*, found 2 that"),
    "negative": ({"pp": 3, "layers": (-1, 2, 3)}, r"add up to 4, -1 among them"),
    "nothing": ({"pp": 3, "layers": (2, 0, 2)}, r"a block at least in stage 1, found layers=\(2, 0, 2\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SIZES)
def test_stages_of_other_numbers_of_blocks_are_refused(case: str) -> None:
    choices, message = BAD_SIZES[case]
    with pytest.raises(PlanError, match=message):
        template_of_graph(graph(), autopar.Mesh("a100", devices_per_node=3), microbatches=2, **choices)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "schedule": ({"pp": 4, "schedule": "2f2b"}, PlanError, r"schedule as one of gpipe, 1f1b, interleaved, z.*'2f2b'"),
    "recompute": ({"dp": 4, "recompute": "all"}, PlanError, r'"none", "selective", "block" or "full", found \'all\''),
    "devices": ({"pp": 3}, MeshError, r"dp × tp × pp = 4 devices"),
    "nothing to interleave": ({"dp": 4, "schedule": "interleaved"}, PlanError, r"at least 2 chunks a rank and pp > 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_choices_that_are_none_are_refused(case: str) -> None:
    choices, error, message = BAD[case]
    with pytest.raises(error, match=message):
        staged(**choices)


def test_no_attention_to_recompute_is_refused() -> None:
    config = mlp.Config()
    with pytest.raises(PlanError, match=r"expected a model with attention operators in repeated blocks"):
        autopar.template_plan(mlp.build(config), MESH, mlp.example_inputs(config), dp=4, recompute="block")


def test_emitted_source_has_a_class_for_each_stage_and_shares_those_of_equal_blocks() -> None:
    source = emit(graph(), two_stages())
    assert "class Stage0(rt.Stage)" in source and "STAGES = (Stage0, Stage1)" in source
    assert "self.layers = rt.Numbered(self.FIRST[0], *(Layer_1(mesh) for _ in range(2)))" in source
    assert source.count("class Layer") == 2 and "for block in self.layers:" in source
    assert re.search(r"rt\.Received\('\w+', \(\d+, \d+, \d+\), torch\.float32, '.*', source=0, position=0", source)


@cache
def deep_graph(num_layers: int) -> Graph:
    config = gpt.Config(num_layers=num_layers, hidden_size=32, num_heads=2, seq_len=16, vocab_size=64)
    return trace(gpt.build(config), gpt.example_inputs(config))


def emitted(num_layers: int, **choices: Any) -> str:
    deep = deep_graph(num_layers)
    mesh = autopar.Mesh("a100", nodes=2, devices_per_node=4)
    return emit(deep, template_of_graph(deep, mesh, **choices))


@pytest.mark.parametrize(
    "choices",
    [{"pp": 8}, {"pp": 4, "dp": 2, "schedule": "interleaved", "chunks": 4}, {"pp": 8, "recompute": "full"}],
    ids=["1f1b", "interleaved", "recompute"],
)
def test_source_grows_by_a_line_for_each_further_stage_that_does_the_same(choices: dict[str, Any]) -> None:
    few, many = (emitted(layers, microbatches=4, **choices) for layers in (32, 48))
    assert abs(len(few.splitlines()) - len(many.splitlines())) <= 2
    stages = choices["pp"] * choices.get("chunks", 1)
    assert many.count("(rt.Stage):") == 3 and many.count(".again(") == stages - 3
    assert len(set(re.findall(r"\.again\(\d+, \d+, (\(\d+,\))", many))) == stages - 3, "each has other layers"


def test_printed_plan_names_stages_and_what_is_recomputed() -> None:
    text = str(staged(pp=2, tp=2, microbatches=2, recompute="full"))
    assert "as (2 stages, 1f1b, each tp=2)" in text
    assert "stage 1     ranks 2 to 3: 2 blocks, layers.2 to layers.3" in text
    assert "recompute   layers.*  ×4" in text and "bubble" in text and "recomputation" in text
    assert "layers.2.attention.query" in two_stages().explain("layers.2")


@pytest.mark.parametrize(
    ("recompute", "text"),
    [
        (
            ("layers.0", "layers.1", "layers.2", "layers.3"),
            "for block in self.layers:\n{}x_1 = rt.recomputed(block, x_1)",
        ),
        (
            ("layers.0", "layers.1"),
            "for number, block in enumerate(self.layers):\n"
            "{}x_1 = rt.recomputed(block, x_1) if number < 2 else block(x_1)",
        ),
        (("layers.0.attention",), "for block in self.layers:\n{}x_1 = block(x_1)"),
        (("layers.2",), "x_3 = rt.recomputed(self.layers[2], x_2)\n        x_4 = self.layers[3](x_3)"),
    ],
    ids=["all blocks", "the first", "inside of the first", "one in between"],
)
def test_emitted_calls_of_recomputed_blocks(recompute: tuple[str, ...], text: str) -> None:
    plan = replace(staged(dp=4), recompute=recompute)
    verify(plan)
    assert text.format(" " * 12) in emit(graph(), plan)


def changed(index: int, change: Callable[[Stage], dict[str, Any]]) -> Plan:
    plan = two_stages()
    stages = [replace(s, **change(s)) if number == index else s for number, s in enumerate(plan.stages)]
    return replace(plan, stages=tuple(stages))


def without_a_node(stage: Stage) -> dict[str, Any]:
    return {"nodes": dict([*stage.nodes.items()][:-1])}


def otherwise_received(stage: Stage) -> dict[str, Any]:
    (name,) = (name for name in stage.inputs if name != "labels")
    return {"inputs": {**stage.inputs, name: (*stage.inputs[name][:-1], S(2))}}


def interleaved(*firsts: int) -> Plan:
    """Four stages of tied gpt, those on other ranks from other first ranks on."""
    plan = staged(pp=2, tp=2, microbatches=2, schedule="interleaved")
    stages = (replace(stage, first_rank=first) for stage, first in zip(plan.stages, firsts, strict=True))
    return replace(plan, stages=tuple(stages))


def stored_otherwise() -> Plan:
    """A parameter that two stages on the same ranks share."""
    plan = staged(pp=2, tp=2, microbatches=2, schedule="interleaved")
    name = next(name for name, kept in plan.stages[0].storage.items() if kept.placement[-1] == I)
    other = replace(plan.stages[0].storage[name], placement=(I, S(0)))
    third = replace(plan.stages[2], storage={**plan.stages[2].storage, name: other})
    return replace(plan, stages=(*plan.stages[:2], third, plan.stages[3]))


def loss_in_both() -> Plan:
    last = two_stages().stages[1].nodes
    node = graph().producers[graph().loss or ""].name
    return changed(0, lambda stage: {"nodes": {**stage.nodes, node: last[node]}})


MUTANTS: dict[str, tuple[Callable[[], Plan], type[Exception], str]] = {
    "a node is missing": (lambda: changed(1, without_a_node), PlanError, r"in one stage, found it in 0"),
    "ranks overlap": (lambda: changed(1, lambda s: {"first_rank": 1}), PlanError, r"equal or disjoint ranks"),
    "ranks are shared": (lambda: changed(1, lambda s: {"first_rank": 0}), PlanError, r"on all 4 devices"),
    "received in another placement": (lambda: changed(1, otherwise_received), PlacementError, r"as it is there"),
    "nothing received": (
        lambda: changed(1, lambda s: {"inputs": {"labels": s.inputs["labels"]}}), PlanError, r"made or received"
    ),
    "a parameter is not stored": (
        lambda: changed(0, lambda s: {"storage": dict([*s.storage.items()][1:])}), PlanError, r"made or received"
    ),
    "summands are stored": (
        lambda: changed(0, lambda s: {"storage": {n: replace(k, placement=(I, R)) for n, k in s.storage.items()}}),
        PlacementError, r"stored as I or S\(d\)",
    ),
    "stages out of turn": (lambda: interleaved(0, 2, 2, 0), PlanError, r"in turn on each of 2 .* ranks 0, 2, 2, 0 on"),
    "more stages on some ranks": (lambda: interleaved(0, 2, 0, 0), PlanError, r"in turn on each of 2 submeshes"),
    "shared on the same ranks, stored otherwise": (stored_otherwise, PlanError, r"stored alike by the stages \[0, 2"),
    "the loss in an earlier stage too": (loss_in_both, PlanError, r"last of 2 stages alone to make the loss, node \w+"),
    "nothing of the name is recomputed": (
        lambda: replace(two_stages(), recompute=("layers.7",)), PlanError, r"found 'layers.7'; there is layers"
    ),
    "recomputed in what is recomputed": (
        lambda: replace(two_stages(), recompute=("layers.1", "layers.1.attention")), PlanError,
        r"each module to recompute once, found layers.1.attention inside of layers.1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MUTANTS)
def test_the_verifier_refuses(case: str) -> None:
    plan, error, message = MUTANTS[case]
    with pytest.raises(error, match=message):
        verify(plan())


class Masked(nn.Module):
    """A mask of the inputs that every block reads, and a skip over a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        mask = keep > 0
        first = hidden = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            hidden = torch.where(mask, block(hidden), hidden)
        return (hidden + first).square().mean()


@pytest.mark.parametrize("schedule", ["zero_bubble", "interleaved"])
def test_microbatches_that_make_no_equal_rounds_are_refused(schedule: str) -> None:
    """Torch's schedule refuses them, which ranks would only find when they are built."""
    masked = trace(Masked(), (torch.zeros(10, 8), torch.ones(10, 8)))
    plan = template_of_graph(masked, autopar.Mesh("cpu", devices_per_node=2), pp=2, microbatches=5)
    with pytest.raises(PlanError, match=rf"2 equal rounds over 2 submeshes with schedule '{schedule}', found 5"):
        check_plan(masked, replace(plan, schedule=schedule))


def test_masks_are_made_where_they_are_read_and_skips_are_sent() -> None:
    inputs = (torch.zeros(8, 8), torch.ones(8, 8))
    plan = autopar.template_plan(Masked(), MESH, inputs, pp=4, microbatches=2)
    assert all("keep" in stage.inputs for stage in plan.stages[1:])
    assert "x" not in plan.stages[1].inputs
    made = {name for name in plan.stages[3].inputs if name not in ("x", "keep")}
    assert len(made) == 2, "what the stage before made, and the skip of the first"
    assert plan.timeline().comm_bytes["send"] > 0


class Counted(nn.Module):
    """A loss over as many rows as a mask of the inputs keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        mask = (keep > 0).float()
        return (x.square() * mask).sum() / mask.sum()


def test_sums_over_all_microbatches_of_what_a_stage_receives_in_each_are_refused() -> None:
    graph = trace(Counted(), (torch.zeros(8, 8), torch.ones(8, 8)))
    plan = template_of_graph(graph, autopar.Mesh("cpu", devices_per_node=2), pp=2, microbatches=2)
    check_plan(graph, plan)
    first, last = plan.stages
    (made,) = (node for node in graph.nodes if "_to_copy" in node.op or ".to." in node.op)
    before = graph.producers[made.operands[0]]
    mask = {name: last.nodes[name] for name in (before.name, made.name)}
    first = replace(first, nodes=first.nodes | mask, inputs=first.inputs | {"keep": last.inputs["keep"]})
    inputs = {name: placement for name, placement in last.inputs.items() if name != "keep"}
    rest = {name: node for name, node in last.nodes.items() if name not in mask}
    last = replace(last, nodes=rest, inputs=inputs | {made.results[0]: last.nodes[made.name].results[0]})
    with pytest.raises(
        PlacementError, match="to follow from the inputs of its stage alone, since it is summed over all"
    ):
        check_plan(graph, replace(plan, stages=(first, last)))
