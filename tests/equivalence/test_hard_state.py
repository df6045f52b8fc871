"""Parameters and buffers in all their kinds: tied, frozen, normalising, updated by forward, clipped, optimised."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.program import PlannedProgram
from autopar.trace import trace
from tests.equivalence.hard import assert_equal, operands_of, pin, planned, state_of, stored, template
from tests.equivalence.hard_jobs import clipped, thawed, trained, trained_alone
from tests.equivalence.harness import Tensors
from tests.rank_pool import pool

pytestmark = pytest.mark.ranks


def normals(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_trains_alike(model: nn.Module, batch: Tensors, program: PlannedProgram, recipe: str = "sgd") -> Any:
    """Losses, every tensor (buffers too), the names of state_dict, and which parameters have gradients."""
    losses, tensors, names, gradients = trained_alone(model, batch, recipe)
    results = pool(program.plan.mesh.num_devices).run(trained, program.source, state_of(model), batch, recipe)
    for found, found_tensors, found_names, found_gradients in results:
        assert found == pytest.approx(losses, rel=1e-5)
        tied = program._graph.tied
        assert found_names == names - set(tied)
        assert found_gradients == gradients | {name for name, first in tied.items() if first in gradients}
        assert set(tensors) <= set(found_tensors)
        for name, expected in tensors.items():
            torch.testing.assert_close(
                found_tensors[name], expected, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    return results


class Tied(nn.Module):
    """An embedding whose matrix is the head's too, and a bias that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(24, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.bias = self.first.bias
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(self.embedding(tokens)))))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.sampled(only=("{'tp': 4}", "{'dp': 2, 'tp': 2, 'zero': 3}"))
@pytest.mark.parametrize(
    "choices", [{"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 4}, {"dp": 2, "tp": 2, "zero": 3}], ids=str
)
def test_tied_weights(choices: dict[str, int]) -> None:
    """Each is one parameter with the gradients of all its uses."""
    model, batch = Tied(), {"tokens": torch.randint(0, 24, (4, 6), generator=torch.Generator().manual_seed(1))}
    program = template(model, batch, **choices)
    assert program._graph.tied == {"head.weight": "embedding.weight", "second.bias": "first.bias"}
    assert_equal(model, batch, program)
    assert_trains_alike(model, batch, program)


class Normalised(nn.Module):
    """Convolutions with batch norm: one as usual, one with a cumulative average, one without running buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolutions = nn.ModuleList([nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 8, 1)])
        self.usual = nn.BatchNorm2d(16)
        self.without = nn.BatchNorm2d(16, track_running_stats=False)
        self.flat = nn.BatchNorm1d(8, affine=False, momentum=0.3)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        first, second, third = self.convolutions
        x = third(F.relu(self.without(second(F.relu(self.usual(first(x)))))))
        return F.cross_entropy(self.head(self.flat(x.mean((2, 3)))), target)


def images(count: int) -> Tensors:
    target = torch.randint(0, 10, (count,), generator=torch.Generator().manual_seed(6))
    return {"x": normals(count, 3, 8, 8), "target": target}


@pytest.mark.sampled(only=("10-{'dp': 4}", "8-{'dp': 2, 'tp': 2}"))
@pytest.mark.parametrize(("count", "axes"), [(8, {"dp": 4}), (10, {"dp": 4}), (8, {"dp": 2, "tp": 2})], ids=str)
def test_batch_norm_in_training_with_its_running_buffers(count: int, axes: dict[str, int]) -> None:
    """Statistics are those of the whole batch, also where ranks hold 3, 3, 3 and 1 samples."""
    model, batch = Normalised(), images(count)
    by_sample = " ".join("S(0)" if axis == "dp" else "R" for axis in axes)
    program = planned(model, batch, axes, only={"aten._native_batch_norm_legit_functional.default": [by_sample]})
    norms = operands_of(program, "aten._native_batch_norm_legit_functional.default")
    assert len(norms) == 2 and all(placements[0].startswith("S(0)") for placements in norms)
    assert_trains_alike(model, batch, program)


def test_batch_norm_over_split_channels() -> None:
    """Each rank normalises its own channels; 10 of them are 3, 3, 3 and 1."""
    model = nn.Sequential(nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.ReLU(), nn.Flatten(), nn.Linear(360, 1))
    model = WithLoss(model)
    batch = {"x": normals(4, 3, 8, 8)}
    only = {"aten._native_batch_norm_legit_functional.default": ["S(1)"]}
    program = planned(model, batch, {"tp": 4}, *pin("inner.0.*", "S(0)"), *pin("inner.1.*", "S(0)"), only=only)
    norms = operands_of(program, "aten._native_batch_norm_legit_functional.default")
    assert norms[0][:3] == ["S(1)", "S(0)", "S(0)"] and stored(program.plan, "inner.1.weight") == "S(0)"
    assert_trains_alike(model, batch, program)


class WithLoss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


class Writes(nn.Module):
    """Forward writes in place to activations and to buffers, and reads a buffer that it has written."""

    calls: Tensor
    average: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("scale", torch.linspace(1, 2, 6), persistent=False)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.mul_(self.scale).add_(1)
        y[:, 0] = 0
        y = F.relu(y, inplace=True)
        self.calls += 1
        self.average.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return self.drop((y - self.average) / self.calls).square().mean()


@pytest.mark.parametrize("count", [8, 7])
def test_in_place_operators_and_buffers_that_forward_updates(count: int) -> None:
    """The average over all ranks' samples, a counter, and a value read after it was written."""
    model, batch = Writes(), {"x": normals(count, 6)}
    program = template(model, batch, dp=4)
    assert set(program._graph.mutations) == {"calls", "average"} and program.input_layout["x"] == "S(0)"
    assert_trains_alike(model, batch, program)


def test_non_persistent_buffers_are_used_but_not_saved() -> None:
    model, batch = Writes(), {"x": normals(8, 6)}
    program = template(model, batch, dp=2)
    assert "scale = rt.Buffer((6,), torch.float32, 'R', persistent=False)" in program.source
    (_, _, names, _), _ = assert_trains_alike(model, batch, program)
    assert names == {"linear.weight", "linear.bias", "calls", "average"}


def test_planning_does_not_change_the_model() -> None:
    """Parameters, buffers, gradients, modes of every module and the state of the generator are as before."""
    model = nn.Sequential(WithLoss(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))))
    model[0].inner[1].eval()
    model[0].inner[0].weight.grad = torch.ones_like(model[0].inner[0].weight)
    writes = Writes()
    for subject, batch in ((model, {"input": normals(4, 3, 6, 6)}), (writes, {"x": normals(4, 6)})):
        before, generator = copy.deepcopy(subject), torch.get_rng_state()
        gradients = [None if p.grad is None else p.grad.clone() for p in subject.parameters()]
        tensors = [*subject.parameters(), *subject.buffers()]
        trace(subject, batch)
        template(subject, batch, dp=2)
        assert torch.equal(generator, torch.get_rng_state())
        assert all(
            left is right for left, right in zip(tensors, [*subject.parameters(), *subject.buffers()], strict=True)
        )
        for left, right in zip(tensors, [*before.parameters(), *before.buffers()], strict=True):
            assert torch.equal(left, right) and left.requires_grad == right.requires_grad
        for parameter, gradient in zip(subject.parameters(), gradients, strict=True):
            assert parameter.grad is gradient is None or torch.equal(parameter.grad, gradient)
        assert [m.training for m in subject.modules()] == [m.training for m in before.modules()]


class Adapted(nn.Module):
    """A frozen embedding and layer below trained ones, and one frozen on top."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(24, 8)
        self.frozen = nn.Linear(8, 10)
        self.norm = nn.LayerNorm(10)
        self.trained = nn.Linear(10, 10)
        self.top = nn.Linear(10, 24)
        for module in (self.embedding, self.frozen, self.top):
            module.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.trained(self.norm(torch.tanh(self.frozen(self.embedding(tokens)))))
        return F.cross_entropy(self.top(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.sampled(only=("{'dp': 2, 'zero': 3}", "{'tp': 4}"))
@pytest.mark.parametrize("choices", [{"dp": 2, "zero": 3}, {"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_frozen_parameters_and_parameter_groups(choices: dict[str, int]) -> None:
    """Frozen ones stay as they were and get no gradient; gradients pass through the one on top."""
    model, batch = Adapted(), {"tokens": torch.randint(0, 24, (4, 6), generator=torch.Generator().manual_seed(1))}
    program = template(model, batch, **choices)
    assert program.source.count("requires_grad=False") == 5
    results = assert_trains_alike(model, batch, program, recipe="groups")
    for name, parameter in model.named_parameters():
        assert torch.equal(results[0][1][name], parameter) == (not parameter.requires_grad)
    assert results[0][3] == {"norm.weight", "norm.bias", "trained.weight", "trained.bias"}


def test_freezing_after_planning_is_heeded_and_thawing_is_refused() -> None:
    model, batch = Adapted(), {"tokens": torch.randint(0, 24, (4, 6), generator=torch.Generator().manual_seed(1))}
    program = template(model, batch, dp=2)
    jobs = pool(2).run(thawed, program.source, state_of(model), batch, "frozen.weight", "trained.weight")
    for without, said in jobs:
        assert without and "expected frozen.weight to need no gradient" in said and "plan again" in said


def mixed() -> tuple[nn.Module, Tensors, PlannedProgram]:
    """A program whose parameters are stored in every way on 2 × 2 ranks, unevenly too."""
    model, batch = Adapted(), {"tokens": torch.randint(0, 24, (4, 6), generator=torch.Generator().manual_seed(1))}
    model.requires_grad_(True)
    rules = [
        *pin("embedding.weight", "S(0)"),
        *pin("frozen.weight", "S(0)"),
        *pin("trained.weight", "S(1)", axis="y"),
        *pin("top.weight", "S(0)", axis="x"),
    ]
    program = planned(model, batch, {"x": 2, "y": 2}, *rules)
    kinds = {stored(program.plan, name) for name, _ in model.named_parameters()}
    assert {"S(0) S(0)", "I I"} <= kinds and len(kinds) >= 4, kinds
    return model, batch, program


@pytest.mark.sampled(only=("2.0", "inf"))
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_gradient_clipping_across_all_kinds_of_shards(norm_type: float) -> None:
    """Each element counts once, however many ranks hold it; torch's own function agrees on the DTensors."""
    model, batch, program = mixed()
    model(**batch).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type).item()
    for found in pool(4).run(clipped, program.source, state_of(model), batch, norm_type):
        for value, gradients in found:
            assert value == pytest.approx(norm, rel=1e-4)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-7)


def test_lamb_has_the_norms_of_whole_parameters() -> None:
    model, batch, program = mixed()
    assert_trains_alike(model, batch, program, recipe="lamb")
