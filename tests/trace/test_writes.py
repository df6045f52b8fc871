"""Writes in place that autograd does not see: values, gradients and buffers of the graph are those of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace import trace
from tests.trace.interpret import check_flags, graph_gradients, run_graph
from tests.trace.writes import HOW, OPS, TARGETS, Stacked, Writes, batch

CASES = [("no_grad", op, target) for op in OPS for target in TARGETS if (op, target) != ("swapped", "view")]
CASES += [(how, op, target) for how in HOW for op in ("mul_", "column") for target in TARGETS if how != "no_grad"]


def assert_traced(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """That the graph's loss, gradients, buffers and flags are the model's, which is left as it was."""
    before = copy.deepcopy(model.state_dict())
    graph = trace(model, inputs)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    found, gradients = graph_gradients(graph, model, inputs)
    values = run_graph(graph, model, inputs)
    check_flags(graph, values)
    reference = copy.deepcopy(model)
    loss = reference(**inputs)
    loss.backward()
    torch.testing.assert_close(found, loss.detach())
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, msg=lambda m, n=name: f"{n}: {m}")
    stored = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in {**dict(reference.named_parameters()), **dict(reference.named_buffers())}.items():
        after = values[graph.mutations[name]] if name in graph.mutations else stored[name]
        torch.testing.assert_close(after, value, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.sampled(always=("no_grad-mul_-activation",))
@pytest.mark.parametrize(("how", "op", "target"), CASES)
def test_the_value_is_the_written_one_and_the_gradient_passes_as_before(how: str, op: str, target: str) -> None:
    assert_traced(Writes(how, op, target), batch())


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["no_grad", "data", "detach"])
@pytest.mark.parametrize("target", ["activation", "buffer", "parameter"])
def test_writes_in_blocks_that_are_alike(how: str, target: str) -> None:
    """Of which one may stand for all."""
    assert_traced(Stacked(how, "column", target), batch())


class Regions(nn.Module):
    """Regions without gradients in each other, switched, and decorated."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.c(getattr(self, self.how)(x)).pow(2).mean()

    def nested(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x)
            with torch.enable_grad():
                h = torch.tanh(self.b(h))
            twice = h * 2
        return h + twice

    def switched(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        h = self.a(x)
        torch.set_grad_enabled(True)
        return torch.tanh(self.b(h))

    def inferred(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            h = self.a(x)
            with torch.inference_mode(False):
                g = self.b(x)
        return h.clone() + g

    def viewed(self, x: Tensor) -> Tensor:
        """A view taken without gradients, of what has one."""
        with torch.no_grad():
            turned = self.b.weight.t()
            h = self.a(x)
            first, second = h.chunk(2, 1)
            second.mul_(3)
        return torch.cat([first, second], 1) @ turned + h

    def copied(self, x: Tensor) -> Tensor:
        """What was made without gradients is written to with them."""
        with torch.no_grad():
            h = self.a(x) * 2
        h[:, 1:3] += self.b(x)[:, :2]
        with torch.no_grad():
            h[:, 0] = 0.5
        return h.relu_()

    def reset(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.detach_()
        return h.add_(self.b(x))

    @torch.no_grad()
    def decorated(self, x: Tensor) -> Tensor:
        return self.a(x)

    @torch.inference_mode()
    def _inferred(self, x: Tensor) -> Tensor:
        return self.a(x).clamp_(-0.5, 0.5)

    def decorated_inference(self, x: Tensor) -> Tensor:
        return self._inferred(x).clone()


@pytest.mark.parametrize(
    "how", ["nested", "switched", "inferred", "viewed", "copied", "reset", "decorated", "decorated_inference"]
)
def test_regions_without_gradients(how: str) -> None:
    assert_traced(Regions(how), batch())


class Refused(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.kept = [torch.ones(8)]
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.how == "gradient":
            h.detach().mul_(self.a.weight[0])
        elif self.how == "alias":
            h.detach().data = h * 2
        elif self.how == "shape":
            self.a.weight.data = torch.zeros(4, 8)
        elif self.how == "constant":
            self.kept[0].mul_(0.5)
        else:
            h.detach().set_(torch.zeros(4, 8))
        return h.sum()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("gradient", "has a gradient"),
        ("alias", "found an alias"),
        ("shape", "its shape"),
        ("constant", "neither a parameter nor a buffer"),
        ("memory", "gives a tensor other memory"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_line(how: str, reason: str) -> None:
    with pytest.raises(TraceError, match=rf"(?s)test_writes.py:\d+.*{reason}"):
        trace(Refused(how), batch())


def test_a_gradient_that_is_written_to_a_frozen_parameter_is_refused_with_its_line() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            self.teacher.weight.copy_(self.student.weight * 2)
            return (self.student(x) - self.teacher(x)).pow(2).mean()

    told = r"(?s)without a gradient to parameter 'teacher\.weight'.*test_writes\.py:\d+: .*under torch\.no_grad\(\)"
    with pytest.raises(TraceError, match=told):
        trace(Model(), (torch.randn(2, 4),))
