"""Which table knows a convolution, and where; what pools, concatenations and frozen batch norms cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.cost import flops, node_time_ns
from autopar.cost.compute import node_call
from autopar.cost.kernels import backward_kernels, forward_kernels
from autopar.cost.profile import OperatorCurve, Profile
from autopar.ir.graph import Graph, Node
from autopar.ops.table import operator
from autopar.profiler import load_profile, measure
from autopar.trace import trace


class Convolutions(nn.Module):
    """One of each kind that a table tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(3, 8, 3, padding=1)
        self.narrow = nn.Conv2d(8, 16, 1)
        self.unpadded = nn.Conv2d(16, 16, (1, 7))
        self.strided = nn.Conv2d(16, 32, 5, stride=2, padding=2)
        self.grouped = nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=8)
        self.turned = nn.ConvTranspose2d(32, 12, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.plain, self.narrow, self.unpadded, self.strided, self.grouped, self.turned):
            x = layer(x)
        return x.sum()


EXPECTED = [
    ("plain convolution 3x3", (3, 8, 32, 2)),
    ("plain convolution 1x1", (8, 16, 32, 2)),
    ("plain convolution 3x3", (16, 16, (32 * 26) ** 0.5, 2)),
    ("strided convolution 3x3", (16, 32, (16 * 13) ** 0.5)),
    ("grouped convolution 3x3", (4, (8 * 7) ** 0.5, 2)),
    ("strided convolution 3x3", (12, 32, (8 * 7) ** 0.5)),
]


def graph_of(model: nn.Module, x: Tensor, mode: str = "train") -> Graph:
    return trace(model, (x,), mode=mode)


def cost_of(graph: Graph, node: Node, profile: Profile) -> tuple[int, int]:
    shapes = (tuple(graph.tensors[name].shape for name in names) for names in (node.operands, node.results))
    return node_time_ns(node, *shapes, graph.tensors, profile)


def test_convolutions_are_looked_up_by_what_their_kernels_depend_on() -> None:
    graph = graph_of(Convolutions(), torch.zeros(2, 3, 32, 32))
    nodes = [node for node in graph.nodes if ".conv" in node.op]
    assert len(nodes) == len(EXPECTED)
    for node, (table, coordinates) in zip(nodes, EXPECTED, strict=True):
        shapes = [tuple(graph.tensors[name].shape for name in names) for names in (node.operands, node.results)]
        call = node_call(node, shapes[0], shapes[1], graph.tensors)
        forward, backward = forward_kernels(call), backward_kernels(call)
        assert forward is not None and backward is not None
        is_turned = "transpose" in node.op
        sides = ["input", "forward", "weight"] if is_turned else ["forward", "input", "weight"]
        wanted = [side for side, is_wanted in zip(sides, (True, *call.differentiable[:2]), strict=True) if is_wanted]
        kernels = [*forward.kernels, *backward.kernels]
        assert [kernel.table for kernel in kernels] == [f"{table} {side}" for side in wanted]
        assert all(kernel.coordinates == pytest.approx(coordinates) for kernel in kernels)


def test_every_convolution_of_the_sweep_is_a_vertex_of_the_table_that_it_is_looked_up_in() -> None:
    names = {case.kind.rpartition(" ")[0] for case in measure.operator_cases() if case.family == "convolution"}
    assert names == {f"{form} {kernel}" for form in ("plain", "strided") for kernel in ("1x1", "3x3")} | {"grouped 3x3"}
    for made in (
        measure.Convolution(8, 16, 64, 4, 3), measure.Convolution(1, 3, 16, 8, 1, stride=2),
        measure.Convolution(8, 32 * 4, 32 * 4, 8, 3, groups=32),
    ):  # fmt: skip
        case = measure._convolution(made, "weight")
        image, weight = case.operands()
        layer = nn.Conv2d(
            made.channels, made.filters, made.kernel, made.stride, made.kernel // 2, 1, made.groups, False
        )
        assert layer.weight.shape == weight.shape and layer(image).shape == case.run(image, weight).shape
        graph = graph_of(nn.Sequential(layer, Summed()), image.detach())
        node = next(node for node in graph.nodes if ".conv" in node.op)
        shapes = [tuple(graph.tensors[name].shape for name in names) for names in (node.operands, node.results)]
        found = forward_kernels(node_call(node, shapes[0], shapes[1], graph.tensors))
        assert found is not None and found.kernels[0].coordinates == pytest.approx(made.coordinates)
        form, kernel, _ = case.kind.split()
        assert found.kernels[0].table == f"{form} convolution {kernel} forward"


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = torch.cat([nn.functional.max_pool2d(x, 3, 1, 1), nn.functional.avg_pool2d(x, (5, 1), 1, (2, 0))], 1)
        return nn.functional.adaptive_avg_pool2d(x, 4).sum()


def costs(profile: Profile, mode: str) -> dict[str, tuple[int, int]]:
    graph = graph_of(Images().train(mode == "train"), torch.zeros(2, 64, 32, 32), mode)
    return {node.op.split(".")[1]: cost_of(graph, node, profile) for node in graph.nodes}


def test_a_pool_computes_an_element_of_each_window() -> None:
    graph = graph_of(Images(), torch.zeros(2, 64, 32, 32))
    found = {}
    for node in graph.nodes:
        shapes = [tuple(graph.tensors[name].shape for name in names) for names in (node.operands, node.results)]
        call = node_call(node, shapes[0], shapes[1], graph.tensors)
        if "pool" in node.op:
            kind = operator(node.op).work
            assert flops(node, shapes[0], shapes[1]) == kind.forward(call).flops
            found[node.op.split(".")[1]] = kind.forward(call).flops, kind.backward(call).flops
    image = 2 * 64 * 32 * 32
    assert found == {
        "max_pool2d": (9 * image, image), "avg_pool2d": (5 * image, 5 * image),
        "adaptive_avg_pool2d": (2 * image, 2 * image),
    }  # fmt: skip


def test_what_a_profile_measured_of_pools_copies_and_frozen_norms_is_what_they_cost() -> None:
    """On a profile without these, as of GPUs, they take their bytes."""
    gpu = load_profile("h100")
    slow: list[OperatorCurve] = []
    for family, bound in (("max_pool", "compute"), ("straight_copy", "memory"), ("batch_norm_inference", "memory")):
        like = gpu.curve("pointwise")
        curve = replace(like.forward, knots=tuple((work, 1e-6) for work, _ in like.forward.knots))
        slow.append(replace(like, family=family, bound=bound, forward=curve, points=()))
    measured = replace(gpu, operators={**gpu.operators, **{item.family: item for item in slow}})
    before, after = costs(gpu, "inference"), costs(measured, "inference")
    slower = {name for name in before if after[name][0] > 100 * before[name][0]}
    assert slower == {"max_pool2d", "cat", "_native_batch_norm_legit_no_training"}
    normed = costs(measured, "train")["_native_batch_norm_legit_functional"]
    assert normed == costs(gpu, "train")["_native_batch_norm_legit_functional"], "it makes its statistics anew"


def test_layouts_of_a_product_are_measured_one_after_the_other() -> None:
    """A machine that drifts would else have one of them slower than the others."""
    products = [case for case in measure.operator_cases() if case.op == "mm"]
    for number in range(0, len(products), 3):
        assert len({case.shape for case in products[number : number + 3]}) == 1
        assert [case.kind for case in products[number : number + 3]] == list(measure.LAYOUTS)
