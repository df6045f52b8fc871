"""Parameters that are gathered once a step: what is played of them is what the runtime does."""

from __future__ import annotations

from autopar.ir.mesh import Mesh
from autopar.pipeline import template_of_graph
from autopar.simulate import Timeline
from autopar.simulate.timeline import Event
from tests.oracles.frozen.cases import graph

MESH = Mesh("h100", nodes=8, devices_per_node=8)


def _step(**options: int | str | bool) -> Timeline:
    found = template_of_graph(graph("gpt, wide"), MESH, **options).timeline()  # type: ignore[arg-type] # of a table
    assert isinstance(found, Timeline)
    return found


def _of_first_rank(timeline: Timeline, kind: str) -> list[Event]:
    return sorted((e for e in timeline.events if e.kind == kind and e.stream[0] == 0), key=lambda e: e.start_ns)


def test_vectors_of_all_layers_come_at_once_before_the_matrices_of_the_first() -> None:
    """They are small and travel with the first of them: no layer waits for one behind all matrices of the model."""
    gathers = [event.name for event in _of_first_rank(_step(dp=64, zero=1), "parameter all_gather")]
    matrices = [name for name in gathers if " more" not in name]
    packed = [name for name in gathers if " more" in name]
    assert len(packed) == 2, "the first bucket is small"
    assert gathers[2] == packed[0] and int(packed[0].split(" and ")[1].split()[0]) > 20
    layers = [int(name.split(".")[1]) for name in matrices if name.startswith("layers.")]
    assert layers == sorted(layers) and len(set(layers)) == 8


def test_gathers_hide_behind_the_first_microbatch() -> None:
    """All but what the first operators wait for: the embedding, and what the first layer cannot hide."""
    timeline = _step(dp=8, tp=8, zero=1, sequence_parallel=True)
    sent = sum(e.end_ns - e.start_ns for e in _of_first_rank(timeline, "parameter all_gather"))
    assert timeline.exposed["parameter all_gather"] < sent / 2


def test_a_later_stage_gathers_while_it_waits_for_its_first_microbatch() -> None:
    timeline = _step(dp=8, tp=4, pp=2, microbatches=8, zero=1)
    first, last = timeline.lanes
    assert "parameter all_gather" in first.exposed and "parameter all_gather" not in last.exposed
