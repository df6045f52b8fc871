"""What going from one plan to another takes, held against index sets: every element of every tensor, rank by rank."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar.cost.memory import optimizer_state_bytes
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import coordinates
from autopar.ir.plan import Plan
from autopar.ladders.layouts import StateLayout, layout_of
from autopar.ladders.transitions import mirrored_bytes, moves, survivors, transition
from autopar.pipeline import template_of_graph, traced
from autopar.profiler import profiles_of
from autopar.runtime.elastic.held import lacking
from autopar.runtime.elastic.mirrors import mirrored
from models import gpt, mlp

WAYS: dict[str, dict[str, Any]] = {
    "one": {"dp": 1}, "three": {"dp": 3}, "sharded": {"dp": 3, "zero": 3}, "tensor": {"tp": 4},
    "both": {"dp": 2, "tp": 2, "zero": 3}, "stages": {"pp": 2, "microbatches": 2},
    "stages of two": {"pp": 2, "dp": 2, "zero": 1, "microbatches": 2},
}  # fmt: skip


def devices(way: str) -> int:
    return math.prod(WAYS[way].get(axes, 1) for axes in ("dp", "tp", "pp"))


@cache
def graph_of_gpt() -> Graph:
    config = gpt.Config(batch_size=12)
    with torch.device("meta"):
        model = gpt.build(config)
        inputs = gpt.example_inputs(config)
    return traced(model, inputs, None, None, check=False)[0]


@cache
def planned(way: str) -> tuple[Graph, Plan]:
    mesh = autopar.Mesh("h100", devices_per_node=devices(way))
    return graph_of_gpt(), template_of_graph(graph_of_gpt(), mesh, **WAYS[way])


@cache
def elements(way: str) -> dict[str, list[set[int]]]:
    """By tensor and rank: the numbers of the elements that it keeps, as torch.chunk cuts a tensor of them."""
    graph, plan = planned(way)
    found: dict[str, list[set[int]]] = {}
    for item in graph.stored:
        if item.kind == "constant" or (item.kind == "buffer" and not item.persistent):
            continue
        shape = graph.kept(item.tensor).shape
        own = found[item.name] = [set() for _ in range(plan.mesh.num_devices)]
        for stage in plan.stages:
            if item.tensor not in stage.storage:
                continue
            for number, coordinate in enumerate(coordinates(stage.axes)):
                part: torch.Tensor | None = torch.arange(math.prod(shape)).reshape(shape)
                for type_, axis, index in zip(
                    stage.storage[item.tensor].placement, stage.axes, coordinate, strict=True
                ):
                    if type_.kind == "S" and part is not None:
                        chunks = part.chunk(axis.size, type_.dim) if part.numel() else ()
                        part = chunks[index] if index < len(chunks) else None
                if part is not None:
                    own[stage.first_rank + number] |= set(part.flatten().tolist())
    return found


def element_bytes(graph: Graph) -> dict[str, int]:
    return {
        item.name: graph.kept(item.tensor).itemsize
        + (optimizer_state_bytes("adamw", (1,), graph.kept(item.tensor).dtype) if item.requires_grad else 0)
        for item in graph.stored
    }


@cache
def layout(way: str) -> StateLayout:
    return layout_of(*planned(way))


PAIRS = [
    pytest.param(old, new, lost, id=f"{old} to {new} without {list(lost)}")
    for old, new in itertools.permutations(WAYS, 2)
    for lost in ((), (1,))
    if not lost or devices(old) > 2
]


@pytest.mark.parametrize(("old", "new", "lost"), PAIRS)
def test_bytes_are_those_of_the_elements_that_ranks_lack(old: str, new: str, lost: tuple[int, ...]) -> None:
    after = planned(new)[1]
    had, needs, size = elements(old), elements(new), element_bytes(graph_of_gpt())
    was = survivors(layout(old).ranks, layout(new).ranks, lost)
    left = [rank for rank in range(layout(old).ranks) if rank not in lost]
    found = moves(layout(old), layout(new), was, lost, after.mesh)
    there = {name: set().union(*(had[name][rank] for rank in left)) for name in had}
    for rank, own in enumerate(was):
        lacks = {
            name: (needs[name][rank] & there[name]) - (had[name][own] if own is not None else set()) for name in needs
        }
        assert found.received[rank] == sum(len(numbers) * size[name] for name, numbers in lacks.items())
        assert found.read_bytes[rank] == sum(len(needs[name][rank]) * size[name] for name in needs)
    gone = {name: set().union(*had[name]) - there[name] for name in had}
    assert found.lost_bytes == sum(len(numbers) * size[name] for name, numbers in gone.items())
    for (source, taker), count in found.sent.items():
        giver = was[source] if source >= 0 else -1 - source
        assert giver is not None and giver not in lost and giver != was[taker]
        assert count <= sum(len(had[name][giver] & needs[name][taker]) * size[name] for name in had)


def test_the_seconds_are_those_of_links_and_of_storage() -> None:
    mesh = planned("three")[1].mesh
    same = transition(layout("three"), layout("one"), planned("one")[1].mesh, profiles_of(mesh))
    assert same.moves.total_bytes == 0 and same.wire_s == 0 and same.lost == (1, 2) and same.read_s > 0
    lost = transition(layout("sharded"), layout("one"), planned("one")[1].mesh, profiles_of(mesh))
    assert lost.wire_s is None and lost.moves.lost_bytes > 0 and lost.pause_s == lost.read_s
    more = transition(layout("one"), layout("three"), mesh, profiles_of(mesh))
    most = max(more.moves.received)
    assert more.wire_s is not None and more.wire_s >= 2 * most / profiles_of(mesh)["h100"].link("inside").bandwidth
    with pytest.raises(PlanError, match="ranks of the old plan, 0 to 2"):
        transition(layout("three"), layout("one"), mesh, profiles_of(mesh), lost=[3])


def test_plans_of_other_models_are_refused() -> None:
    config = mlp.Config()
    model, inputs = mlp.build(config), mlp.example_inputs(config)
    plan = autopar.template_plan(model, autopar.Mesh("h100"), inputs)
    other = layout_of(traced(model, inputs, None, None, check=False)[0], plan)
    with pytest.raises(PlanError, match="two plans of one model"):
        moves(layout("one"), other, [0], (), plan.mesh)


@pytest.mark.parametrize("mirrors", [1, 2])
def test_with_mirrors_no_node_alone_has_anything(mirrors: int) -> None:
    """What goes to other nodes is what the ladder says it is; without so many nodes, all is still there."""
    for way, per_node in itertools.product(WAYS, (1, 2)):
        own = layout(way)
        sizes = [
            [((name, tuple(a for a, _ in box)), tuple(b - a for a, b in box)) for name, tensor in own.tensors.items()
             for box, ranks in tensor.owners.items() if rank in ranks]
            for rank in range(own.ranks)
        ]  # fmt: skip
        nodes = [str(rank // per_node) for rank in range(own.ranks)]
        sent = mirrored(sizes, nodes, mirrors)
        shapes = {key: shape for held in sizes for key, shape in held}
        size = {name: tensor.num_bytes // max(1, math.prod(tensor.shape)) for name, tensor in own.tensors.items()}
        for rank, count in enumerate(mirrored_bytes(own, per_node, mirrors)):
            told = sum(
                math.prod(shapes[key]) * size[key[0]]
                for (source, _), ks in sent.items()
                if source == rank
                for key in ks
            )
            assert told == count
        held = [dict(own_sizes) for own_sizes in sizes]
        for (_, to), keys in sent.items():
            held[to].update({key: shapes[key] for key in keys})
        whole = {name: (tensor.shape, "float32") for name, tensor in own.tensors.items()}
        for gone in itertools.combinations(sorted(set(nodes)), min(mirrors, len(set(nodes)) - 1)):
            left = {item for rank, known in enumerate(held) if nodes[rank] not in gone for item in known.items()}
            assert lacking(whole, left) == []
