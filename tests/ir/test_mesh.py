"""Meshes: their text, their logical shapes, and which axes stay inside a node."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError
from autopar.ir.mesh import MAX_AXES, Mesh, coordinates, logical_meshes, make_axes, ranks_within_node


@pytest.mark.parametrize("text", ["h100:8x8", "cpu:1x4", "a100:1x8+v100:2x8"])
def test_text_round_trips(text: str) -> None:
    assert str(Mesh.parse(text)) == text


def test_sizes() -> None:
    mesh = Mesh("h100", nodes=8, devices_per_node=4)
    assert (mesh.num_devices, mesh.nodes, mesh.devices_per_node) == (32, 8, 4)
    assert Mesh.parse("cpu:4") == Mesh("cpu", devices_per_node=4)
    assert mesh.is_homogeneous and mesh.profile == "h100"


@pytest.mark.parametrize(("size", "local", "per_node", "found"), [
    (8, None, None, "cpu:1x8"), (8, "4", None, "cpu:2x4"), (8, "4", 2, "cpu:4x2"), (6, "4", None, None),
])  # fmt: skip
def test_the_mesh_of_a_running_program(
    size: int, local: str | None, per_node: int | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    running = DeviceMesh("cpu", torch.arange(size).reshape(2, -1), _init_backend=False, _rank=0)
    if found is None:
        with pytest.raises(MeshError, match="expected full nodes, found 6 devices with 4 a node"):
            Mesh.from_device_mesh(running, per_node)
    else:
        assert str(Mesh.from_device_mesh(running, per_node)) == found


@pytest.mark.parametrize("text", ["", ":4", "cpu:x", "cpu:2x2x2", "cpu:-1", "cpu:0"])
def test_malformed_texts_are_refused(text: str) -> None:
    with pytest.raises(MeshError):
        Mesh.parse(text)


def test_unequal_devices_have_no_single_profile() -> None:
    with pytest.raises(MeshError, match="unequal devices need pipeline stages"):
        _ = Mesh.parse("a100:1x8+v100:2x8").profile
    with pytest.raises(MeshError, match="expected 1 to 1,048,576 devices in groups"):
        Mesh([])


@pytest.mark.parametrize("text", ["cpu:1", "cpu:4", "h100:1x8", "h100:2x4", "h100:8x8", "cpu:6", "cpu:7"])
def test_logical_meshes_factor_the_devices_node_by_node(text: str) -> None:
    mesh = Mesh.parse(text)
    found = logical_meshes(mesh)
    shapes = [tuple(axis.size for axis in axes) for axes in found]
    assert len(set(shapes)) == len(shapes)
    for axes, shape in zip(found, shapes, strict=True):
        assert math.prod(shape) == mesh.num_devices and len(shape) <= MAX_AXES
        assert all(size > 1 for size in shape)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        assert [axis.stride for axis in axes] == strides
        assert len(coordinates(axes)) == mesh.num_devices


def test_logical_meshes_of_eight_devices() -> None:
    shapes = {tuple(axis.size for axis in axes) for axes in logical_meshes(Mesh("h100", devices_per_node=8))}
    assert {(8,), (2, 4), (2, 2, 2)} <= shapes


def test_ranks_within_a_node() -> None:
    outer, inner = make_axes(("x", "y"), (2, 4))
    assert ranks_within_node(inner, 4) == 4 and ranks_within_node(outer, 4) == 1
    assert ranks_within_node(inner, 2) == 2 and ranks_within_node(outer, 8) == 2


def test_parts_of_a_mesh() -> None:
    mesh = Mesh([("a100", 2, 4), ("v100", 1, 8)])
    assert [mesh.node_of(rank) for rank in (0, 3, 4, 8, 15)] == [0, 0, 1, 2, 2]
    assert str(mesh.part(range(8))) == "a100:2x4" and str(mesh.part(range(8, 16))) == "v100:1x8"
    assert str(mesh.part(range(1, 4))) == "a100:1x3", "in one node"
    assert str(mesh.part(range(2, 6))) == "a100:2x2" and str(mesh.part(range(3, 6))) == "a100:3x1"
    assert mesh.group_of(range(9, 11)).profile == "v100"
    with pytest.raises(MeshError, match=r"ranks 7 to 8 of .* on devices of one kind, found a100 and v100"):
        mesh.part(range(7, 9))
    with pytest.raises(MeshError, match="found one that is 0 beyond its last"):
        mesh.node_of(16)
