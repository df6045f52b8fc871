"""A program refuses to run on other processes than the mesh that it was planned for, and says which it needs."""

from __future__ import annotations

import pytest

import autopar
from models import mlp
from tests.pipeline.jobs import groups_of_meshes, refusal
from tests.rank_pool import pool


def source_for(world: int) -> str:
    model, batch = mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config())
    mesh = autopar.Mesh("h100", devices_per_node=world)
    plan = autopar.template_plan(model, mesh, batch, dp=world // 2, tp=2)
    return autopar.parallelize(model, mesh, batch, plan=plan).source


@pytest.mark.ranks
def test_two_ranks_refuse_a_program_for_four() -> None:
    texts = pool(2).run(refusal, source_for(4), (), ())
    assert (
        texts
        == [
            "the program needs 4 ranks (mesh dp=2 × tp=2), found 2 running; "
            "start it with `torchrun --nproc-per-node 4 …`, or plan again for 2 ranks"
        ]
        * 2
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shape", "names", "found"),
    [((2,), ("dp",), "dp=2 on 2 ranks"), ((2, 1), ("tp", "dp"), "tp=2 × dp=1 on 2 ranks")],
)
def test_another_device_mesh_is_refused(shape: tuple[int, ...], names: tuple[str, ...], found: str) -> None:
    text = pool(2).run(refusal, source_for(2), shape, names)[0]
    assert text.startswith(f"the program needs a DeviceMesh with axes tp=2, found {found}; ")
    assert text.endswith("name its dimensions alike (mesh_dim_names), or plan again for it")


@pytest.mark.ranks
def test_the_device_mesh_of_the_plan_is_taken() -> None:
    assert pool(2).run(refusal, source_for(2), (2,), ("tp",)) == ["built", "built"]


@pytest.mark.ranks
def test_programs_of_a_process_share_their_groups() -> None:
    for first, *others, none in pool(2).run(groups_of_meshes):
        assert others == [first, first] != [none, none]
